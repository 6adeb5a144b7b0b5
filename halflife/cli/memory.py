"""`halflife memory`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Memory:
    """Print and plot the bytes in which models remember one sequence, against the KV cache of a llama of their sizes.

    Sizes are those of real states: of each kind of layer, while it reads a few tokens. "smaller from" is the first
    length at which a state is smaller than the cache. Files: memory.png, memory.svg, memory.json, memory.csv.

    examples:
      halflife memory mamba2 mamba2+ska gated_deltanet llama --lengths 64 256 1024 4096 16384 65536
      halflife memory mamba2 rwkv7 --lengths 2048 131072 --hidden-size 2048 --num-layers 24 --cache-dtype float8
      halflife memory simple+vector simple+lrpe --lengths 1024 --dtype float32 --output sizes
    """

    models: Positional[tuple[str, ...]] = ()
    """Presets, base[+modifier…]; `halflife list` shows them."""
    lengths: tuple[int, ...] = ()
    """Tokens that have been read."""
    hidden_size: int = 256
    """Model width D."""
    num_layers: int = 4
    """Layers."""
    num_heads: int | None = None
    """Heads a layer. Default: each architecture's own choice."""
    vocab_size: int = 256
    """Vocabulary; it counts among the parameters, not in the state."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the models run in; recurrent states are float32 in either."""
    cache_dtype: Literal["float32", "bfloat16", "float8"] | None = None
    """How softmax attention stores its keys and values, in the llama and in layers of models. Default: dtype."""
    output: Path | None = None
    """The folder to write. Default: runs/<time>-memory."""

    def run(self) -> None:
        from halflife.evaluation.memory import measure_memory
        from halflife.report.figures.comparison import save
        from halflife.report.figures.memory import memory, write_tables

        result = measure_memory(
            self.models, self.lengths, hidden_size=self.hidden_size, num_layers=self.num_layers,
            num_heads=self.num_heads, vocab_size=self.vocab_size, dtype=self.dtype, cache_dtype=self.cache_dtype,
        )  # fmt: skip
        print_tables(result)
        output = self.output or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-memory"
        files = [*write_tables(result, output), *save(memory(result), output, "memory")]
        print(f"written to {output}: {', '.join(file.name for file in files)}")


def print_tables(result: dict[str, Any]) -> None:
    """Prints what `evaluation.memory.measure_memory` returns."""
    from rich.console import Console

    from halflife.evaluation.memory import format_bytes

    cache, models = result["cache"], result["models"]
    sizes = [(row["model"], *map(format_bytes, row["bytes"])) for row in models]
    growth = [
        (row["model"], f"{row['parameters']:,}", format_bytes(row["constant"]), format_bytes(row["per_token"]),
         _count(row["smaller_from"]))
        for row in models
    ]  # fmt: skip
    layers = [(row["model"], layer) for row in models for layer in row["ska"]]
    tables = [
        _table(
            "state of one sequence", ("model", *(f"{length:,}" for length in result["lengths"])),
            [*sizes, ("KV cache", *map(format_bytes, cache["bytes"]))],
        ),
        _table(
            "how it grows", ("model", "parameters", "constant", "a token", "smaller from"),
            [*growth, ("KV cache", "", "", format_bytes(cache["per_token"]), "")],
        ),
        *([_ska_table(layers)] if layers else []),
    ]  # fmt: skip
    console = Console()
    # A pipe has no width of its own: there the tables are as wide as they need to be.
    console = console if console.is_terminal else Console(width=200)
    console.print(*tables)
    llama = f"a llama of {result['num_layers']} layers of width {result['hidden_size']:,}, {result['cache_dtype']}"
    print(f"smaller from: the first length at which the state is smaller than the KV cache, that of\n{llama}.")
    if layers:
        print("theory, measured, all: likewise for a layer of SKA and a cache of its own keys and values:")
        print("T > (2r² + Pr + r + 1)/(r + P); its committed sums; these with room for a pending chunk.")


def _ska_table(layers: Sequence[tuple[str, dict[str, Any]]]) -> Any:
    """A row a model: what one of its SKA layers holds, see `evaluation.memory.ska_sizes`."""
    keys = ("heads", "rank", "value_dim", "committed", "pending", "theory", "measured", "with_pending")
    return _table(
        "numbers in a layer of spectral Koopman attention",
        ("model", "H", "r", "P", "committed", "pending", "theory", "measured", "all"),
        [(name, *(_count(layer[key]) for key in keys)) for name, layer in layers],
    )


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=heading == "model")
    for name, *cells in rows:
        table.add_row(escape(name), *cells, style="dim" if name == "KV cache" else None)
    return table


def _count(count: int | None) -> str:
    return "never" if count is None else f"{count:,}"
