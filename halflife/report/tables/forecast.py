"""The files of `halflife forecast`, `forecast.json` and `forecast.md`, and its table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from halflife.files import FORECAST_JSON, read_json, write_json, write_text

LAGS = ("half_lag", "forecast_half_lag", "fade_lag", "fill_lag", "energy_lag")
FORECASTS = {"aged state": "forecast_half_lag", "energy": "energy_lag"}  # name → the field of its lag
HEADINGS = (
    "model", "seed", "task", "T", "pairs", "recall in T", "0, T later", "half-lag", "aged state", "octaves", "fades",
    "fills", "energy", "octaves",
)  # fmt: skip
LEGEND = """recall in T: the report's accuracy in distribution, where all pairs and questions lie within T tokens.
0, T later: the share of the pairs that a model recalls with no other token, and with T, between pairs and question.
half-lag: the number of such tokens after which it recalls fewer than half. aged state, energy: forecasts of it.
fades, fills: the half-lag if the pairs only fade, or if only other tokens fill the state. octaves: log2 of the ratio
of forecast and half-lag."""


def log2_ratio(row: Mapping[str, Any], key: str) -> float | None:
    """Return log2 of a forecast lag over the measured half-lag, which is the error of the forecast in octaves.

    It is None if there is nothing to compare: the model never recalled half of the pairs, or it neither fell below half
    nor was forecast to. If only one of the two lies beyond the longest lag, the longest lag stands for it, and the
    error is at least the result.
    """
    if row["measured"][0] < 0.5 or (math.isinf(row["half_lag"]) and math.isinf(row[key])):
        return None
    longest = float(row["lags"][-1])
    measured, forecast = (min(value, longest) for value in (row["half_lag"], row[key]))
    return math.log2(max(forecast, 1) / max(measured, 1))


def forecast_errors(models: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the errors of both forecasts in octaves.

    Returns:
        "aged state" and "energy" → "models", the number of models that were compared; "median" and "largest", of the
        absolute errors; "bias", the median error. A forecast without a model to compare is omitted.
    """
    table = {}
    for name, key in FORECASTS.items():
        errors = [error for row in models if (error := log2_ratio(row, key)) is not None]
        if errors:
            sizes = [abs(error) for error in errors]
            table[name] = {
                "models": len(errors), "median": median(sizes), "largest": max(sizes), "bias": median(errors)
            }  # fmt: skip
    return table


def markdown(result: Mapping[str, Any]) -> str:
    """Return a table of `ModelForecasts.to_dict()`, a row for each model, with the errors and a legend below."""
    lines = [table(result["models"])]
    for name, errors in forecast_errors(result["models"]).items():
        lines.append(
            f"\n{name}: {errors['models']} models, error {errors['median']:.2f} octaves in the median, at most "
            f"{errors['largest']:.2f} (median with its sign {errors['bias']:+.2f})."
        )
    return "\n".join([*lines, "", LEGEND]) + "\n"


def table(models: Sequence[Mapping[str, Any]]) -> str:
    """A row for each model, in Markdown."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---|---|---|" + "---:|" * (len(HEADINGS) - 3)]
    return "\n".join([*lines, *("| " + " | ".join(_cells(row)) + " |" for row in models)])


def _cells(row: Mapping[str, Any]) -> list[str]:
    nearest = min(range(len(row["lags"])), key=lambda i: abs(row["lags"][i] - row["train_length"]))
    recalled = ", ".join(f"{100 * row['measured'][i]:.0f}" for i in (0, nearest))
    cells = [
        row["model"], str(row["seed"]), row["task"], f"{row['train_length']:,}", str(row["num_pairs"]),
        "–" if (reported := row.get("reported")) is None else f"{100 * reported:.0f} %", f"{recalled} %",
        _lag(row, "half_lag"),
    ]  # fmt: skip
    for keys in (("forecast_half_lag",), ("fade_lag", "fill_lag", "energy_lag")):
        error = log2_ratio(row, keys[-1])
        cells += [*(_lag(row, key) for key in keys), "–" if error is None else f"{error:+.1f}"]
    return cells


def _lag(row: Mapping[str, Any], key: str) -> str:
    return f"> {row['lags'][-1]:,}" if math.isinf(row[key]) else f"{row[key]:,.0f}"


def print_forecasts(result: Mapping[str, Any]) -> None:
    """Print the table, and the models for which there is no forecast."""
    from rich.markdown import Markdown

    from halflife.report.tables.terminal import print_wide

    print_wide(Markdown(markdown(result)))
    for label, why in result["refused"].items():
        print(f"left out: {label}: {why}")


def write_forecasts(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `forecast.json` (null for a lag beyond the longest one) and `forecast.md`; return both files."""
    files = [folder / FORECAST_JSON, folder / "forecast.md"]
    write_json(files[0], result)
    write_text(files[1], markdown(result))
    return files


def read_forecasts(path: Path) -> dict[str, Any]:
    """Read a `forecast.json` back, with lags beyond the longest one as infinity.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if it is damaged, or another file.
    """
    result = read_json(path)
    if not isinstance(result, dict) or not isinstance(result.get("models"), list):
        raise ValueError(f"{path} is no forecast of `halflife forecast`")
    for row in result["models"]:
        for key in LAGS:
            row[key] = math.inf if row[key] is None else row[key]
    return result
