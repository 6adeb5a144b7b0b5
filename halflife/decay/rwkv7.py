"""The decay of RWKV-7."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.decay.base import DECAYS
from halflife.decay.spectral import SpectralDecay
from halflife.initial import draws
from halflife.ops.laws import Law, Product

FASTEST_RATE = math.exp(-0.5)  # the upper limit of all rates


def zigzag(num_heads: int, head_dim: int) -> Tensor:
    """`u|u|` with u from −1 to 1 along each head, `[H, K]`; it makes the channels of a head differ."""
    half = (head_dim - 1) / 2
    u = (torch.arange(head_dim, dtype=torch.float32) - half) / (half or 1)
    return (u * u.abs()).expand(num_heads, -1)


@DECAYS.add("rwkv7")
class RWKV7Decay(SpectralDecay):
    """λ = exp(−e^{−1/2} σ(f + w₀)): a sigmoid, with λ always above 0.545.

    Range (0.545, 1). Initialisation, channel n = 0 … C − 1 of C = H·K, depth r from 0 (first layer) to 1 (last):
    `w₀ = −5.5 + 6 (n/(C−1))^{1 + r^0.3} + 2.5 zigzag`. Time-scale at f = 0: `e^{1/2} / σ(w₀)`, 1.7 to 4,900 tokens.
    Under PoST the sorted parameters are logits w, from rate 1/T to logit 0.5 (2.65 tokens). The zigzag becomes a
    learned bias of f, which is no part of the base rates and the taper. The stretch is added to the logit:
    `g = −e^{−1/2} σ(w + zigzag + f − α log(t / t_ref))`.
    Source: Peng et al. 2025 and its code; PoST, §5.3, Algorithm 3.
    """

    granularities = ("vector",)
    fastest_rate = FASTEST_RATE / (1 + math.exp(-0.5))
    bounded = True
    sorts_log_rates = False

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self.logit = nn.Parameter(torch.empty(self.shape))
        self.zigzag = None
        self.reset_parameters()

    @draws
    def reset_parameters(self) -> None:
        if self.zigzag is not None:
            self.zigzag.copy_(2.5 * zigzag(*self.shape))
        if self.logit is not None:
            depth = self.layer_idx / max(self.num_layers - 1, 1)
            channels = math.prod(self.shape)
            rise = (torch.arange(channels, dtype=torch.float32) / max(channels - 1, 1)) ** (1 + depth**0.3)
            self.logit.copy_(6 * rise.view(self.shape) - 5.5 + 2.5 * zigzag(*self.shape))

    def forward(self, f: Tensor | Product, *, offset: Tensor | None = None, **options: Any) -> Any:
        """As `Decay.forward`, with the zigzag as a bias of f under PoST."""
        if self.zigzag is not None:
            offset = self.zigzag if offset is None else offset + self.zigzag
        return super().forward(f, offset=offset, **options)

    def law(self, log_rate: Tensor | None) -> Law:
        return Law("sigmoid", self.logit if log_rate is None else log_rate, factor=FASTEST_RATE)

    def release_rates(self) -> None:
        self.logit, self.zigzag = None, nn.Parameter(torch.empty(self.shape))
        self.reset_parameters()

    def post_base(self, rate: float) -> float:
        if not 0 < rate < FASTEST_RATE:
            raise ValueError(f"RWKV-7's rates lie below e^(−1/2) = {FASTEST_RATE:.4f}; got the end point {rate:.4f}")
        return math.log(rate / (FASTEST_RATE - rate))

    def post_log_rates(self, base: Tensor) -> Tensor:
        return F.logsigmoid(base)
