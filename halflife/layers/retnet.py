"""RetNet's retention."""

from __future__ import annotations

from typing import Any

from halflife.layers.mixer import LAYERS, LinearMixer
from halflife.layers.parts import check_heads


@LAYERS.add("retnet")
class RetNet(LinearMixer):
    """Multi-scale retention (Sun et al. 2023): one fixed decay a head, RoPE on q and k, values of twice the size.

    This is the design-space block without an activation on q and k, and with a SiLU output gate after a norm over each
    head. `options` are `LinearMixer`'s.
    """

    def __init__(self, hidden_size: int, num_heads: int = 4, **options: Any) -> None:
        defaults = {
            "decay": "retnet", "granularity": "scalar", "value_dim": 2 * check_heads(hidden_size, num_heads),
            "position": "rope", "activation": "none", "gate": "swish",
        }  # fmt: skip
        super().__init__(hidden_size, num_heads, **{**defaults, **options})
