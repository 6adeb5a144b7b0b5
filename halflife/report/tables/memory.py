"""Tables of `halflife memory`: sizes of states, on a terminal and as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from halflife.evaluation.memory import format_bytes
from halflife.files import write_csv, write_json
from halflife.report.tables.terminal import print_wide

COLUMNS = ("model", "length", "bytes", "cache_bytes", "smaller_from")
CACHE = "KV cache"


def print_memory(result: dict[str, Any]) -> None:
    """Print the sizes at the lengths, how they grow, and the layers of SKA if a model has any.

    Args:
        result: as `evaluation.memory.measure_memory` returns it.
    """
    cache, models = result["cache"], result["models"]
    sizes = [(row["model"], *map(format_bytes, row["bytes"])) for row in models]
    growth = [
        (row["model"], f"{row['parameters']:,}", format_bytes(row["constant"]), format_bytes(row["per_token"]),
         format_bytes(row["per_digit"]), _count(row["smaller_from"]))
        for row in models
    ]  # fmt: skip
    layers = [(row["model"], layer) for row in models for layer in row["ska"]]
    print_wide(
        _table(
            "state of one sequence", ("model", *(f"{length:,}" for length in result["lengths"])),
            [*sizes, (CACHE, *map(format_bytes, cache["bytes"]))],
        ),
        _table(
            "growth of the state", ("model", "parameters", "constant", "a token", "a doubling", "smaller from"),
            [*growth, (CACHE, "", "", format_bytes(cache["per_token"]), "", "")],
        ),
        *([_ska_table(layers)] if layers else []),
    )  # fmt: skip
    llama = f"{result['num_layers']} layers of width {result['hidden_size']:,} in {result['cache_dtype']}"
    print(
        f"smaller from: the shortest length at which the state is smaller than the KV cache\nof a llama with {llama}."
    )
    if any(row["per_digit"] for row in models):
        print("a doubling: what twice as many tokens add; log-linear attention has a state for every power of two.")
    if layers:
        print("theory, measured, all: the same for one layer of SKA, against a cache of its keys and values.")
        print(
            "theory is T > (2r² + Pr + r + 1)/(r + P); measured counts the committed sums, all the pending chunk too."
        )


def _ska_table(layers: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """A row a model, with the numbers that one of its SKA layers stores (`evaluation.memory.ska_sizes`)."""
    keys = ("heads", "rank", "value_dim", "committed", "pending", "theory", "measured", "with_pending")
    return _table(
        "numbers in a layer of spectral Koopman attention",
        ("model", "H", "r", "P", "committed", "pending", "theory", "measured", "all"),
        [(name, *(_count(layer[key]) for key in keys)) for name, layer in layers],
    )


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=heading == "model")
    for name, *cells in rows:
        table.add_row(escape(name), *cells, style="dim" if name == CACHE else None)
    return table


def _count(count: int | None) -> str:
    return "never" if count is None else f"{count:,}"


def write_memory(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `memory.json` with all of `result`, and `memory.csv` with a row a model and length; return the files."""
    files = [folder / "memory.json", folder / "memory.csv"]
    write_json(files[0], result)
    rows = (
        (model["model"], *cells, "never" if model["smaller_from"] is None else model["smaller_from"])
        for model in result["models"]
        for cells in zip(result["lengths"], model["bytes"], result["cache"]["bytes"], strict=True)
    )
    write_csv(files[1], COLUMNS, rows)
    return files
