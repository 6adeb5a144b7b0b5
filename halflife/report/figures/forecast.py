"""The figure of a forecast of recall, from its saved data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from halflife.analysis.forecast.text import FORGOTTEN_SHARE
from halflife.report.figures.grids import panel_grid
from halflife.report.style import INK, REFERENCE_LINE, WIDTH, ModelStyle, legend, model_handles, model_styles, styled
from halflife.report.tables.forecast import FORECASTS, is_text, measured_lag

MAX_CURVES = 6  # kinds of models whose recall is drawn by lag
DOTTED = (0, (1, 1.5))
SOLID: dict[str, Any] = {"color": INK, "linewidth": 1.4}
HOLLOW: dict[str, Any] = {"color": INK, "marker": "o", "fillstyle": "none", "linestyle": "none"}

Row = Mapping[str, Any]
DrawCurves = Callable[[Axes, list[Row], Mapping[str, ModelStyle]], None]


def forecast_figures(result: Mapping[str, Any]) -> dict[str, Figure]:
    """File name → figure: "forecast" of recall, and "forecast_text" of texts, as far as there are models of each.

    Args:
        result: what `analysis.forecast.survey.measure_forecasts` returns.
    """
    drawn = {"forecast": forecasts(result)} if result["models"] else {}
    return {**drawn, "forecast_text": text_forecasts(result)} if result.get("texts") else drawn


@styled
def text_forecasts(result: Mapping[str, Any]) -> Figure:
    """Left: forecast lag at which the beginning of a text is forgotten, against the measured one. Right: influence.

    The influence is drawn over that at lag 0, for the first six kinds of models. The rest is as in `forecasts`.
    """
    label = "measured: lag at which a beginning is forgotten (tokens)"
    return _lags_and_curves(list(result["texts"]), label, _influence_by_lag)


@styled
def forecasts(result: Mapping[str, Any]) -> Figure:
    """Left: forecast half-lag against the measured one. Right: recall by lag.

    On the left, each model is a marker, hollow for the energy forecast. A forecast on the line is exact, and one in the
    band is right within an octave. Half-lags beyond the longest lag are drawn at that lag. On the right, measured
    recall is solid and forecast recall is dotted, for the first six kinds of models.

    Args:
        result: what `analysis.forecast.survey.measure_forecasts` returns.
    """
    rows = [row for row in result["models"] if row["measured"][0] >= 0.5] or list(result["models"])
    return _lags_and_curves(rows, "measured: lag at which recall falls below half (tokens)", _recall_by_lag)


def _lags_and_curves(rows: list[Row], label: str, draw_curves: DrawCurves) -> Figure:
    """Left: forecast lags against measured ones. Right: values by lag, which `draw_curves` draws."""
    styles = model_styles(list(dict.fromkeys(_kind(row) for row in rows)))
    figure, (left, right) = panel_grid(2, 4.2, width=1.45 * WIDTH)
    _lags(left, rows, styles, label)
    draw_curves(right, rows, styles)
    handles = [
        *model_handles(list(styles), linestyle="none"),
        Line2D([], [], **HOLLOW, label="energy forecast (hollow)"),
        Line2D([], [], **SOLID, label="measured"),
        Line2D([], [], **SOLID, linestyle=DOTTED, label="forecast (aged state)"),
    ]
    legend(figure, handles)
    return figure


def _lags(axes: Axes, rows: list[Row], styles: Mapping[str, ModelStyle], label: str) -> None:
    aged, energy = (keys[is_text(rows[0])] for keys in FORECASTS.values())
    lags = [_limited(row, lag) for row in rows for lag in (measured_lag(row), row[aged], row[energy])]
    ends = np.array([min(lags) / 2, max(lags) * 2])
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    axes.fill_between(ends, ends / 2, ends * 2, color=INK, alpha=0.08, linewidth=0)
    for row in rows:
        style, measured = styles[_kind(row)], _limited(row, measured_lag(row))
        for key, fill in ((energy, "none"), (aged, "full")):
            axes.plot(measured, _limited(row, row[key]), marker=style.marker, color=style.color, fillstyle=fill)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel=label, ylabel="forecast (tokens)")


def _recall_by_lag(axes: Axes, rows: list[Row], styles: Mapping[str, ModelStyle]) -> None:
    _curves(axes, rows, styles, lambda row: 100)
    axes.axhline(50, **REFERENCE_LINE)
    axes.set(xscale="log", xlabel="tokens between the pairs and the query", ylabel="recall (%)", ylim=(-3, 103))


def _influence_by_lag(axes: Axes, rows: list[Row], styles: Mapping[str, ModelStyle]) -> None:
    _curves(axes, rows, styles, lambda row: 1 / row["measured"][0])
    axes.axhline(FORGOTTEN_SHARE, **REFERENCE_LINE)
    axes.set(xscale="log", yscale="log", ylim=(1e-4, 2))
    axes.set(xlabel="tokens after the beginning", ylabel="influence, over that at lag 0")


def _curves(axes: Axes, rows: list[Row], styles: Mapping[str, ModelStyle], factor: Callable[[Row], float]) -> None:
    """Measured and forecast values by lag, multiplied by a factor, of one model of each kind."""
    for kind in list(styles)[:MAX_CURVES]:
        row = next(row for row in rows if _kind(row) == kind)
        for lags, key, line in (("lags", "measured", "-"), ("forecast_lags", "forecast", DOTTED)):
            x, y = np.array(row[lags]), factor(row) * np.array(row[key])
            axes.plot(x[x > 0], y[x > 0], color=styles[kind].color, linestyle=line, linewidth=1.4)


def _kind(row: Row) -> str:
    """What models of different seeds have in common: name and training length."""
    return f"{row['model']}, T {row['train_length']}"


def _limited(row: Row, lag: float) -> float:
    """The lag within the limits of the figure: at least 2, and the longest measured lag if it is infinite."""
    return max(row["lags"][-1] if math.isinf(lag) else lag, 2.0)
