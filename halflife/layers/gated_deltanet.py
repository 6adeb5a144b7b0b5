"""DeltaNet and Gated DeltaNet."""

from __future__ import annotations

from typing import Any

from halflife.layers.mixer import LAYERS, LinearMixer


@LAYERS.add("gated_deltanet")
class GatedDeltaNet(LinearMixer):
    """Gated DeltaNet (Yang et al. 2025): the delta rule under Mamba-2's decay.

    This is the design-space block with short convolutions, L2-normalised q and k, and a SiLU output gate after a norm
    over each head. `options` are `LinearMixer`'s.
    """

    DECAY: str | None = "mamba2"

    def __init__(self, hidden_size: int, num_heads: int = 4, **options: Any) -> None:
        defaults = {
            "decay": self.DECAY, "granularity": "scalar", "update": "delta", "conv_size": 4, "gate": "swish",
        }  # fmt: skip
        super().__init__(hidden_size, num_heads, **{**defaults, **options})


@LAYERS.add("deltanet")
class DeltaNet(GatedDeltaNet):
    """DeltaNet (Yang et al. 2024): the delta rule without decay.

    It equals Gated DeltaNet otherwise.
    """

    DECAY = None
