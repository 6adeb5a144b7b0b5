"""`halflife convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Convert:
    """Convert weights: models of transformers and fla to checkpoints of halflife, and Mamba-2 to transformers.

    examples:
      halflife convert mamba2-130m-hf my-mamba2
      halflife convert my-mamba2 for-transformers --to transformers
      halflife convert Qwen3-Next-80B-A3B-Instruct layer-0 --layer 0
    """

    source: Positional[Path]
    """The folder to read: a mamba2, rwkv7, gla or gated_deltanet in safetensors, or a qwen3_next for one mixer."""
    target: Positional[Path]
    """The folder to write, which must not hold a checkpoint."""
    to: Literal["halflife", "transformers"] = "halflife"
    """The format to write."""
    layer: int | None = None
    """The layer of a qwen3_next whose mixer is converted, from 0. `halflife.models.convert.load_layer` reads it."""

    def run(self) -> None:
        from halflife.models.convert import convert

        print(f"written to {convert(self.source, self.target, to=self.to, layer=self.layer)}")
