"""Tables of the decay grid at several budgets, for docs/tables.py."""

from __future__ import annotations

from collections.abc import Mapping

import differences
import numpy as np
from claims import results
from join import RESULTS

from halflife.experiments.decay_design import paper_loss
from halflife.experiments.decay_findings import FINDINGS
from halflife.experiments.evidence.decay_regression import HEADING, regression_rows
from halflife.files import read_json
from halflife.report.intervals import with_interval
from halflife.report.markdown import markdown

Budgets = Mapping[int, str]  # steps → file of results


def losses(files: Budgets) -> str:
    """Rows in the order of their mean loss at the first budget; mean, 95 % interval and every seed."""
    first, *_ = grids = [_grid(file) for file in files.values()]
    lines = []
    for name in sorted(first, key=lambda name: np.mean(_losses(first[name]))):
        every = [_losses(grid[name]) for grid in grids]
        cells = (f"{with_interval(x, 3)} ({', '.join(f'{value:.3f}' for value in x)})" for x in every)
        rates = ", ".join(f"{float(grid[name][0]['learning_rate']):g}" for grid in grids)
        lines.append([name, f"{int(first[name][0]['parameters']):,}", rates, *cells, _paper(name)])
    return markdown(["row", "parameters", "rates", *(f"loss, {steps} steps" for steps in files), "paper"], lines)


def findings(files: Budgets) -> str:
    """The loss of the second row of each pair minus that of the first, by seed."""
    grids = [_grid(file) for file in files.values()]
    lines = []
    for finding in FINDINGS:
        for first, second in finding.pairs:
            cells = [differences.write(_difference(grid[first], grid[second]), 3, "+") for grid in grids]
            paper = [paper_loss(name) for name in (second, first)]
            printed = "–" if None in paper else f"{paper[0] - paper[1]:+.3f}"
            lines.append([finding.statement, f"{first}, {second}", *cells, printed])
    names = ["finding", "first, second"]
    return markdown([*names, *(f"{steps} steps" for steps in files), "paper"], lines, texts=names)


def regressions(files: Budgets) -> str:
    """The regressions of the loss on λ, from `decay_regression.json` of each budget."""
    lines = [
        [str(steps), *row]
        for steps, file in files.items()
        for row in regression_rows(read_json(RESULTS / file)["regressions"])
    ]
    return markdown(["steps", *HEADING], lines, texts=HEADING[:1])


def decays(files: Budgets, words: Mapping[str, str]) -> str:
    """The median λ of rows before and after training, by seed, from `decay_regression.json` of each budget.

    Args:
        words: row → what the paper says.
    """
    runs = {steps: read_json(RESULTS / file)["runs"] for steps, file in files.items()}
    first = next(iter(runs))

    def cell(steps: int, name: str, when: str) -> str:
        own = sorted((run for run in runs[steps] if run["model"] == name), key=lambda run: run["seed"])
        values = [run[when]["median"] for run in own]
        return f"{np.mean(values):.3f} ({', '.join(f'{value:.3f}' for value in values)})"

    lines = [
        [name, cell(first, name, "init"), *(cell(steps, name, "trained") for steps in runs), text]
        for name, text in words.items()
    ]
    paper = "the paper, after training"
    return markdown(["row", "before", *(f"after {steps} steps" for steps in runs), paper], lines, texts=["row", paper])


def _grid(file: str) -> dict[str, list[dict[str, str]]]:
    """Row of the grid → its runs at the selected rate."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in results(file):
        if row["selected"] == "True":
            found.setdefault(row["model"], []).append(row)
    return found


def _losses(runs: list[dict[str, str]]) -> np.ndarray:
    return np.array([float(run["loss"]) for run in runs])


def _difference(first: list[dict[str, str]], second: list[dict[str, str]]) -> np.ndarray:
    """The losses of the second row minus those of the first, on the seeds that both have."""
    one, two = differences.paired(*({run["seed"]: float(run["loss"]) for run in runs} for runs in (first, second)))
    return two - one


def _paper(name: str) -> str:
    return "–" if (loss := paper_loss(name)) is None else f"{loss:.3f}"
