"""Draws figure data with matplotlib, and writes figures into files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from halflife.files import atomic_path
from halflife.report.figures.data import NO_DATA, Axis, FigureData, HeatMap, Panel, Series, log_tick_digits
from halflife.report.figures.grids import panel_grid
from halflife.report.labels import label_point, separate_labels
from halflife.report.style import (
    HEAT_COLOURS,
    INK,
    PAPER,
    REFERENCE_LINE,
    WIDTH,
    escape_formula,
    legend,
    note,
    styled,
)

WEIGHTS: dict[str, dict[str, Any]] = {
    "thick": {}, "thin": {"linewidth": 0.7, "alpha": 0.5, "marker": ""}, "level": {"linewidth": 1.2},
}  # fmt: skip
MAX_MARKERS = 16  # of a line; longer lines have markers at equal distances
PANEL = (3.0, 3.0)  # width and height of a panel of curves, inches
PAGE_HEIGHT = 18.0  # of the panels in one picture, inches
FORMATS = ("png", "svg")  # by default
DPI = 150
# Without a date, the same data give the same file.
_METADATA: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


def draw_pages(data: FigureData) -> list[Figure]:
    """`draw` in pictures whose rows of panels are at most `PAGE_HEIGHT` high in all."""
    heights = _heat_map_heights(data) or [PANEL[1]]
    size = max(1, int(PAGE_HEIGHT / max(heights))) * data.columns
    pages = [replace(data, panels=data.panels[i : i + size]) for i in range(0, len(data.panels), size)]
    return [draw(page) for page in pages or [data]]


def _heat_map_heights(data: FigureData) -> list[float]:
    """The heights of the heat maps of a figure, inches."""
    return [0.75 + 0.3 * len(panel.rows) for panel in data.panels if isinstance(panel, HeatMap)]


@styled
def draw(data: FigureData) -> Figure:
    """The figure as matplotlib draws it, with a legend below its panels."""
    if heights := _heat_map_heights(data):
        ratios = [len(panel.columns) for panel in data.panels[: data.columns] if isinstance(panel, HeatMap)]
        width = max(WIDTH, 0.38 * sum(ratios) + 0.5 * len(ratios) + 1)
        figure, grid = panel_grid(
            len(data.panels), max(heights), columns=data.columns, width=width, width_ratios=ratios
        )
    else:
        count = max(1, len(data.panels))
        figure, grid = panel_grid(count, PANEL[1], columns=data.columns, width=max(WIDTH, PANEL[0] * min(count, 3)))
    if not data.panels:
        grid[0].set_title(data.title)
        note(grid[0], NO_DATA)
    for axes, panel in zip(grid, data.panels, strict=False):
        axes.set(title=escape_formula(panel.title), xlabel=panel.x.label, ylabel=panel.y.label)
        if isinstance(panel, HeatMap):
            draw_heat_map(axes, np.array(panel.cells), panel.rows, panel.columns)
        else:
            _draw_curves(axes, panel)
    styles = data.legend.items()
    legend(figure, [Line2D([], [], **style._asdict(), label=escape_formula(name)) for name, style in styles])
    return figure


def _draw_curves(axes: Axes, panel: Panel) -> None:
    if not panel.series:
        return note(axes, NO_DATA)
    for reference in panel.references:
        _draw_reference(axes, reference.label, reference.x, reference.y)
    for i, series in enumerate(panel.series):
        style = {**series.style._asdict(), **WEIGHTS[series.weight]}
        axes.plot(series.x, series.y, **style, markevery=_marker_places(series, i / len(panel.series)))
        for point in zip(series.x, series.y, strict=True) if series.label else ():
            label_point(axes, escape_formula(series.label), point)
    _set_axis(axes, "x", panel.x, [value for series in panel.series for value in series.x])
    _set_axis(axes, "y", panel.y, [value for series in panel.series for value in series.y])


def _marker_places(series: Series, shift: float) -> tuple[float, float] | None:
    """Where a long line has markers, as a share of the panel's diagonal; lines are shifted against each other.

    None where no more than `MAX_MARKERS` points are seen: matplotlib refuses places on a line of NaN alone.
    """
    spacing = 0.15
    return (spacing * shift, spacing) if sum(map(math.isfinite, series.y)) > MAX_MARKERS else None


def _draw_reference(axes: Axes, label: str, x: float | None, y: float | None) -> None:
    place: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}
    if x is not None:
        axes.axvline(x, **REFERENCE_LINE)
        axes.annotate(label, (x, 1), (3, -2), xycoords=("data", "axes fraction"), va="top", **place)
    if y is not None:
        axes.axhline(y, **REFERENCE_LINE)
        axes.annotate(label, (1, y), (0, 1), xycoords=("axes fraction", "data"), ha="right", va="bottom", **place)


def _set_axis(axes: Axes, name: str, data: Axis, values: Sequence[float]) -> None:
    """Scale, limits and ticks of the x-axis or y-axis."""
    axis = getattr(axes, f"{name}axis")
    if data.log:
        axes.set(**{f"{name}scale": "log"})
        axis.set_minor_locator(NullLocator())
        axis.set_major_locator(LogLocator(subs=log_tick_digits(values)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    elif name == "x":
        axis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if data.ticks:
        axis.set_ticks(list(data.ticks), labels=list(data.ticks.values()))
    if data.fraction and not data.log:
        axes.set(**{f"{name}lim": (-0.03, 1.03)})
        axis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    if data.from_zero:
        axes.set(**{f"{name}lim": (0, None)})


def draw_heat_map(axes: Axes, cells: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Draw fractions `[rows, columns]` as coloured cells with percentages. Cells that are NaN stay empty."""
    axes.imshow(cells, vmin=0, vmax=1, cmap=HEAT_COLOURS, aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(columns)), columns, fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    for (i, j), value in np.ndenumerate(cells):
        if math.isfinite(value):
            colour = PAPER if value > 0.55 else INK
            axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=6.5, color=colour)


# -------------------------------------------------------------------------------------------------- files


def save(figure: Figure, folder: Path, name: str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write `name.png` (150 dpi), `name.svg`, … into the folder and return the files.

    Raises:
        ValueError: see `check_format`.
    """
    files = [folder / f"{name}.{check_format(suffix)}" for suffix in formats]
    _arrange(figure)
    for file in files:
        save_as(figure, file)
    return files


@styled
def _arrange(figure: Figure) -> None:
    """Compute the layout once for all files. With a layout engine, matplotlib draws each file twice."""
    if (engine := figure.get_layout_engine()) is not None:
        figure.dpi = DPI
        engine.execute(figure)
        figure.set_layout_engine(None)
    separate_labels(figure)


@styled
def save_as(figure: Figure, file: Path) -> None:
    """Write the figure in the format of the file's suffix. The file is replaced only when it is complete.

    Raises:
        ValueError: see `check_format`.
    """
    suffix = check_format(file.suffix[1:])
    with atomic_path(file) as temporary:
        figure.savefig(temporary, format=suffix, dpi=DPI, metadata=_METADATA[suffix])


def check_format(suffix: str) -> str:
    """Return the format if figures can be written in it.

    Raises:
        ValueError: the format is unknown; the message lists the known ones.
    """
    if suffix not in _METADATA:
        raise ValueError(f"unknown format {suffix!r}; choose from {', '.join(_METADATA)}")
    return suffix
