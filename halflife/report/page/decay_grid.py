"""The report page of a comparison on text: losses of the models beside the paper's."""

from __future__ import annotations

import math
from typing import Any

from halflife.report.figures.data import UNFINISHED
from halflife.report.figures.decays import unit
from halflife.report.numbers import MISSING
from halflife.report.page.comparison import (
    LEARNING_RATE,
    PARAMETERS,
    SPEED,
    STATE_SIZE,
    Column,
    rows_of_models,
    spread,
    sweep_page,
)
from halflife.report.table import Cell, Row, Table
from halflife.runs.folder import read_grid
from halflife.runs.records import Comparison, mean

COLUMNS = [Column("test loss", "loss", {}, "{:.4f}".format, min), PARAMETERS, STATE_SIZE, SPEED, LEARNING_RATE]


def decay_grid_page(run: Comparison) -> dict[str, Any]:
    """The variables of the page's template, without the figures."""
    data = read_grid(run.path)
    return sweep_page(run, findings(data, unit(run)), _table(run, data["paper"]))


def findings(data: dict[str, Any], unit: str = "byte") -> list[str]:
    """The model with the lowest loss, and for each finding of the paper whether it holds."""
    losses = {name: [seed["test"] for seed in seeds.values()] for name, seeds in data["results"].items()}
    if not losses:
        return [UNFINISHED]
    seeds = max(map(len, losses.values()))
    # A mean that leaves out diverged seeds is too good. Models with such seeds therefore rank last.
    best = min(losses, key=lambda name: (len(losses[name]) < seeds, mean(losses[name])))
    losses[best] += [math.nan] * (seeds - len(losses[best]))
    text = f"{best} has the lowest test loss in nats a {unit}, {spread(losses[best], '{:.4f}'.format)}."
    return [text, *data["findings"]]


def _table(run: Comparison, papers: dict[str, float | None]) -> Table:
    return Table(
        ["model", COLUMNS[0].label, "paper's loss", *(column.label for column in COLUMNS[1:])],
        [_with_paper(row, papers) for row in rows_of_models(run, COLUMNS, "loss")],
        f"Test loss of each model in nats a {unit(run)}, as a mean and for each seed. The paper's loss is in "
        "nats a token. The lowest loss is marked.",
    )


def _with_paper(row: Row, papers: dict[str, float | None]) -> Row:
    """The row with the paper's loss in the third column."""
    paper = papers.get(row[0].text) if row and isinstance(row[0], Cell) else None
    return [*row[:2], Cell(MISSING) if paper is None else Cell(f"{paper:.3f}", paper), *row[2:]] if row else row
