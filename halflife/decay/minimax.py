"""Power laws approximated by sums of exponentials: the minimax error, and the geometric rates with the smallest error.

PoST (§4) assumes that a memory should weigh the token t steps ago by `t^{−β}`. It measures a spectrum of rates r_k by
the minimax error of `Σ_k w_k e^{−r_k t}` on [1, T] with the best weights w_k. This module computes that error together
with a lower bound, independently of the paper's claims about it.

Rates are `[N]`, ascending, in float64, so the slowest channel comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from halflife.files import read_json, write_json
from halflife.shapes import Float

GRID_POINTS = 1000  # points of the first grid, spaced evenly in log t
BOUND_TOLERANCE = 1e-3  # relative difference of upper and lower bound at which the search ends
SINGULAR_NOISE = 1e-12  # singular values below this, relative to the largest, are rounding errors
ERROR_NOISE = 1e-14  # errors below this are rounding errors
LEAST_ERROR = 1e-12  # the search for end points does not distinguish errors below this
MOST_CHANNELS = 64  # more channels than this make no difference in float64
FIRST_START = (0.5, 4.0)  # end points (slowest · T, fastest) at which the search for the best ones starts
FEW_CHANNELS = 8  # up to this number of channels there are other local minima, some of them far away at large T
# Further starts for few channels. On a million tokens the best slow end of two channels is 8,450/T.
FURTHER_STARTS = ((1.0, 1.0), (8.0, 1.0), (128.0, 0.5), (512.0, 1.0), (1024.0, 0.5), (8192.0, 0.5))
MOVING_STARTS = ((0.05, 1.0), (0.05, 4.0))  # the same for channels that PoST stretches
LEAST_MOVING_ERROR = 1e-6  # the search for their end points does not distinguish errors below this
LAWSON_STEPS = 8  # enough to bring the peaks near their places; later steps converge slowly
GRID_REFINEMENTS = 5  # largest number of grids
FASTEST_RATE = 700  # largest rate; e^{−r} is 0 beyond it


class Fit(NamedTuple):
    """The best approximation of t^{−β} with given rates."""

    error: float  # the largest error of these weights
    lower: float  # a lower bound on the error of all weights in the numerical span of the exponentials
    weights: Tensor  # w_k `[N]`
    positions: Tensor  # the grid `[M]`
    residual: Tensor  # `t^{−β} − Σ_k w_k e^{−r_k t}` on the grid `[M]`
    # dimension of the numerical span in float64. If it is less than N, weights too large for float64 might give a
    # smaller error.
    rank: int


def minimax_error(rates: Float[Tensor, " N"], length: float, beta: float = 0.5, *, continuous: bool = False) -> float:
    """Compute `min_w max_t |t^{−β} − Σ_k w_k e^{−r_k t}|` on t = 1, 2, …, T, or on all of [1, T]; see `fit`."""
    return fit(rates, length, beta, continuous=continuous).error


def fit(rates: Float[Tensor, " N"], length: float, beta: float = 0.5, *, continuous: bool = False) -> Fit:
    """Find the weights for which `Σ_k w_k e^{−r_k t}` is closest to t^{−β} in the maximum norm.

    The grid has 1,000 points spaced evenly in log t. For the norm over integers they are rounded, so that at T = 1e4
    the grid contains every integer up to 70. It is refined around the peaks of the error until the error no longer
    grows.

    Args:
        rates: r_k ≥ 0, in any order.
        length: T, at least 2.
        beta: exponent of the power law, positive.
        continuous: whether the norm is over the interval [1, T], as in the paper, or over its integers, the positions
            of tokens.

    Raises:
        ValueError: a rate, T or β is out of range.
    """
    rates = torch.as_tensor(rates, dtype=torch.float64)
    if length < 2 or beta <= 0 or not len(rates) or not ((rates >= 0) & (rates <= FASTEST_RATE)).all():
        limits = f"rates in [0, {FASTEST_RATE}], T ≥ 2, β > 0"
        raise ValueError(f"need {limits}; got {rates.tolist()}, T = {length}, β = {beta}")
    positions = _grid(length, continuous)
    for round in range(GRID_REFINEMENTS):
        target, columns = positions**-beta, _exponentials(rates, positions)
        weights, lower, rank = best_weights(columns, target)
        residual = target - columns @ weights
        peaks = _around(positions, residual, continuous)
        error = float(residual.abs().max())
        highest = float((peaks**-beta - _exponentials(rates, peaks) @ weights).abs().max())
        if highest <= max((1 + BOUND_TOLERANCE) * error, ERROR_NOISE) or round == GRID_REFINEMENTS - 1:
            break
        positions = torch.cat([positions, peaks]).unique()
    return Fit(max(error, highest), lower, weights * rates.exp(), positions, residual, rank)


def _exponentials(rates: Tensor, positions: Tensor) -> Tensor:
    """Columns e^{−r_k (t − 1)} `[M, N]`, which are 1 at t = 1, so that fast exponentials do not vanish."""
    return torch.exp(-rates * (positions.unsqueeze(-1) - 1))


def _grid(length: float, continuous: bool) -> Tensor:
    points = torch.linspace(0, math.log(length), GRID_POINTS, dtype=torch.float64).exp()
    return points if continuous else points.round().unique()


def _around(positions: Tensor, residual: Tensor, continuous: bool) -> Tensor:
    """Points between the two neighbours of each local maximum of |residual|."""
    size = torch.nn.functional.pad(residual.abs(), (1, 1))
    at = torch.nonzero((size[1:-1] >= size[:-2]) & (size[1:-1] >= size[2:])).flatten()
    low, high = positions[(at - 1).clamp(min=0)], positions[(at + 1).clamp(max=len(positions) - 1)]
    steps = torch.linspace(0, 1, 17, dtype=torch.float64)
    points = (low.unsqueeze(-1) + (high - low).unsqueeze(-1) * steps).flatten()
    return points.unique() if continuous else points.round().unique()


def best_weights(columns: Float[Tensor, "M N"], target: Float[Tensor, " M"]) -> tuple[Tensor, float, int]:
    """Find the weights `[N]` that minimise `max |target − columns · w|`.

    Decaying exponentials are almost linearly dependent, so the search works in the span of their leading left singular
    vectors. Exponentials are totally positive, so these vectors form a Chebyshev system too (Gantmacher and Krein), and
    the best residual has one more alternating peak than there are vectors. Remez' exchange algorithm finds these peaks.
    Lawson's algorithm gives its start.

    Returns:
        The weights, a lower bound on the error in the span, and the rank of the columns.
    """
    left, sizes, right = torch.linalg.svd(columns, full_matrices=False)
    rank = int((sizes > SINGULAR_NOISE * sizes[0]).sum())
    span = left[:, :rank]
    coefficients, lower = _remez(span, target, *_lawson(span, target))
    return right[:rank].mT @ (coefficients / sizes[:rank]), lower, rank


def _lawson(span: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Lawson's algorithm: least squares with growing weights where the error is large.

    The root of the weighted mean square, with weights of sum 1, is at most the maximum: a lower bound.
    """
    weights = torch.full_like(target, 1 / len(target))
    best, lower, least = span.mT @ target, 0.0, math.inf
    for _ in range(LAWSON_STEPS):
        root = weights.sqrt().unsqueeze(-1)
        coefficients = torch.linalg.lstsq(root * span, root * target.unsqueeze(-1)).solution.squeeze(-1)
        size = (target - span @ coefficients).abs()
        lower = max(lower, float((weights * size**2).sum().sqrt()))
        if float(size.max()) < least:
            best, least = coefficients, float(size.max())
        weights = weights * size / (weights * size).sum().clamp(min=ERROR_NOISE**2)
    return best, lower


