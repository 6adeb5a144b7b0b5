"""Gaps, responses and energy of decay spectra, and the data behind them, against PoST's statements."""

import math

import pytest
import torch
from helpers import assert_raises, generator

from halflife import decay
from halflife.decay.minimax import geometric_rates, taper
from halflife.evaluation.language import octave_means
from halflife.lab.theory import correlations, spectra
from halflife.lab.theory import figures as theory_figures
from halflife.lab.theory.approximation import linear_rates
from halflife.report.figures.matplotlib_renderer import draw

EXACT = 4 * 4.5e-16  # relative, four times the worst measured error, as all multiples of 4 below
PAIRS = [(1, 2), (2, 3), (3, 10), (10, 1000)]  # positions t₁ < t₂


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def noise(length, beta, *key):
    """Fractional Gaussian noise `[T]`, R(s) = (|s+1|^{2−β} − 2|s|^{2−β} + |s−1|^{2−β})/2 (Davies and Harte)."""
    covariance = exact(torch.arange(length + 1), beta)
    power = torch.fft.fft(torch.cat([covariance, covariance[1:-1].flip(0)])).real.clamp(min=0)
    white = torch.randn(2, 2 * length, generator=generator("noise", beta, *key), dtype=torch.float64)
    return torch.fft.fft(torch.complex(*white) * (power / (2 * length)).sqrt()).real[:length]


def exact(lags, beta):
    s, power = lags.double(), 2 - beta
    return ((s + 1) ** power - 2 * s**power + (s - 1).abs() ** power) / 2


def test_the_least_gap_collapses():
    """Uniform draws reach the bound of Lemma 4.1 for every m. Other draws are below it."""
    found = spectra.minimum_gap([2, 5, 20, 60], density=0.25, trials=4000)
    for mean, error, bound in zip(found["mean"], found["error"], found["bound"], strict=True):
        assert abs(mean - bound) < 4 * error < 0.1 * bound
    assert found["even"] == pytest.approx([4 / (n - 1) for n in (2, 5, 20, 60)])
    slope = math.log(found["mean"][3] / found["mean"][2]) / math.log(3)
    assert slope == pytest.approx(-2, abs=0.15)
    # Mamba-2 draws rates uniformly on [1, 16]; the density of their logarithms is e^p / 15, at least 1/15.
    logs = spectra.minimum_gap([5, 20], density=1 / 15, draw=lambda u: (1 + 15 * u).log(), trials=2000)
    assert all(mean < bound for mean, bound in zip(logs["mean"], logs["bound"], strict=True))
    assert_raises(ValueError, "two channels", spectra.minimum_gap, [1])


def test_channels_in_use():
    """Prop. 4.9, Part 1, holds within one channel. Channels not in use are slow and vary by at most 1 − 1/e."""
    rates, positions = geometric_rates(17, 1e4), [1, 7, 10, 100, 3000, 10_000]
    found = spectra.effective_channels(rates, positions, 1e4)
    assert found["counted"] == [1, 4, 5, 9, 14, 17]  # T^{k/16} ≤ t
    assert all(abs(n - law) <= 1 for n, law in zip(found["counted"], found["law"], strict=True))
    for t, count in zip(positions, found["counted"], strict=True):
        slow = rates[: 17 - count]
        assert (1 - torch.exp(-slow * t) <= 1 - math.exp(-1)).all()
        assert (1 - torch.exp(-rates[17 - count :] * t) >= (1 - math.exp(-1)) * (1 - 1e-9)).all()
    for t in (10, 100, 10_000):
        theorem, default = (spectra.effective_channels(rates, [t], 1e4, reference) for reference in (1e4, 1))
        assert (theorem["counted"], theorem["law"]) == ([17], [pytest.approx(17)])
        scales = [(1e4 * t) ** (k / 16) for k in range(17)]
        assert default["counted"] == [sum(scale <= t * (1 + 1e-9) for scale in scales)]
        assert abs(default["counted"][0] - default["law"][0]) <= 1


