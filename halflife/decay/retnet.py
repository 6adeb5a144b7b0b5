"""The decay of RetNet."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halflife.decay.base import DECAYS, ConstantDecay
from halflife.decay.minimax import geometric_rates
from halflife.decay.spectral import SpectralDecay, check_rate_start


@DECAYS.add("retnet")
class RetNetDecay(SpectralDecay, ConstantDecay):
    """λ = 1 − 2^{−5 − 3j/(h−1)}: one fixed rate per head, j = 0 … h − 1.

    Time-scales 31 to 255 tokens. Under PoST the decays are `exp(−e^{p_h})` with learned, sorted p. The PoST paper uses
    the same form as its model of GLA. RetNet's paper has `retnet_paper`, which is the same for four heads only.
    Source: PoST, Appendix E and Algorithm 4; the options are ours.

    Args:
        trained_rates: train log(−log λ) of each head, without an order.
        rate_start: "own" for the rates above, or "geometric" for rates −log λ geometric from 1/T to 1, as PoST starts.
        train_length: T of "geometric".
    """

    RATE_STARTS = ("own", "geometric")

    def __init__(
        self, *, trained_rates: bool = False, rate_start: str = "own", train_length: int | None = None, **sizes
    ) -> None:
        super().__init__(trained_rates=trained_rates, **sizes)
        check_rate_start(rate_start, self.RATE_STARTS, train_length)
        self.train_length = train_length
        self.reset_parameters()

    def rates(self) -> Tensor:
        if self.train_length is not None:
            return geometric_rates(self.num_heads, self.train_length)
        return -torch.log1p(-(-self._exponents() * math.log(2)).exp())

    def _exponents(self) -> Tensor:
        return 5 + 3 * torch.arange(self.num_heads, dtype=torch.float64) / max(self.num_heads - 1, 1)

    def release_rates(self) -> None:
        if self.trained_rates or self.train_length is not None:
            raise ValueError("PoST sets and trains the rates, so trained_rates and rate_start have no meaning under it")
        self.log_rate = None


@DECAYS.add("retnet_paper")
class PaperRetNetDecay(RetNetDecay):
    """λ = 1 − 2^{−5−j}: one fixed rate per head, j = 0 … h − 1, as RetNet's paper has it.

    Time-scales 31 tokens to `2^{h+4}`. Source: Sun et al. 2023; flash-linear-attention.
    """

    def _exponents(self) -> Tensor:
        return 5 + torch.arange(self.num_heads, dtype=torch.float64)
