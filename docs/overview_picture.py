"""The picture of the overview: one panel per quantity, one line per model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


# The models of the short picture: two that erase, one gated so, one of each other kind, and attention.
CHOSEN = ("deltaproduct", "deltanet", "gated_deltanet", "mamba2", "mamba2+ska", "hgrn2", "rwkv7", "llama")
NOT_LEARNED, NOT_RUN = "not learned", "not run"
WORDS = ModelStyle(INK, "", "none")


def overview(data: Mapping[str, Any], chosen: Sequence[str] = ()) -> FigureData:
    """A dot for each model and quantity: hollow at the shorter length, filled at the longer one, with a line between.

    Dots are means, and small ones the seeds at the longer length. Where a model has no dots, words say why. A task that
    no model has learned has no panel. `data` is that of `overview.joined`.

    Args:
        chosen: the models that are shown; none for all. The best in the first panel stand first, and those that did
            not learn it last.
    """
    names, columns = _sorted(data, chosen or data["models"]), dict(data["columns"])
    columns |= {name: {"values": {m: [[x], [x]] for m, x in own.items()}} for name, own in data["speeds"].items()}
    y = Axis("", ticks=dict(enumerate(names)), limits=(len(names) - 0.5, -0.5), names=True)
    panels = []
    for name, title in PANELS.items():
        column = columns.get(name, {"values": {}})
        values = {model: column["values"][model] for model in column.get("learned", column["values"])}
        absent = {model: NOT_LEARNED if model in column["values"] else NOT_RUN for model in names}
        if values:
            lengths = " → ".join(f"{n:,}" for n in column.get("lengths", []))
            x = Axis(f"{lengths} tokens" if lengths else "", **OPTIONS.get(name, {}))
            if name == "state":
                sizes = [value for ends in values.values() for end in ends for value in end]
                x = replace(x, log=True, ticks=size_ticks(min(sizes), max(sizes), 4))
            scale = 100 if OPTIONS.get(name) is PERCENT else 1
            left = 0.0 if scale > 1 else min(x for m in names for end in values.get(m, [[math.inf]]) for x in end)
            series = [
                one for i, model in enumerate(names)
                for one in _dots(i, values.get(model), scale) or [_words(absent[model], left, i)]
            ]  # fmt: skip
            panels.append(Panel(title, x, y, series))
    return FigureData("overview", "Overview", panels, columns=4, shared=True, size=(2.6, 3.0))


def _words(text: str, x: float, row: int) -> Series:
    """Words on a row. A label stands above its point, which is therefore at the lower end of the row."""
    return Series("", "", WORDS, [x], [row + 0.5], label=text)


def _sorted(data: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The models by their mean in the first panel at the longer length."""
    column = data["columns"][next(iter(PANELS))]
    means = {name: fmean(column["values"][name][1]) for name in column["learned"] if name in names}
    return sorted(names, key=lambda name: -means.get(name, -1.0))


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