@pytest.mark.parametrize("reference", [1, 1000])
def test_responses_are_scale_free(reference):
    """The slowest response depends on s/t, the fastest on s (Corollary 4.13), also with the gates of each position."""
    rates = geometric_rates(5, 1000)
    fractions = torch.tensor([0.1, 0.5, 1])
    slow = [spectra.response(rates, fractions.double() * t, t, reference)[0].tolist() for t in (10, 500)]
    assert slow[0] == pytest.approx(slow[1], rel=EXACT)
    fast = [spectra.response(rates, f64([1.0, 4]), t, reference)[-1].tolist() for t in (10, 500)]
    assert fast[0] == pytest.approx(fast[1], rel=EXACT)
    assert fast[0] == pytest.approx([math.exp(-1), math.exp(-4)])
    middle = [spectra.response(rates, f64([3.0]), t, reference)[2].item() for t in (10, 500)]
    assert middle[0] < middle[1]


def test_the_response_as_run_is_the_recurrence_of_the_layer():
    """Products of the gates of `halflife.decay.PoST` are near the corollary for s ≪ t, and far from it at s = t."""
    own = decay.build("retnet", num_heads=4, head_dim=2, granularity="scalar", layer_idx=0, num_layers=1)
    post = decay.PoST(own, train_length=32, reference_length=32).double()
    gates = post(torch.zeros(1, 100, 4, dtype=torch.float64))[0].T  # [H, T]
    rates = geometric_rates(4, 32)
    lags = torch.tensor([0, 1, 5, 60, 100])
    found = spectra.response_as_run(rates, lags, 100, 32)
    expected = torch.stack([gates[:, 100 - s :].sum(-1).exp() for s in lags.tolist()], -1)
    assert torch.allclose(found, expected, rtol=0, atol=4 * 1.2e-8)  # the layer's parameters were set in float32
    frozen = spectra.response(rates, lags, 100, 32)
    assert torch.allclose(found[:, 1], frozen[:, 1], rtol=0.01)
    assert frozen[0, -1] == pytest.approx(math.exp(-1))
    assert found[0, -1] < 0.1 * frozen[0, -1]
    # α = 1: (1 − s/t)^r, up to the difference between the sum and the integral.
    wide = spectra.response_as_run(torch.tensor([2.0, 50.0]), torch.tensor([20_000, 80_000]), 100_000)
    assert wide[0].tolist() == pytest.approx([0.8**2, 0.2**2], rel=1e-4)


def test_response_figure():
    data = spectra.responses(geometric_rates(5, 100), [10, 100], 100)
    figure = draw(
        theory_figures.impulse_responses({**data, "default": spectra.responses(geometric_rates(5, 100), [10, 100])})
    )
    figure.canvas.draw()
    assert [len(axes.lines) for axes in figure.axes] == [4] * 12
    assert [axes.get_title("left")[:9] for axes in figure.axes[::6]] == ["t_ref = T", "t_ref = 1"]


@pytest.mark.parametrize("alpha", [0, 0.3, 0.7, 1])
@pytest.mark.parametrize("rate", [1e-3, 0.05, 2])
def test_energy_ratios(alpha, rate):
    """In continuous time the ratio lies between (t₂/t₁)^α and t₂/t₁ (Theorem B.1). At α = 1 it equals both."""
    rates, tapers = f64([rate]), f64([alpha])
    for first, second in PAIRS:
        low, high = spectra.energy(rates, tapers, f64([first, second]))[0].tolist()
        ratio = high / low
        assert (second / first) ** alpha * (1 - 1e-12) <= ratio <= second / first * (1 + 1e-12)
        if alpha == 1:
            assert ratio == pytest.approx(second / first)
    far = spectra.energy(rates, tapers, f64([1e12, 1e15]))[0]
    if alpha < 1:
        assert (far[1] / far[0]).item() == pytest.approx(1000**alpha, rel=1e-3)


def test_energy_formulas():
    """The continuous energy is an integral, the frozen one a sum. They differ by 1/τ. In discrete time Part 2 fails."""
    rates, tapers = f64([0.02, 0.3]), f64([0.5, 0])
    t, tau = 40, f64([40**0.5 / 0.02, 1 / 0.3])
    summed = torch.exp(-2 * torch.arange(t).double() / tau.unsqueeze(-1)).sum(-1)
    position = f64([t])
    frozen = spectra.energy_frozen(rates, tapers, position)[:, 0]
    assert torch.allclose(frozen, summed, rtol=EXACT, atol=0)
    fine = torch.linspace(0, t, 100_001, dtype=torch.float64)
    integral = torch.trapezoid(torch.exp(-2 * fine / tau.unsqueeze(-1)), fine)
    continuous = spectra.energy(rates, tapers, position)[:, 0]
    assert torch.allclose(continuous, integral, rtol=4 * 4.8e-9, atol=0)
    assert ((frozen / continuous - 1) * tau).tolist() == pytest.approx([1, 1], rel=0.15)
    one = torch.ones(1).double()
    first, second = spectra.energy_frozen(one, one, f64([1, 2]))[0].tolist()
    assert second / first < 2 - 0.1


