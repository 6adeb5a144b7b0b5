"""The decay of HGRN2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.decay.base import DECAYS, Decay


@DECAYS.add("hgrn2")
class HGRN2Decay(Decay):
    """λ = γ + (1 − γ) σ(f): the lower bound γ grows with depth.

    g = log(γ + (1 − γ) σ(f)). A softmax over learned logits gives L shares, one a layer, and γ of layer l is the sum of
    the first l shares. The first layer therefore has γ = 0. Range (γ, 1). Initialisation: logits 0, γ = l/L. Each layer
    has its separate set of L logits. Source: Qin et al. 2024; Decay, Table 1.
    """

    shares_keys = True

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self.bound_logits = nn.Parameter(torch.empty(self.num_layers, *self.shape)) if self.layer_idx else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.bound_logits is not None:
            self.bound_logits.zero_()

    def lower_bound(self) -> Tensor:
        """γ of this layer, `[H]` or `[H, K]`, in [0, 1)."""
        if self.bound_logits is None:
            return torch.zeros(self.shape)
        return self.bound_logits.softmax(0)[: self.layer_idx].sum(0)

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        if self.bound_logits is None:
            return F.logsigmoid(f)
        # (γ + e^f) / (1 + e^f)
        return torch.logaddexp(f, self.lower_bound().log()) - F.softplus(f)
