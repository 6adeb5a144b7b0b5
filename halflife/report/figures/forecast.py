"""The figure of a forecast of recall, from its saved data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from halflife.report.figures.grids import panel_grid
from halflife.report.style import INK, REFERENCE_LINE, WIDTH, ModelStyle, legend, model_handles, model_styles, styled

MAX_CURVES = 6  # kinds of models whose recall is drawn by lag
DOTTED = (0, (1, 1.5))
SOLID: dict[str, Any] = {"color": INK, "linewidth": 1.4}
HOLLOW: dict[str, Any] = {"color": INK, "marker": "o", "fillstyle": "none", "linestyle": "none"}

Row = Mapping[str, Any]


@styled
def forecasts(result: Mapping[str, Any]) -> Figure:
    """Left: forecast half-lag against the measured one. Right: recall by lag.

    On the left, each model is a marker, hollow for the energy forecast. A forecast on the line is exact, and one in the
    band is right within an octave. Half-lags beyond the longest lag are drawn at that lag. On the right, measured
    recall is solid and forecast recall is dotted, for the first six kinds of models.

    Args:
        result: what `analysis.forecast_survey.measure_forecasts` returns.
    """
    rows = [row for row in result["models"] if row["measured"][0] >= 0.5] or list(result["models"])
    styles = model_styles(list(dict.fromkeys(_kind(row) for row in rows)))
    figure, (left, right) = panel_grid(2, 4.2, width=1.45 * WIDTH)
    _half_lags(left, rows, styles)
    _recall_by_lag(right, rows, styles)
    handles = [
        *model_handles(list(styles), linestyle="none"),
        Line2D([], [], **HOLLOW, label="energy forecast (hollow)"),
        Line2D([], [], **SOLID, label="measured"),
        Line2D([], [], **SOLID, linestyle=DOTTED, label="forecast (aged state)"),
    ]
    legend(figure, handles)
    return figure


def _half_lags(axes: Axes, rows: list[Row], styles: Mapping[str, ModelStyle]) -> None:
    lags = [_limited(row, row[key]) for row in rows for key in ("half_lag", "forecast_half_lag", "energy_lag")]
    ends = np.array([min(lags) / 2, max(lags) * 2])
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    axes.fill_between(ends, ends / 2, ends * 2, color=INK, alpha=0.08, linewidth=0)
    for row in rows:
        style, measured = styles[_kind(row)], _limited(row, row["half_lag"])
        for key, fill in (("energy_lag", "none"), ("forecast_half_lag", "full")):
            axes.plot(measured, _limited(row, row[key]), marker=style.marker, color=style.color, fillstyle=fill)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured: lag at which recall falls below half (tokens)", ylabel="forecast (tokens)")


def _recall_by_lag(axes: Axes, rows: list[Row], styles: Mapping[str, ModelStyle]) -> None:
    for kind in list(styles)[:MAX_CURVES]:
        row = next(row for row in rows if _kind(row) == kind)
        for lags, key, line in (("lags", "measured", "-"), ("forecast_lags", "forecast", DOTTED)):
            x, y = np.array(row[lags]), 100 * np.array(row[key])
            axes.plot(x[x > 0], y[x > 0], color=styles[kind].color, linestyle=line, linewidth=1.4)
    axes.axhline(50, **REFERENCE_LINE)
    axes.set(xscale="log", xlabel="tokens between the pairs and the query", ylabel="recall (%)", ylim=(-3, 103))


def _kind(row: Row) -> str:
    """What models of different seeds have in common: name and training length."""
    return f"{row['model']}, T {row['train_length']}"


def _limited(row: Row, lag: float) -> float:
    """The lag within the limits of the figure: at least 2, and the longest measured lag if it is infinite."""
    return max(row["lags"][-1] if math.isinf(lag) else lag, 2.0)
