"""The picture of the overview: one panel a quantity, one line a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from halflife.evaluation.memory import format_bytes
from halflife.report.figures.grids import panel_grid
from halflife.report.style import INK, WIDTH, escape_formula, styled

# Column → title.
PANELS = {
    "persistence": "persistence, %", "capacity": "capacity, %", "decoys": "decoys, %", "tracking": "tracking, %",
    "text": "text, bits a byte", "state": "state, bytes", "training": "training, tokens/s",
    "decoding": "decoding, tokens/s",
}  # fmt: skip
PERCENT = ("persistence", "capacity", "decoys", "tracking")
SPEEDS = ("training", "decoding")


@styled
def overview(data: Mapping[str, Any]) -> Figure:
    """A dot for each model and quantity: hollow at the shorter length, filled at the longer one, with a line between.

    Dots are means, and the seeds at the longer length are small and pale. A model that has not learned the task of a
    panel has no dots there, and a task that no model has learned no panel.

    Args:
        data: what `experiments.evidence.overview_page.collect` returns.
    """
    names, columns = data["models"], dict(data["columns"])
    columns |= {name: {"values": {m: [[x], [x]] for m, x in own.items()}} for name, own in data["speeds"].items()}
    drawn = {
        name: {model: column["values"][model] for model in column.get("learned", column["values"])}
        for name, column in columns.items()
    }
    shown = [name for name in PANELS if drawn.get(name)]
    figure, panels = panel_grid(
        len(shown), max(1.6, 0.17 * len(names) + 0.6), columns=4, width=1.45 * WIDTH, sharey=True
    )
    for axes, name in zip(panels, shown, strict=True):
        _draw(axes, names, drawn[name], 100 if name in PERCENT else 1)
        lengths = columns[name].get("lengths", [])
        axes.set_title(PANELS[name], loc="left")
        axes.set_xlabel(" → ".join(f"{n:,}" for n in lengths) + " tokens" if lengths else "")
        if name == "state":
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(LogLocator(base=2, numticks=3))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_bytes(x)))
        if name in SPEEDS:
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 15k
        if name in PERCENT:
            axes.set_xlim(-3, 103)
    panels[0].set_yticks(range(len(names)), [escape_formula(name) for name in names])
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    return figure


def _draw(axes: Axes, names: Sequence[str], values: Mapping[str, Sequence[Sequence[float]]], scale: float) -> None:
    for y, name in enumerate(names):
        if (ends := values.get(name)) and all(ends):
            near, far = (scale * fmean(end) for end in ends)
            axes.plot([near, far], [y, y], color=INK, linewidth=1, alpha=0.5)
            axes.plot(near, y, "o", color=INK, fillstyle="none", markersize=4)
            axes.plot(far, y, "o", color=INK, markersize=4)
            axes.plot([scale * value for value in ends[1]], [y] * len(ends[1]), ".", color=INK, alpha=0.4, markersize=3)
