"""Gated Linear Attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from halflife.layers.mixer import LAYERS, LinearMixer
from halflife.layers.parts import FEATURE_MAPS, check_heads
from halflife.registry import unknown


@LAYERS.add("gla")
class GLA(LinearMixer):
    """Gated Linear Attention (Yang et al. 2024): vector decay σ(f)^{1/16} through rank 16, keys of half size.

    This is the design-space block without an activation on q and k, and with a SiLU output gate after a norm over each
    head.

    Args:
        hidden_size: D.
        num_heads: H.
        feature_map: "none", or a function of queries and keys, also after a short convolution: "relu", "relu2", "silu",
            "gelu", "sigmoid" or "tanh".
        options: those of `LinearMixer`.
    """

    def __init__(self, hidden_size: int, num_heads: int = 4, *, feature_map: str = "none", **options: Any) -> None:
        if feature_map not in ("none", *FEATURE_MAPS):
            raise unknown("feature_map", feature_map, ["none", *FEATURE_MAPS])
        defaults = {
            "decay": "gla", "granularity": "vector", "head_dim": max(check_heads(hidden_size, num_heads) // 2, 1),
            "activation": "none", "gate": "swish", "decay_rank": 16, "decay_bias": True,
        }  # fmt: skip
        super().__init__(hidden_size, num_heads, **{**defaults, **options})
        self.feature_map = FEATURE_MAPS.get(feature_map)

    def activate(self, x: Tensor) -> Tensor:
        x = super().activate(x)
        return x if self.feature_map is None else self.feature_map(x)
