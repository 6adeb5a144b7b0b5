"""The tables of a comparison as files: `timescales.csv`, `validation.csv`, and for text `lengths.csv` with means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from halflife.files import write_text
from halflife.report.intervals import with_interval
from halflife.report.numbers import evenly
from halflife.report.table import Table
from halflife.runs.folder import LENGTHS_CSV, TIMESCALES_CSV, VALIDATION_CSV
from halflife.runs.records import CELL, Comparison

TIMESCALES = ("layer", "position", "channel", "initial", "trained")
LENGTHS = ("length", "perplexity", "last_perplexity")
Position = TypeVar("Position", int, float)
MAX_CHANNELS = 64  # of one layer; vector decays have hundreds


def write_timescales(run: Comparison) -> None:
    """Write the time-scales in tokens, if a model with a decay has finished.

    A row is a channel of a layer of one run at one position: the first one, T, and the longest tested length. Channels
    are numbered from 0 in the model's order. Of more than `MAX_CHANNELS`, as many are written, evenly spaced.
    """
    rows = [
        (*cell, *row)
        for training, cell in run.cells()
        for layer in training.spectrum.get("layers", ())
        for row in _rows_of(layer, run.train_length)
    ]
    if rows:
        write_text(run.path / TIMESCALES_CSV, Table((*CELL, *TIMESCALES), rows).csv())


def write_validations(run: Comparison) -> None:
    """Write the accuracy on validation data, for text the loss in nats, by step of training. A row is one step."""
    rows = [
        (*cell, step, f"{value:.6g}")
        for training, cell in run.cells()
        for key in ("validation_accuracy", "validation_loss")
        for step, value in zip(*training.curve(key), strict=True)
    ]
    if rows:
        write_text(run.path / VALIDATION_CSV, Table((*CELL, "step", "validation"), rows).csv())


def _rows_of(layer: dict[str, Any], train_length: int | None) -> Iterator[tuple[Any, ...]]:
    """The columns from `layer` on. `layer` is one of `spectrum.json`."""
    initial, trained = (
        {int(at): np.ravel(x) for at, x in layer[when]["timescales"].items()} for when in ("init", "trained")
    )
    for position in sorted({min(initial), nearest_to(train_length, initial), max(initial)}):
        for channel in evenly(range(len(initial[position])), MAX_CHANNELS):
            yield layer["layer"], position, channel, *(f"{x[position][channel]:.6g}" for x in (initial, trained))


def nearest_to(train_length: int | None, positions: Iterable[Position]) -> Position:
    """The position that is nearest to the training length; the first one if that is not known."""
    return min(positions, key=lambda position: abs(position - (train_length or math.inf)))


def write_lengths(run: Comparison) -> None:
    """Write the perplexities on the test text, if a model on text has finished.

    A row is a length of one run, in tokens, with the perplexity of all of its tokens and of its last T ones.
    """
    rows = [(*cell, *(at[key] for key in LENGTHS)) for one, cell in run.cells() for at in one.lengths]
    if rows:
        write_text(run.path / LENGTHS_CSV, Table((*CELL, *LENGTHS), rows).csv())


def length_table(run: Comparison) -> str:
    """The perplexity of the last T tokens of texts of each length: means over seeds with their intervals, or ""."""
    lengths = sorted({at["length"] for one in run.trainings for at in one.lengths})
    table = []
    for model in run.models:
        found = [{at["length"]: at["last_perplexity"] for at in one.lengths} for one in run.trainings_of(model)]
        values = ([each[n] for each in found if n in each] for n in lengths)
        table.append([model, *(_of_seeds(own, len(found)) for own in values)])
    return Table(["perplexity of the last T of", *(f"{n:,}" for n in lengths)], table).markdown() if lengths else ""


def _of_seeds(values: list[float], seeds: int) -> str:
    """The mean, with the number of the seeds that have it if some diverged."""
    mean = with_interval(values, 3) if values else "–"
    return mean if len(values) in (0, seeds) else f"{mean} ({len(values)} of {seeds} seeds)"
