"""The decays of TransNormerLLM: one fixed, and one learnable from the same initial rates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halflife.decay.base import DECAYS, Decay
from halflife.decay.spectral import SpectralDecay


@DECAYS.add("tnl")
class TNLDecay(Decay):
    """λ = exp(−8 j/h · (1 − l/L)): one fixed rate a head, slower in deeper layers.

    Heads count j = 1 … h and layers l = 0 … L − 1, so that λ < 1 everywhere. Time-scale `h / (8 j (1 − l/L))`.
    Source: Qin et al. 2024; Decay, Table 1.
    """

    data_dependent = False
    granularities = ("scalar",)
    learnable = False

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        log_rate = torch.empty(self.shape)
        if self.learnable:
            self.log_rate = nn.Parameter(log_rate)
        else:
            self.register_buffer("log_rate", log_rate)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.log_rate is not None:
            head = torch.arange(1, self.num_heads + 1, dtype=torch.float32) / self.num_heads
            self.log_rate.copy_((8 * head * (1 - self.layer_idx / self.num_layers)).log())

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        learned: Tensor | None = self.log_rate
        rate = (learned if log_rate is None else log_rate).exp()  # type: ignore[union-attr]
        return (-rate).to(f.dtype).expand(f.shape)


@DECAYS.add("tnl_l")
class LearnableTNLDecay(SpectralDecay, TNLDecay):
    """λ = exp(−e^p) with learnable p, which starts at the rates of TNL.

    Source: Decay, §4.
    """

    learnable = True

    def release_rates(self) -> None:
        self.log_rate = None
