"""Means over seeds with bootstrap intervals, and the rule for a baseline that has not learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np

Values = Sequence[float] | np.ndarray

MIN_SEEDS = 3  # fewer seeds have no interval
LEARNED = 0.9  # a baseline of a lower accuracy in distribution has not learned
MAX_EXACT_VALUES = 8  # up to so many values, every resample is weighed; beyond, resamples are drawn
RESAMPLES = 9999


class Interval(NamedTuple):
    """A mean over seeds and the ends of its 95 % interval, which are NaN for fewer than `MIN_SEEDS` seeds."""

    mean: float
    low: float
    high: float


def bootstrap(values: Values, level: float = 0.95) -> Interval:
    """Return the mean of some values and its percentile bootstrap interval.

    Of few values all resamples are enumerated with their probabilities, so that the interval has no noise. The interval
    of three values reaches from the smallest to the largest, because each of these two resamples has a probability of
    1/27. Percentile intervals of so few values are too narrow. `values` are one number per seed.
    """
    x = np.sort(np.asarray(values, dtype=float))
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < MIN_SEEDS or not np.isfinite(x).all():
        return Interval(mean, math.nan, math.nan)
    if len(x) <= MAX_EXACT_VALUES:
        means, weights = _all_resamples(x)
    else:
        draws = np.random.default_rng(0).integers(0, len(x), (RESAMPLES, len(x)))
        means, weights = x[draws].mean(1), np.full(RESAMPLES, 1 / RESAMPLES)
    order = np.argsort(means, kind="stable")
    cumulative, tail = weights[order].cumsum(), (1 - level) / 2
    low, high = (means[order][np.searchsorted(cumulative, q)] for q in (tail, 1 - tail))
    return Interval(mean, float(low), float(high))


def _all_resamples(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of every multiset of n of the n values, and its probability."""
    n = len(x)
    picks = np.array(list(combinations_with_replacement(range(n), n)))
    counts = np.stack([(picks == i).sum(1) for i in range(n)])
    factorials = np.array([math.factorial(i) for i in range(n + 1)], dtype=float)
    return x[picks].mean(1), factorials[n] / factorials[counts].prod(0) / float(n) ** n


def with_interval(values: Values, digits: int, sign: str = "") -> str:
    """Write a mean over seeds with its interval, "78.0 [72.8, 81.1]", which fewer than `MIN_SEEDS` seeds do not have.

    With the sign "+", positive numbers have a plus sign.
    """
    interval = bootstrap(values)
    mean, low, high = (f"{value:{sign}.{digits}f}" for value in interval)
    return mean if math.isnan(interval.low) else f"{mean} [{low}, {high}]"


def has_learned(accuracies: Values) -> bool:
    """Whether the mean accuracy in distribution reaches `LEARNED`. A diverged run has not learned."""
    return bool(np.mean(accuracies) >= LEARNED - 1e-9)  # the mean of 0.95 and 0.85 is rounded
