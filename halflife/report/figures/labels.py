"""Labels of points that do not cover each other."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox, BboxBase

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
