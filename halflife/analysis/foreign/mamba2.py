"""Mamba-2 in Mamba2, Bamba, Falcon-H1, Granite hybrids, Nemotron-H and Zamba2 (https://arxiv.org/abs/2405.21060)."""

from __future__ import annotations

import math

from torch import Tensor

from halflife.analysis.foreign.mixer_decay import MIXERS, MixerDecay, softplus_decay


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
