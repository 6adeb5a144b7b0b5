"""How figures look: one palette, one look a model, legends below the panels.

Figures read in grey print and by colour-blind eyes: every model has a colour of Okabe and Ito, a marker and a line
style, the same in all figures. All else is drawn in `INK` on `PAPER`, so that a page can swap the two for a dark theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

INK, PAPER = "#1f2328", "#ffffff"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)  # Okabe–Ito without its yellow
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (6, 2, 1, 2)), (0, (3, 1.5)), (0, (5, 1.5, 1, 1.5, 1, 1.5)))
LEVELS: dict[str, dict[str, Any]] = {
    "shortcut_accuracy": {
        "color": INK,
        "linewidth": 1.2,
        "linestyle": (0, (1, 1.2)),
        "label": "guess (ignores the key)",
    },
    "chance": {"color": INK, "linewidth": 1.2, "linestyle": (0, (1, 4)), "label": "chance"},
}
REFERENCE_LINE: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (5, 3)), "alpha": 0.7}
WIDTH = 7.2  # inches: of a page of print

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "svg.hashsalt": "halflife",  # the same data give the same file
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), PAPER),
}
styled = matplotlib.style.context(["default", STYLE])  # a decorator; whatever the user's own style is


class ModelStyle(NamedTuple):
    """How a model is drawn in every figure."""

    color: str
    marker: str
    linestyle: Any


def model_styles(models: Sequence[str]) -> dict[str, ModelStyle]:
    """One look a model, by its place in the command; no two of the first 280 are alike."""
    return {
        model: ModelStyle(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], LINES[i % len(LINES)])
        for i, model in enumerate(models)
    }


def model_handles(models: Sequence[str]) -> list[Line2D]:
    """Legend entries of models."""
    return [Line2D([], [], **look._asdict(), label=plain(model)) for model, look in model_styles(models).items()]


def legend(figure: Figure, handles: list[Line2D]) -> None:
    """A legend below the panels, in as many columns as fit; the figure grows by it."""
    for columns in range(len(handles), 0, -1):
        box = figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        if columns == 1 or box.get_window_extent().width < 0.98 * figure.bbox.width:
            break
        box.remove()
    figure.set_figheight(figure.get_figheight() + box.get_window_extent().height / figure.dpi)


def note(axes: Axes, text: str) -> None:
    """Says in an empty panel why it is empty."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", alpha=0.7)


def plain(name: str) -> str:
    """A name in which matplotlib sees no formula."""
    return name.replace("$", r"\$")
