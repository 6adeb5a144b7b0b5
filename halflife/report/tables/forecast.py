"""The files of `halflife forecast`, `forecast.json` and `forecast.md`, and its table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from halflife.analysis.forecast.recall import HALF_RECALLED
from halflife.files import FORECAST_JSON, read_json, write_json, write_text
from halflife.report.table import Table, show

LAGS = ("half_lag", "forecast_half_lag", "forgotten_lag", "forecast_forgotten_lag", "fade_lag", "fill_lag")
HEADINGS = (
    "model", "seed", "task", "T", "pairs", "recall in T", "0, T later", "half-lag", "forecast", "octaves", "fades",
    "fills",
)  # fmt: skip
LEGEND = """recall in T: the report's accuracy in distribution, where all pairs and questions lie within T tokens.
0, T later: the share of the pairs that a model recalls with no other token, and with T, between pairs and question.
half-lag: the number of such tokens after which it recalls fewer than half. forecast: of it. octaves: log2 of the ratio
of forecast and half-lag. fades, fills: the half-lag if the pairs only fade, or if only other tokens fill the state."""
TEXT_HEADINGS = (
    "model", "seed", "T", "beginning", "read", "influence at 0, T", "forgotten", "forecast", "octaves", "fades",
    "fills",
)  # fmt: skip
TEXT_LEGEND = """beginning: tokens at the start of a text. read: the tokens after it that the forecast reads.
influence: how much the beginning's part of the state changes the prediction of a token, in nats, right after the
beginning and T tokens later. forgotten: the lag at which the influence is a hundredth of that at lag 0."""


def has_not_learned(row: Mapping[str, Any]) -> bool:
    """Whether a model recalls fewer than half of the pairs where no other token follows them."""
    return not is_text(row) and row["measured"][0] < HALF_RECALLED


def is_text(row: Mapping[str, Any]) -> bool:
    """Whether a row is about a text, and not about pairs."""
    return "forgotten_lag" in row


def measured_lag(row: Mapping[str, Any]) -> float:
    """Return the lag at which a model has forgotten half of the pairs, or the beginning of a text, as measured."""
    return row["forgotten_lag" if is_text(row) else "half_lag"]


def forecast_lag(row: Mapping[str, Any]) -> float:
    """Return the forecast of `measured_lag`."""
    return row["forecast_forgotten_lag" if is_text(row) else "forecast_half_lag"]


def log2_ratio(row: Mapping[str, Any]) -> float | None:
    """Return log2 of the forecast lag over the measured one, which is the error of the forecast in octaves.

    It is None if there is nothing to compare: the model never recalled half of the pairs, it forgot a text within the
    window, or it neither forgot nor was forecast to. If only one of the two lies beyond the longest lag, the longest
    lag stands for it, and the error is at least the result.
    """
    lags, longest = (measured_lag(row), forecast_lag(row)), float(row["lags"][-1])
    unknown = is_text(row) and lags[0] <= row["window"]
    if unknown or has_not_learned(row) or all(map(math.isinf, lags)):
        return None
    measured, forecast = (min(lag, longest) for lag in lags)
    return math.log2(max(forecast, 1) / max(measured, 1))


def error_sentence(models: Sequence[Mapping[str, Any]]) -> str:
    """Say how large the errors of the forecasts are, in octaves; "" if no model can be compared."""
    errors = [error for row in models if (error := log2_ratio(row)) is not None]
    if not errors:
        return ""
    sizes = [abs(error) for error in errors]
    return (
        f"{len(errors)} models, error {median(sizes):.2f} octaves in the median, at most {max(sizes):.2f} (median with "
        f"its sign {median(errors):+.2f})."
    )


def forecast_tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of `ModelForecasts.to_dict()`, a row for each model, with the errors and a legend below each."""
    for rows, headings, left, cells, legend in (
        (result["models"], HEADINGS, 3, _cells, LEGEND),
        (result.get("texts", []), TEXT_HEADINGS, 2, _text_cells, TEXT_LEGEND),
    ):
        if rows:
            note = "\n\n".join(filter(None, (error_sentence(rows), legend)))
            yield Table(headings, list(map(cells, rows)), note, left=headings[:left])


