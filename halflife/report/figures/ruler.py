"""The figure of RULER's scores: every task by length, and needles by how deep they lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from halflife.report.figures.comparison import save
from halflife.report.figures.recall import heat_map
from halflife.report.style import WIDTH, plain, styled
from halflife.runs.folder import mean
from halflife.tasks.ruler import names

MAX_COLUMNS = 3  # panels side by side


@styled
def ruler_figure(details: Sequence[Mapping[str, Any]]) -> Figure:
    """Mean scores: tasks × length (tokens); below, a panel a task whose answer lies in one place, its depth × length.

    Args:
        details: of `evaluation.ruler.Ruler`, at least one.

    Raises:
        ValueError: no details.
    """
    if not details:
        raise ValueError("there is no example to draw")
    tasks = list(dict.fromkeys(row["task"] for row in details))
    lengths = sorted({row["length"] for row in details})
    deep = [task for task in tasks if any(row["depth"] is not None for row in details if row["task"] == task)]
    depths = sorted({row["depth"] for row in details if row["depth"] is not None})
    columns = min(len(deep), MAX_COLUMNS) or 1
    lines = math.ceil(len(deep) / columns)
    heights = [0.3 * len(tasks) + 0.8, *[0.22 * len(depths) + 0.8] * lines]
    wide = max(WIDTH, columns * (0.36 * len(lengths) + 0.8))
    figure = Figure(figsize=(wide, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(1 + lines, columns, height_ratios=heights)
    every = figure.add_subplot(grid[0, :])
    _panel(every, details, "task", tasks, [_labelled(task) for task in tasks], lengths)
    every.set_title("references found, %")
    for i, task in enumerate(deep):
        axes = figure.add_subplot(grid[1 + i // columns, i % columns])
        own = [row for row in details if row["task"] == task]
        _panel(axes, own, "depth", depths, [f"{100 * depth:.0f}" for depth in depths], lengths)
        axes.set(title=_labelled(task), ylabel="depth, %" if i % columns == 0 else "")
    for axes in figure.axes:
        axes.set_xlabel("length (tokens)")
    return figure


def write_figure(details: Sequence[Mapping[str, Any]], folder: str | Path) -> list[Path]:
    """Writes `ruler.png` and `ruler.svg` into the folder; returns the files."""
    return save(ruler_figure(details), Path(folder), "ruler")


def _labelled(task: str) -> str:
    """The task's name; those of the user's text are not RULER's own, and say so."""
    return plain(task) + (" (user text)" if task in names() and task not in names(essay=False) else "")


def _panel(
    axes: Axes,
    details: Sequence[Mapping[str, Any]],
    key: str,
    values: Sequence[Any],
    labels: Sequence[str],
    lengths: Sequence[int],
) -> None:
    """One heat map of mean scores, `key` × length, as percentages; cells without examples stay empty."""
    cells = np.array(
        [
            [mean(r["score"] for r in details if r[key] == value and r["length"] == n) for n in lengths]
            for value in values
        ]
    )
    heat_map(axes, cells, labels, lengths)
