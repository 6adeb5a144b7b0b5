"""Grids of panels for figures that are drawn with matplotlib directly, and the limits that spectrum figures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from halflife.report.numbers import evenly
from halflife.report.style import WIDTH, escape_formula, note

SLOWEST, FASTEST = 1e8, 1e-2  # tokens; time-scales outside are drawn at these limits
MAX_LAYERS = 6  # of one model
CROWDED = 48  # channels of a panel; with more, markers are smaller and vertical lines are left out


def panel_grid(
    count: int, height: float, *, columns: int = 3, width: float = WIDTH, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, at most `columns` in a row (four panels stand two by two).

    Args:
        count: number of panels.
        height: the height of a row, inches.
        columns: the largest number of panels in a row.
        width: the width of the figure, inches.
        options: arguments of `Figure.subplots`.
    """
    columns = 2 if count == 4 and columns == 3 else max(1, min(count, columns))
    rows = -(-count // columns)
    figure = Figure(figsize=(width, rows * height), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def layer_grid(
    models: Sequence[tuple[str, Sequence[dict[str, Any]]]],
    size: float = 2.1,
    *,
    layout: Any = "constrained",
    **options: Any,
) -> tuple[Figure, list[tuple[Axes, str, dict[str, Any]]]]:
    """A figure with a row of panels for each model, one panel for each layer, and their titles.

    At most `MAX_LAYERS` layers are shown, evenly spaced. Models with a single layer each stand side by side.

    Args:
        models: name and layers of each model. Models without layers are left out.
        size: width and height of a panel, inches.
        layout: matplotlib's layout engine.
        options: arguments of `Figure.subplots`.

    Returns:
        The figure, and for each panel its axes, the model's name and the layer. Without any layer, the figure has one
        empty panel.
    """
    rows = [[(name, layer) for layer in evenly(layers, MAX_LAYERS)] for name, layers in models if layers] or [[]]
    width = max(map(len, rows))
    if width <= 1:
        width = min(3, len(rows))
        single = [panel for row in rows for panel in row]
        rows = [single[i : i + width] for i in range(0, len(single), width)] or [[]]
    figure = Figure(figsize=(max(WIDTH, size * width), (size + 0.15) * len(rows)), layout=layout)
    grid = figure.subplots(len(rows), width, squeeze=False, **options)
    panels = []
    for line, row in zip(grid.tolist(), rows, strict=True):
        for axes in line[len(row) :]:
            axes.set_axis_off()
        for i, (axes, (name, layer)) in enumerate(zip(line, row, strict=False)):
            # A long name extends over the panels to its right, which have the same model.
            above = f"{escape_formula(name)}\n" if i == 0 or row[i - 1][0] != name else ""
            axes.set_title(f"{above}layer {layer['layer']}", loc="left")
            panels.append((axes, name, layer))
    return figure, panels


def note_missing(figure: Figure, text: str) -> Figure:
    """Say in the first panel of an otherwise empty figure what is missing."""
    first = figure.axes[0]
    first.set_axis_on()
    note(first, text)
    return figure
