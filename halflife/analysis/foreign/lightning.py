"""Lightning attention in MiniMax (https://arxiv.org/abs/2501.08313)."""

from __future__ import annotations

from torch import Tensor

from halflife.analysis.foreign.mixer_decay import MIXERS, MixerDecay


@MIXERS.add("MiniMaxLightningAttention")
class LightningDecay(MixerDecay):
    """One constant decay per head, `g = −slope`. Deep layers have smaller slopes."""

    family = "lightning attention"
    source_name = "qkv_proj"
    sizes = ("num_attention_heads",)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return -self.mixer.slope_rate.float().flatten().expand(*y.shape[:2], -1)
