"""`halflife convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Convert:
    """Weights in and out: models of transformers and fla as checkpoints of halflife, and Mamba-2 for transformers.

    examples:
      halflife convert mamba2-130m-hf my-mamba2
      halflife convert my-mamba2 for-transformers --to transformers
      halflife convert Qwen3-Next-80B-A3B-Instruct layer-0 --layer 0
    """

    source: Positional[Path]
    """The folder to read: mamba2, rwkv7, gla or gated_deltanet in safetensors, or a mixer of a qwen3_next."""
    target: Positional[Path]
    """The folder to write; it must hold no checkpoint."""
    to: Literal["halflife", "transformers"] = "halflife"
    layer: int | None = None
    """Which mixer of a qwen3_next, from 0; `halflife.models.convert.load_layer` reads it."""

    def run(self) -> None:
        from halflife.models.convert import convert

        print(f"written to {convert(self.source, self.target, to=self.to, layer=self.layer)}")
