"""Tables of `halflife throughput`: times of training steps, on a terminal and as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halflife.files import write_with_table
from halflife.report.table import Table

COLUMNS = ("model", "length", "seconds", "tokens_per_second")
SOFTMAX = "llama"


def throughput_tables(result: dict[str, Any]) -> Iterator[Table]:
    """Milliseconds of a step or a forward pass, and tokens/s, of each model at each length.

    `result` is that of `evaluation.throughput.measure_steps`.
    """
    firsts = faster_from(result)
    headings = ("model", "parameters", *(f"{n:,}" for n in result["lengths"]), *(["faster from"] if firsts else []))
    note = f"{result['device']}, {result['dtype']}; a step has {result['tokens']:,} tokens, or one sequence if longer."
    if firsts:
        note += f"\nfaster from: the first of these lengths from which on a model is faster than {SOFTMAX}."
    for title, key, scale, form, below in (
        (f"a {result.get('timed', 'training step')}, ms", "seconds", 1e3, ",.1f", ""),
        ("tokens/s", "tokens_per_second", 1, ",.0f", note),
    ):
        rows = []
        for row in result["models"]:
            numbers = ("no memory" if x is None else format(scale * x, form) for x in row[key])
            rows.append((row["model"], f"{row['parameters']:,}", *numbers, *([firsts[row["model"]]] if firsts else [])))
        yield Table(headings, rows, below, title)


def faster_from(result: dict[str, Any]) -> dict[str, str]:
    """Model → the first measured length from which on it is faster than softmax attention, or "never"; {} without it.

    A model that needs too much memory at a length is slower there.
    """
    times = {row["model"]: [x or float("inf") for x in row["seconds"]] for row in result["models"]}
    if SOFTMAX not in times:
        return {}
    softmax = times.pop(SOFTMAX)
    return {SOFTMAX: ""} | {
        name: first_ahead({n: x < y for n, x, y in zip(result["lengths"], own, softmax, strict=True)})
        for name, own in times.items()
    }


def first_ahead(ahead: Mapping[int, bool]) -> str:
    """Return the first length from which on a model is ahead, or "never" if it is not at the last one."""
    behind = [n for n, faster in ahead.items() if not faster]
    return next((f"{n:,}" for n in sorted(ahead) if n > max(behind, default=-1)), "never")


def write_throughput(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `throughput.json` with all of `result`, and `throughput.csv` with one row per model and length."""
    rows = [
        (model["model"], *cells)
        for model in result["models"]
        for cells in zip(result["lengths"], model["seconds"], model["tokens_per_second"], strict=True)
    ]
    return write_with_table(result, COLUMNS, rows, folder / "throughput")
