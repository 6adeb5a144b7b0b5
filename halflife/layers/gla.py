"""Gated Linear Attention."""

from __future__ import annotations

from typing import Any

from halflife.layers.mixer import LAYERS, LinearMixer
from halflife.layers.parts import check_heads


@LAYERS.add("gla")
class GLA(LinearMixer):
    """Gated Linear Attention (Yang et al. 2024): vector decay σ(f)^{1/16} through rank 16, keys of half size.

    This is the design-space block without an activation on q and k, and with a SiLU output gate after a norm over each
    head. `options` are `LinearMixer`'s.
    """

    def __init__(self, hidden_size: int, num_heads: int = 4, **options: Any) -> None:
        defaults = {
            "decay": "gla", "granularity": "vector", "head_dim": max(check_heads(hidden_size, num_heads) // 2, 1),
            "activation": "none", "gate": "swish", "decay_rank": 16, "decay_bias": True,
        }  # fmt: skip
        super().__init__(hidden_size, num_heads, **{**defaults, **options})
