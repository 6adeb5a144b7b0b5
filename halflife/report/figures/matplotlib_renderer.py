"""Draws figure data with matplotlib, and writes figures into files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, PercentFormatter

from halflife.files import atomic_path
from halflife.report.figures.data import Axis, FigureData, HeatMap, Panel, Series
from halflife.report.style import (
    HEAT_COLOURS,
    INK,
    PAGE_WIDTH,
    PAPER,
    REFERENCE_LINE,
    ModelStyle,
    escape_formula,
    label_point,
    legend,
    note,
    separate_labels,
    styled,
)

WEIGHTS: dict[str, dict[str, Any]] = {
    "thick": {}, "thin": {"linewidth": 0.7, "alpha": 0.5, "marker": ""}, "level": {"linewidth": 1.2},
    "line": {"linewidth": 1.4, "marker": ""}, "hollow": {"linewidth": 0.8, "markerfacecolor": "none"},
    "ring": {"markerfacecolor": "none", "markeredgewidth": 1.4, "markersize": 9},
    "bar": {"linewidth": 3, "alpha": 0.35, "solid_capstyle": "butt"},
}  # fmt: skip
BARS: dict[str, Any] = {"linewidth": 1.6, "alpha": 0.45, "zorder": 1.5}  # below all lines
MAX_MARKERS = 16  # of a line; longer lines have markers at equal distances
MAX_LARGE_DOTS = 48  # dots of a series; more dots are smaller
PAGE_HEIGHT = 18.0  # of the panels in one picture, inches
FORMATS = ("png", "svg")  # by default
DPI = 150
DATA = "Data"  # the field of a PNG file that has the `digest` of its figure
TITLE_PAD, LINE_HEIGHT = 6, 11.5  # of titles, points
# Without a date, the same data give the same file.
_METADATA: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


def draw_pages(data: FigureData) -> list[Figure]:
    """`draw` in pictures whose rows of panels are at most `PAGE_HEIGHT` high in all."""
    rows = max(1, int(PAGE_HEIGHT / max((_height(data, panel) for panel in data.panels), default=1.0)))
    size = rows * data.columns
    pages = [replace(data, panels=data.panels[i : i + size]) for i in range(0, len(data.panels), size)]
    return [draw(page) for page in pages or [data]]


def _height(data: FigureData, panel: Panel | HeatMap | None) -> float:
    """The height of the row of a panel, inches."""
    if isinstance(panel, HeatMap):
        return 0.75 + 0.3 * len(panel.rows)
    return 0.7 + 0.17 * len(panel.y.ticks) if isinstance(panel, Panel) and panel.y.names else data.size[1]


@styled
def draw(data: FigureData) -> Figure:
    """The figure as matplotlib draws it, with a legend below its panels."""
    data = data if any(data.panels) else replace(data, panels=[Panel(data.title, Axis(""), Axis(""), [])])
    columns = min(len(data.panels), data.columns)
    columns = 2 if (len(data.panels), data.columns) == (4, 3) else columns  # two by two
    rows = [data.panels[i : i + columns] for i in range(0, len(data.panels), columns)]
    heights = [max(_height(data, panel) for panel in row) for row in rows]
    figure = Figure(figsize=(_width(data, columns), sum(heights)))
    figure.set_layout_engine(
        "compressed" if any(isinstance(p, Panel) and p.equal for p in data.panels) else "constrained"
    )
    ratios = [len(panel.columns) for panel in rows[0] if isinstance(panel, HeatMap)]
    ratios = ratios if len(ratios) == columns else None
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights, width_ratios=ratios)
    y = _shared_axis(data)
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            if panel is not None:
                axes = figure.add_subplot(grid[i, j])
                _draw_panel(axes, replace(panel, y=y) if y else panel, data)
                if y and j:
                    axes.set_ylabel("")
                    axes.tick_params(labelleft=False)
    legend(figure, [Line2D([], [], **_look(*key), label=escape_formula(name)) for name, key in data.legend.items()])
    return figure


def _width(data: FigureData, columns: int) -> float:
    """The width of a figure, inches."""
    counts = [len(panel.columns) for panel in data.panels[:columns] if isinstance(panel, HeatMap)]
    return max(PAGE_WIDTH, data.size[0] * columns, 0.38 * sum(counts) + 0.5 * len(counts) + 1 if counts else 0)


def _shared_axis(data: FigureData) -> Axis | None:
    """The y-axis of all panels with limits around all their values. Axes that matplotlib shares take far longer."""
    panels = [panel for panel in data.panels if isinstance(panel, Panel)]
    if not data.shared or not panels:
        return None
    axis = panels[0].y
    values = [y for panel in panels for one in panel.series for end in (one.y, *(one.bars or ())) for y in end]
    values += [one.y for panel in panels for one in panel.references if one.y is not None]
    shown = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
    if not shown or axis.fraction or axis.limits != (None, None):
        return axis
    low, high = min(shown), max(shown)
    margin = 0.05 * (high - low) or 1.0
    return replace(axis, limits=(low / 1.4, high * 1.4) if axis.log else (low - margin, high + margin))


def _draw_panel(axes: Axes, panel: Panel | HeatMap, data: FigureData) -> None:
    above, _, title = escape_formula(panel.title).rpartition("\n")
    axes.set_title("\n" * bool(above) + title, loc="left")
    if above:  # this line may extend over the panels to its right, and takes no width from them
        place = (0, TITLE_PAD + LINE_HEIGHT)
        text = axes.annotate(above, (0, 1), place, xycoords="axes fraction", textcoords="offset points", fontsize=9)
        text.set_in_layout(False)
    axes.set(xlabel=panel.x.label, ylabel=panel.y.label)
    if isinstance(panel, HeatMap):
        _draw_heat_map(axes, np.array(panel.cells, dtype=float), panel.rows, panel.columns)
    elif panel.series:
        _draw_curves(axes, panel)
    else:
        note(axes, data.missing)


def _draw_heat_map(axes: Axes, cells: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Draw fractions `[rows, columns]` as coloured cells with percentages. Cells that are NaN stay empty."""
    axes.imshow(cells, vmin=0, vmax=1, cmap=HEAT_COLOURS, aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(columns)), columns, fontsize=7, rotation=90 if max(map(len, columns)) > 5 else 0)
    axes.set_yticks(range(len(rows)), list(map(escape_formula, rows)), fontsize=7)
    for (i, j), value in np.ndenumerate(cells):
        if math.isfinite(value):
            colour = PAPER if value > 0.55 else INK
            axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=6.5, color=colour)


