"""Differences of two models over the same seeds, for the tables of docs/results."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.stats import ttest_1samp

from halflife.report.intervals import with_interval


def paired(own: Mapping[str, float], theirs: Mapping[str, float]) -> np.ndarray:
    """The numbers of two models on the seeds that both have, `[2, seeds]`; each mapping is seed → number."""
    return np.array([(own[seed], theirs[seed]) for seed in sorted(own.keys() & theirs.keys())]).reshape(-1, 2).T


def write(found: np.ndarray, digits: int, sign: str = "") -> str:
    """The mean difference with its 95 % interval by bootstrap, in bold if it is significant.

    Args:
        found: one difference per seed.
        digits: digits after the point.
        sign: "+" for a plus sign before positive numbers.
    """
    values = [0.0 if abs(value) < 1e-9 else value for value in found]
    text = with_interval(values, digits, sign)
    return f"**{text}**" if significant(found) else text


def significant(found: np.ndarray) -> bool:
    """Whether differences over seeds have a mean other than 0: Student's t test at 5 %.

    The bootstrap interval of three seeds reaches from the smallest difference to the largest, so in one case of four it
    has no 0 by chance. The test is stricter for few seeds.
    """
    if len(found) < 3 or np.ptp(found) < 1e-9:
        return len(found) >= 3 and abs(found[0]) > 1e-9
    return bool(ttest_1samp(found, 0).pvalue < 0.05)
