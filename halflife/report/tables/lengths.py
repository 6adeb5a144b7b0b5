"""Perplexity by the length of the text, for comparisons on text: the file `lengths.csv` and a table of means."""

from __future__ import annotations

from halflife.files import write_text
from halflife.report.intervals import with_interval
from halflife.report.table import Table
from halflife.runs.folder import LENGTHS_CSV
from halflife.runs.records import CELL, Comparison

COLUMNS = ("length", "perplexity", "last_perplexity")


def write_lengths(run: Comparison) -> None:
    """Write the perplexities on the test text, if a model on text has finished.

    A row is a length of one run, in tokens, with the perplexity of all of its tokens and of its last T ones.
    """
    rows = [(*cell, *(at[key] for key in COLUMNS)) for one, cell in run.cells() for at in one.lengths]
    if rows:
        write_text(run.path / LENGTHS_CSV, Table((*CELL, *COLUMNS), rows).csv())


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
