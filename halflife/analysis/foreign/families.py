"""The mixers of transformers whose decays can be read, family by family. Importing the module registers them."""

from __future__ import annotations

import math

from torch import Tensor

from halflife.analysis.foreign import rg_lru  # noqa: F401 (it registers itself)
from halflife.analysis.foreign.mixer_decay import MIXERS, MixerDecay, softplus_decay

__all__ = ["MIXERS", "MixerDecay"]


# Mamba-2 in Mamba2, Bamba, Falcon-H1, Granite hybrids, Nemotron-H and Zamba2 (https://arxiv.org/abs/2405.21060).
@MIXERS.add("Mamba2Mixer")
@MIXERS.add("BambaMixer")
@MIXERS.add("GraniteMoeHybridMambaLayer")
@MIXERS.add("NemotronHMamba2Mixer")
@MIXERS.add("Zamba2MambaMixer")
class Mamba2Decay(MixerDecay):
    """One decay per head, `g = −e^A_log · clamp(softplus(Δ + dt_bias))`. Δ is the last part of the input projection.

    The limits of the clamp are the mixer's `time_step_limit`.
    """

    family = "Mamba-2"
    source_name = "in_proj"
    key_axis = -1

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        step = y[..., -self.mixer.num_heads :].float() + self.mixer.dt_bias.float()
        low, high = self.mixer.time_step_limit or (0.0, math.inf)
        return softplus_decay(self.mixer.A_log, step, (low, high))


@MIXERS.add("FalconH1Mixer")
class FalconH1Decay(Mamba2Decay):
    """The same law after the multipliers of Falcon-H1, which scale the output of the projection."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y * self.mixer.mup_vector)


# Gated DeltaNet in Qwen3-Next, Qwen3.5, Qwen4 and OLMo Hybrid (https://arxiv.org/abs/2412.06464).
@MIXERS.add("Qwen3_5GatedDeltaNet")
@MIXERS.add("Qwen3_5MoeGatedDeltaNet")
@MIXERS.add("Qwen4ExpTextGatedDeltaNet")
class GatedDeltaNetDecay(MixerDecay):
    """One decay per head, `g = −e^A_log · softplus(a + dt_bias)`, with a projection of its own for a."""

    family = "Gated DeltaNet"
    source_name = "in_proj_a"
    sizes = ("num_v_heads",)
    key_axis = -2

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return softplus_decay(self.mixer.A_log, self.activation(y).float() + self.mixer.dt_bias.float())

    def activation(self, y: Tensor) -> Tensor:
        """Return a, `[B, T, H]`, from the output of the source."""
        return y


@MIXERS.add("OlmoHybridGatedDeltaNet")
class OlmoGatedDeltaNetDecay(GatedDeltaNetDecay):
    """The same law. The projection has another name."""

    source_name = "a_proj"


@MIXERS.add("Qwen3NextGatedDeltaNet")
class Qwen3NextDecay(GatedDeltaNetDecay):
    """The same law. One projection gives β and a of the value heads, key head by key head."""

    source_name = "in_proj_ba"

    def activation(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.mixer.num_k_heads, 2, -1))[..., 1, :].flatten(-2)


# Kimi delta attention in Kimi Linear, GLM and Bailing hybrids (https://arxiv.org/abs/2510.26692).
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


# Lightning attention in MiniMax (https://arxiv.org/abs/2501.08313).
@MIXERS.add("MiniMaxLightningAttention")
class LightningDecay(MixerDecay):
    """One constant decay per head, `g = −slope`. Deep layers have smaller slopes."""

    family = "lightning attention"
    source_name = "qkv_proj"
    sizes = ("num_attention_heads",)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return -self.mixer.slope_rate.float().flatten().expand(*y.shape[:2], -1)


# RWKV-4 (https://arxiv.org/abs/2305.13048).
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
