"""How well N exponentials imitate the power law t^{−β} on [1, T], for random, linear, geometric and adapted rates.

PoST, Table 1, bounds the minimax error of `Σ_k w_k e^{−r_k t}` with the best weights for given rates. It is computed
here, between a lower and an upper bound that hold whatever the paper says. What comes out (T = 1e4, N = 16, β = 0.5):

* Ends matter most. Geometric rates on exactly [1/T, 1], the paper's, reach 3.0e-3 on the interval (1.6e-3 at the
  integers); with the best ends, about 0.6/T and 4.6, 3.2e-6 (0.5/T and 3.9, 1.6e-6). Those are not far out: with
  0.1/T and 6 it is 2.2e-5 (1.4e-5) again.
* What "random" means matters next: uniform rates reach 7e-2, worse than linear ones at their best (2.3e-2),
  uniform logarithms of rates 6e-3, near the paper's geometric ones.
* Theorem 4.7's rate, π² / (log T + C₆) a channel, is that of geometric rates with the best ends (C₆ 3.2 to 4.0 at the
  integers), and of no other spectrum here; with ends at [1/T, 1] errors fall about a fifth as fast.

Rates are `[N]`, ascending, in float64: the slowest channel is the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from halflife.decay.minimax import (
    Fit,
    best_endpoints,
    best_weights,
    descend,
    fit,
    geometric_rates,
    minimax_error,
    remembered,
)
from halflife.shapes import Float

__all__ = [
    "Fit", "adapted_rates", "best_endpoints", "best_step", "best_weights", "fit", "geometric_rates", "linear_rates",
    "minimax_error", "random_rates", "taper",
]  # fmt: skip

LAWS = ("uniform", "log-uniform")


def random_rates(channels: int, length: float, generator: torch.Generator, law: str = "uniform") -> Tensor:
    """Independent rates on [1/T, 1], sorted: "uniform", or "log-uniform" (uniform logarithms); Lemma 4.1 is of either.

    Raises:
        ValueError: another law.
    """
    if law not in LAWS:
        raise ValueError(f"no law {law!r}; choose from {', '.join(LAWS)}")
    draws = torch.rand(channels, generator=generator, dtype=torch.float64).sort().values
    return (1 + draws * (length - 1)) / length if law == "uniform" else length ** (draws - 1)


def linear_rates(channels: int, step: float) -> Tensor:
    """`step · k`, k = 1 … N (Lemma 4.3; S4D-Real's, up to the scale)."""
    return step * torch.arange(1, channels + 1, dtype=torch.float64)


def taper(channels: int) -> Tensor:
    """The exponents α_k = (N−k)/(N−1) of Theorem 4.11, `[N]`: 1 for the slowest channel, 0 for the fastest (or one)."""
    return torch.linspace(1, 0, channels, dtype=torch.float64) if channels > 1 else torch.zeros(1).double()


def adapted_rates(rates: Float[Tensor, " N"], position: float, reference_length: float = 1) -> Tensor:
    """Rates at a position, `r_k (t / t_ref)^{−α_k}` `[N]`; t_ref is 1 (the paper's algorithm) or T (its theorem).

    Geometric rates from lo/T to hi with t_ref = T are geometric from lo/t to hi at t (`halflife.decay.PoST`).
    """
    return rates * (position / reference_length) ** -taper(len(rates))


def best_step(
    channels: int, length: float, beta: float = 0.5, *, continuous: bool = False, cache: Path | None = None
) -> float:
    """The step of the linear rates that approximate t^{−β} best; as `best_endpoints`."""

    def error(x: Sequence[float]) -> float:
        return minimax_error(linear_rates(channels, math.exp(x[0])), length, beta, continuous=continuous)

    key = f"linear N={channels} T={length:g} beta={beta:g} {'interval' if continuous else 'integers'}"
    return math.exp(remembered(key, lambda: descend(error, [-math.log(length) / 2]), cache)[0])
