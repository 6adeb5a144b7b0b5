"""PoST: a sorted spectrum of decay rates that stretches with the position."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halflife.decay.base import ROUNDED, Decay, DecayParts
from halflife.decay.minimax import FASTEST_RATE, best_endpoints
from halflife.decay.spectral import SpectralDecay, no_base_rates
from halflife.ops.laws import Product, Spectrum, log_stretch, ordered_spectrum, tapers
from halflife.packing import Packing
from halflife.precision import inverse_softplus, inverse_softplus_of


class PoST(Decay):
    """Position-adaptive spectral tapering around any `SpectralDecay`.

    The log-rates p are ordered by construction, and channel 1 is the slowest. Each channel slows down with the position
    by its exponent α, which is 1 for the slowest channel and 0 for the fastest:

        p_1 = θ,   p_k = p_{k−1} + softplus(δ_{k−1}),      g_{t,k} ← g_{t,k}(p) · t^{−α_k} · t_ref^{ᾱ_k}
        α_k = clamp(ᾱ_k + ((p_k−p_1) − (k−1)Ḡ) / log T, 0, 1),   ᾱ_k = (N−k)/(N−1),   Ḡ = (p_N−p_1)/(N−1)

    N is the number of base rates of the layer, H or H·K. Initially the rates at zero activation are geometric from
    `endpoints[0] / T` to `endpoints[1]`. A strategy whose rate is not an exponential sorts and stretches another
    parameter. RWKV-7 sorts the logits of its sigmoid, and computes α from `p = logsigmoid` of them.

    `reference_length=1` is the paper's algorithm, with time-scale T·t^α at the slow end. `reference_length=T` is its
    Theorem 4.11, with τ_k(t) = t^{α_k} exactly. With both, the log-rates of a perturbed spectrum are evenly spaced
    again at position T, where α is not clamped (Prop. 4.16). Those of RWKV-7 are so at slow channels alone, because its
    stretch is inside the sigmoid.
    Source: PoST, Algorithms 1 to 4, Prop. 4.16, Cor. 5.1; docs/equations.md, section 3.

    Args:
        decay: the decay whose base rates PoST replaces.
        train_length: the training length T, at least 2.
        reference_length: t_ref, the position at which the spectrum is the base spectrum.
        endpoints: slowest and fastest base rate, in units of 1/T and of the strategy's `fastest_rate`; the paper has
            (1, 1). "optimal" takes those of the geometric spectrum that approximates t^{−β} best (`decay.minimax`),
            about (0.5, 4). For a decay with bounded rates the fastest is then at most `fastest_rate`. "moving" takes
            the best ones at position T for rates that stretch, whose gates differ from token to token.
        beta: exponent β of "optimal" and "moving".
        rate_range: the smallest and the largest initial e^p, in place of `endpoints`. PoST's released Gated DeltaNet
            has (1, T), and its released GLA (1, 16).
        learning_rate_factor: factor on the learning rate of θ and δ (see `models.param_groups`). PoST's released RWKV-7
            has 2.
        stretch: whether channels slow down with the position. Without, α is 0, and the spectrum is sorted and static.
        last_position: the position that all later ones count as, such as T; None for no limit.

    Raises:
        ValueError: the decay has no base rates, a length, an end point or a factor is out of range, a static spectrum
            has an option of the stretching, or given end points have a β.
    """

    def __init__(
        self, decay: Decay, *, train_length: int, reference_length: float = 1,
        endpoints: tuple[float, float] | list[float] | str = (1.0, 1.0), beta: float = 0.5,
        rate_range: Sequence[float] | None = None, learning_rate_factor: float = 1.0, stretch: bool = True,
        last_position: float | None = None,
    ) -> None:  # fmt: skip
        if train_length < 2 or reference_length <= 0:
            raise ValueError(f"need train_length ≥ 2 and reference_length > 0; got {train_length}, {reference_length}")
        if not isinstance(decay, SpectralDecay):
            raise no_base_rates(decay)
        if last_position is not None and last_position < 1:
            raise ValueError(f"last_position must be at least 1; got {last_position}")
        if not stretch and (reference_length != 1 or last_position is not None):
            raise ValueError("reference_length and last_position have no meaning without stretch; leave them out")
        if beta != 0.5 and endpoints not in ("optimal", "moving"):
            raise ValueError(f'beta is for endpoints "optimal" and "moving", which it chooses; got {endpoints!r}')
        if learning_rate_factor <= 0:
            raise ValueError(f"learning_rate_factor must be positive; got {learning_rate_factor}")
        ends = _check_range(decay, rate_range, endpoints) or _endpoint_rates(
            decay, train_length, endpoints, beta, reference_length if stretch else None
        )
        if not 0 < ends[0] <= ends[1]:
            raise ValueError(
                f"endpoints and rate_range must give base rates 0 < slowest ≤ fastest; got {ends[0]} and {ends[1]}"
            )
        decay.release_rates()
        super().__init__(decay.num_heads, decay.head_dim, decay.granularity, decay.layer_idx, decay.num_layers)
        self.data_dependent = decay.data_dependent
        self.shares_keys, self.sorts_log_rates = decay.shares_keys, decay.sorts_log_rates
        self.decay = decay
        self.train_length, self.reference_length, self.endpoints = train_length, reference_length, endpoints
        self.learning_rate_factor = learning_rate_factor
        self.stretch, self.last_position = stretch, last_position
        slow, fast = (math.log(end) if rate_range is not None else decay.post_base(end) for end in ends)
        self.base_endpoints = slow, fast
        self.base_shape = decay.base_shape
        self.channels = math.prod(self.base_shape)
        self.theta = nn.Parameter(torch.empty(1))  # FSDP shards only parameters with an axis
        if self.channels > 1:
            self.delta = nn.Parameter(torch.empty(self.channels - 1))
        else:  # FSDP2 cannot shard the gradient of an empty parameter
            self.register_buffer("delta", torch.empty(0))
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
        return self._spectrum()[0]

    def log_rates(self) -> Tensor:
        """The sorted log-rates p, `[N]`, strictly increasing."""
        return self.decay.post_log_rates(self.base())

    def taper(self) -> Tensor:
        """The exponents α `[N]`, in [0, 1]; a single channel, or a static spectrum, has α = 0."""
        base, taper = self._spectrum()
        return torch.zeros_like(base) if taper is None else taper

    def _spectrum(self) -> tuple[Tensor, Tensor | None]:
        """The base parameters, and α where it is not 0: `[N]` each."""
        theta, delta = self.theta, self.delta
        if theta.dtype.itemsize < 4:
            warnings.warn(ROUNDED, stacklevel=3)
            theta, delta = theta.float(), delta.float()
        if self.channels == 1:
            return theta.clone(), None
        base, taper = ordered_spectrum(theta, delta, math.log(self.train_length))
        if not self.stretch:
            return base, None
        return base, taper if self.sorts_log_rates else tapers(
            self.decay.post_log_rates(base), math.log(self.train_length)
        )

    def _offset(self, taper: Tensor) -> Tensor | None:
        """`ᾱ log t_ref [N]`, with ᾱ of a geometric spectrum, which falls from 1 to 0; None for 0."""
        if self.reference_length == 1:
            return None
        return torch.linspace(math.log(self.reference_length), 0, self.channels, dtype=taper.dtype, device=taper.device)

    def log_decay(self, f: Tensor, log_rate: Tensor | None, step: Tensor | None = None) -> Tensor:
        return self.decay.log_decay(f, self.base().view(self.base_shape))

    def forward(
        self, f: Tensor | Product, *, position: Tensor | None = None, log_rate: Tensor | None = None,
        step: Tensor | None = None, parts: bool = False, with_step: bool = True,
        then: Callable[[DecayParts], Any] | None = None,
    ) -> Any:  # fmt: skip
        if position is None:
            x = f.x if isinstance(f, Product) else f
            position = torch.arange(1, x.shape[1] + 1, device=x.device)
        if then is not None and self._leaves_spectrum():
            taper, position = Spectrum(self.theta, self.delta, math.log(self.train_length)), self._limited(position)
            return self.decay(f, position=position, log_rate=self.theta, parts=True, taper=taper, then=then)
        leaves = then is None and step is None and not isinstance(f, Product) and not f.is_cpu
        if leaves and self.decay.has_law() and self._leaves_spectrum():  # one kernel for both
            spectrum = Spectrum(self.theta, self.delta, math.log(self.train_length))
            options = {"log_rate": self.theta, "taper": spectrum, "position": self._limited(position)}
            found = self.decay(f, parts=parts, with_step=with_step, **options)
            # Called outside of this method, where an offloaded parameter is no longer here.
            later = lambda: self._stretched(position, ordered_spectrum(*spectrum)[1])  # noqa: E731
            return found._replace(log_stretch=later) if parts else found
        base, taper = self._spectrum()
        options: dict[str, Any] = {"log_rate": base.view(self.base_shape)} | ({} if then is None else {"then": then})
        if taper is not None and (self.sorts_log_rates or self.decay.has_law()):
            offset = self._offset(taper)
            options |= {
                "taper": taper.view(self.base_shape), "position": self._limited(position),
                "offset": None if offset is None else offset.view(self.base_shape),
            }  # fmt: skip
        elif taper is not None:
            options["log_rate"] = options["log_rate"] + self._stretched(position, taper)
        found = self.decay(f, step=step, parts=parts, with_step=with_step, **options)
        if not isinstance(found, DecayParts):
            return found
        like = base if taper is None else taper
        return DecayParts(found.g, found.step, lambda: self._stretched(position, taper, like))

    def _leaves_spectrum(self) -> bool:
        """Whether the kernel of a token also computes the spectrum: of a scalar decay whose rates it is."""
        plain = self.granularity == "scalar" and self.channels > 1 and self.theta.dtype == torch.float32
        law = self.decay.law_of_token(self.theta) if plain and self.stretch and self.reference_length == 1 else None
        return law is not None and law.rate is self.theta and self.sorts_log_rates

    @property
    def passes_law(self) -> bool:
        return self.leaves_law and self.decay.has_law()

    def _limited(self, position: Tensor) -> Tensor:
        return position if self.last_position is None else position.clamp(max=self.last_position)

    def log_stretch(self, position: Tensor) -> Tensor:
        """`ᾱ log t_ref − α log t` at positions `[T]` or `[B, T]`: `[…, T, H]` or `[…, T, H, K]`."""
        base, taper = self._spectrum()
        return self._stretched(position, taper, base)

    def _stretched(self, position: Tensor, taper: Tensor | None, like: Tensor | None = None) -> Tensor:
        """`log_stretch` of exponents α, where None is 0 for channels as those of `like`."""
        if taper is None:
            assert like is not None
            stretch = like.new_zeros(*position.shape, self.channels)
        else:
            stretch = log_stretch(self._limited(position), taper, self._offset(taper))
        return stretch.view(*position.shape, *self.base_shape)

    def step_size(self, f: Tensor) -> Tensor:
        """The step size of the wrapped decay, by which Mamba-2 scales its values. PoST does not change it."""
        return self.decay.step_size(f)

    def shared_key(
        self, f: Tensor, parts: DecayParts, state: Tensor | None, cu_seqlens: Tensor | Packing | None
    ) -> Tensor:
        return self.decay.shared_key(f, parts, state, cu_seqlens)

    def timescales(self, position: float = 1) -> Tensor:
        rest, (base, taper) = self._rest(), self._spectrum()
        rates, stretch = base.view(self.base_shape), self._stretched(rest.new_full((1,), position), taper, base)
        if self.sorts_log_rates:
            return -1 / (self.decay.log_decay(rest, rates) * stretch.exp())[0, 0]
        return -1 / self.decay.log_decay(rest, rates + stretch)[0, 0]  # without RWKV-7's zigzag

    @classmethod
    def from_rates(cls, decay: Decay, rates: Tensor, *, train_length: int, **options: Any) -> PoST:
        """Wrap `decay` with a spectrum that has given rates at zero activation (Prop. 4.18).

        Args:
            decay: as in the constructor.
            rates: positive rates, one per channel, of any shape with N entries, for example those of a trained Mamba-2.
                They are sorted. Channel k gets the k-th smallest, so move the other parameters of the channels by
                `rates.flatten().argsort()`. Gaps between log-rates below 1e-6 become 1e-6.
            train_length, **options: as in the constructor, without `endpoints` and `rate_range`.

        Raises:
            ValueError: the number of rates is not N, or a rate is not positive.
        """
        post = cls(decay, train_length=train_length, **options)
        post.set_rates(rates)
        return post

    @torch.no_grad()
    def set_rates(self, rates: Tensor) -> None:
        """Set θ and δ such that the sorted `rates` are those at zero activation; see `from_rates`."""
        if rates.numel() != self.channels or not (rates > 0).all():
            raise ValueError(f"need {self.channels} positive rates; got {rates.numel()}, the least {rates.min():g}")
        ordered = rates.detach().cpu().flatten().double().sort().values.tolist()
        base = torch.tensor([self.decay.post_base(rate) for rate in ordered], dtype=torch.float64)
        self.theta.copy_(base[0])
        self.delta.copy_(inverse_softplus(base.diff().clamp(min=1e-6)))

    def extra_repr(self) -> str:
        return f"train_length={self.train_length}, reference_length={self.reference_length}, endpoints={self.endpoints}"


def _check_range(
    decay: SpectralDecay, rate_range: Sequence[float] | None, endpoints: Sequence[float] | str
) -> tuple[float, float] | None:
    if rate_range is None:
        return None
    if tuple(endpoints) != (1.0, 1.0):
        raise ValueError(f"give endpoints or rate_range, not both; got {endpoints!r} and {rate_range!r}")
    if not decay.sorts_log_rates:
        raise ValueError(f"rate_range is for decays whose base parameters are log-rates, unlike {type(decay).__name__}")
    if len(rate_range) != 2:
        raise ValueError(f"rate_range is two numbers; got {rate_range!r}")
    return rate_range[0], rate_range[1]


def _endpoint_rates(
    decay: SpectralDecay, train_length: int, endpoints: Sequence[float] | str, beta: float,
    reference_length: float | None,
) -> tuple[float, float]:  # fmt: skip
    """The slowest and the fastest base rate; a static spectrum has no reference length."""
    if endpoints == "moving" and reference_length is None:
        raise ValueError('endpoints "moving" are for rates that stretch; take "optimal" without stretch')
    if endpoints in ("optimal", "moving"):
        fastest = decay.fastest_rate if decay.bounded else FASTEST_RATE
        channels, moving = math.prod(decay.base_shape), endpoints == "moving"
        slow, fast = best_endpoints(channels, train_length, beta, fastest=fastest, moving=moving)
        return (slow * train_length / reference_length if moving and reference_length else slow), fast
    if isinstance(endpoints, str) or len(endpoints) != 2:
        raise ValueError(f'endpoints are two numbers, "optimal" or "moving"; got {endpoints!r}')
    return endpoints[0] / train_length, endpoints[1] * decay.fastest_rate
