"""Sizes of the papers' models, for `preset(name, **SIZES["decay-160m"])`."""

from __future__ import annotations

from typing import Any


def _decay(layers: int, hidden: int, heads: int, intermediate: int) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": hidden, "num_heads": heads, "intermediate_size": intermediate,
        "vocab_size": 50257, "tie_embeddings": False,
    }  # fmt: skip


# Decay, Table 5, with GPT-2's tokenizer. The table gives neither the width of the GLU nor whether the head is tied; its
# parameter counts say: untied, and 8/3 of the hidden size rounded up to a multiple of 256.
SIZES: dict[str, dict[str, Any]] = {
    "decay-160m": _decay(12, 768, 12, 2048),
    "decay-410m": _decay(24, 1024, 16, 2816),
    "decay-1.45b": _decay(24, 2048, 32, 5632),
}
