"""The decays of TransNormerLLM: fixed, and learnable from the same start."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halflife.decay.base import DECAYS, Decay


@DECAYS.add("tnl")
class TNLDecay(Decay):
    """λ = exp(−8 j/h · (1 − l/L)): fixed, one a head, slower in deeper layers.

    Head j = 1 … h of h, layer l = 0 … L − 1 of L, so that λ < 1 everywhere. Time-scale `h / (8 j (1 − l/L))`.
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
        own: Tensor | None = self.log_rate
        rate = (own if log_rate is None else log_rate).exp()  # type: ignore[union-attr]
        return (-rate).to(f.dtype).expand(f.shape)


@DECAYS.add("tnl_l")
class LearnableTNLDecay(TNLDecay):
    """λ = exp(−e^p), p learnable, starting where TNL stands.

    Source: Decay, §4.
    """

    spectral = True
    learnable = True

    def release_rates(self) -> None:
        self.log_rate = None
