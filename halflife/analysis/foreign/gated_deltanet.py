"""Gated DeltaNet in Qwen3-Next, Qwen3.5, Qwen4 and OLMo Hybrid (https://arxiv.org/abs/2412.06464)."""

from __future__ import annotations

from torch import Tensor

from halflife.analysis.foreign.mixer_decay import MIXERS, MixerDecay, softplus_decay


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