def _cells(row: Mapping[str, Any]) -> list[str]:
    nearest = _at_train_length(row)
    recalled = ", ".join(f"{100 * row['measured'][i]:.0f}" for i in (0, nearest))
    cells = [
        row["model"], _seed(row), row["task"], f"{row['train_length']:,}", str(row["num_pairs"]),
        "–" if (reported := row.get("reported")) is None else f"{100 * reported:.0f} %", f"{recalled} %",
        _lag(row, row["half_lag"]),
    ]  # fmt: skip
    return [*cells, *_forecast_cells(row)]


def _seed(row: Mapping[str, Any]) -> str:
    return "–" if row["seed"] is None else str(row["seed"])


def sentences(result: Mapping[str, Any]) -> list[str]:
    """What was measured and forecast of each model, in words."""
    return [f"{_name(row)} {_said(row)}" for row in (*result["models"], *result.get("texts", ()))]


def _name(row: Mapping[str, Any]) -> str:
    return row["model"] if row["seed"] is None else f"{row['model']}, seed {row['seed']},"


def _said(row: Mapping[str, Any]) -> str:
    what = "the beginning of a text" if is_text(row) else f"its {row['num_pairs']} pairs ({row['task']})"
    if has_not_learned(row):
        found, guess = (f"{100 * value:.0f} %" for value in (row["measured"][0], 1 / row["num_pairs"]))
        return f"has not learned to recall: {found} of {what}, asked at once, where naming any value gives {guess}."
    forecast = f"Forecast: {_about(row, forecast_lag(row))}."
    if math.isinf(measured_lag(row)):
        kept = f"remembers {what}" if is_text(row) else f"recalls half of {what} or more up to"
        return f"{kept} {row['lags'][-1]:,} tokens later, the longest lag. {forecast}"
    return f"forgets {'' if is_text(row) else 'half of '}{what} after {_about(row, measured_lag(row))}. {forecast}"


def _about(row: Mapping[str, Any], lag: float) -> str:
    """A lag in two digits."""
    return f"more than {row['lags'][-1]:,} tokens" if math.isinf(lag) else f"about {float(f'{lag:.2g}'):,.0f} tokens"


def _text_cells(row: Mapping[str, Any]) -> list[str]:
    influences = ", ".join(f"{row['measured'][i]:.2g}" for i in (0, _at_train_length(row)))
    cells = [
        row["model"], _seed(row), f"{row['train_length']:,}", str(row["beginning"]), str(row["window"]),
        influences, _lag(row, row["forgotten_lag"]),
    ]  # fmt: skip
    return [*cells, *_forecast_cells(row)]


def _at_train_length(row: Mapping[str, Any]) -> int:
    """The index of the lag that is nearest to T."""
    return min(range(len(row["lags"])), key=lambda i: abs(row["lags"][i] - row["train_length"]))


def _forecast_cells(row: Mapping[str, Any]) -> list[str]:
    """The forecast with its error in octaves, and what it would be if one part alone aged."""
    error = log2_ratio(row)
    octaves = "–" if error is None else f"{error:+.1f}"
    return [_lag(row, forecast_lag(row)), octaves, _lag(row, row["fade_lag"]), _lag(row, row["fill_lag"])]


def _lag(row: Mapping[str, Any], lag: float) -> str:
    if has_not_learned(row):
        return "–"
    return f"> {row['lags'][-1]:,}" if math.isinf(lag) else f"{lag:,.0f}"


def print_forecasts(result: Mapping[str, Any], details: bool) -> None:
    """Print a sentence for each model, with `details` the tables too, and the models that have no forecast."""
    print("\n".join(sentences(result)))
    if details:
        show(*forecast_tables(result))
    for label, why in result["refused"].items():
        print(f"left out: {label}: {why}")


def write_forecasts(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `forecast.json` (null for a lag beyond the longest one) and `forecast.md`; return both files."""
    words = "".join(f"* {each}\n" for each in sentences(result))
    parts = [words, *(f"{each.markdown()}\n\n{each.note}\n" for each in forecast_tables(result))]
    return [write_json(folder / FORECAST_JSON, result), write_text(folder / "forecast.md", "\n".join(parts))]


def read_forecasts(path: Path) -> dict[str, Any]:
    """Read a `forecast.json` back, with lags beyond the longest one as infinity; raises as `read_json`."""
    result = read_json(path)
    if not isinstance(result, dict) or not all(isinstance(result.get(key), list) for key in ("models", "texts")):
        raise ValueError(f"{path} is no forecast of `halflife forecast`")
    for row in (*result["models"], *result["texts"]):
        for key in LAGS:
            if key in row and row[key] is None:
                row[key] = math.inf
    return result
