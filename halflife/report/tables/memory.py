"""Tables of `halflife memory`: sizes of states, on a terminal and as files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halflife.evaluation.memory import format_bytes
from halflife.files import write_with_table
from halflife.report.table import Row, Table, styled

COLUMNS = ("model", "length", "bytes", "cache_bytes", "smaller_from")
CACHE = "KV cache"
SKA = ("heads", "rank", "value_dim", "committed", "pending", "theory", "measured", "with_pending")


def memory_tables(result: dict[str, Any]) -> Iterator[Table]:
    """The sizes at the lengths, how they grow, and the layers of SKA if a model has any.

    `result` is that of `evaluation.memory.measure_memory`.
    """
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
    return write_with_table(result, COLUMNS, rows, folder / "memory")
