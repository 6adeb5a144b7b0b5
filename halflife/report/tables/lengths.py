"""Perplexity by the length of the text, for comparisons on text: the file `lengths.csv` and a table of means."""

from __future__ import annotations

from halflife.files import write_csv
from halflife.report.intervals import with_interval
from halflife.report.markdown import markdown
from halflife.runs.folder import LENGTHS_CSV, Comparison

COLUMNS = ("model", "learning_rate", "seed", "selected", "length", "perplexity", "last_perplexity")


def write_lengths(run: Comparison) -> None:
    """Write the perplexities on the test text, if a model on text has finished.

    A row is a length of one run, in tokens, with the perplexity of all of its tokens and of its last T ones. `selected`
    marks the runs at each model's selected learning rate, as in `results.csv`.
    """
    selected = {training.path for model in run.models for training in run.trainings_of(model)}
    rows = [
        (one.model, one.learning_rate, one.seed, one.path in selected, *(at[key] for key in COLUMNS[4:]))
        for one in run.trainings
        for at in one.lengths
    ]
    if rows:
        write_csv(run.path / LENGTHS_CSV, COLUMNS, rows)


def length_table(run: Comparison) -> str:
    """The perplexity of the last T tokens of texts of each length: means over seeds with their intervals, or ""."""
    lengths = sorted({at["length"] for one in run.trainings for at in one.lengths})
    table = []
    for model in run.models:
        found = [{at["length"]: at["last_perplexity"] for at in one.lengths} for one in run.trainings_of(model)]
        values = ([each[n] for each in found if n in each] for n in lengths)
        table.append([model, *(with_interval(own, 3) if own else "–" for own in values)])
    return markdown(["perplexity of the last T of", *(f"{n:,}" for n in lengths)], table) if lengths else ""
