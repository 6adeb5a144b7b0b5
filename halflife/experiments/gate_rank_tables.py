"""GateRank's results in Markdown: state tracking by position, recall by test, and what the gates did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from halflife.report.markdown import Rows, in_distribution, markdown
from halflife.runs.folder import Comparison, read


def tracking(folder: Path, rows: Rows) -> str:
    """Accuracy and cross-entropy in the positions of training and in those beyond, mean and every seed; the gates."""
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
    said = "Percent, and nats, at the positions of words of the longest test; a mean, and every seed."
    return "\n\n".join(filter(None, [said, markdown(heading, table), gates(run)]))


def recall(folder: Path, rows: Rows) -> str:
    """A row a model: sizes and every test; then the gates."""
    return "\n\n".join(filter(None, [in_distribution(rows), gates(read(folder))]))


def gates(run: Comparison) -> str:
    """What the slow gates of each model did in the last steps of training: mean over layers, and every seed."""
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
    return f"{fmean(values):.{digits}f}{every}"
