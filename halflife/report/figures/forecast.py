"""The figures of a forecast of recall, from its saved data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from halflife.analysis.forecast.text import FORGOTTEN_SHARE
from halflife.report.figures.data import Axis, Band, FigureData, Key, Panel, Reference, Series
from halflife.report.style import DOTS, FORMULA, INK, PAGE_WIDTH, ModelStyle, model_styles
from halflife.report.tables.forecast import FORECASTS, is_text, measured_lag

MAX_CURVES = 6  # kinds of models whose recall is drawn by lag
SOLID = ModelStyle(INK, "", "-")

Row = Mapping[str, Any]


def forecast_figures(result: Mapping[str, Any]) -> list[FigureData]:
    """The figures "forecast" of recall, and "forecast_text" of texts, as far as there are models of each.

    On the left, each model is a marker, hollow for the energy forecast. A forecast on the line is exact, and one in the
    band is right within an octave. Half-lags beyond the longest lag are drawn at that lag. On the right, measured
    values are solid and forecast ones are dotted, for the first six kinds of models. The influence of the beginning of
    a text is drawn over that at lag 0. `result` is that of `analysis.forecast.survey.measure_forecasts`.
    """
    figures = []
    if models := list(result["models"]):
        rows = [row for row in models if row["measured"][0] >= 0.5] or models
        x = Axis("tokens between the pairs and the query", log=True)
        y = Axis("recall (%)", limits=(-3, 103))
        label = "measured: lag at which recall falls below half (tokens)"
        figures.append(_figure("forecast", rows, label, x, y, 50, lambda row: 100))
    if texts := list(result.get("texts", ())):
        x = Axis("tokens after the beginning", log=True)
        y = Axis("influence, over that at lag 0", log=True, limits=(1e-4, 2))
        label = "measured: lag at which a beginning is forgotten (tokens)"
        figures.append(
            _figure("forecast_text", texts, label, x, y, FORGOTTEN_SHARE, lambda row: 1 / row["measured"][0])
        )
    return figures


def _figure(
    name: str, rows: Sequence[Row], label: str, x: Axis, y: Axis, level: float, factor: Callable[[Row], float]
) -> FigureData:
    """Left: forecast lags against measured ones. Right: values by lag, times a factor, of one model of each kind."""
    styles = model_styles(list(dict.fromkeys(_kind(row) for row in rows)))
    curves = []
    for kind in list(styles)[:MAX_CURVES]:
        row = next(row for row in rows if _kind(row) == kind)
        for lags, key, line in (("lags", "measured", "-"), ("forecast_lags", "forecast", FORMULA.linestyle)):
            at, values = np.array(row[lags]), factor(row) * np.array(row[key])
            style = ModelStyle(styles[kind].color, "", line)
            curves.append(Series(f"{kind}, {key}", "", style, at[at > 0], values[at > 0], "line"))
    keys = {
        "energy forecast (hollow)": Key(DOTS, "hollow"), "measured": Key(SOLID, "line"),
        "forecast (aged state)": Key(FORMULA, "level"),
    }  # fmt: skip
    return FigureData(
        name, "Forecast", [_lags(rows, styles, label), Panel("", x, y, curves, [Reference("", y=level)])], keys=keys,
        size=(0.72 * PAGE_WIDTH, 4.2),
    )  # fmt: skip


def _lags(rows: Sequence[Row], styles: Mapping[str, ModelStyle], label: str) -> Panel:
    aged, energy = (keys[is_text(rows[0])] for keys in FORECASTS.values())
    lags = [_limited(row, lag) for row in rows for lag in (measured_lag(row), row[aged], row[energy])]
    ends = np.array([min(lags) / 2, max(lags) * 2])
    series = [Series("exact", "", SOLID, ends, ends, "level")]
    for row in rows:
        kind, measured = _kind(row), _limited(row, measured_lag(row))
        style = styles[kind]._replace(linestyle="none")
        series += [
            Series(f"{kind}, {energy}", kind, style, [measured], [_limited(row, row[energy])], "hollow"),
            Series(f"{kind}, {aged}", kind, style, [measured], [_limited(row, row[aged])]),
        ]
    x, y = (Axis(text, log=True, limits=(ends[0], ends[1])) for text in (label, "forecast (tokens)"))
    return Panel("", x, y, series, bands=[Band(ends, ends / 2, ends * 2, INK, 0.08)])


def _kind(row: Row) -> str:
    """What models of different seeds have in common: name and training length."""
    return f"{row['model']}, T {row['train_length']}"


def _limited(row: Row, lag: float) -> float:
    """The lag within the limits of the figure: at least 2, and the longest measured lag if it is infinite."""
    return max(row["lags"][-1] if math.isinf(lag) else lag, 2.0)
