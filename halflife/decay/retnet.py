"""The decay of RetNet."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halflife.decay.base import DECAYS
from halflife.decay.spectral import SpectralDecay


@DECAYS.add("retnet")
class RetNetDecay(SpectralDecay):
    """λ = 1 − 2^{−5 − 3j/(h−1)}: one fixed rate a head, j = 0 … h − 1.

    Time-scales 31 to 255 tokens. Under PoST the decays are `exp(−e^{p_h})` with learned, sorted p. The PoST paper uses
    the same form as its model of GLA. Source: Sun et al. 2023; Decay, Table 1; PoST, Algorithm 4.
    """

    data_dependent = False
    granularities = ("scalar",)

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self.register_buffer("log_rate", torch.empty(self.shape))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.log_rate is not None:
            exponent = 5 + 3 * torch.arange(self.num_heads, dtype=torch.float64) / max(self.num_heads - 1, 1)
            self.log_rate.copy_((-torch.log1p(-(-exponent * math.log(2)).exp())).log())

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        fixed: Tensor | None = self.log_rate
        rate = (fixed if log_rate is None else log_rate).exp()  # type: ignore[union-attr]
        return (-rate).to(f.dtype).expand(f.shape)

    def release_rates(self) -> None:
        self.log_rate = None
