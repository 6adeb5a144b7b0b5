"""Kimi delta attention in Kimi Linear, GLM and Bailing hybrids (https://arxiv.org/abs/2510.26692)."""

from __future__ import annotations

from torch import Tensor

from halflife.analysis.foreign.mixer_decay import MIXERS, MixerDecay


@MIXERS.add("KimiLinearDeltaAttention")
@MIXERS.add("Glm5NextTextLinearAttention")
@MIXERS.add("BailingHybridDeltaAttention")
class KimiDeltaDecay(MixerDecay):
    """One decay a key channel. The mixer has a module that returns g itself.

    Kimi Linear has `g = −e^A_log · softplus(f(x) + dt_bias)`. The others may have a lower bound b < 0 instead,
    `g = b · sigmoid(e^A_log · (f(x) + dt_bias))`.
    """

    family = "Kimi delta attention"
    granularity = "vector"
    source_name = "forget_gate"
    sizes = ("num_heads", "head_dim")
    key_axis = -2

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return y.float()
