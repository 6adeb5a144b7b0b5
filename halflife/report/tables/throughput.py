"""Tables of `halflife throughput`: times of training steps, on a terminal and as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from halflife.files import write_csv, write_json
from halflife.report.tables.terminal import print_sections

COLUMNS = ("model", "length", "seconds", "tokens_per_second")
SOFTMAX = "llama"


def print_throughput(result: dict[str, Any]) -> None:
    """Print milliseconds of a step and tokens/s of each model at each length.

    Args:
        result: as `evaluation.throughput.measure_steps` returns it.
    """
    lengths = [f"{length:,}" for length in result["lengths"]]
    firsts = faster_from(result)
    beside = ["faster from"] if firsts else []
    for title, key, scale, form in (
        ("a training step, ms", "seconds", 1e3, ",.1f"), ("tokens/s", "tokens_per_second", 1, ",.0f")
    ):  # fmt: skip
        rows = [
            [escape(row["model"]), f"{row['parameters']:,}", *(_number(x, scale, form) for x in row[key]),
             *([firsts[row["model"]]] if firsts else [])]
            for row in result["models"]
        ]  # fmt: skip
        print_sections(title, ("model", "parameters", *lengths, *beside), [rows])
    print(f"{result['device']}, {result['dtype']}; a step has {result['tokens']:,} tokens, or one sequence if longer.")
    if firsts:
        print(f"faster from: the first of these lengths from which on a model is faster than {SOFTMAX}.")


def _number(value: float | None, scale: float, form: str) -> str:
    return "no memory" if value is None else format(scale * value, form)


def faster_from(result: dict[str, Any]) -> dict[str, str]:
    """Model → the first measured length from which on it is faster than softmax attention, or "never"; {} without it.

    A model that needs too much memory at a length is slower there.
    """
    times = {row["model"]: [x or float("inf") for x in row["seconds"]] for row in result["models"]}
    if SOFTMAX not in times:
        return {}
    return {
        name: ""
        if name == SOFTMAX
        else first_ahead({n: x < y for n, x, y in zip(result["lengths"], own, times[SOFTMAX], strict=True)})
        for name, own in times.items()
    }


def first_ahead(ahead: Mapping[int, bool]) -> str:
    """Return the first length from which on a model is ahead, or "never" if it is not at the last one."""
    behind = [n for n, faster in ahead.items() if not faster]
    return next((f"{n:,}" for n in sorted(ahead) if n > max(behind, default=-1)), "never")


def write_throughput(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `throughput.json` with all of `result`, and `throughput.csv` with a row a model and length."""
    files = [folder / "throughput.json", folder / "throughput.csv"]
    write_json(files[0], result)
    rows = (
        (model["model"], *cells)
        for model in result["models"]
        for cells in zip(result["lengths"], model["seconds"], model["tokens_per_second"], strict=True)
    )
    write_csv(files[1], COLUMNS, rows)
    return files
