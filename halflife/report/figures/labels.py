"""Labels of points and names of lines that do not cover each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox, BboxBase

from halflife.report.figures.data import Series
from halflife.report.style import escape_formula

NAME_GAP = 0.055  # between names of lines, as a fraction of the panel's height, which has room for about 17 names
MARKER_HALF_SIZE = 4.0  # half the size of a marker, points
# Where a label may stand: its offset from the point in points, and its alignment.
PLACES = (
    (5, 3, "left", "bottom"), (5, -3, "left", "top"), (-5, 3, "right", "bottom"), (-5, -3, "right", "top"),
    (0, 6, "center", "bottom"), (0, -6, "center", "top"), (6, 0, "left", "center"), (-6, 0, "right", "center"),
)  # fmt: skip


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


def name_lines(axes: Axes, lines: Sequence[Series]) -> None:
    """Write the names of lines beside the right end of the panel, without overlaps. Series of dots have none.

    The scale and the limits of the y-axis are set before.
    """
    named = [line for line in lines if line.weight in ("line", "bar")]
    y = axes.transData.transform([(1, line.y[-1]) for line in named])[:, 1]
    ends = [float(end) for end in axes.transAxes.inverted().transform([(0, each) for each in y])[:, 1]]
    beside: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
    for line, at, moved in zip(named, ends, apart(ends, min(NAME_GAP, 0.95 / len(ends))), strict=True):
        colour = line.style.color
        axes.add_line(Line2D([1, 1.04], [at, moved], color=colour, linewidth=0.8, **beside))
        axes.add_line(Line2D([1.055], [moved], color=colour, marker=line.style.marker or "_", **beside))
        where: dict[str, Any] = {"xycoords": "axes fraction", "va": "center", "annotation_clip": False}
        axes.annotate(escape_formula(line.name), (1.075, moved), fontsize=8, **where)


def apart(positions: list[float], gap: float) -> list[float]:
    """Move positions between 0 and 1 so that neighbours are at least `gap` apart. Their order stays the same.

    Of equal positions, later ones move down. Positions that are too close form a group around their mean, inside
    [0, 1]. Groups that overlap are joined.
    """
    order = sorted(range(len(positions)), key=lambda i: (positions[i], -i))
    groups: list[list[int]] = []

    def centre(group: list[int]) -> float:
        reach = gap * (len(group) - 1) / 2
        return min(max(sum(positions[i] for i in group) / len(group), reach), 1 - reach)

    for i in order:
        groups.append([i])
        while len(groups) > 1:
            lower, upper = groups[-2:]
            if centre(upper) - centre(lower) >= gap * (len(lower) + len(upper)) / 2:
                break
            groups[-2:] = [lower + upper]
    moved = {
        i: centre(group) + gap * (place - (len(group) - 1) / 2) for group in groups for place, i in enumerate(group)
    }
    return [moved[i] for i in range(len(positions))]
