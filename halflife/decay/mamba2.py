"""Mamba-2's decay, and the Decay paper's three ablations of it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.decay.base import DECAYS, Decay
from halflife.decay.spectral import SpectralDecay
from halflife.precision import inverse_softplus


@DECAYS.add("mamba2")
class Mamba2Decay(SpectralDecay):
    """λ = σ(−f − Δ)^{exp A}: a learned rate times a step size that depends on the input.

    g = −e^A softplus(f + Δ). Range (0, 1). Initialisation: e^A uniform in [1, 16]; softplus(Δ) log-uniform in
    [1e-3, 0.1]. Time-scale at f = 0: `1 / (e^A softplus(Δ))`, 0.6 to 1,000 tokens. Under PoST, A becomes the
    sorted spectrum, and softplus(Δ) starts at 0.05 in every channel.
    Source: Dao & Gu 2024; Decay, Table 1; PoST, Algorithm 2.
    """

    has_rate, has_step_bias = True, True
    POST_STEP = 0.05

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self.released = False
        self.A_log = nn.Parameter(torch.empty(self.shape)) if self.has_rate else None
        self.dt_bias = nn.Parameter(torch.empty(self.shape)) if self.has_step_bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.A_log is not None:
            self.A_log.uniform_(1, 16).log_()
        if self.dt_bias is not None:
            step = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp()
            self.dt_bias.copy_(inverse_softplus(step.fill_(self.POST_STEP) if self.released else step))

    def step_size(self, f: Tensor) -> Tensor:
        """The step size softplus(f + Δ) in float32, `[B, T, H]` or `[B, T, H, K]`. Mamba-2 scales values by it."""
        f = f if f.dtype == torch.float64 else f.float()
        return F.softplus(f if self.dt_bias is None else f + self.dt_bias)

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        log_rate = self.A_log if log_rate is None else log_rate
        step = self.step_size(f)
        return -step if log_rate is None else -log_rate.exp() * step

    def rate_offset(self) -> float:
        return math.log(math.log(2) if self.dt_bias is None else self.POST_STEP)

    def release_rates(self) -> None:
        self.A_log, self.released = None, True
        self.reset_parameters()


@DECAYS.add("mamba2_no_a")
class Mamba2NoRate(Mamba2Decay):
    """λ = σ(−f − Δ): Mamba-2's decay without A.

    g = −softplus(f + Δ). Under PoST Δ has the sorted spectrum, softplus(Δ) = e^p. Source: Decay, Table 1.
    """

    has_rate = False

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        return -self.step_size(f) if log_rate is None else -F.softplus(f + inverse_softplus(log_rate.exp()))

    def rate_offset(self) -> float:
        return 0.0

    def release_rates(self) -> None:
        self.dt_bias = None


@DECAYS.add("mamba2_no_dt")
class Mamba2NoStepBias(Mamba2Decay):
    """λ = σ(−f)^{exp A}: Mamba-2's decay without Δ.

    g = −e^A softplus(f). Source: Decay, Table 1.
    """

    has_step_bias = False


@DECAYS.add("mamba2_no_a_dt")
class Mamba2Bare(Decay):
    """λ = σ(−f): Mamba-2's decay without A and Δ.

    g = −softplus(f); no parameters; time-scale 1.4 tokens at f = 0. Source: Decay, Table 1.
    """

    def step_size(self, f: Tensor) -> Tensor:
        """The step size softplus(f) in float32, `[B, T, H]` or `[B, T, H, K]`. Mamba-2 scales values by it."""
        return F.softplus(f if f.dtype == torch.float64 else f.float())

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        return -self.step_size(f)