def _look(style: ModelStyle, weight: str) -> dict[str, Any]:
    return {**style._asdict(), **WEIGHTS[weight]}


def _draw_curves(axes: Axes, panel: Panel) -> None:
    for reference in panel.references:
        _draw_reference(axes, reference.label, reference.x, reference.y)
    for band in panel.bands:
        axes.fill_between(band.x, band.low, band.high, color=band.color, alpha=band.alpha, linewidth=0)
    for i, series in enumerate(panel.series):
        look = _look(series.style, series.weight)
        if look["linestyle"] == "none":
            crowded = len(series.x) > MAX_LARGE_DOTS
            edge = (0.5 if crowded else 0.8) if series.weight == "hollow" else 0
            look = {"markersize": 2.0 if crowded else 4.5, "markeredgewidth": edge, "alpha": 0.85, **look}
        x = np.asarray(series.x) + series.shift if series.shift else series.x
        if series.bars:
            low, high = series.bars
            axes.vlines(x, low, high, color=series.style.color, **BARS)
        axes.plot(x, series.y, **look, markevery=_marker_places(series, i / len(panel.series)))
        for point in zip(series.x, series.y, strict=True) if series.label else ():
            label_point(axes, escape_formula(series.label), point)
    _set_axis(axes, "x", panel.x, panel.ticks("x"))
    _set_axis(axes, "y", panel.y, panel.ticks("y"))
    if panel.equal:
        axes.set_aspect("equal")


