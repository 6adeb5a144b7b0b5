"""Makes interactive plots of figure data, as plain dicts in plotly's terms.

Everything that is not in a model's colour is in `INK`, which the page replaces by the colour of its text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple

from halflife.report.figures.data import Axis, FigureData, HeatMap, Panel, Reference, Series
from halflife.report.numbers import rounded
from halflife.report.style import INK

# Marker of matplotlib → plotly's symbol, and its outline in an SVG of 8 × 8 around 0.
SYMBOLS = {
    "o": ("circle", "M4 0A4 4 0 1 1-4 0A4 4 0 1 1 4 0Z"), "s": ("square", "M-3.5-3.5H3.5V3.5H-3.5Z"),
    "^": ("triangle-up", "M0-4.5L4 3H-4Z"), "D": ("diamond", "M0-5L5 0L0 5L-5 0Z"),
    "v": ("triangle-down", "M0 4.5L4-3H-4Z"),
    "P": ("cross", "M-1.5-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z"),
    "X": ("x", "M-4.2-2.1L-2.1-4.2L0-2.1L2.1-4.2L4.2-2.1L2.1 0L4.2 2.1L2.1 4.2L0 2.1L-2.1 4.2L-4.2 2.1L-2.1 0Z"),
    "h": ("hexagon", "M0-4.5L3.9-2.2V2.2L0 4.5L-3.9 2.2V-2.2Z"), "": ("circle", ""),
}  # fmt: skip
WIDTHS = {"thick": 2.2, "thin": 1, "level": 1.4, "line": 1.8, "hollow": 1.2}


class LegendEntry(NamedTuple):
    """An entry of a plot's legend: a button that shows and hides the traces of its group."""

    label: str
    color: str
    dash: str
    outline: str


class Plot(NamedTuple):
    """A figure of the page: its data, its panels as plotly takes them, and its legend."""

    data: FigureData
    panels: list[dict[str, Any]]
    legend: list[LegendEntry]


def plot(data: FigureData) -> Plot:
    """The figure as an interactive plot: for each panel its title, traces ("data") and layout."""
    shown = [one for one in data.panels if isinstance(one, Panel | HeatMap)]
    panels = [_heat_map(one) if isinstance(one, HeatMap) else _curves(one) for one in shown]
    groups = {series.group for one in shown if isinstance(one, Panel) for series in one.series}
    legend = [
        LegendEntry(group, style.color, _dash(style.linestyle), SYMBOLS[style.marker][1])
        for group, (style, _) in data.legend.items() if group in groups
    ]  # fmt: skip
    return Plot(data, panels, legend)


def _curves(panel: Panel) -> dict[str, Any]:
    layout = {
        "xaxis": _axis(panel.x, panel.ticks("x")),
        "yaxis": _axis(panel.y, panel.ticks("y")),
        "shapes": [_reference(reference) for reference in panel.references],
    }
    hover = f"{_phrase(panel.x, 'x')}: {_phrase(panel.y, 'y')}"
    return {"title": panel.title, "data": [_trace(series, hover) for series in panel.series], "layout": layout}


def _trace(series: Series, hover: str) -> dict[str, Any]:
    style, weight = series.style, series.weight
    mode = "lines+markers" if weight in ("thick", "hollow") and style.marker else "lines"
    bars = {}
    if series.bars:
        low, high = ([rounded(abs(end - y)) for end, y in zip(ends, series.y, strict=True)] for ends in series.bars)
        bars["error_y"] = {"type": "data", "symmetric": False, "array": high, "arrayminus": low, "width": 0}
    label = {"text": [escape(series.label)] * len(series.x), "textposition": "top right"} if series.label else {}
    return {
        "type": "scatter", "mode": f"{mode}+text" if label else mode, **label, **bars,
        "name": series.name, "legendgroup": series.group,
        "x": list(series.x), "y": [rounded(value) for value in series.y], "opacity": 0.45 if weight == "thin" else 1,
        "line": {"color": style.color, "width": WIDTHS[weight], "dash": _dash(style.linestyle)},
        "marker": {"symbol": SYMBOLS[style.marker][0] + "-open" * (weight == "hollow"), "size": 8, "maxdisplayed": 16},
        "hovertemplate": f"<b>{escape(series.name)}</b>{series.note}<br>{hover}<extra></extra>",
    }  # fmt: skip


def _heat_map(panel: HeatMap) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "heatmap", "x": list(panel.columns), "y": list(panel.rows), "zmin": 0, "zmax": 1,
        "z": [[rounded(value) for value in row] for row in panel.cells],
        "text": [[f"{100 * value:.0f}" if math.isfinite(value) else "" for value in row] for row in panel.cells],
        "texttemplate": "%{text}", "xgap": 2, "ygap": 2, "showscale": False, "colorscale": "recall",
        "hoverongaps": False,
        "hovertemplate": f"{panel.x.phrase.format('%{x}')}, {panel.y.phrase.format('%{y}')}: %{{z:.2%}}<extra></extra>",
    }  # fmt: skip
    axis = {"type": "category", "showgrid": False}
    layout = {
        "xaxis": {"title": {"text": panel.x.label}, **axis},
        "yaxis": {"title": {"text": panel.y.label}, **axis, "autorange": "reversed"},
        "height": 90 + 34 * len(panel.rows),
    }
    return {"title": panel.title.replace("\n", ", "), "data": [trace], "layout": layout}


def _axis(axis: Axis, places: Mapping[float, str]) -> dict[str, Any]:
    layout: dict[str, Any] = {"title": {"text": axis.label}}
    if axis.log:
        layout |= {"type": "log"}
    if places:
        labels = [label.replace("\n", "<br>") for label in places.values()]
        layout |= {"tickmode": "array", "tickvals": list(places), "ticktext": labels}
    if axis.fraction and not axis.log:
        layout |= {"tickformat": ".0%", "range": [-0.03, 1.03]}
    if axis.from_zero:
        layout |= {"rangemode": "tozero"}
    if None not in axis.limits:
        layout |= {"range": [math.log10(end) if axis.log else end for end in axis.limits if end is not None]}
    return layout


def _phrase(axis: Axis, name: str) -> str:
    """A value of the axis as it is read under the pointer, in plotly's template language."""
    digits = "," if name == "x" else ".2%" if axis.fraction else ".4g"
    return axis.phrase.format(f"%{{{name}:{digits}}}")


def _reference(reference: Reference) -> dict[str, Any]:
    line = {"type": "line", "line": {"color": INK, "width": 1, "dash": "dash"}}
    place = {"textposition": "end", "textangle": 0, "yanchor": "bottom"}
    label = {"text": reference.label, **place, "font": {"color": INK}}
    if reference.x is not None:
        return {**line, "label": label, "x0": reference.x, "x1": reference.x, "yref": "paper", "y0": 0, "y1": 1}
    return {**line, "label": label, "y0": reference.y, "y1": reference.y, "xref": "paper", "x0": 0, "x1": 1}


def _dash(linestyle: Any) -> str:
    """A line style of matplotlib in plotly's terms."""
    return "solid" if linestyle == "-" else ",".join(f"{2 * length:g}px" for length in linestyle[1])