def test_energy_of_moving_gates():
    """At α = 1 it also grows linearly, to t/(1 + 2r), not to t(1 − e^{−2r})/2r of frozen gates. White noise agrees."""
    rates, tapers = f64([1, 0.5, 1]), f64([1, 0.5, 0])
    data = spectra.energies(rates, tapers, 400, trials=1500)
    held = f64(data["as run"])
    assert held[0, -1].item() == pytest.approx(400 / 3, rel=0.01)
    assert data["continuous"][0][-1] == pytest.approx(400 * (1 - math.exp(-2)) / 2)
    assert held[2, -1].item() == pytest.approx(1 / (1 - math.exp(-2)), rel=EXACT)
    gates = torch.exp(-rates.unsqueeze(-1) * torch.arange(1, 401) ** -tapers.unsqueeze(-1))
    tail = gates.flip(-1).cumprod(-1).flip(-1)  # products from t to the end
    expected = (torch.nn.functional.pad(tail[:, 1:], (0, 1), value=1) ** 2).sum(-1)
    assert torch.allclose(held[:, -1], expected, rtol=EXACT, atol=0)
    # The mean of n squares of a normal variable has the relative error √(2/n).
    shares = f64(data["simulated"])[:, ::40] / held[:, ::40]
    assert (shares - 1).abs().max() < 4.5 * math.sqrt(2 / 1500)


@pytest.mark.parametrize("slack", [0, 0.1, 0.5, 0.9])
def test_taper_bounds(slack):
    """Corollary 4.15 holds for random information within the slack. The sharp bound is reached, and 0 at both ends."""
    bound, q = spectra.taper_bound(slack, 9), taper(9)
    assert torch.allclose(bound.paper, 2 * slack / (1 - slack) * q)
    assert (bound.sharp <= bound.paper + 1e-15).all()
    assert bound.sharp[[0, -1]].tolist() == [0, 0]
    draw, reached = generator("slack"), torch.zeros(9).double()
    cuts = [[1 + slack if (i < cut) == up else 1 - slack for i in range(400)] for cut in range(401) for up in (0, 1)]
    random = (1 + slack * (2 * torch.rand(200, 12, generator=draw) - 1)).double()
    for information in [*f64(cuts), *random]:
        off = (spectra.best_taper(information, 9) - q).abs()
        assert (off <= bound.sharp + 1e-12).all()
        reached = torch.maximum(reached, off)
    assert torch.allclose(reached, bound.sharp, atol=0.5 / 400)


def test_best_taper_by_hand():
    information = f64([3, 1, 2])  # F: 0, 1/2, 2/3, 1
    assert spectra.best_taper(information, 5).tolist() == pytest.approx([1, 0.75, 1 / 3, 1 / 6, 0])
    assert spectra.best_taper(torch.ones(7), 4).tolist() == pytest.approx(taper(4).tolist())
    assert_raises(ValueError, "positive information", spectra.best_taper, torch.tensor([1.0, 0]), 3)
    assert_raises(ValueError, r"\[0, 1\)", spectra.taper_bound, 1, 3)


def test_autocovariance_is_a_mean_over_pairs():
    x = torch.randn(2, 9, 3, generator=generator("acov"), dtype=torch.float64)
    found = correlations.autocovariance(x, 8)
    centred = x - x.mean((0, 1))
    for s in range(9):
        expected = (centred[:, : 9 - s] * centred[:, s:]).sum(-1).mean(-1)
        assert torch.allclose(found[:, s], expected, atol=1e-14)
    assert_raises(ValueError, "below the 9 tokens", correlations.autocovariance, x, 9)


