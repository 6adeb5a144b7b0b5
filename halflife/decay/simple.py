"""Simple Decay: one sigmoid, and an offset that says where it starts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.decay.base import DECAYS, Decay
from halflife.precision import inverse_softplus


@DECAYS.add("simple")
class SimpleDecay(Decay):
    """λ = σ(f + Δ), Δ = logit(p): p is the decay at the start; 0.99 by default.

    g = −softplus(−f − Δ). Range (0, 1). Initialisation: Δ = logit(p) in every channel, learnable; the paper tries
    p = 0.8, 0.9, 0.95, 0.99, and p = 0 means no offset at all, λ = σ(f) (§5.6).
    Time-scale at f = 0: `1 / −log p`, 100 tokens. Under PoST the spectrum is that of Δ:
    softplus(−Δ) = e^p. Source: Decay, Eq. 4.
    """

    spectral = True

    def __init__(self, *, p: float = 0.99, **sizes) -> None:
        super().__init__(**sizes)
        if not 0 <= p < 1:
            raise ValueError(f"p, the decay at the start, must lie between 0 and 1 (0: no offset); got {p}")
        self.p = p
        self.delta = nn.Parameter(torch.empty(self.shape)) if p else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.delta is not None:
            self.delta.fill_(math.log(self.p / (1 - self.p)))

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        offset = self.delta if log_rate is None else -inverse_softplus(log_rate.exp())
        return F.logsigmoid(f if offset is None else f + offset)

    def release_rates(self) -> None:
        if not self.p:
            super().release_rates()
        self.delta = None
