"""Put measured forecasts in the place of those of the same models in a file of results, and draw its picture again.

    python docs/forecasts.py forecast_overview runs/forecast

Rows of the same model, seed, task and number of pairs are replaced; models that the file has not are added at its end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from join import RESULTS  # beside this file

from halflife.files import read_json, write_json
from halflife.report.figures.forecast import forecast_figures
from halflife.report.figures.matplotlib_renderer import save
from halflife.report.markdown import markdown
from halflife.report.tables.forecast import log2_ratio, read_forecasts

KINDS = ("models", "texts")


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one forecast from another."""
    return tuple(row.get(name) for name in ("model", "seed", "task", "train_length", "num_pairs"))


def replaced(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the old rows with the new ones in their places, and further new ones at the end."""
    return list(({key(row): row for row in old} | {key(row): row for row in new}).values())


def errors(file: str) -> str:
    """The table of errors of a `forecast.json` of pairs, by whether the half-lag and its forecast were reached.

    Raises:
        ValueError: the longest lags of the models are different multiples of T.
    """
    models = read_forecasts(RESULTS / file)["models"]
    (longest,) = {row["lags"][-1] // row["train_length"] for row in models}
    reached = [row for row in models if math.isfinite(row["half_lag"])]
    beyond = [row for row in models if math.isinf(row["half_lag"])]
    aged, energy = (_sizes(reached, key) for key in ("forecast_half_lag", "energy_lag"))
    least = _sizes(beyond, "forecast_half_lag")  # a forecast beyond has no error that is known
    return markdown(
        ["", "models and tasks", "aged state: error in octaves, median", "largest", "energy: median"],
        [
            [
                f"half-lag within {longest} T", f"{len(aged)}", f"{median(aged):.2f}", f"{max(aged):.2f}",
                f"{median(energy):.1f}",
            ],
            [f"beyond {longest} T, forecast beyond", f"{len(beyond) - len(least)}", "–", "–", "–"],
            [
                f"beyond {longest} T, forecast within", f"{len(least)}",
                f"at least {min(least):.1f} to {max(least):.1f}", "–", "–",
            ],
        ],
    )  # fmt: skip


def _sizes(models: list[dict[str, Any]], key: str) -> list[float]:
    """The absolute errors of a forecast in octaves, where they are known."""
    return [abs(error) for row in models if (error := log2_ratio(row, key)) is not None]


def main(arguments: Sequence[str]) -> None:
    name, *folders = arguments
    file = RESULTS / f"{name}.json"
    data = read_json(file)
    for folder in folders:
        new = read_json(Path(folder) / "forecast.json")
        data |= {kind: replaced(data.get(kind, []), new.get(kind, [])) for kind in KINDS}
    write_json(file, data)
    for figure in forecast_figures(read_forecasts(file)).values():
        save(figure, RESULTS, name, ("png",))


if __name__ == "__main__":
    main(sys.argv[1:])
