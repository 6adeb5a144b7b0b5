"""Put measured forecasts in the place of those of the same models in a file of results, and draw its picture again.

    python docs/forecasts.py forecast_overview runs/forecast

Rows of the same model, seed, task and number of pairs are replaced; models that the file has not are added at its end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from join import RESULTS  # beside this file

from halflife.files import read_json, write_json
from halflife.report.figures.forecast import forecast_figures
from halflife.report.figures.matplotlib_renderer import save
from halflife.report.table import Table
from halflife.report.tables.forecast import log2_ratio, measured_lag, read_forecasts

KINDS = ("models", "texts")


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The fields that identify a forecast."""
    return tuple(row.get(name) for name in ("model", "seed", "task", "train_length", "num_pairs"))


def replaced(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the old rows with the new ones in their places, and further new ones at the end."""
    return list(({key(row): row for row in old} | {key(row): row for row in new}).values())


def errors(files: Mapping[str, str]) -> str:
    """The table of errors of forecasts by model.

    Args:
        files: what the models are → their `forecast.json`.
    """
    lines = []
    for label, file in files.items():
        found = read_forecasts(RESULTS / file)
        rows = [*found["models"], *found["texts"]]
        for model in dict.fromkeys(row["model"] for row in rows):
            lines.append([f"{label}: `{model}`", *_errors([row for row in rows if row["model"] == model])])
    return Table(
        [
            "model",
            "forecasts",
            "right to an octave",
            "off by more",
            "beyond the longest lag",
            "median error",
            "largest",
        ],
        lines,
    ).markdown()


def _errors(rows: list[dict[str, Any]]) -> list[str]:
    """The cells of a model: how many forecasts are right, and their errors in octaves.

    A lag beyond the longest one is not measured, so that the error of its forecast is not known.
    """
    reached = [row for row in rows if math.isfinite(measured_lag(row))]
    found = [error for row in reached if (error := log2_ratio(row)) is not None]
    right = sum(abs(error) <= 1 for error in found)
    counts = [len(rows), right, len(found) - right, len(rows) - len(found)]
    sizes = [f"{median(found):+.2f}", f"{max(found, key=abs):+.2f}"] if found else ["–", "–"]
    return [*map(str, counts), *sizes]


def main(arguments: Sequence[str]) -> None:
    name, *folders = arguments
    file = RESULTS / f"{name}.json"
    data = read_json(file)
    for folder in folders:
        new = read_json(Path(folder) / "forecast.json")
        data |= {kind: replaced(data.get(kind, []), new.get(kind, [])) for kind in KINDS}
    write_json(file, data)
    for figure in forecast_figures(read_forecasts(file)):
        save(figure, RESULTS, name, ("png",))


if __name__ == "__main__":
    main(sys.argv[1:])
