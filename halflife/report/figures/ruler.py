"""The figure of RULER's scores: every task by length, and needle tasks by the depth of the needle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from halflife.report.figures.matplotlib_renderer import draw_heat_map, save
from halflife.report.numbers import short_count
from halflife.report.style import WIDTH, escape_formula, styled
from halflife.runs.folder import mean
from halflife.tasks.ruler import names

MAX_COLUMNS = 3  # panels side by side

Details = Sequence[Mapping[str, Any]]


@styled
def ruler_figure(details: Details) -> Figure:
    """Mean scores in percent. Above: task × length (tokens). Below: depth × length for each task with a needle.

    Args:
        details: those of `evaluation.ruler.Ruler`, at least one.

    Raises:
        ValueError: there are no details.
    """
    if not details:
        raise ValueError("there is no example to draw")
    tasks = list(dict.fromkeys(row["task"] for row in details))
    lengths = sorted({row["length"] for row in details})
    deep = [{**row, "tenth": min(int(10 * row["depth"]), 9)} for row in details if row["depth"] is not None]
    tenths = sorted({row["tenth"] for row in deep})
    with_depth = [task for task in tasks if any(row["task"] == task for row in deep)]
    columns = min(len(with_depth), MAX_COLUMNS) or 1
    rows = math.ceil(len(with_depth) / columns)
    heights = [0.3 * len(tasks) + 0.8, *[0.22 * len(tenths) + 0.8] * rows]
    width = max(WIDTH, columns * (0.36 * len(lengths) + 0.8))
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=heights)
    ticks = [short_count(length) for length in lengths]
    axes = figure.add_subplot(grid[0, :])
    axes.set_title("references found, %")
    draw_heat_map(axes, _means(details, "task", tasks, lengths), [_label(task) for task in tasks], ticks)
    for i, task in enumerate(with_depth):
        axes = figure.add_subplot(grid[1 + i // columns, i % columns])
        axes.set(title=_label(task), ylabel="depth, %" if i % columns == 0 else "")
        cells = _means([row for row in deep if row["task"] == task], "tenth", tenths, lengths)
        draw_heat_map(axes, cells, [f"{10 * tenth} to {10 * tenth + 10}" for tenth in tenths], ticks)
    for axes in figure.axes:
        axes.set_xlabel("length (tokens)")
    return figure


def write_figure(details: Details, folder: str | Path) -> list[Path]:
    """Write `ruler.png` and `ruler.svg` into the folder and return the files."""
    return save(ruler_figure(details), Path(folder), "ruler")


def _label(task: str) -> str:
    """The task's name, marked if its text is the user's instead of RULER's."""
    return escape_formula(task) + (" (user text)" if task in names() and task not in names(essay=False) else "")


def _means(details: Details, key: str, values: Sequence[Any], lengths: Sequence[int]) -> np.ndarray:
    """Mean scores `[values, lengths]` of the details whose `key` has each value; NaN where there is none."""
    return np.array([
        [mean(row["score"] for row in details if row[key] == value and row["length"] == n) for n in lengths]
        for value in values
    ])  # fmt: skip
