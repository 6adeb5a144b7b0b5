"""How well N exponentials imitate a power law, and the end points of geometric rates with which they do it best.

PoST (§4) takes `t^{−β}` for what a memory should keep of the token t steps ago, and measures a spectrum by the minimax
error of `Σ_k w_k e^{−r_k t}` on [1, T] with the best weights. Here that error lies between a lower and an upper bound
which hold whatever the paper says.

Rates are `[N]`, ascending, in float64: the slowest channel is the first.
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

POINTS = 1000  # of the first grid, spaced evenly in log t
CLOSE = 1e-3  # upper and lower bound agree to this
NOISE = 1e-12  # singular values below, relative to the largest, are rounding errors
FLOOR = 1e-14  # errors below are, too
MEASURABLE = 1e-12  # errors below are not told apart
MANY = 64  # channels: more make no difference in float64
START = (0.5, 4.0)  # ends, slowest · T and fastest, from which the best are searched
FEW = 8  # channels: up to here there are other valleys, some far out at large T
FAR = ((1.0, 1.0), (8.0, 1.0), (128.0, 0.5), (1024.0, 0.5))
LAWSON_STEPS = 8  # they bring the peaks near their places; few, as they converge slowly from there
REFINEMENTS = 5  # grids at most
FASTEST = 700  # of rates; e^{−r} is 0 beyond


class Fit(NamedTuple):
    """The best approximation of t^{−β} with given rates.

    `error` is what the weights reach, `lower` what no weights in the span go below; `rank` is the dimension of the
    span in float64. Where it is less than N, larger weights than float64 can add up might do better.
    """

    error: float
    lower: float
    weights: Tensor  # [N]
    positions: Tensor  # [M], the grid
    residual: Tensor  # [M], t^{−β} − Σ_k w_k e^{−r_k t}
    rank: int


def minimax_error(rates: Float[Tensor, " N"], length: float, beta: float = 0.5, *, continuous: bool = False) -> float:
    """`min_w max_t |t^{−β} − Σ_k w_k e^{−r_k t}|` on t = 1, 2, …, T, or on all of [1, T]; see `fit`."""
    return fit(rates, length, beta, continuous=continuous).error


def fit(rates: Float[Tensor, " N"], length: float, beta: float = 0.5, *, continuous: bool = False) -> Fit:
    """The weights for which Σ_k w_k e^{−r_k t} is closest to t^{−β} in the maximum norm.

    The grid has 1,000 points evenly in log t (rounded to integers, all of them up to 70 at T = 1e4), and is refined
    around the peaks of the error until it grows no more.

    Args:
        rates: r_k ≥ 0, in any order.
        length: T, at least 2.
        beta: exponent of the power law, positive.
        continuous: the paper's norm, over the interval [1, T]; otherwise over its integers, where tokens are.

    Raises:
        ValueError: a rate, T or β out of range.
    """
    rates = torch.as_tensor(rates, dtype=torch.float64)
    if length < 2 or beta <= 0 or not len(rates) or not ((rates >= 0) & (rates <= FASTEST)).all():
        raise ValueError(f"need rates in [0, {FASTEST}], T ≥ 2, β > 0; got {rates.tolist()}, T = {length}, β = {beta}")
    positions = _grid(length, continuous)
    for round in range(REFINEMENTS):
        target, columns = positions**-beta, _exponentials(rates, positions)
        weights, lower, rank = best_weights(columns, target)
        residual = target - columns @ weights
        peaks = _around(positions, residual, continuous)
        error = float(residual.abs().max())
        highest = float((peaks**-beta - _exponentials(rates, peaks) @ weights).abs().max())
        if highest <= max((1 + CLOSE) * error, FLOOR) or round == REFINEMENTS - 1:
            break
        positions = torch.cat([positions, peaks]).unique()
    return Fit(max(error, highest), lower, weights * rates.exp(), positions, residual, rank)


def _exponentials(rates: Tensor, positions: Tensor) -> Tensor:
    """Columns e^{−r_k (t − 1)} `[M, N]`: scaled to 1 at t = 1, so that fast ones do not vanish."""
    return torch.exp(-rates * (positions.unsqueeze(-1) - 1))


def _grid(length: float, continuous: bool) -> Tensor:
    points = torch.linspace(0, math.log(length), POINTS, dtype=torch.float64).exp()
    return points if continuous else points.round().unique()


def _around(positions: Tensor, residual: Tensor, continuous: bool) -> Tensor:
    """Points between the neighbours of every local maximum of |residual|."""
    size = torch.nn.functional.pad(residual.abs(), (1, 1))
    at = torch.nonzero((size[1:-1] >= size[:-2]) & (size[1:-1] >= size[2:])).flatten()
    low, high = positions[(at - 1).clamp(min=0)], positions[(at + 1).clamp(max=len(positions) - 1)]
    steps = torch.linspace(0, 1, 17, dtype=torch.float64)
    points = (low.unsqueeze(-1) + (high - low).unsqueeze(-1) * steps).flatten()
    return points.unique() if continuous else points.round().unique()


# ------------------------------------------------------------------------------------- minimax on a grid


def best_weights(columns: Float[Tensor, "M N"], target: Float[Tensor, " M"]) -> tuple[Tensor, float, int]:
    """The weights `[N]` that minimise `max |target − columns · w|`, a lower bound of it, and the rank of the columns.

    Decaying exponentials are all but dependent, so we work in the span of their leading left singular vectors. As
    they are totally positive, those are a Chebyshev system too (Gantmacher and Krein): the best residual has one
    more alternating peak than there are vectors. Remez' exchange finds these peaks, given a start by Lawson's.
    """
    left, sizes, right = torch.linalg.svd(columns, full_matrices=False)
    rank = int((sizes > NOISE * sizes[0]).sum())
    span = left[:, :rank]
    coefficients, lower = _remez(span, target, *_lawson(span, target))
    return right[:rank].mT @ (coefficients / sizes[:rank]), lower, rank


def _lawson(span: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Least squares with more and more weight where the error is large: coefficients, and a lower bound of the error.

    Weights that sum to 1 make the root of the weighted mean square at most the maximum, for all coefficients.
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
        weights = weights * size / (weights * size).sum().clamp(min=FLOOR**2)
    return best, lower


def _remez(span: Tensor, target: Tensor, best: Tensor, lower: float) -> tuple[Tensor, float]:
    """Levels the error at rank + 1 alternating peaks, until no other is higher; the level is a lower bound."""
    rank = span.shape[1]
    signs = (-1.0) ** torch.arange(rank + 1, dtype=target.dtype)
    residual = target - span @ best
    least = float(residual.abs().max())
    for _ in range(50):
        at = _alternation(residual, rank + 1)
        if len(at) <= rank or least <= max((1 + CLOSE) * lower, FLOOR):
            break
        solved, failed = torch.linalg.solve_ex(torch.cat([span[at], signs.unsqueeze(-1)], -1), target[at])
        level = float(solved[-1].abs())
        if failed or not level <= least:  # it is at most the minimum; what says otherwise is rounding
            break
        lower, residual = max(lower, level), target - span @ solved[:-1]
        if float(residual.abs().max()) < least:
            best, least = solved[:-1], float(residual.abs().max())
    return best, min(lower, least)


def _alternation(residual: Tensor, count: int) -> Tensor:
    """Up to `count` points where the residual peaks with alternating signs, the highest peak among them."""
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
        else:  # with its smaller neighbour, that signs go on alternating
            i -= sizes[peaks[i - 1]] < sizes[peaks[i + 1]]
            del peaks[i : i + 2]
    return torch.tensor(peaks)


def geometric_rates(channels: int, length: float, low: float | None = None, high: float = 1.0) -> Tensor:
    """N rates evenly spaced in their logarithm from `low` (1/T unless given) to `high` (Theorem 4.7)."""
    low = 1 / length if low is None else low
    return torch.linspace(math.log(low), math.log(high), channels, dtype=torch.float64).exp()


# --------------------------------------------------------------------------------------------- best ends

_FOUND: dict[str, list[float]] = {}


def best_endpoints(
    channels: int, length: float, beta: float = 0.5, *,
    fastest: float = FASTEST, continuous: bool = False, cache: Path | None = None,
) -> tuple[float, float]:  # fmt: skip
    """Slowest and fastest of the geometric rates that approximate t^{−β} best (within a few percent of the error; of
    up to 4 channels on a million tokens perhaps not the best valley).

    As `endpoints` of `halflife.decay.PoST` they are `(low · T, high)`; "optimal" there are these. With so many
    channels that float64 sees no error any more (about 30 at T = 1e3), they are (0.5/T, 4). Above 64, those of 64.

    Args:
        channels, length, beta, continuous: N, T, β and the norm, as `fit` has them.
        fastest: no rate above; for decays that have a limit.
        cache: JSON file that keeps what was found; memory keeps it in any case.
    """

    channels = min(channels, MANY)

    def error(x: Sequence[float]) -> float:
        rates = geometric_rates(channels, length, math.exp(x[0]) / length, math.exp(min(x[1], math.log(fastest))))
        return max(minimax_error(rates, length, beta, continuous=continuous), MEASURABLE)

    limit = "" if fastest == FASTEST else f" fastest={fastest:g}"
    key = f"geometric N={channels} T={length:g} beta={beta:g} {'interval' if continuous else 'integers'}{limit}"

    def find() -> list[float]:
        ends = [START, *(FAR if channels <= FEW else ())]
        starts = [[math.log(a), math.log(min(b, fastest))] for a, b in ends if a / length <= min(b, fastest)]
        if error(starts[0]) <= MEASURABLE:
            return starts[0]
        return min((descend(error, start) for start in starts), key=error)

    low, high = remembered(key, find, cache)
    return math.exp(low) / length, min(math.exp(high), fastest)


def remembered(key: str, find: Callable[[], list[float]], cache: Path | None) -> list[float]:
    """What was found under `key`, in memory or in the JSON file `cache`; else what `find` finds."""
    kept = read_json(cache) if cache is not None and cache.exists() else {}
    if key not in _FOUND:
        with torch.device("cpu"):  # also while a model is built on the meta device
            _FOUND[key] = kept[key] if key in kept else find()
    if cache is not None and key not in kept:
        write_json(cache, {**kept, key: _FOUND[key]})
    return _FOUND[key]


def descend(error: Callable[[Sequence[float]], float], at: list[float], step: float = 1.0) -> list[float]:
    """A minimum by compass search: along every axis by `step`, which halves where nothing is lower, to 1/32."""
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
