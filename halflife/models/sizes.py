"""Sizes of the papers' models, for `preset(name, **SIZES["decay-160m"])`."""

from __future__ import annotations

from typing import Any, NamedTuple


def _decay(layers: int, hidden: int, heads: int, intermediate: int) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": hidden, "num_heads": heads, "intermediate_size": intermediate,
        "vocab_size": 50257, "tie_embeddings": False,
    }  # fmt: skip


def _echo(layers: int, hidden: int) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": hidden, "vocab_size": 32_000, "tie_embeddings": True}


class Layout(NamedTuple):
    """Where a model has SKA, counted from 0, and of what rank."""

    layers: tuple[int, ...]
    rank: int


# Decay, Table 5, with GPT-2's tokenizer. The table gives neither the width of the GLU nor whether the head is tied; its
# parameter counts say: untied, and 8/3 of the hidden size rounded up to a multiple of 256.
SIZES: dict[str, dict[str, Any]] = {
    "decay-160m": _decay(12, 768, 12, 2048),
    "decay-410m": _decay(24, 1024, 16, 2816),
    "decay-1.45b": _decay(24, 2048, 32, 5632),
    # Echo, §3.4, which names no tokenizer: of the common ones only LLaMA-2's of 32,000 tokens, with a tied head, gives
    # both its "50M" and its "180M" (50.1M and 184.9M). docs/design-space.md has the other readings.
    "echo-50m": _echo(16, 448),
    "echo-180m": _echo(24, 768),
}

# Echo, §3.4, by hidden size and layers.
ECHO = {(448, 16): Layout((3, 7, 11, 15), 56), (768, 24): Layout((8, 16), 48)}
