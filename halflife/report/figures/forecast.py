"""The figures of a forecast of recall, from its saved data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from halflife.analysis.forecast.text import FORGOTTEN_SHARE
from halflife.report.figures.data import Axis, Band, FigureData, Key, Panel, Reference, Series
from halflife.report.style import DOTS, FORMULA, INK, PAGE_WIDTH, ModelStyle, run_styles
from halflife.report.tables.forecast import forecast_lag, has_not_learned, measured_lag

MAX_CURVES = 6  # kinds of models whose recall is drawn by lag
SOLID = ModelStyle(INK, "", "-")

Row = Mapping[str, Any]


def forecast_figures(result: Mapping[str, Any]) -> list[FigureData]:
    """The figures "forecast" of recall, and "forecast_text" of texts, as far as there are models of each.

    On the left, each model is a marker. A forecast on the line is exact, and one in the band is right within an octave.
    A triangle stands at the longest lag where the half-lag (it points to the right) or its forecast (upwards) is beyond
    that. Models that have not learned to recall are left out. On the right, measured values are solid and forecast ones
    are dotted, for the first six kinds of models. The influence of the beginning of a text is drawn over that at lag 0.
    `result` is that of `analysis.forecast.survey.measure_forecasts`.
    """
    figures = []
    runs = {_kind(row): row["model"] for row in (*result["models"], *result.get("texts", ()))}
    styles = run_styles(runs, result.get("names", ()))
    if models := list(result["models"]):
        rows = [row for row in models if not has_not_learned(row)]
        x = Axis("tokens between the pairs and the query", log=True)
        y = Axis("recall (%)", limits=(-3, 103))
        label = "measured: lag at which recall falls below half (tokens)"
        figures.append(_figure("forecast", rows, styles, label, x, y, 50, lambda row: 100))
    if texts := list(result.get("texts", ())):
        x = Axis("tokens after the beginning", log=True)
        y = Axis("influence, over that at lag 0", log=True, limits=(1e-4, 2))
        label = "measured: lag at which a beginning is forgotten (tokens)"
        figures.append(
            _figure("forecast_text", texts, styles, label, x, y, FORGOTTEN_SHARE, lambda row: 1 / row["measured"][0])
        )
    return figures


def _figure(
    name: str,
    rows: Sequence[Row],
    styles: Mapping[str, ModelStyle],
    label: str,
    x: Axis,
    y: Axis,
    level: float,
    factor: Callable[[Row], float],
) -> FigureData:
    """Left: forecast lags against measured ones. Right: values by lag, times a factor, of one model of each kind."""
    curves = []
    for kind in list(dict.fromkeys(map(_kind, rows)))[:MAX_CURVES]:
        row = next(row for row in rows if _kind(row) == kind)
        for lags, key, line in (("lags", "measured", "-"), ("forecast_lags", "forecast", FORMULA.linestyle)):
            at, values = np.array(row[lags]), factor(row) * np.array(row[key])
            style = ModelStyle(styles[kind].color, "", line)
            curves.append(Series(f"{kind}, {key}", "", style, at[at > 0], values[at > 0], "line"))
    keys = {
        **{kind: Key(styles[kind]._replace(marker="o", linestyle="none")) for kind in dict.fromkeys(map(_kind, rows))},
        "measured": Key(SOLID, "line"), "forecast": Key(FORMULA, "level"),
    }  # fmt: skip
    if any(math.isinf(lag) for row in rows for lag in _lags_of(row)):
        keys["beyond the longest lag"] = Key(DOTS._replace(marker=">"))
    return FigureData(
        name, "Forecast", [_lags(rows, styles, label), Panel("", x, y, curves, [Reference("", y=level)])], keys=keys,
        size=(0.72 * PAGE_WIDTH, 4.2), missing="no model recalls half of its pairs",
    )  # fmt: skip


def _lags(rows: Sequence[Row], styles: Mapping[str, ModelStyle], label: str) -> Panel:
    if not rows:
        return Panel("", Axis(label), Axis(""), [])
    lags = [_limited(row, lag) for row in rows for lag in _lags_of(row)]
    ends = np.array([min(lags) / 2, max(lags) * 2])
    series = [Series("exact", "", SOLID, ends, ends, "level")]
    for row in rows:
        kind, (measured, lag) = _kind(row), _lags_of(row)
        marker = ">" if math.isinf(measured) else "^" if math.isinf(lag) else "o"
        style = ModelStyle(styles[kind].color, marker, "none")
        series.append(Series(kind, kind, style, [_limited(row, measured)], [_limited(row, lag)]))
    x, y = (Axis(text, log=True, limits=(ends[0], ends[1])) for text in (label, "forecast (tokens)"))
    return Panel("", x, y, series, bands=[Band(ends, ends / 2, ends * 2, INK, 0.08)])


def _lags_of(row: Row) -> tuple[float, float]:
    """The lag as measured, and its forecast."""
    return measured_lag(row), forecast_lag(row)


def _kind(row: Row) -> str:
    """What models of different seeds have in common: name and training length."""
    return f"{row['model']}, T {row['train_length']}"


def _limited(row: Row, lag: float) -> float:
    """The lag within the limits of the figure: at least 2, and the longest measured lag if it is infinite."""
    return max(row["lags"][-1] if math.isinf(lag) else lag, 2.0)
