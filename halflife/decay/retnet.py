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
    the same form as its model of GLA. RetNet's paper has `retnet_paper`, which is the same for four heads only.
    Source: PoST, Appendix E and Algorithm 4.
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
            exponent = self._exponents()
            self.log_rate.copy_((-torch.log1p(-(-exponent * math.log(2)).exp())).log())

    def _exponents(self) -> Tensor:
        """The exponents n of λ = 1 − 2^{−n}, `[H]`."""
        return 5 + 3 * torch.arange(self.num_heads, dtype=torch.float64) / max(self.num_heads - 1, 1)

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        fixed: Tensor | None = self.log_rate
        rate = (fixed if log_rate is None else log_rate).exp()  # type: ignore[union-attr]
        return (-rate).to(f.dtype).expand(f.shape)

    def release_rates(self) -> None:
        self.log_rate = None


@DECAYS.add("retnet_paper")
class PaperRetNetDecay(RetNetDecay):
    """λ = 1 − 2^{−5−j}: one fixed rate a head, j = 0 … h − 1, as RetNet's paper has it.

    Time-scales 31 tokens to `2^{h+4}`. Source: Sun et al. 2023; flash-linear-attention.
    """

    def _exponents(self) -> Tensor:
        return 5 + torch.arange(self.num_heads, dtype=torch.float64)
