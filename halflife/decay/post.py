"""PoST: a sorted spectrum of decay rates that stretches with the position."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.decay.base import Decay
from halflife.decay.minimax import FASTEST, best_endpoints
from halflife.decay.spectral import SpectralDecay, no_base_rates
from halflife.precision import inverse_softplus_of


class PoST(Decay):
    """Position-adaptive spectral tapering around any `SpectralDecay`.

    The log-rates p are ordered by construction, and channel 1 is the slowest. Each channel slows down with the position
    by its exponent α, which is 1 for the slowest channel and 0 for the fastest:

        p_1 = θ,   p_k = p_{k−1} + softplus(δ_{k−1}),      g_{t,k} ← g_{t,k}(p) · (t / t_ref)^{−α_k}
        α_k = clamp((N−k)/(N−1) + ((p_k−p_1) − (k−1)Ḡ) / log T, 0, 1),   Ḡ = (p_N−p_1)/(N−1)

    N is the number of channels of the layer, H or H·K. Initially the rates at zero activation are geometric from
    `endpoints[0] / T` to `endpoints[1]`. A strategy whose rate is not an exponential sorts and stretches another
    parameter. RWKV-7 sorts the logits of its sigmoid, and computes α from `p = logsigmoid` of them.

    `reference_length=1` is the paper's algorithm, with time-scale T·t^α at the slow end. `reference_length=T` is its
    Theorem 4.11, with τ_k(t) = t^{α_k} exactly.
    Source: PoST, Algorithms 1 to 4, Prop. 4.16, Cor. 5.1; docs/equations.md, section 3.

    Args:
        decay: the decay whose base rates PoST replaces.
        train_length: the training length T, at least 2.
        reference_length: t_ref, the position at which the spectrum is the base spectrum.
        endpoints: slowest and fastest base rate, in units of 1/T and of the strategy's `fastest_rate`; the paper has
            (1, 1). "optimal" takes those of the geometric spectrum that approximates t^{−β} best (`decay.minimax`),
            about (0.5, 4). For a decay with bounded rates the fastest is then at most `fastest_rate`.
        beta: exponent β of "optimal".

    Raises:
        ValueError: the decay has no base rates, or a length or an end point is out of range.
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
        if not isinstance(decay, SpectralDecay):
            raise no_base_rates(decay)
        low, high = _endpoint_rates(decay, train_length, endpoints, beta)
        if not 0 < low <= high:
            raise ValueError(f"endpoints must give base rates 0 < slowest ≤ fastest; got {low} and {high}")
        decay.release_rates()
        super().__init__(decay.num_heads, decay.head_dim, decay.granularity, decay.layer_idx, decay.num_layers)
        self.data_dependent = decay.data_dependent
        self.shares_keys = decay.shares_keys
        self.decay = decay
        self.train_length, self.reference_length, self.endpoints = train_length, reference_length, endpoints
        self.base_endpoints = decay.post_base(low), decay.post_base(high)
        self.channels = math.prod(self.shape)
        self.theta = nn.Parameter(torch.empty(()))
        self.delta = nn.Parameter(torch.empty(self.channels - 1))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.decay.reset_parameters()
        slowest, fastest = self.base_endpoints
        self.theta.fill_(slowest)
        if self.channels > 1:
            gap = (fastest - slowest) / (self.channels - 1)
            self.delta.fill_(inverse_softplus_of(max(gap, 1e-6)))

    def base(self) -> Tensor:
        """The sorted base parameters `[N]`, strictly increasing: log-rates, or logits for RWKV-7."""
        return self.theta + F.pad(F.softplus(self.delta).cumsum(0), (1, 0))

    def log_rates(self) -> Tensor:
        """The sorted log-rates p, `[N]`, strictly increasing."""
        return self.decay.post_log_rates(self.base())

    def taper(self) -> Tensor:
        """The exponents α `[N]`, in [0, 1]; a single channel has α = 0."""
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
        return self._stretched(self.decay.activation(self._wide(f)), position)

    def log_stretch(self, position: Tensor) -> Tensor:
        """`−α log(t / t_ref)` at positions `[T]` or `[B, T]`: `[…, T, H]` or `[…, T, H, K]`."""
        log_t = (position.to(self.theta.dtype) / self.reference_length).log().unsqueeze(-1)
        return (-log_t * self.taper()).unflatten(-1, self.shape)

    def step_size(self, f: Tensor) -> Tensor:
        """The step size of the wrapped decay, by which Mamba-2 scales its values. PoST does not change it."""
        return self.decay.step_size(f)

    def timescales(self, position: float = 1) -> Tensor:
        rest = self._rest()
        return -1 / self._stretched(rest, rest.new_full((1,), position))[0, 0]

    def _stretched(self, f: Tensor, position: Tensor) -> Tensor:
        return self.decay.stretch_log_decay(f, self.base().view(self.shape), self.log_stretch(position))

    def extra_repr(self) -> str:
        return f"train_length={self.train_length}, reference_length={self.reference_length}, endpoints={self.endpoints}"


def _endpoint_rates(
    decay: SpectralDecay, train_length: int, endpoints: tuple[float, float] | str, beta: float
) -> tuple[float, float]:
    """The slowest and the fastest base rate."""
    if endpoints == "optimal":
        fastest = decay.fastest_rate if decay.bounded else FASTEST
        return best_endpoints(math.prod(decay.shape), train_length, beta, fastest=fastest)
    if isinstance(endpoints, str) or len(endpoints) != 2:
        raise ValueError(f'endpoints are two numbers or "optimal"; got {endpoints!r}')
    return endpoints[0] / train_length, endpoints[1] * decay.fastest_rate
