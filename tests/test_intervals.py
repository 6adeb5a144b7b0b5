"""Bootstrap intervals over seeds, against every resample and against scipy; the rule for baselines."""

import itertools
import math

import numpy as np
import pytest

from halflife.report.intervals import bootstrap, has_learned, in_percent, ratio

FIVE = [0.1, 0.7, 0.4, 0.45, 0.9]


def test_three_seeds_reach_from_the_least_to_the_largest():
    assert bootstrap([0.3, 0.1, 0.2]) == pytest.approx((0.2, 0.1, 0.3))


def test_every_resample_is_counted():
    means = np.sort([np.mean(each) for each in itertools.product(FIVE, repeat=5)])
    mean, low, high = bootstrap(FIVE)
    assert mean == pytest.approx(0.51)
    # With rounding in the sums, a quantile may fall on the neighbouring resample.
    assert low == pytest.approx(np.quantile(means, 0.025, method="inverted_cdf"), abs=1e-12)
    assert high == pytest.approx(np.quantile(means, 0.975, method="inverted_cdf"), abs=1e-12)


@pytest.mark.slow  # for the import of scipy.stats
@pytest.mark.parametrize("values", [FIVE, [*FIVE, *np.linspace(0, 1, 15)]], ids=["all resamples", "drawn resamples"])
def test_scipy_finds_the_same(values):
    stats = pytest.importorskip("scipy.stats")
    other = stats.bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(1)).confidence_interval
    assert bootstrap(values)[1:] == pytest.approx((other.low, other.high), abs=0.02)


def test_few_or_diverged_seeds_have_no_interval():
    assert bootstrap([0.25, 0.75])[0] == 0.5
    assert all(math.isnan(end) for values in ([0.2, 0.4], [0.1, 0.2, math.nan]) for end in bootstrap(values)[1:])
    assert math.isnan(bootstrap([])[0])


def test_texts():
    assert in_percent([0.811, 0.728, 0.801]) == "78.0 [72.8, 81.1]"
    assert in_percent([0.5, 0.6]) == "55.0"


def test_ratios_need_a_baseline_that_has_learned():
    assert ratio([0.9, 0.8], [0.4, 0.45], learned=[0.95, 0.85]) == "2 ×"
    assert ratio([0.9, 0.8], [0.4, 0.45], learned=[0.95, 0.84]) == "not learned"
    assert ratio([1.0], [0.5], learned=[math.nan]) == "not learned"
    assert has_learned([0.9])
