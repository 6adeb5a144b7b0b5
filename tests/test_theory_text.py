"""Condition 3.2, Corollary 3.7 and Proposition B.2 of PoST against literal sums in float64."""

import cmath
import math

import pytest
import torch
from helpers import generator
from test_spectra import noise

from halflife.lab.theory import correlations, spectra
from halflife.lab.theory.approximation import geometric_rates, taper
from halflife.lab.theory.normalization import FORMS, energy_at, relative_energies
from halflife.lab.theory.stationarity import block_averages, block_exponents, spectral_density

EXACT = 4 * 4.5e-16


def test_block_exponents_are_those_of_literal_sums():
    """R_b(s) is a mean of products of block means, taken segment by segment."""
    sequence = noise(400, 0.3, "blocks")
    found = block_exponents(sequence, mean=0.0, factors=(2, 3), lags=(1, 2), blocks=4)
    for i, factor in enumerate((2, 3)):
        for j, lag in enumerate((1, 2)):
            means = []
            for size in (1, factor):
                total = 0.0
                for segment in range(4):
                    x = sequence[100 * segment : 100 * segment + 100].tolist()
                    averages = [sum(x[size * n : size * n + size]) / size for n in range(100 // size)]
                    pairs = [averages[t] * averages[t + lag] for t in range(len(averages) - lag)]
                    total += sum(pairs) / len(pairs) / 4
                means.append(total)
            assert found["exponents"][i][j] == pytest.approx(math.log(means[0] / means[1]) / math.log(factor))
    assert found["beta"] == correlations.power_law(sequence, mean=0.0, blocks=4)["exponent"]


def test_block_averages():
    assert block_averages(torch.arange(7.0).unsqueeze(-1), 3).flatten().tolist() == [1, 4]


@pytest.mark.parametrize("beta", [0.3, 0.6])
def test_fractional_noise_meets_the_condition(beta):
    found = block_exponents(noise(1 << 15, beta, "condition"), factors=(2, 8), lags=(1, 2))
    for key, sign in (("low", 1), ("high", -1)):
        assert all(sign * (beta - end) > -0.03 for row in found[key] for end in row)
    assert all(abs(value - beta) < 0.1 for row in found["exponents"] for value in row)


def test_white_noise_keeps_the_condition_and_short_correlations_break_it():
    """White noise adds to R(0) alone. An autoregression over a few tokens makes the exponents too large."""
    base, draws = noise(1 << 14, 0.3, "period"), torch.randn(1 << 14, generator=generator("white"), dtype=torch.float64)
    white = block_exponents(base + draws, factors=(2, 4), lags=(2,), mean=0.0)
    assert all(abs(row[0] - 0.3) < 0.15 for row in white["exponents"])
    short = [draws[0]]
    for x in draws[1:]:
        short.append(0.8 * short[-1] + x)
    found = block_exponents(base + torch.stack(short), factors=(8,), lags=(2,), mean=0.0)
    assert found["exponents"][0][0] > 0.5


def test_an_exponent_that_does_not_exist_is_none():
    """A wave of 64 tokens makes the covariance of blocks of 16 negative at lag 2."""
    sequence = noise(1 << 13, 0.3, "none") + 2 * torch.cos(torch.arange(1 << 13).double() * math.pi / 32)
    found = block_exponents(sequence, factors=(16,), lags=(1, 2), mean=0.0)
    assert [value is None for value in found["exponents"][0]] == [False, True]
    assert [end is None for end in found["low"][0]] == [False, True]


def test_short_texts_are_errors():
    with pytest.raises(ValueError, match="a segment of 280 tokens is too short for 9 blocks of 32"):
        block_exponents(noise(16 * 280, 0.2, "short"))
    with pytest.raises(ValueError, match="a segment of 125 tokens is too short for 9 blocks of 32"):
        block_exponents(noise(2000, 0.2, "short"))
    with pytest.raises(ValueError, match=r"three octaves of frequencies up to 0\.0625 in 62 tokens; got 0"):
        spectral_density(noise(1000, 0.2, "short"))


def test_the_density_is_a_literal_sum():
    sequence, size = noise(256, 0.3, "density"), 64
    found = spectral_density(sequence, blocks=4, mean=0.0, high=0.5)
    window = [(1 - math.cos(2 * math.pi * t / size)) / 2 for t in range(size)]
    scale = math.sqrt(sum(w * w for w in window) / size)
    power = [0.0] * (size // 2 + 1)
    for segment in range(4):
        for k in range(1, size // 2 + 1):
            x = sequence[size * segment : size * segment + size].tolist()
            total = sum(x[t] * window[t] / scale * cmath.exp(-2j * math.pi * k * t / size) for t in range(size))
            power[k] += abs(total) ** 2 / size / 4
    octaves = [range(2**i, min(2 ** (i + 1), size // 2 + 1)) for i in range(6)]
    expected = [sum(power[k] for k in octave) / len(octave) for octave in octaves]
    assert found["density"] == pytest.approx(expected)
    logs = [sum(math.log(k / size) for k in octave) / len(octave) for octave in octaves]
    assert found["frequencies"] == pytest.approx([math.exp(x) for x in logs])
    x, y = torch.tensor(logs[2:]), torch.tensor(expected[2:]).log()
    slope = ((x - x.mean()) * y).sum() / ((x - x.mean()) ** 2).sum()
    assert found["slope"] == pytest.approx(slope.item(), rel=1e-5)
    assert found["used"] == [False, False, True, True, True, True]


@pytest.mark.parametrize("beta", [0.3, 0.6])
def test_fractional_noise_has_the_slope_of_the_corollary(beta):
    sequence = noise(1 << 16, beta, "slope")
    found = spectral_density(sequence)
    assert found["slope"] == pytest.approx(beta - 1, abs=0.06)
    assert found["low"] < found["slope"] < found["high"]
    flat = spectral_density(sequence + 4 * torch.randn(1 << 16, generator=generator("flat"), dtype=torch.float64))
    assert flat["slope"] > found["slope"] + 0.15  # the white part of R(0)


@pytest.mark.parametrize("reference", [1, 40])
def test_energies_are_those_of_a_literal_recurrence(reference):
    rates, tapers = geometric_rates(3, 40), taper(3)
    scaled = rates * float(reference) ** tapers
    found = energy_at(scaled, tapers, [1, 40, 90])
    for k in range(3):
        energy, wanted = 0.0, []
        for t in range(1, 91):
            gate = math.exp(-rates[k].item() * (t / reference) ** -tapers[k].item())
            energy = gate**2 * energy + 1
            wanted += [energy] if t in (1, 40, 90) else []
        assert found[k].tolist() == pytest.approx(wanted, rel=1e-12)
    assert torch.allclose(found[:, 2], spectra.energy_as_run(scaled, tapers, 90)[:, -1], rtol=1e-12, atol=0)


def test_relative_energies():
    """The extreme pair grows as claimed under both forms, the middle one under the theorem's alone."""
    found = relative_energies(9, 2000, (2, 8))
    for form in FORMS[1:]:
        assert found[form]["as run"] == pytest.approx([2, 8], rel=2e-3)
        assert found[form]["frozen"] == pytest.approx([2, 8], rel=2e-3)
        assert found[form]["shrunk"] == pytest.approx([2**-0.5, 8**-0.5], rel=0.2)
        assert found[form]["claimed middle"] == pytest.approx([2**0.5, 8**0.5])
    assert found["theorem"]["middle"] == pytest.approx([2**0.5, 8**0.5], rel=0.02)
    assert found["algorithm"]["middle"][1] > 1.2 * 8**0.5
    assert all(1 < growth < 1.2 for growth in found["static"]["as run"])
    rates = geometric_rates(9, 2000)
    energies = energy_at(rates, torch.zeros(9, dtype=torch.float64), [2000, 4000])
    total = energies.sum(0)
    assert found["static"]["share"][0] == pytest.approx((energies[0] / total)[1].item(), rel=EXACT)
    assert found["static"]["shrunk"][0] == pytest.approx((total[0] / total[1]).sqrt().item(), rel=1e-9)
