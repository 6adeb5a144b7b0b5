"""GateRank's results in Markdown: state tracking by position, recall by test, and statistics of the gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from halflife.files import write_csv
from halflife.report.intervals import with_interval
from halflife.report.markdown import Rows, in_distribution, markdown
from halflife.runs.folder import Comparison, read

POSITIONS_CSV = "positions.csv"  # accuracy and loss of each seed, by span of positions
COLUMNS = ("model", "learning_rate", "seed", "first", "last", "accuracy", "loss")


def tracking(folder: Path, rows: Rows) -> str:
    """Accuracy and cross-entropy at the positions of training and beyond, as means and by seed; then the gates.

    Writes `positions.csv`, from which the table is made.
    """
    run = read(folder)
    spans = list(_spans(run))
    write_csv(folder / POSITIONS_CSV, COLUMNS, (list(row.values()) for row in spans))
    caption = "Accuracy in percent and loss in nats, by position in the longest test: the mean, and every seed."
    return "\n\n".join(filter(None, [caption, by_position(spans), gates(run)]))


def _spans(run: Comparison) -> Iterator[dict[str, Any]]:
    """The means of each training over spans of positions, which end at the lengths of the tests."""
    edges = sorted({found["length"] for one in run.trainings for found in one.positions})
    for model in run.models:
        for one in run.trainings_of(model):
            for found in one.positions:
                if found["length"] == edges[-1]:
                    for low, high in pairwise([0, *edges]):
                        means = [fmean(found[name][low:high]) for name in COLUMNS[-2:]]
                        cells = (model, one.learning_rate, one.seed, low + 1, high, *means)
                        yield dict(zip(COLUMNS, cells, strict=True))


def by_position(spans: Sequence[Mapping[str, Any]]) -> str:
    """The table of the rows of `positions.csv`, in Markdown: a row for each model."""
    if not spans:  # all runs diverged
        return ""
    cells: dict[str, dict[str, list[float]]] = {}
    for name, scale in (("accuracy", 100), ("loss", 1)):
        for row in spans:
            columns = cells.setdefault(row["model"], {})
            columns.setdefault(f"{name} {row['first']}–{row['last']}", []).append(scale * float(row[name]))
    lines = [
        [f"`{model}`", *(_seeds(values, digits=1 if "accuracy" in name else 2) for name, values in columns.items())]
        for model, columns in cells.items()
    ]
    return markdown(["model", *next(iter(cells.values()))], lines)


def recall(folder: Path, rows: Rows) -> str:
    """One row per model with its sizes and all tests; then the gates."""
    return "\n\n".join(filter(None, [in_distribution(rows), gates(read(folder))]))


def gates(run: Comparison) -> str:
    """Statistics of the slow gates in the last steps of training: the mean over layers, and every seed."""
    names = ("reset_rate", "segment_length", "slow_share")
    table = []
    for model in run.models:
        last = [one.gates()[-1][1] for one in run.trainings_of(model) if one.gates()]
        if last:
            means = [[fmean(layer[name] for layer in found.values()) for found in last] for name in names]
            table.append([model, *(_seeds(values, digits=3) for values in means)])
    if not table:
        return ""
    return markdown(["model", "share of resets", "mean segment, tokens", "slow state's share of energy"], table)


def _seeds(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return "–"
    every = f" ({', '.join(f'{x:.{digits}f}' for x in values)})" if len(values) > 1 else ""
    return f"{with_interval(values, digits)}{every}"
