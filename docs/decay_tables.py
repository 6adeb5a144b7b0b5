"""Tables of the decay grid at several budgets, for docs/tables.py."""

from __future__ import annotations

from collections.abc import Mapping

import differences
import numpy as np
from claims import results

from halflife.lab.experiments.decay_design import paper_loss
from halflife.lab.experiments.decay_findings import FINDINGS
from halflife.report.table import Table

Budgets = Mapping[int, str]  # steps → file of results


def findings(files: Budgets) -> str:
    """The loss of the second row of each pair minus that of the first, by seed."""
    grids = [_grid(file) for file in files.values()]
    lines = []
    for finding in FINDINGS:
        for pair in finding.pairs:
            first, second = (name if name in grids[0] else f"{name}:ours" for name in pair)
            cells = [differences.write(_difference(grid[first], grid[second]), 3, "+") for grid in grids]
            paper = [paper_loss(name) for name in (second, first)]
            printed = "–" if None in paper else f"{paper[0] - paper[1]:+.3f}"
            lines.append([finding.statement, f"{first}, {second}", *cells, printed])
    names = ["finding", "first, second"]
    return Table([*names, *(f"{steps} steps" for steps in files), "paper"], lines, left=names).markdown()


def _grid(file: str) -> dict[str, list[dict[str, str]]]:
    """Row of the grid → its runs at the selected rate."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in results(file):
        if row["selected"] == "True":
            found.setdefault(row["model"], []).append(row)
    return found


def _difference(first: list[dict[str, str]], second: list[dict[str, str]]) -> np.ndarray:
    """The losses of the second row minus those of the first, on the seeds that both have."""
    one, two = differences.paired(*({run["seed"]: float(run["loss"]) for run in runs} for runs in (first, second)))
    return two - one