def _marker_places(series: Series, shift: float) -> tuple[float, float] | None:
    """Where a long line has markers, as a share of the panel's diagonal; lines are shifted against each other.

    None where no more than `MAX_MARKERS` points are seen: matplotlib refuses places on a line of NaN alone.
    """
    spacing = 0.15
    many = series.style.linestyle != "none" and sum(map(math.isfinite, series.y)) > MAX_MARKERS
    return (spacing * shift, spacing) if many else None


def _draw_reference(axes: Axes, label: str, x: float | None, y: float | None) -> None:
    place: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}
    if x is not None:
        axes.axvline(x, **REFERENCE_LINE)
        axes.annotate(label, (x, 1), (3, -2), xycoords=("data", "axes fraction"), va="top", **place)
    if y is not None:
        axes.axhline(y, **REFERENCE_LINE)
        axes.annotate(label, (1, y), (0, 1), xycoords=("axes fraction", "data"), ha="right", va="bottom", **place)


def _set_axis(axes: Axes, name: str, data: Axis, places: Mapping[float, str]) -> None:
    axis = getattr(axes, f"{name}axis")
    if data.log and math.isfinite(axis.get_minpos()):  # a run that diverged at once has no loss at all
        axes.set(**{f"{name}scale": "log"})
        axis.set_minor_locator(NullLocator())
    if places:
        labels = list(map(escape_formula, places.values()))
        axis.set_ticks(list(places), labels=labels, fontsize=7 if data.names else None)
    if data.fraction and not data.log:
        axes.set(**{f"{name}lim": (-0.03, 1.03)})
        axis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    if data.from_zero:
        axes.set(**{f"{name}lim": (0, None)})
    if data.limits != (None, None):
        axes.set(**{f"{name}lim": data.limits})


# -------------------------------------------------------------------------------------------------- files


def save(data: FigureData, folder: Path, name: str = "", formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write `name.png` (150 dpi), `name.svg`, … into the folder and return the files.

    A figure with many panels is divided into several files, `name.png`, `name-2.png` and so on. By default the name is
    that of the figure. Formats are png, svg and pdf; any other is an error.
    """
    files = []
    for number, figure in enumerate(draw_pages(data), start=1):
        stem = (name or data.name) + ("" if number == 1 else f"-{number}")
        arrange(figure)
        for suffix in formats:
            files.append(folder / f"{stem}.{suffix}")
            save_as(figure, files[-1])
    return files


@styled
def arrange(figure: Figure) -> Figure:
    """Compute the layout once for all files and return the figure. With a layout engine, each file is drawn twice."""
    if (engine := figure.get_layout_engine()) is not None:
        figure.dpi = DPI
        engine.execute(figure)
        figure.set_layout_engine(None)
    separate_labels(figure)
    return figure


@styled
def save_as(figure: Figure, file: Path) -> None:
    """Write the figure in the format of the file's suffix. The file is replaced only when it is complete."""
    suffix = check_format(file.suffix[1:])
    metadata = {DATA: digest(figure)} if suffix == "png" else _METADATA[suffix]
    with atomic_path(file) as temporary:
        figure.savefig(temporary, format=suffix, dpi=DPI, metadata=metadata)


def digest(figure: Figure) -> str:
    """A digest of the numbers that a figure shows, in six digits. PNG files have it under `DATA`."""
    lines = [line.get_xydata() for axes in figure.axes for line in axes.get_lines()]
    images = [
        np.ma.asarray(image.get_array(), float).filled(np.nan) for axes in figure.axes for image in axes.get_images()
    ]
    numbers = (f"{number:.6g}" for shown in (*lines, *images) for number in np.asarray(shown, float).flat)
    return hashlib.sha256(" ".join(numbers).encode()).hexdigest()


def check_format(suffix: str) -> str:
    """Return the format if figures can be written in it; a ValueError lists those that can."""
    if suffix not in _METADATA:
        raise ValueError(f"unknown format {suffix!r}; choose from {', '.join(_METADATA)}")
    return suffix
