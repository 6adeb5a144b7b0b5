"""How well N exponentials approximate the power law t^{−β} on [1, T], for several choices of their rates.

PoST, Table 1, bounds the minimax error of `Σ_k w_k e^{−r_k t}` with the best weights for given rates. This module
computes the error, between a lower and an upper bound that hold independently of the paper. Results for T = 1e4, N =
16, β = 0.5:

* The ends of the range of rates matter most. Geometric rates on exactly [1/T, 1], as in the paper, reach 3.0e-3 on the
  interval (1.6e-3 at the integers). With the best ends, about 0.6/T and 4.6, they reach 3.2e-6 (0.5/T and 3.9, 1.6e-6).
  These ends must not lie too far out: with 0.1/T and 6 the error is 2.2e-5 (1.4e-5).
* The distribution of random rates matters next. Uniform rates reach 6.2e-2, which is worse than linear rates with the
  best step (2.3e-2). Rates with uniform logarithms reach 1.1e-2, not far from the paper's geometric rates.
* Theorem 4.7 states the convergence rate π² / (log T + C₆) a channel. Geometric rates with the best ends have it (C₆
  3.2 to 4.0 at the integers), and no other spectrum here does. With ends at [1/T, 1] errors fall about a fifth as fast.

Rates are `[N]`, ascending, in float64, so that the slowest channel is the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from halflife.decay.minimax import descend, minimax_error, remembered, taper
from halflife.shapes import Float

LAWS = ("uniform", "log-uniform")


def random_rates(channels: int, length: float, generator: torch.Generator, law: str = "uniform") -> Tensor:
    """Draw N independent rates on [1/T, 1] and sort them. Lemma 4.1 holds for both laws.

    The law is "uniform", or "log-uniform" for rates with uniform logarithms; any other is a ValueError.
    """
    if law not in LAWS:
        raise ValueError(f"no law {law!r}; choose from {', '.join(LAWS)}")
    draws = torch.rand(channels, generator=generator, dtype=torch.float64).sort().values
    return (1 + draws * (length - 1)) / length if law == "uniform" else length ** (draws - 1)


def linear_rates(channels: int, step: float) -> Tensor:
    """Return `step · k` for k = 1 … N (Lemma 4.3). These are the rates of S4D-Real, up to the scale."""
    return step * torch.arange(1, channels + 1, dtype=torch.float64)


def adapted_rates(rates: Float[Tensor, " N"], position: float, reference_length: float = 1) -> Tensor:
    """Return rates at a position, `r_k (t / t_ref)^{−α_k}` `[N]`.

    Geometric rates from lo/T to hi with t_ref = T become geometric rates from lo/t to hi at t (`halflife.decay.PoST`).
    The reference length t_ref is 1 in the paper's algorithm and T in its theorem.
    """
    return rates * (position / reference_length) ** -taper(len(rates))


def best_step(
    channels: int, length: float, beta: float = 0.5, *, continuous: bool = False, cache: Path | None = None
) -> float:
    """Return the step of the linear rates that approximate t^{−β} best. Arguments are those of `best_endpoints`."""

    def error(x: Sequence[float]) -> float:
        return minimax_error(linear_rates(channels, math.exp(x[0])), length, beta, continuous=continuous)

    key = f"linear N={channels} T={length:g} beta={beta:g} {'interval' if continuous else 'integers'}"
    return math.exp(remembered(key, lambda: descend(error, [-math.log(length) / 2]), cache)[0])
