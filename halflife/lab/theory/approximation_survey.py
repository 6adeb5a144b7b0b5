"""The minimax error of t^{−β} by the number of channels, the ends of the rates and the position, with PoST's claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halflife.decay.minimax import (
    GRID_POINTS,
    LEAST_ERROR,
    best_endpoints,
    best_weights,
    geometric_rates,
    minimax_error,
)
from halflife.lab.theory.approximation import adapted_rates, best_step, linear_rates, random_rates
from halflife.lab.theory.correlations import slope
from halflife.lab.theory.spectra import response_as_run, spread

SPECTRA = ("random", "random, log-uniform", "linear", "geometric on [1/T, 1]", "geometric, best ends")
RANDOM_DRAWS = 9  # of random rates, whose median error is taken
NORMS = {"integers": False, "interval": True}
ENDS = {  # in units of (1/T, 1): the ends of the paper, and two pairs further out
    "geometric on [1/T, 1]": (1.0, 1.0), "geometric on [0.1/T, 6]": (0.1, 6.0), "geometric on [0.5/T, 4]": (0.5, 4.0),
}  # fmt: skip


def error_by_channels(
    channels: Sequence[int], lengths: Sequence[float], beta: float = 0.5, *,
    draws: int = RANDOM_DRAWS, seed: int = 0, continuous: bool = False, cache: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compute the error for each N, spectrum and T, and how fast it falls with N (PoST, Table 1).

    Args:
        channels: N, ascending.
        lengths: T.
        beta: exponent β of the power law.
        draws: number of draws of random rates. Their median error is taken.
        continuous: whether the error is over the interval [1, T] instead of its integers.
        cache: JSON file that stores the best ends and steps.

    Returns:
        "beta", "channels", "lengths", "continuous", "draws"; "errors", spectrum → T (as a string) → an error for each
        N; and "slopes", see `slopes`.
    """
    options: dict[str, Any] = {"continuous": continuous, "cache": cache}

    def drawn(count: int, length: float, law: str) -> float:
        generator = torch.Generator().manual_seed(seed)
        rates = [random_rates(count, length, generator, law) for _ in range(draws)]
        return torch.tensor([minimax_error(r, length, beta, continuous=continuous) for r in rates]).median().item()

    def error(rates: Tensor, length: float) -> float:
        return minimax_error(rates, length, beta, continuous=continuous)

    makers: dict[str, Callable[[int, float], float]] = {
        "random": lambda n, t: drawn(n, t, "uniform"),
        "random, log-uniform": lambda n, t: drawn(n, t, "log-uniform"),
        "linear": lambda n, t: error(linear_rates(n, best_step(n, t, beta, **options)), t),
        "geometric on [1/T, 1]": lambda n, t: error(geometric_rates(n, t), t),
        "geometric, best ends": lambda n, t: error(geometric_rates(n, t, *best_endpoints(n, t, beta, **options)), t),
    }
    errors = {name: {f"{t:g}": [makers[name](n, t) for n in channels] for t in lengths} for name in SPECTRA}
    return {"beta": beta, "channels": list(channels), "lengths": list(lengths), "continuous": continuous,
            "draws": draws, "errors": errors, "slopes": slopes(errors, channels, beta)}  # fmt: skip


def slopes(
    errors: dict[str, dict[str, list[float]]], channels: Sequence[int], beta: float
) -> list[dict[str, Any]]:  # fmt: skip
    """Fit slopes of log error against N, and against log N, by least squares, and state PoST's claims beside them.

    Table 1 claims π² / (log T + C₆) a channel for geometric rates, and the power β for linear rates. It claims that the
    error of random rates falls as exp(−Ω(N / log N)), without a constant.

    Returns:
        One dict for each spectrum and T. "per_channel" is −d log E / dN. "claimed_per_channel" is the claim with C₆ =
        0, or None. "offset" is the C₆ that would make them equal. "power" is −d log E / d log N. "claimed_power" is the
        claim or None. "points" is the number of errors that were fitted. Errors under 1e-12 are left out. With fewer
        than two errors the slopes are None.
    """
    rows = []
    for name, by_length in errors.items():
        for length, by_channels in by_length.items():
            points = [(n, math.log(e)) for n, e in zip(channels, by_channels, strict=True) if e > LEAST_ERROR]
            counts, logs = torch.tensor(points, dtype=torch.float64).reshape(-1, 2).unbind(-1)
            rate, power = (-slope(x, logs).item() if len(points) > 1 else None for x in (counts, counts.log()))
            geometric = name.startswith("geometric")
            rows.append({
                "spectrum": name, "length": float(length), "points": len(points),
                "per_channel": rate,
                "claimed_per_channel": math.pi**2 / math.log(float(length)) if geometric else None,
                "offset": math.pi**2 / rate - math.log(float(length)) if geometric and rate else None,
                "power": power, "claimed_power": beta if name == "linear" else None,
            })  # fmt: skip
    return rows


