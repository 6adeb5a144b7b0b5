"""`halflife convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Convert:
    """Convert weights: models of transformers, fla and RWKV-LM to checkpoints of halflife, and some back.

    examples:
      halflife convert mamba2-130m-hf my-mamba2
      halflife convert my-mamba2 for-transformers --to transformers
      halflife convert Qwen3.5-0.8B my-qwen
      halflife convert rwkv7-g1-0.1b.pth my-rwkv7
    """

    source: Positional[Path]
    """The folder to read, in safetensors: a mamba2, qwen3_5, qwen3_5_text or olmo_hybrid of transformers, or a gla,
    gated_deltanet, delta_net, gated_deltaproduct, comba, retnet, kda, rwkv7 or mamba3 of fla. For RWKV-7 also a file
    .pth of its author."""
    target: Positional[Path]
    """The folder to write, which must not hold a checkpoint."""
    to: Literal["halflife", "transformers", "fla"] = "halflife"
    """The format to write. transformers takes a mamba2, and hybrids of gated_deltanet and attention; fla a gla,
    gated_deltanet, deltanet, deltaproduct, comba, retnet, kda, rwkv7 or mamba3."""

    def run(self) -> None:
        from halflife.models.convert import convert

        print(f"written to {convert(self.source, self.target, to=self.to)}")
