"""Tables of `halflife memory` and `halflife throughput`: sizes of states, and times of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halflife.evaluation.memory import format_bytes
from halflife.files import write_with_table
from halflife.report.table import Row, Table, styled

MEMORY = ("model", "length", "bytes", "cache_bytes", "smaller_from")
CACHE = "KV cache"
SKA = ("heads", "rank", "value_dim", "committed", "pending", "theory", "measured", "with_pending")
THROUGHPUT = ("model", "length", "seconds", "tokens_per_second")
SOFTMAX = "llama"


def memory_tables(result: dict[str, Any]) -> Iterator[Table]:
    """The sizes that `measure_memory` found at the lengths, how they grow, and the layers of SKA if a model has any."""
    cache, models = result["cache"], result["models"]
    sizes: list[Row] = [(row["model"], *map(format_bytes, row["bytes"])) for row in models]
    sizes.append(styled("dim", CACHE, *map(format_bytes, cache["bytes"])))
    yield Table(("model", *(f"{n:,}" for n in result["lengths"])), sizes, title="state of one sequence")
    growth: list[Row] = [
        (row["model"], f"{row['parameters']:,}", format_bytes(row["constant"]), format_bytes(row["per_token"]),
         format_bytes(row["per_digit"]), _count(row["smaller_from"]))
        for row in models
    ]  # fmt: skip
    growth.append(styled("dim", CACHE, "", "", format_bytes(cache["per_token"]), "", ""))
    llama = f"{result['num_layers']} layers of width {result['hidden_size']:,} in {result['cache_dtype']}"
    note = (
        f"smaller from: the shortest length at which the state is smaller than the KV cache\nof a llama with {llama}."
    )
    if any(row["per_digit"] for row in models):
        note += "\na doubling: what twice as many tokens add; log-linear attention has a state for every power of two."
    headings = ("model", "parameters", "constant", "a token", "a doubling", "smaller from")
    yield Table(headings, growth, note, "growth of the state")
    if layers := [(row["model"], *(_count(layer[key]) for key in SKA)) for row in models for layer in row["ska"]]:
        yield Table(
            ("model", "H", "r", "P", "committed", "pending", "theory", "measured", "all"), layers,
            "theory, measured, all: the same for one layer of SKA, against a cache of its keys and values.\n"
            "theory is T > (2r² + Pr + r + 1)/(r + P); measured counts the committed sums, all the pending chunk too.",
            "numbers in a layer of spectral Koopman attention",
        )  # fmt: skip


def _count(count: int | None) -> str:
    return "never" if count is None else f"{count:,}"


def write_memory(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `memory.json` with all of `result`, and `memory.csv` with one row per model and length."""
    rows = [
        (model["model"], *cells, "never" if model["smaller_from"] is None else model["smaller_from"])
        for model in result["models"]
        for cells in zip(result["lengths"], model["bytes"], result["cache"]["bytes"], strict=True)
    ]
    return write_with_table(result, MEMORY, rows, folder / "memory")


def throughput_tables(result: dict[str, Any]) -> Iterator[Table]:
    """Milliseconds of a step or a forward pass, and tokens/s, of each model and length of `measure_steps`."""
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
    return write_with_table(result, THROUGHPUT, rows, folder / "throughput")
