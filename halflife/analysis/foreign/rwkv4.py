"""RWKV-4 (https://arxiv.org/abs/2305.13048)."""

from __future__ import annotations

from torch import Tensor

from halflife.analysis.foreign.mixer_decay import MIXERS, MixerDecay


@MIXERS.add("RwkvSelfAttention")
class Rwkv4Decay(MixerDecay):
    """One constant decay per channel, `g = −e^time_decay`, of numerator and denominator alike. It has no heads."""

    family = "RWKV-4"
    granularity = "vector"
    source_name = "key"

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, self.mixer.attention_hidden_size)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return -self.mixer.time_decay.float().exp().expand(*y.shape[:2], 1, -1)
