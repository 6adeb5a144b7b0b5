"""The decay of Gated Linear Attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from halflife.decay.base import DECAYS, Decay
from halflife.ops.laws import Law


@DECAYS.add("gla")
class GLADecay(Decay):
    """λ = σ(f)^{1/τ}, τ = 16: a sigmoid gate that the temperature τ brings near 1.

    g = logsigmoid(f) / τ (not logsigmoid(f/τ)). Range (0, 1); no parameters; time-scale τ / log 2 = 23 tokens at
    f = 0. Source: Yang et al. 2024; Decay, Table 1.
    """

    def __init__(self, *, tau: float = 16.0, **sizes) -> None:
        super().__init__(**sizes)
        if tau <= 0:
            raise ValueError(f"tau must be positive; got {tau}")
        self.tau = tau

    def law(self, log_rate: Tensor | None) -> Law:
        return Law("logsigmoid", factor=1 / self.tau)


@DECAYS.add("gla_released")
class ReleasedGLADecay(GLADecay):
    """λ = σ(f/τ), τ = 16: the GLA rows of the Decay paper as its authors ran them.

    g = logsigmoid(f/τ). Range (0, 1); time-scale 1 / log 2 = 1.4 tokens at f = 0, in place of GLA's 23 tokens.
    Source: released code of the Decay paper (xmixers).
    """

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        return F.logsigmoid(f / self.tau)
