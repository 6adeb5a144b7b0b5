"""Tables of the decay grid at several budgets, for docs/tables.py."""

from __future__ import annotations

from collections.abc import Mapping

import differences
import numpy as np
from claims import results

from halflife.lab.experiments.decay_design import FINDINGS
from halflife.lab.experiments.decay_rows import as_run, paper_loss
from halflife.report.table import Table

Budgets = Mapping[int, str]  # steps → file of results


def findings(forms: Mapping[str, Budgets]) -> str:
    """The loss of the second row of each pair minus that of the first, by seed, for each form of the rows.

    The paper ran the released forms, so its own differences stand last.
    """
    grids = {f"{form}, {steps} steps": _grid(file) for form, files in forms.items() for steps, file in files.items()}
    lines = []
    for finding in FINDINGS:
        for pair in finding.pairs:
            found = [_difference(*(_form(grid, name) for name in pair)) for grid in grids.values()]
            before, after = (paper_loss(as_run(name)) for name in pair)
            paper = "–" if before is None or after is None else f"{after - before:+.3f}"
            cells = (differences.write(each, 3, "+") for each in found)
            lines.append([finding.statement, ", ".join(pair), *cells, paper])
    names = ["finding", "first, second"]
    return Table([*names, *grids, "paper"], lines, left=names).markdown()


def _form(grid: Mapping[str, list[dict[str, str]]], name: str) -> list[dict[str, str]]:
    """The runs of a row, in the form that the file has."""
    return next(grid[each] for each in (f"{name}:released", name, f"{name}:ours") if each in grid)


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
