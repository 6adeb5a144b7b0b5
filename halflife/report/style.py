"""The style of all figures: one palette, one style for each model, and legends below the panels.

Every model has a colour (Okabe and Ito's palette for colour-blind readers), a marker and a line style, which are the
same in all figures, so that lines can be told apart in grey print too. Everything else is drawn in `INK` on `PAPER`;
the report page replaces these two colours in its dark theme.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox, BboxBase

INK, PAPER = "#1f2328", "#ffffff"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)  # Okabe and Ito, without yellow
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (6, 2, 1, 2)), (0, (3, 1.5)), (0, (5, 1.5, 1, 1.5, 1, 1.5)))
# A single hue whose lightness alone carries the value, for grey print and colour-blind readers.
HEAT_COLOURS: Colormap = LinearSegmentedColormap.from_list("recall", ["#eef4f9", "#56a0cf", "#08306b"])
REFERENCE_LINE: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (5, 3)), "alpha": 0.7}
PAGE_WIDTH = 7.2  # inches, the width of a printed page
MARKER_HALF_SIZE = 4.0  # half the size of a marker, points
# Where a label may stand: its offset from the point in points, and its alignment.
PLACES = (
    (5, 3, "left", "bottom"), (5, -3, "left", "top"), (-5, 3, "right", "bottom"), (-5, -3, "right", "top"),
    (0, 6, "center", "bottom"), (0, -6, "center", "top"), (6, 0, "left", "center"), (-6, 0, "right", "center"),
)  # fmt: skip

STYLE = {
    "font.size": 9, "axes.titlesize": 9,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "axes.grid": True, "grid.alpha": 0.15, "grid.linewidth": 0.6,
    "lines.linewidth": 1.8, "lines.markersize": 5,
    "legend.frameon": False, "legend.handlelength": 3.2,
    "svg.hashsalt": "halflife",  # makes the ids in an SVG file depend on the data alone
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), PAPER),
}  # fmt: skip
styled = matplotlib.style.context(["default", STYLE])  # a decorator that ignores the user's own matplotlib style


class ModelStyle(NamedTuple):
    """Colour, marker and line style of a model, in matplotlib's terms. An empty marker means none."""

    color: str
    marker: str
    linestyle: Any


REFERENCE = ModelStyle(INK, "", REFERENCE_LINE["linestyle"])
FORMULA = ModelStyle(INK, "", (0, (1, 1.5)))  # values of a formula, or a level to compare with
DOTS = ModelStyle(INK, "o", "none")


def model_styles(models: Sequence[str]) -> dict[str, ModelStyle]:
    """The style of each model, by its place in the list. The first 280 styles all differ."""
    return {
        model: ModelStyle(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], LINES[i % len(LINES)])
        for i, model in enumerate(models)
    }


def run_styles(runs: Mapping[str, str], models: Iterable[str] = ()) -> dict[str, ModelStyle]:
    """The style of each run in `runs`, label → model: the colour of its model, so that pictures of a folder agree.

    The colours are those of `model_styles` for `models`, followed by other models in their order. The first run of a
    model has all of its style, and further ones have other markers and lines.
    """
    order = list(dict.fromkeys([*models, *runs.values()]))
    styles = model_styles(order)
    earlier, found = Counter[str](), {}
    for label, model in runs.items():
        place = order.index(model) + len(order) * earlier[model]
        marker, line = MARKERS[place % len(MARKERS)], LINES[place % len(LINES)]
        found[label] = ModelStyle(styles[model].color, marker, line)
        earlier[model] += 1
    return found


def label_styles(labels: Iterable[str]) -> dict[str, ModelStyle]:
    """`run_styles` of the labels of `models.load.checkpoints`, which begin with the model's name."""
    return run_styles({label: label.partition(" ")[0] for label in labels})


def legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Add a legend below the panels, in as many columns as fit, and make the figure taller by its height."""
    if not handles:
        return
    fits, too_many = 1, len(handles) + 1
    columns = len(handles)
    while True:
        box = figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        extent = box.get_window_extent()
        if columns == 1 or extent.width < 0.98 * figure.bbox.width:
            fits = columns
        else:
            too_many = columns
        if columns == fits and fits + 1 == too_many:
            figure.set_figheight(figure.get_figheight() + extent.height / figure.dpi)
            return
        box.remove()
        columns = (fits + too_many) // 2


def note(axes: Axes, text: str) -> None:
    """Write in an empty panel why it is empty."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", alpha=0.7)


def escape_formula(name: str) -> str:
    """Escape dollar signs, which matplotlib would read as the start of a formula."""
    return name.replace("$", r"\$")


def label_point(axes: Axes, text: str, point: tuple[float, float]) -> None:
    """Write a label beside a point, which is in data coordinates. `separate_labels` may move the label."""
    axes.annotate(text, point, PLACES[0][:2], textcoords="offset points", fontsize=7, gid=label_point.__name__)


def separate_labels(figure: Figure) -> None:
    """Move each label of a point to the first of `PLACES` where it covers no point and no earlier label.

    A label without such a place is left out. The layout of the figure must not change afterwards.
    """
    for axes in figure.axes:
        own = [text for text in axes.texts if text.get_gid() == label_point.__name__]
        labels = [text for text in own if isinstance(text, Annotation)]
        size = MARKER_HALF_SIZE * figure.dpi / 72
        points = [axes.transData.transform(label.xy) for label in labels]
        taken = [Bbox.from_bounds(x - size, y - size, 2 * size, 2 * size) for x, y in points]
        for label in labels:
            box = _place(label, taken, axes.bbox)
            label.set_visible(box is not None)
            taken += [] if box is None else [box]


def _place(label: Annotation, taken: Sequence[Bbox], inside: BboxBase) -> Bbox | None:
    """Put a label where it covers nothing, and return its box; None if there is no such place."""
    for x, y, horizontal, vertical in PLACES:
        label.set(position=(x, y), ha=horizontal, va=vertical)
        box = label.get_window_extent()
        fits = inside.x0 <= box.x0 and inside.y0 <= box.y0 and box.y1 <= inside.y1  # they may end right of the axes
        if fits and not any(box.overlaps(other) for other in taken):
            return box
    return None
