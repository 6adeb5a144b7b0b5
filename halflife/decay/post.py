"""PoST: an ordered spectrum of decay rates that stretches with the position."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.decay.base import Decay
from halflife.decay.minimax import FASTEST, best_endpoints
from halflife.precision import inverse_softplus_of


class PoST(Decay):
    """Position-adaptive spectral tapering around any decay with base rates, one a channel.

    The log-rates are ordered by construction, channel 1 the slowest, and each channel slows down with the position
    by its taper α, 1 for the slowest and 0 for the fastest:

        p_1 = θ,   p_k = p_{k−1} + softplus(δ_{k−1}),      g_{t,k} ← g_{t,k}(p) · (t / t_ref)^{−α_k}
        α_k = clamp((N−k)/(N−1) + ((p_k−p_1) − (k−1)Ḡ) / log T, 0, 1),   Ḡ = (p_N−p_1)/(N−1)

    N counts the channels of the layer, H or H·K. At the start the rates at zero activation are geometric from
    `endpoints[0] / T` to `endpoints[1]`. A strategy whose rate is not an exponential orders something else, and
    stretches that: RWKV-7 the logits of its sigmoid, with α from their `p = logsigmoid`.
    Source: PoST, Algorithms 1 to 4, Prop. 4.16, Cor. 5.1; math.md §3 for the two reference lengths: 1 is the paper's
    algorithm (time-scale T·t^α at the slow end), T its Theorem 4.11 (τ_k(t) = t^{α_k} exactly).

    Args:
        decay: the decay whose base rates are replaced; it must be `spectral`.
        train_length: the training length T, at least 2.
        reference_length: t_ref, the position at which the spectrum is the base one.
        endpoints: slowest and fastest base rate, in units of 1/T and of the strategy's `fastest_rate`; (1, 1) is
            the paper's. "optimal": those of the geometric spectrum that approximates t^{−β} best (`power_law`),
            about (0.5, 4); for a decay whose rates are bounded no faster than `fastest_rate`.
        beta: β of "optimal".

    Raises:
        ValueError: a decay without base rates, or lengths or end points out of range.
    """

    def __init__(
        self,
        decay: Decay,
        *,
        train_length: int,
        reference_length: float = 1,
        endpoints: tuple[float, float] | str = (1.0, 1.0),
        beta: float = 0.5,
    ) -> None:
        if train_length < 2 or reference_length <= 0:
            raise ValueError(f"need train_length ≥ 2 and reference_length > 0; got {train_length}, {reference_length}")
        low, high = _ends(decay, train_length, endpoints, beta)
        if not 0 < low <= high:
            raise ValueError(f"endpoints must give base rates 0 < slowest ≤ fastest; got {low} and {high}")
        decay.release_rates()
        super().__init__(decay.num_heads, decay.head_dim, decay.granularity, decay.layer_idx, decay.num_layers)
        self.data_dependent = decay.data_dependent
        self.shares_keys = decay.shares_keys
        self.decay = decay
        self.train_length, self.reference_length, self.endpoints = train_length, reference_length, endpoints
        self.base_ends = decay.post_base(low), decay.post_base(high)
        self.channels = math.prod(self.shape)
        self.theta = nn.Parameter(torch.empty(()))
        self.delta = nn.Parameter(torch.empty(self.channels - 1))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.decay.reset_parameters()
        slowest, fastest = self.base_ends
        self.theta.fill_(slowest)
        if self.channels > 1:
            gap = (fastest - slowest) / (self.channels - 1)
            self.delta.fill_(inverse_softplus_of(max(gap, 1e-6)))

    def base(self) -> Tensor:
        """The ordered quantities `[N]`, strictly increasing: log-rates (RWKV-7: logits)."""
        return self.theta + F.pad(F.softplus(self.delta).cumsum(0), (1, 0))

    def log_rates(self) -> Tensor:
        """The ordered log-rates p, `[N]`, strictly increasing."""
        return self.decay.post_log_rates(self.base())

    def taper(self) -> Tensor:
        """The exponents α, `[N]`, in [0, 1]; 0 when there is one channel."""
        p = self.log_rates()
        if self.channels == 1:
            return torch.zeros_like(p)
        k = torch.arange(self.channels, device=p.device, dtype=p.dtype)
        gap = (p[-1] - p[0]) / (self.channels - 1)
        ideal = (self.channels - 1 - k) / (self.channels - 1)
        return (ideal + (p - p[0] - k * gap) / math.log(self.train_length)).clamp(0, 1)

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        return self.decay.log_decay(f, self.base().view(self.shape))

    def forward(self, f: Tensor, *, position: Tensor | None = None, log_rate: Tensor | None = None) -> Tensor:
        if position is None:
            position = torch.arange(1, f.shape[1] + 1, device=f.device)
        return self._at(self.decay.activation(self._wide(f)), position)

    def log_stretch(self, position: Tensor) -> Tensor:
        """`−α log(t / t_ref)` at positions `[T]` or `[B, T]`: `[…, T, H]` or `[…, T, H, K]`."""
        log_t = (position.to(self.theta.dtype) / self.reference_length).log().unsqueeze(-1)
        return (-log_t * self.taper()).unflatten(-1, self.shape)

    def step(self, f: Tensor) -> Tensor:
        """The wrapped decay's step size (Mamba-2 scales values by it); PoST leaves it alone."""
        return self.decay.step(f)

    def timescales(self, position: float = 1) -> Tensor:
        rest = self._rest()
        return -1 / self._at(rest, rest.new_full((1,), position))[0, 0]

    def _at(self, f: Tensor, position: Tensor) -> Tensor:
        return self.decay.stretch_log_decay(f, self.base().view(self.shape), self.log_stretch(position))

    def extra_repr(self) -> str:
        return f"train_length={self.train_length}, reference_length={self.reference_length}, endpoints={self.endpoints}"


def _ends(decay: Decay, train_length: int, endpoints: tuple[float, float] | str, beta: float) -> tuple[float, float]:
    """The slowest and the fastest base rate."""
    if endpoints == "optimal":
        fastest = decay.fastest_rate if decay.bounded else FASTEST
        return best_endpoints(math.prod(decay.shape), train_length, beta, fastest=fastest)
    if isinstance(endpoints, str) or len(endpoints) != 2:
        raise ValueError(f'endpoints are two numbers or "optimal"; got {endpoints!r}')
    return endpoints[0] / train_length, endpoints[1] * decay.fastest_rate
