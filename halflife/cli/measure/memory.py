"""`halflife memory`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Memory:
    """Print and plot how many bytes models store of one sequence, against the KV cache of a llama of the same sizes.

    The sizes are measured: each kind of layer reads a few tokens, and its state is counted. "smaller from" is the
    shortest length at which a state is smaller than the cache. Files: memory.png, memory.svg, memory.json, memory.csv.

    examples:
      halflife memory mamba2 mamba2+ska gated_deltanet llama --lengths 64 256 1024 4096 16384 65536
      halflife memory mamba2 rwkv7 --lengths 2048 131072 --hidden-size 2048 --num-layers 24 --cache-dtype float8
      halflife memory simple+vector simple+lrpe --lengths 1024 --dtype float32 --output sizes
      halflife memory runs/20260101-120000-text gated_deltanet
    """

    models: Positional[tuple[str, ...]] = ("mamba2", "gated_deltanet", "llama")
    """Presets, base[+modifier…], which `halflife list` shows; or folders with trained models, whose sizes the presets
    and the llama beside them then have."""
    lengths: tuple[int, ...] = (64, 256, 1024, 4096, 16384, 65536)
    """Lengths of the sequence, in tokens."""
    hidden_size: int = 256
    """Model width D."""
    num_layers: int = 4
    """Layers."""
    num_heads: int | None = None
    """Heads of a layer. Default: the choice of each architecture."""
    vocab_size: int = 256
    """Vocabulary. It counts among the parameters, not in the state."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The precision in which the models run. Recurrent states are float32 in either."""
    cache_dtype: Literal["float32", "bfloat16", "float8"] | None = None
    """The precision of keys and values in softmax attention, in the llama and in layers of models. Default: --dtype."""
    output: Path | None = None
    """The folder to write. Default: runs/<time>-memory."""

    def run(self) -> None:
        from halflife.cli.options import new_folder
        from halflife.evaluation.memory import measure_memory
        from halflife.report.figures.matplotlib_renderer import save
        from halflife.report.figures.memory import memory
        from halflife.report.table import show
        from halflife.report.tables.memory import memory_tables, write_memory

        result = measure_memory(
            self.models, self.lengths, hidden_size=self.hidden_size, num_layers=self.num_layers,
            num_heads=self.num_heads, vocab_size=self.vocab_size, dtype=self.dtype, cache_dtype=self.cache_dtype,
        )  # fmt: skip
        show(*memory_tables(result))
        output = self.output or new_folder("memory")
        files = [*write_memory(result, output), *save(memory(result), output)]
        print(f"written to {output}: {', '.join(file.name for file in files)}")