def _remez(span: Tensor, target: Tensor, best: Tensor, lower: float) -> tuple[Tensor, float]:
    """Remez' algorithm: equalise the error at rank + 1 alternating peaks, whose common error is a lower bound."""
    rank = span.shape[1]
    signs = (-1.0) ** torch.arange(rank + 1, dtype=target.dtype)
    residual = target - span @ best
    least = float(residual.abs().max())
    for _ in range(50):
        at = _alternation(residual, rank + 1)
        if len(at) <= rank or least <= max((1 + BOUND_TOLERANCE) * lower, ERROR_NOISE):
            break
        solved, failed = torch.linalg.solve_ex(torch.cat([span[at], signs.unsqueeze(-1)], -1), target[at])
        level = float(solved[-1].abs())
        if failed or not level <= least:  # the level is at most the minimum, except for rounding errors
            break
        lower, residual = max(lower, level), target - span @ solved[:-1]
        if float(residual.abs().max()) < least:
            best, least = solved[:-1], float(residual.abs().max())
    return best, min(lower, least)


def _alternation(residual: Tensor, count: int) -> Tensor:
    """Up to `count` points where the residual peaks with alternating signs; the highest peak is one of them."""
    turns = torch.nonzero((residual[1:] >= 0) != (residual[:-1] >= 0)).flatten() + 1
    runs = torch.arange(len(residual)).tensor_split(turns)
    peaks = [int(run[residual[run].abs().argmax()]) for run in runs]
    sizes = residual.abs().tolist()
    while len(peaks) > count:
        i = min(range(len(peaks)), key=lambda i: sizes[peaks[i]])
        if len(peaks) == count + 1:
            del peaks[0 if sizes[peaks[0]] < sizes[peaks[-1]] else -1]
        elif i in (0, len(peaks) - 1):
            del peaks[i]
        else:  # its smaller neighbour goes too, so that signs still alternate
            i -= sizes[peaks[i - 1]] < sizes[peaks[i + 1]]
            del peaks[i : i + 2]
    return torch.tensor(peaks)


def geometric_rates(channels: int, length: float, low: float | None = None, high: float = 1.0) -> Tensor:
    """N rates spaced evenly in their logarithm from `low` (None means 1/T) to `high` (PoST, Theorem 4.7)."""
    low = 1 / length if low is None else low
    return torch.linspace(math.log(low), math.log(high), channels, dtype=torch.float64).exp()


