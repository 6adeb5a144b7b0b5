"""The report page of a comparison on text: losses of the models beside the paper's."""

from __future__ import annotations

import math
from typing import Any

from halflife.report.figures.decays import unit
from halflife.report.numbers import MISSING
from halflife.report.page.comparison import (
    LEARNING_RATE,
    PARAMETERS,
    SPEED,
    STATE_SIZE,
    Column,
    groups_of_rows,
    spread,
    sweep_page,
)
from halflife.report.page.table import UNFINISHED, Cell, Row, Table
from halflife.runs.folder import Comparison, mean, read_grid

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
        caption=f"Test loss of each model in nats a {unit(run)}, as a mean and for each seed. The paper's loss is in "
        "nats a token. The lowest loss and the highest tokens/s are marked.",
        first="model",
        columns=[COLUMNS[0].label, "paper's loss", *(column.label for column in COLUMNS[1:])],
        spans=[],
        groups=[
            [_with_paper(row, papers.get(row.name)) for row in rows] for rows in groups_of_rows(run, COLUMNS, "loss")
        ],
    )


def _with_paper(row: Row, paper: float | None) -> Row:
    cell = Cell(MISSING) if paper is None else Cell(f"{paper:.3f}", paper)
    return row._replace(cells=[row.cells[0], cell, *row.cells[1:]])
