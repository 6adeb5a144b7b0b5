"""The figure of RULER's scores: every task by length, and needle tasks by the depth of the needle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halflife.report.figures.data import Axis, FigureData, HeatMap
from halflife.report.figures.matplotlib_renderer import save
from halflife.report.numbers import short_count
from halflife.runs.records import mean
from halflife.tasks.ruler import names

Details = Sequence[Mapping[str, Any]]


def ruler_figure(details: Details) -> FigureData:
    """Mean scores in percent. Above: task × length (tokens). Below: depth × length for each task with a needle.

    Details are those of `evaluation.ruler.Ruler`. It is a ValueError if there are none.
    """
    if not details:
        raise ValueError("there is no example to draw")
    lengths = sorted({row["length"] for row in details})
    deep = [{**row, "tenth": min(int(10 * row["depth"]), 9)} for row in details if row["depth"] is not None]
    x, depth, ticks = Axis("length (tokens)"), Axis("depth, %"), [short_count(length) for length in lengths]
    tasks = list(dict.fromkeys(row["task"] for row in details))
    tenths = sorted({row["tenth"] for row in deep})
    cells = _means(details, "task", tasks, lengths)
    panels = [HeatMap("references found, %", x, Axis(""), ticks, list(map(_label, tasks)), cells, wide=True)]
    ranges = [f"{10 * tenth} to {10 * tenth + 10}" for tenth in tenths]
    for task in tasks:
        if own := [row for row in deep if row["task"] == task]:
            panels.append(HeatMap(_label(task), x, depth, ticks, ranges, _means(own, "tenth", tenths, lengths)))
    return FigureData("ruler", "RULER", panels, size=(2.4, 2.4))


def write_figure(details: Details, folder: str | Path) -> list[Path]:
    """Write `ruler.png` and `ruler.svg` into the folder and return the files."""
    return save(ruler_figure(details), Path(folder))


def _label(task: str) -> str:
    """The task's name, marked if its text is the user's instead of RULER's."""
    return task + (" (user text)" if task in names() and task not in names(essay=False) else "")


def _means(details: Details, key: str, values: Sequence[Any], lengths: Sequence[int]) -> list[list[float]]:
    """Mean scores `[values, lengths]` of the details whose `key` has each value; NaN where there is none."""
    return [
        [mean(row["score"] for row in details if row[key] == value and row["length"] == n) for n in lengths]
        for value in values
    ]
