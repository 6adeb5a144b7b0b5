"""The table `timescales.csv` of a comparison: decay time-scales before and after training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from halflife.files import write_text
from halflife.report.numbers import evenly
from halflife.report.table import Table
from halflife.runs.folder import TIMESCALES_CSV
from halflife.runs.records import CELL, Comparison

COLUMNS = ("layer", "position", "channel", "initial", "trained")
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
        write_text(run.path / TIMESCALES_CSV, Table((*CELL, *COLUMNS), rows).csv())


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
