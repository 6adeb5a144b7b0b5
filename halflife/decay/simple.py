"""Simple Decay: a sigmoid with an offset that sets the initial decay."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from halflife.decay.base import DECAYS
from halflife.decay.spectral import SpectralDecay, no_base_rates
from halflife.initial import draws
from halflife.ops.laws import Law
from halflife.precision import inverse_softplus


@DECAYS.add("simple")
class SimpleDecay(SpectralDecay):
    """λ = σ(f + Δ), Δ = logit(p): p is the initial decay, 0.99 by default.

    g = −softplus(−f − Δ). Range (0, 1). Initialisation: Δ = logit(p) in every channel, learnable. The paper tries
    p = 0.8, 0.9, 0.95, 0.99; p = 0 means no offset, λ = σ(f) (§5.6).
    Time-scale at f = 0: `1 / −log p`, 100 tokens. Under PoST Δ has the sorted spectrum of log-rates p_k,
    softplus(−Δ) = e^{p_k}. Source: Decay, Eq. 4.
    """

    def __init__(self, *, p: float = 0.99, **sizes) -> None:
        super().__init__(**sizes)
        if not 0 <= p < 1:
            raise ValueError(f"p, the initial decay, must lie between 0 and 1, and 0 means no offset; got {p}")
        self.p = p
        self.delta = nn.Parameter(torch.empty(self.shape)) if p else None
        self.reset_parameters()

    @draws
    def reset_parameters(self) -> None:
        if self.delta is not None:
            self.delta.fill_(math.log(self.p / (1 - self.p)))

    def law(self, log_rate: Tensor | None) -> Law:
        return Law("logsigmoid", self.delta if log_rate is None else -inverse_softplus(log_rate.exp()))

    def release_rates(self) -> None:
        if not self.p:
            raise no_base_rates(self)
        if self.p != 0.99:
            raise ValueError("PoST sets the initial decays, so p has no meaning under it; leave it out")
        self.delta = None