def error_by_ends(
    channels: int, length: float, beta: float = 0.5, *, seed: int = 0, cache: Path | None = None
) -> dict[str, Any]:
    """Compute the error of geometric rates for different ends, and of other spectra, in both norms.

    Returns:
        "channels", "length", "beta", "draws", and "rows" with one dict for each spectrum: "spectrum", "low" and "high"
        (its ends in units of (1/T, 1), or None), and its errors over the "integers" and over the "interval".
    """

    def error(low: float, high: float, continuous: bool = False) -> float:
        return minimax_error(geometric_rates(channels, length, low / length, high), length, beta, continuous=continuous)

    best = [best_endpoints(channels, length, beta, continuous=on, cache=cache) for on in NORMS.values()]
    chosen = ENDS | {
        f"geometric, best on the {norm}": (low * length, high) for norm, (low, high) in zip(NORMS, best, strict=True)
    }
    rows: list[dict[str, Any]] = [
        {"spectrum": name, "low": low, "high": high, **{norm: error(low, high, on) for norm, on in NORMS.items()}}
        for name, (low, high) in chosen.items()
    ]
    options: dict[str, Any] = {"draws": RANDOM_DRAWS, "seed": seed, "cache": cache}
    others = {
        norm: error_by_channels([channels], [length], beta, continuous=on, **options)["errors"]
        for norm, on in NORMS.items()
    }
    for name in SPECTRA[:3]:
        errors = {norm: others[norm][name][f"{length:g}"][0] for norm in NORMS}
        rows.append({"spectrum": name, "low": None, "high": None, **errors})
    return {"channels": channels, "length": length, "beta": beta, "draws": RANDOM_DRAWS, "rows": rows}


def error_by_position(
    channels: int, length: float, positions: Sequence[int], beta: float = 0.5, *,
    ends: tuple[float, float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compute the error on [1, t] at positions t of one geometric spectrum for T, fixed and adapted (Prop. 4.9).

    The errors are of four responses:

    "static" uses the rates unchanged. "adapted" uses the rates of Theorem 4.11 at t, `r_k (t/T)^{−α_k}`, as if they had
    been constant up to t. In a recurrence the gates before t were different ones. "as run" takes this into account: the
    response to the input s = 1 … t − 1 tokens ago is `exp(−r_k Σ_{j = t−s+1}^t (j/T)^{−α_k})`. "as run, t_ref = 1" is
    the response of the algorithm that runs by default, `exp(−r_k Σ j^{−α_k})`.

    The theorem leaves out that the gates change. With the paper's ends, this cancels the gain of adaptation, because a
    slow response (1 − s/t)^r falls to 0 at the oldest input. With a slow end near 0.01/T, "as run" is as good as
    "adapted". The slow channels of the algorithm hardly forget, so that its error is two to four times the static one
    with the paper's ends. Proposition 4.9 bounds the static error at t by an expression that grows as t falls, although
    [1, t] is part of [1, T].

    Args:
        channels, length: N, T.
        positions: t, at least 3.
        beta: exponent β of the power law.
        ends: the slowest and the fastest rate at T. Default: (1/T, 1).

    Returns:
        "channels", "length", "beta", "ends", "positions", and "errors": the name of a response → an error for each t.
    """
    low, high = ends or (1 / length, 1.0)
    rates = geometric_rates(channels, length, low, high)
    references = {"as run": length, "as run, t_ref = 1": 1}
    errors: dict[str, list[float]] = {name: [] for name in ("static", "adapted", *references)}
    for t in positions:
        adapted = adapted_rates(rates, t, length)
        errors["static"].append(minimax_error(rates, t, beta))
        errors["adapted"].append(minimax_error(adapted, t, beta))
        lags = spread(1, t - 1, GRID_POINTS)
        for name, reference in references.items():
            columns = response_as_run(rates, lags.long(), t, reference).mT
            weights, _, _ = best_weights(columns, lags**-beta)
            errors[name].append((lags**-beta - columns @ weights).abs().max().item())
    return {"channels": channels, "length": length, "beta": beta, "ends": [low, high],
            "positions": list(positions), "errors": errors}  # fmt: skip
