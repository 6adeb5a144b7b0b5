"""Mamba-2's decay, and the Decay paper's three ablations of it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.decay.base import DECAYS, Decay, DecayParts
from halflife.decay.minimax import geometric_rates
from halflife.decay.spectral import SpectralDecay, check_rate_start
from halflife.initial import draws
from halflife.ops.laws import Law
from halflife.packing import Packing
from halflife.precision import inverse_softplus
from halflife.registry import check_choice


@DECAYS.add("mamba2")
class Mamba2Decay(SpectralDecay):
    """λ = σ(−f − Δ)^{exp A}: a learned rate times a step size that depends on the input.

    g = −e^A softplus(f + Δ). Range (0, 1). Initialisation: e^A uniform in [1, 16]; softplus(Δ) log-uniform in
    [1e-3, 0.1]. Time-scale at f = 0: `1 / (e^A softplus(Δ))`, 0.6 to 1,000 tokens. Under PoST, A becomes the
    sorted spectrum, and softplus(Δ) starts at 0.05 in every channel.
    Source: Dao & Gu 2024; Decay, Table 1; PoST, Algorithm 2.

    Args:
        step_bias: "trained"; "frozen", which does not train Δ, as PoST's text and released code have it; or "random",
            which draws Δ under PoST as without it, as PoST's released Gated DeltaNet does, and trains it. None means
            "trained", and "random" for `mamba2_headwise`.
        rate_start: initial e^A: "uniform_1_16"; "uniform_0_16" (fla's Gated DeltaNet); "s4d_real", which is k + 1 in
            channel k = 0, 1, … (PoST, Table 7); or "geometric", with which the rates at zero activation are geometric
            from 1/T to 1, and softplus(Δ) is 0.05, as PoST starts. These rates are free: they are neither sorted nor
            stretched.
        train_length: T of "geometric".
        min_step, max_step: limits of the step size, clamp(softplus(f + Δ), min_step, max_step). None is no upper limit.
            Zamba-2 and Nemotron-H have a lower limit.
    """

    has_rate, has_step_bias, has_step_size = True, True, True
    POST_STEP = 0.05
    STEP_BIASES = ("trained", "frozen", "random")
    default_step_bias = "trained"
    RATE_STARTS = ("uniform_1_16", "uniform_0_16", "s4d_real", "geometric")

    def __init__(
        self, *, step_bias: str | None = None, rate_start: str = "uniform_1_16", train_length: int | None = None,
        min_step: float = 0.0, max_step: float | None = None, **sizes,
    ) -> None:  # fmt: skip
        super().__init__(**sizes)
        if not 0 <= min_step < (math.inf if max_step is None else max_step):
            raise ValueError(f"need 0 ≤ min_step < max_step; got {min_step} and {max_step}")
        self.min_step, self.max_step = min_step, max_step
        step_bias = step_bias or self.default_step_bias
        check_choice("step_bias", step_bias, self.STEP_BIASES)
        check_rate_start(rate_start, self.RATE_STARTS, train_length)
        if step_bias != "trained" and not self.has_step_bias:
            raise ValueError(f"step_bias is an option of the bias Δ, and {type(self).__name__} has none")
        if rate_start != "uniform_1_16" and not self.has_rate:
            raise ValueError(f"rate_start is an option of the rates A, and {type(self).__name__} has none")
        self.under_post, self.step_bias, self.rate_start = False, step_bias, rate_start
        self.train_length = train_length
        self.A_log = nn.Parameter(torch.empty(self.base_shape)) if self.has_rate else None
        if step_bias == "frozen":
            self.register_buffer("dt_bias", torch.empty(self.shape))
        else:
            self.dt_bias = nn.Parameter(torch.empty(self.shape)) if self.has_step_bias else None
        self.reset_parameters()

    @draws
    def reset_parameters(self) -> None:
        if self.A_log is not None:
            self.A_log.copy_(self._initial_rates(self.A_log).log())
        if self.dt_bias is not None:
            step = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp()
            fixed = (self.under_post or self.rate_start == "geometric") and self.step_bias != "random"
            self.dt_bias.copy_(inverse_softplus(step.fill_(self.POST_STEP) if fixed else step))

    def _initial_rates(self, like: Tensor) -> Tensor:
        if self.train_length is not None:
            rates = geometric_rates(like.numel(), self.train_length) * math.exp(-self.rate_offset())
            return rates.to(like).view(like.shape)
        if self.rate_start == "s4d_real":
            return torch.arange(1, like.shape[-1] + 1, device=like.device, dtype=like.dtype).expand(like.shape)
        low = 1 if self.rate_start == "uniform_1_16" else 0
        return torch.empty_like(like).uniform_(low, 16).clamp(min=1e-4)  # log 0 would stop the gradient

    def step_size(self, f: Tensor) -> Tensor:
        """The step size softplus(f + Δ) in float32, `[B, T, H]` or `[B, T, H, K]`. Mamba-2 scales values by it."""
        return Mamba2Decay.law(self, None).step(f)

    def law(self, log_rate: Tensor | None) -> Law:
        rate = self.A_log if log_rate is None else log_rate
        return Law("softplus", self.dt_bias, rate, least=self.min_step, most=self.max_step)

    def rate_offset(self) -> float:
        step = 1e-2 if self.step_bias == "random" else self.POST_STEP  # the middle of a random step
        step = math.log(2) if self.dt_bias is None else step
        return math.log(min(max(step, self.min_step), math.inf if self.max_step is None else self.max_step))

    def release_rates(self) -> None:
        if self.rate_start != "uniform_1_16":
            raise ValueError("PoST sets the initial rates, so rate_start has no meaning under it; leave it out")
        self.A_log, self.under_post = None, True
        self.reset_parameters()


@DECAYS.add("mamba2_released")
class ReleasedMamba2Decay(Mamba2Decay):
    """λ = σ(−f − Δ)^{exp A}, with the step size softplus(f + Δ) as shared key, where `mamba2` has 1 − λ.

    Mamba-2 with shared keys as the authors of the Decay paper ran it. The key is not bounded.
    Source: released code of the Decay paper (xmixers).
    """

    granularities = ("vector",)

    def shared_key(
        self, f: Tensor, parts: DecayParts, state: Tensor | None, cu_seqlens: Tensor | Packing | None
    ) -> Tensor:
        assert parts.step is not None
        return parts.step


@DECAYS.add("mamba2_no_a")
class Mamba2NoRate(Mamba2Decay):
    """λ = σ(−f − Δ): Mamba-2's decay without A.

    g = −softplus(f + Δ). Under PoST Δ has the sorted spectrum, softplus(Δ) = e^p. Source: Decay, Table 1.
    """

    has_rate = False

    def log_decay(self, f: Tensor, log_rate: Tensor | None, step: Tensor | None = None) -> Tensor:
        if log_rate is None:
            return -(self.step_size(f) if step is None else step)
        return -F.softplus(f + inverse_softplus(log_rate.exp()))

    def rate_offset(self) -> float:
        return 0.0

    def release_rates(self) -> None:
        if self.step_bias != "trained":
            raise ValueError("PoST orders and trains Δ of Mamba-2's decay without A, so its step_bias is 'trained'")
        if self.min_step or self.max_step is not None:
            raise ValueError("PoST orders Δ of Mamba-2's decay without A, so its step size has no limits")
        self.dt_bias = None


@DECAYS.add("mamba2_no_dt")
class Mamba2NoStepBias(Mamba2Decay):
    """λ = σ(−f)^{exp A}: Mamba-2's decay without Δ, g = −e^A softplus(f). Source: Decay, Table 1."""

    has_step_bias = False


@DECAYS.add("mamba2_no_a_dt")
class Mamba2Bare(Decay):
    """λ = σ(−f): Mamba-2's decay without A and Δ.

    g = −softplus(f); no parameters; time-scale 1.4 tokens at f = 0. Source: Decay, Table 1.
    """

    has_step_size = True

    def step_size(self, f: Tensor) -> Tensor:
        """The step size softplus(f) in float32, `[B, T, H]` or `[B, T, H, K]`. Mamba-2 scales values by it."""
        return self.law(None).step(f)

    def law(self, log_rate: Tensor | None) -> Law:
        return Law("softplus")


@DECAYS.add("mamba2_headwise")
class Mamba2Headwise(Mamba2Decay):
    """λ = σ(−f − Δ)^{exp A} with one A per head and one f and one Δ per key channel.

    g = −e^{A_h} softplus(f + Δ). Initialisation as `mamba2`, and Δ is drawn under PoST too. It is the decay of PoST's
    released GLA and RetNet, where e^A is the sorted spectrum, from 1 to 16. Source: released code of PoST.
    """

    granularities = ("vector",)
    default_step_bias = "random"

    @property
    def base_shape(self) -> tuple[int, ...]:
        return (self.num_heads, 1)
