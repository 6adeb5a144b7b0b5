"""The figure of a forecast, drawn from its saved data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from halflife.report.style import INK, REFERENCE_LINE, WIDTH, legend, model_styles, plain, styled

CURVES = 6  # models whose recall is drawn by lag


@styled
def forecasts(result: Mapping[str, Any]) -> Figure:
    """Left: forecast against measured half-lag, a marker a model (hollow: the energy forecast). Right: recall by lag.

    On the line a forecast is right, in the band within an octave. Models beyond the longest lag stand at it. On the
    right measured recall is drawn solid, forecast recall dotted, of the first six kinds of model.

    Args:
        result: what `forecast_survey.survey` gives.
    """
    rows = [row for row in result["models"] if row["measured"][0] >= 0.5] or list(result["models"])
    kinds = list(dict.fromkeys(_kind(row) for row in rows))
    shown = model_styles(kinds)
    figure = Figure(figsize=(1.45 * WIDTH, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    drawn = [_within(row, row[key]) for row in rows for key in ("half_lag", "forecast_half_lag", "energy_lag")]
    ends = np.array([min(drawn) / 2, max(drawn) * 2])
    left.plot(ends, ends, color=INK, linewidth=0.8)
    left.fill_between(ends, ends / 2, ends * 2, color=INK, alpha=0.08, linewidth=0)
    for row in rows:
        look = shown[_kind(row)]
        measured = _within(row, row["half_lag"])
        for key, style in (("energy_lag", "none"), ("forecast_half_lag", "full")):
            left.plot(measured, _within(row, row[key]), marker=look.marker, color=look.color, fillstyle=style)
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    left.set(xlabel="measured: lag at which recall falls below half", ylabel="forecast (tokens)")
    for kind in kinds[:CURVES]:
        row = next(row for row in rows if _kind(row) == kind)
        for lags, key, line in (("lags", "measured", "-"), ("forecast_lags", "forecast", (0, (1, 1.5)))):
            x, y = np.array(row[lags]), 100 * np.array(row[key])
            right.plot(x[x > 0], y[x > 0], color=shown[kind].color, linestyle=line, linewidth=1.4)
    right.axhline(50, **REFERENCE_LINE)
    right.set(xscale="log", xlabel="tokens between the pairs and the question", ylabel="recall (%)", ylim=(-3, 103))
    handles = [
        Line2D([], [], color=look.color, marker=look.marker, linestyle="none", label=plain(kind))
        for kind, look in shown.items()
    ]
    plain_line: dict[str, Any] = {"color": INK, "linewidth": 1.4}
    handles += [
        Line2D([], [], marker="o", color=INK, fillstyle="none", linestyle="none", label="energy forecast (hollow)"),
        Line2D([], [], **plain_line, label="measured"),
        Line2D([], [], **plain_line, linestyle=(0, (1, 1.5)), label="forecast (aged state)"),
    ]
    legend(figure, handles)
    return figure


def _kind(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, T {row['train_length']}"


def _within(row: Mapping[str, Any], lag: float) -> float:
    return max(row["lags"][-1] if math.isinf(lag) else lag, 2.0)