def taper(channels: int) -> Tensor:
    """Exponents α_k = (N−k)/(N−1) of Theorem 4.11, `[N]`: 1 for the slowest channel, 0 for the fastest or only one."""
    return torch.linspace(1, 0, channels, dtype=torch.float64) if channels > 1 else torch.zeros(1).double()


_FOUND: dict[str, list[float]] = {}


def best_endpoints(
    channels: int, length: float, beta: float = 0.5, *,
    fastest: float = FASTEST_RATE, continuous: bool = False, cache: Path | None = None, moving: bool = False,
) -> tuple[float, float]:  # fmt: skip
    """Find the slowest and the fastest of the geometric rates that approximate t^{−β} best.

    Their error is within a few percent of the best, for up to a million tokens. Where the error is below float64's
    precision (from about 30 channels on at T = 1e3), the result is (0.5/T, 4). More than 64 channels get that of 64.
    `halflife.decay.PoST` uses them for `endpoints="optimal"`, in the form `(low · T, high)`.

    Args:
        channels, length, beta, continuous: N, T, β and the norm, as in `fit`.
        fastest: upper limit of the rates, for decays whose rates are bounded.
        cache: JSON file in which results are stored, or None. Results also stay in memory.
        moving: whether the rates are those at T of channels that PoST stretches, whose error is `moving_error`.
    """
    channels = min(channels, MOST_CHANNELS)

    def error(x: Sequence[float]) -> float:
        rates = geometric_rates(channels, length, math.exp(x[0]) / length, math.exp(min(x[1], math.log(fastest))))
        if moving and rates[0] > rates[-1]:
            return math.inf
        if moving:
            return max(moving_error(rates, int(length), beta), LEAST_MOVING_ERROR)
        return max(minimax_error(rates, length, beta, continuous=continuous), LEAST_ERROR)

    limit = "" if fastest == FASTEST_RATE else f" fastest={fastest:g}"
    norm = ("interval" if continuous else "integers") + limit + (" moving" if moving else "")
    key = f"geometric N={channels} T={length:g} beta={beta:g} {norm}"

    def find() -> list[float]:
        ends = MOVING_STARTS if moving else [FIRST_START, *(FURTHER_STARTS if channels <= FEW_CHANNELS else ())]
        starts = [[math.log(a), math.log(min(b, fastest))] for a, b in ends if a / length <= min(b, fastest)]
        if error(starts[0]) <= (LEAST_MOVING_ERROR if moving else LEAST_ERROR):
            return starts[0]
        return min((descend(error, start) for start in starts), key=error)

    low, high = remembered(key, find, cache)
    return math.exp(low) / length, min(math.exp(high), fastest)


def moving_error(rates: Float[Tensor, " N"], length: int, beta: float) -> float:
    """Compute the minimax error at position T of channels that PoST stretches with the position.

    The response to the input of s tokens ago is `exp(−r_k Σ_{j = T−s+1}^T (j/T)^{−α_k})` with the gate of each position
    j, and α_k falls from 1 to 0. With another t_ref the same channels have the base rates `r_k (T/t_ref)^{α_k}`, which
    are geometric too.

    Args:
        rates: r_k at position T, ascending.
        length, beta: T and β.
    """
    tapers = torch.linspace(1, 0, len(rates), dtype=torch.float64)
    steps = torch.arange(length, 0, -1, dtype=torch.float64) / length
    passed = (rates * steps.unsqueeze(-1) ** -tapers).cumsum(0)  # [T, N], after 1, 2, … tokens
    lags = _grid(length - 1, continuous=False)
    columns, target = torch.exp(passed[0] - passed[lags.long() - 1]), lags**-beta  # 1 at the first lag
    return float((target - columns @ best_weights(columns, target)[0]).abs().max())


def remembered(key: str, find: Callable[[], list[float]], cache: Path | None) -> list[float]:
    """Return the result stored under `key` in memory or in the JSON file `cache`; if there is none, call `find`."""
    stored = read_json(cache) if cache is not None and cache.exists() else {}
    if key not in _FOUND:
        with torch.device("cpu"):  # needed while a model is built on the meta device
            _FOUND[key] = stored[key] if key in stored else find()
    if cache is not None and key not in stored:
        write_json(cache, {**stored, key: _FOUND[key]})
    return _FOUND[key]


def descend(error: Callable[[Sequence[float]], float], at: list[float], step: float = 1.0) -> list[float]:
    """Find a local minimum by compass search. It moves by `step` along axes, and halves a step that fails, to 1/32."""
    least = error(at)
    while step >= 1 / 32:
        moves = [[x + d * (i == j) for j, x in enumerate(at)] for i in range(len(at)) for d in (step, -step)]
        errors = [error(move) for move in moves]
        if min(errors) < least:
            least = min(errors)
            at = moves[errors.index(least)]
        else:
            step /= 2
    return at