@pytest.mark.parametrize("beta", [0.3, 0.6])
def test_the_exponent_is_found(beta):
    """Estimates from numbers, bits (their sign) and two dimensions agree. Six samples of 2¹⁶ scatter by 0.05 each."""
    found = {"numbers": [], "bits": [], "pairs": []}
    for seed in range(6):
        x = noise(1 << 16, beta, seed)
        y = noise(1 << 16, beta, seed, "other")
        found["numbers"].append(correlations.power_law(5 + 3 * x, draws=100))
        found["bits"].append(correlations.power_law((x > 0).long(), draws=100))
        found["pairs"].append(correlations.power_law(torch.stack([x, y], -1), draws=100))
    for results in found.values():
        exponents = torch.tensor([result["exponent"] for result in results])
        assert exponents.mean().item() == pytest.approx(beta, abs=4 * 0.05 / math.sqrt(6))
        assert sum(result["low"] <= beta <= result["high"] for result in results) >= 4
    figure = draw(theory_figures.autocovariances({kind: results[0] for kind, results in found.items()}))
    figure.canvas.draw()
    assert "β = " in figure.legends[0].get_texts()[0].get_text()


def test_an_estimated_mean_is_allowed_for():
    """Without the correction the slope would be far too steep."""
    x = noise(1 << 14, 0.3, "mean") + 100
    corrected = correlations.power_law(x, draws=10)["exponent"]
    plain = correlations.power_law(x, draws=10, mean=x.mean().item())["exponent"]
    assert plain > corrected + 0.05


def test_no_power_law_is_an_error():
    with pytest.raises(ValueError, match="octaves of lags have an autocovariance clearly above 0"):
        correlations.power_law(torch.randn(1 << 12, generator=generator("white")))
    assert_raises(ValueError, "need 2 blocks or more", correlations.power_law, torch.randn(100))
    assert_raises(ValueError, "need 2 blocks or more", correlations.power_law, torch.randn(1000), blocks=1)


def test_condition_3_2_does_not_make_a_power_law():
    """Lemma 3.6: R_b(s) = b^{−β} R(s) holds for fractional noise, whose R(2)/R(1) is not 2^{−β}."""
    beta = 0.4
    for b in (2, 3, 7):
        inside = torch.arange(b)
        for s in (1, 2, 5):
            lags = (s * b + inside.unsqueeze(-1) - inside).flatten()
            assert exact(lags, beta).mean().item() == pytest.approx(b**-beta * exact(torch.tensor(s), beta).item())
    first, second, far, twice = exact(torch.tensor([1, 2, 1000, 2000]), beta).tolist()
    assert second / first < 0.95 * 2**-beta
    assert twice / far == pytest.approx(2**-beta, rel=1e-4)


def test_information_per_octave():
    """A loss that falls by 0.3 bits per doubling gives 0.3 bits in every octave. The slack is that of Condition 3.5."""
    positions = torch.arange(1, 5001, dtype=torch.float64)
    buckets = octave_means(8 - 0.3 * math.log(2) * positions.log2())
    found = correlations.octave_information(buckets)
    assert found["scales"] == [2**i for i in range(1, 12)]  # 4097 … 5000 is no whole octave
    assert found["information"][4:] == pytest.approx([0.3] * 7, rel=0.02)
    uneven = [(1, 1, 9.0), (2, 2, 8.0), (3, 4, 7.0), (5, 8, 6.7), (9, 16, 6.5), (17, 30, 6.4)]
    found = correlations.octave_information([(a, b, loss * math.log(2)) for a, b, loss in uneven])
    assert found["information"] == pytest.approx([1, 0.3, 0.2])
    assert (found["mean"], found["slack"]) == pytest.approx((0.6, 2 / 3))
    for j in found["information"]:
        assert found["mean"] * (1 - found["slack"]) - 1e-12 <= j <= found["mean"] * (1 + found["slack"]) + 1e-12
    worse = correlations.octave_information([(2, 2, 3.0), (3, 4, 2.0), (5, 8, 2.5)])
    assert worse["slack"] > 1
    assert_raises(ValueError, "two whole octaves", correlations.octave_information, [(1, 1, 3.0), (2, 2, 2.0)])
    figure = draw(theory_figures.information({"even": found, "worse": worse}))
    figure.canvas.draw()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["even (ε = 0.67)", "worse (not even)"]


def test_linear_rates_waste_channels():
    """Almost all rates of S4D-Real lie in the fastest octaves, so few time-scales lie in [1, t] at any t."""
    found = spectra.effective_channels(linear_rates(16, 1 / 16), [4, 16], 16)
    assert found["counted"] == [13, 16]
