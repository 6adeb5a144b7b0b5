"""The picture of the overview: one panel per quantity, one line per model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from halflife.report.figures.data import Axis, FigureData, Panel, Series
from halflife.report.figures.memory import size_ticks
from halflife.report.style import DOTS, INK, ModelStyle

# Column → title.
PANELS = {
    "persistence": "persistence, %", "capacity": "capacity, %", "decoys": "decoys, %", "tracking": "tracking, %",
    "text": "text, bits a byte", "state": "state, bytes", "training": "training, tokens/s",
    "decoding": "decoding, tokens/s",
}  # fmt: skip
PERCENT: dict[str, Any] = {"limits": (-3, 103)}
SPEED: dict[str, Any] = {
    "from_zero": True, "whole": True, "write": lambda x: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}"
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("persistence", "capacity", "decoys", "tracking"), PERCENT),
    **dict.fromkeys(("training", "decoding"), SPEED),
}


def overview(data: Mapping[str, Any]) -> FigureData:
    """A dot for each model and quantity: hollow at the shorter length, filled at the longer one, with a line between.

    Dots are means, and the bars reach over the seeds at the longer length. A model that has not learned the task of a
    panel has no dots there, and a task that no model has learned no panel. `data` is that of
    `lab.experiments.evidence.overview_page.collect`.
    """
    names, columns = data["models"], dict(data["columns"])
    columns |= {name: {"values": {m: [[x], [x]] for m, x in own.items()}} for name, own in data["speeds"].items()}
    y = Axis("", ticks=dict(enumerate(names)), limits=(len(names) - 0.5, -0.5), names=True)
    panels = []
    for name, title in PANELS.items():
        column = columns.get(name, {"values": {}})
        values = {model: column["values"][model] for model in column.get("learned", column["values"])}
        if values:
            lengths = " → ".join(f"{n:,}" for n in column.get("lengths", []))
            x = Axis(f"{lengths} tokens" if lengths else "", **OPTIONS.get(name, {}))
            if name == "state":
                sizes = [value for ends in values.values() for end in ends for value in end]
                x = replace(x, log=True, ticks=size_ticks(min(sizes), max(sizes), 4))
            scale = 100 if OPTIONS.get(name) is PERCENT else 1
            series = [one for i, model in enumerate(names) for one in _dots(i, values.get(model), scale)]
            panels.append(Panel(title, x, y, series))
    return FigureData("overview", "Overview", panels, columns=4, shared=True, size=(2.6, 3.0))


def _dots(y: int, ends: Any, scale: float) -> list[Series]:
    """The dots of one model: the line between its means, the seeds at the longer length, and the means."""
    if not ends or not all(ends):
        return []
    near, far = (scale * fmean(end) for end in ends)
    seeds = [scale * value for value in ends[1]]
    small = ModelStyle(INK, ".", "none")
    return [
        Series("", "", ModelStyle(INK, "", "-"), [near, far], [y, y], "thin"),
        Series("seeds", "", small, seeds, [y] * len(seeds), "hollow"),
        Series("shorter", "", DOTS, [near], [y], "hollow"),
        Series("longer", "", DOTS, [far], [y]),
    ]
