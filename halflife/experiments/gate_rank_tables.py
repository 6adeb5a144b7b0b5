"""GateRank's results in Markdown: state tracking by position, recall by test, and statistics of the gates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from halflife.report.intervals import with_interval
from halflife.report.markdown import Rows, in_distribution, markdown
from halflife.runs.folder import Comparison, read


def tracking(folder: Path, rows: Rows) -> str:
    """Accuracy and cross-entropy at the positions of training and beyond, as means and by seed; then the gates."""
    run = read(folder)
    edges = sorted({found["length"] for one in run.trainings for found in one.positions})
    spans = list(zip([0, *edges[:-1]], edges, strict=True))
    heading = ["model", *(f"{name} {low + 1}–{high}" for name in ("accuracy", "loss") for low, high in spans)]
    table = []
    for model in run.models:
        longest = [found for one in run.trainings_of(model) for found in one.positions if found["length"] == edges[-1]]
        row = [model]
        for name, scale in (("accuracy", 100), ("loss", 1)):
            row += [_seeds([scale * fmean(found[name][low:high]) for found in longest]) for low, high in spans]
        table.append(row)
    caption = "Accuracy in percent and loss in nats, by position in the longest test: the mean, and every seed."
    return "\n\n".join(filter(None, [caption, markdown(heading, table), gates(run)]))


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
