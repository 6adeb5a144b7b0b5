"""The minimax error of power laws by exponentials, against linear programs, closed forms and PoST's claims."""

import math

import numpy as np
import pytest
import torch
from helpers import assert_raises, cases, generator
from scipy.optimize import linprog

from halflife import decay
from halflife.decay import minimax
from halflife.lab.theory import approximation as approx
from halflife.lab.theory.approximation_survey import SPECTRA, error_by_channels, error_by_position, slopes
from halflife.lab.theory.spectra import response_as_run

AGREES = 4 * 6.6e-4  # against linear programs: four times the worst measured error; the solver stops at 1e-3
ROUNDED = 4 * 2.2e-16  # a few roundings in float64


def linear_program(columns, target):
    """Return min max |target − columns · w| by HiGHS, whose absolute tolerances need a scaled problem."""
    basis, target = np.linalg.qr(columns.numpy())[0], target.numpy()
    residual = target - basis @ (basis.T @ target)
    size, one = abs(residual).max(), np.ones((len(target), 1))
    found = linprog(
        np.eye(basis.shape[1] + 1)[-1],
        A_ub=np.block([[basis, -one], [-basis, -one]]),
        b_ub=np.r_[residual, -residual] / size,
        bounds=[(None, None)] * basis.shape[1] + [(0, None)],
    )
    return found.fun * size


def program_of(rates, positions, beta):
    return linear_program(torch.exp(-rates * (positions.unsqueeze(-1) - 1)), positions**-beta)


SPECTRA_OF_5 = {
    "random": approx.random_rates(5, 300, generator("rates")),
    "random, log-uniform": approx.random_rates(5, 300, generator("rates"), "log-uniform"),
    "linear": approx.linear_rates(5, 0.02),
    "geometric": minimax.geometric_rates(5, 300),
    "wide": minimax.geometric_rates(5, 300, 1e-3, 6),
    "one": torch.tensor([0.1], dtype=torch.float64),
}


@pytest.mark.parametrize("beta", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("name", SPECTRA_OF_5)
def test_equals_a_linear_program(name, beta):
    rates = SPECTRA_OF_5[name]
    every = torch.arange(1, 301, dtype=torch.float64)
    assert minimax.minimax_error(rates, 300, beta) == pytest.approx(program_of(rates, every, beta), rel=AGREES)
    dense = torch.logspace(0, math.log10(300), 2000, dtype=torch.float64)
    found = minimax.minimax_error(rates, 300, beta, continuous=True)
    assert found == pytest.approx(program_of(rates, dense, beta), rel=AGREES)


@cases(
    "rates",
    minimax.geometric_rates(16, 1e4),
    minimax.geometric_rates(16, 1e4, 5e-5, 4),
    approx.linear_rates(16, 0.0056),
)
def test_weights_reach_the_error_at_every_integer(rates):
    found = minimax.fit(rates, 1e4)
    every = torch.arange(1, 10001, dtype=torch.float64)
    residual = every**-0.5 - torch.exp(-rates * every.unsqueeze(-1)) @ found.weights
    rounding = 4 * 2.2e-16 * float(found.weights.abs().max())
    assert residual.abs().max().item() == pytest.approx(found.error, rel=AGREES, abs=rounding)
    assert found.lower <= found.error <= (1 + AGREES) * found.lower + rounding
    assert found.rank == 16
    turns = torch.sign(found.residual[found.residual.abs() > 0.99 * found.error]).diff().count_nonzero()
    assert turns == 16  # 17 alternating peaks, as Chebyshev's theorem requires of the best approximation


def test_closed_forms():
    constant = torch.zeros(1, dtype=torch.float64)
    assert minimax.minimax_error(constant, 100, 0.5) == pytest.approx((1 - 100**-0.5) / 2, rel=ROUNDED)
    twins = torch.full((3,), 0.1, dtype=torch.float64)
    found = minimax.fit(twins, 50)
    assert found.rank == 1
    assert found.error == pytest.approx(minimax.minimax_error(twins[:1], 50), rel=AGREES)
    assert minimax.minimax_error(minimax.geometric_rates(4, 4, 0.3, 3), 4) < 1e-13  # 4 weights and 4 positions
    # The best single exponential on {1, 2} has the errors w e^{−r} and w e^{−2r}, equal with opposite signs.
    rate = torch.tensor([0.7], dtype=torch.float64)
    a, b = math.exp(-0.7), math.exp(-1.4)
    expected = 1 - a * (1 + 2**-0.5) / (a + b)
    assert minimax.minimax_error(rate, 2) == pytest.approx(abs(expected), rel=AGREES)


def test_spans_that_float64_cannot_tell_apart():
    """Rounding makes 64 rates dependent. More channels are never worse, and the solver never fails."""
    few, many = (minimax.fit(minimax.geometric_rates(n, 1e4, 3e-5, 5), 1e4) for n in (12, 64))
    assert many.rank < 64
    assert many.error < 1e-6 * few.error
    assert minimax.minimax_error(approx.linear_rates(64, 1e-4), 1e4) < 0.3


@pytest.mark.parametrize(("rates", "length", "beta"), [([-0.1], 10, 0.5), ([0.1], 1, 0.5), ([0.1], 9, 0), ([], 9, 1)])
def test_what_cannot_be_fitted(rates, length, beta):
    assert_raises(ValueError, "need rates in", minimax.fit, torch.tensor(rates, dtype=torch.float64), length, beta)
    assert_raises(ValueError, "choose from uniform, log-uniform", approx.random_rates, 3, 10, generator(), "normal")


def test_spectra_are_what_they_are_called():
    rates = minimax.geometric_rates(5, 1e4)
    assert rates.log().diff().tolist() == pytest.approx([math.log(10)] * 4)
    assert (rates[0].item(), rates[-1].item()) == pytest.approx((1e-4, 1))
    assert approx.linear_rates(3, 0.5).tolist() == [0.5, 1, 1.5]
    for law in approx.LAWS:
        drawn = approx.random_rates(4000, 1e3, generator(law), law)
        assert (drawn.diff() > 0).all()
        assert drawn[0] >= 1e-3
        assert drawn[-1] <= 1
        middle = {"uniform": 0.5, "log-uniform": 1e-3**0.5}[law]
        assert drawn.median().item() == pytest.approx(middle, rel=0.15)
    assert minimax.taper(1).tolist() == [0]


@pytest.mark.parametrize("reference", [1, 64])
@pytest.mark.parametrize("position", [1, 5, 64, 1000])
def test_adapted_rates_are_those_of_the_layer(reference, position):
    """PoST in a model starts with the same geometric rates, in float32."""
    own = decay.build("retnet", num_heads=6, head_dim=4, granularity="scalar", layer_idx=0, num_layers=1)
    post = decay.PoST(own, train_length=64, reference_length=reference, endpoints=(0.5, 4.0))
    rates = approx.adapted_rates(minimax.geometric_rates(6, 64, 0.5 / 64, 4), position, reference)
    # The layer's taper corrects for T. With these ends T is not their ratio, but the taper stays linear in k.
    assert (1 / post.timescales(position)).tolist() == pytest.approx(rates.tolist(), rel=4 * 4.2e-7)
    if reference == 64:
        assert rates.tolist() == pytest.approx(minimax.geometric_rates(6, position, 0.5 / position, 4).tolist())


def test_known_figures():
    """The statements are checked for T = 1e4, N = 16, β = 0.5 over the interval."""

    def error(rates):
        return minimax.minimax_error(rates, 1e4, continuous=True)

    assert error(minimax.geometric_rates(16, 1e4)) == pytest.approx(3e-3, rel=0.3)
    assert error(approx.linear_rates(16, approx.best_step(16, 1e4, continuous=True))) == pytest.approx(2e-2, rel=0.3)
    draw = generator("known")
    drawn = torch.tensor([[error(approx.random_rates(16, 1e4, draw, law)) for _ in range(15)] for law in approx.LAWS])
    uniform, log_uniform = drawn.median(-1).values.tolist()
    assert uniform == pytest.approx(6e-2, rel=0.3)
    assert log_uniform < 2e-2  # random logarithms are better than the best linear spectrum
    assert error(minimax.geometric_rates(16, 1e4, 5e-5, 4)) == pytest.approx(8e-6, rel=0.3)


def test_best_endpoints_lie_a_little_outside():
    low, high = minimax.best_endpoints(16, 1e4, continuous=True)
    best = minimax.minimax_error(minimax.geometric_rates(16, 1e4, low, high), 1e4, continuous=True)
    assert best == pytest.approx(3.2e-6, rel=0.1)
    assert 0.3 < low * 1e4 < 1
    assert 3 < high < 7
    for a, b in ((2, 1), (0.5, 1), (1, 2), (1, 0.5)):
        assert minimax.minimax_error(minimax.geometric_rates(16, 1e4, low * a, high * b), 1e4, continuous=True) > best
    far = minimax.geometric_rates(16, 1e4, 1e-5, 6)
    dense = torch.logspace(0, 4, 800, dtype=torch.float64)
    assert program_of(far, dense, 0.5) > 2e-5  # fewer positions give a lower bound


@pytest.mark.slow
def test_rates_of_convergence():
    """π² / (log T + C₆) per channel with the best ends; Ω(N^{−β}) for linear rates while N ≪ √T (Lemma 4.3)."""
    data = error_by_channels([8, 12, 16], [100, 1e4], draws=3)
    assert list(data["errors"]) == list(SPECTRA)
    rows = {(row["spectrum"], row["length"]): row for row in data["slopes"]}
    for length in (100, 1e4):
        best, paper = (rows[name, length] for name in ("geometric, best ends", "geometric on [1/T, 1]"))
        assert best["per_channel"] == pytest.approx(math.pi**2 / (math.log(length) + 3), rel=0.15)
        assert paper["per_channel"] < 0.4 * best["per_channel"]
        assert best["claimed_per_channel"] == pytest.approx(math.pi**2 / math.log(length))
    assert rows["linear", 1e4]["power"] < 1.2
    assert minimax.minimax_error(approx.linear_rates(32, approx.best_step(32, 100)), 100) < 1e-4 * 32**-0.5
    assert data["errors"]["random"]["10000"][-1] > data["errors"]["linear"]["10000"][-1]


def test_slopes_are_least_squares():
    channels = [2, 4, 8]
    rows = slopes(
        {"geometric": {"100": [math.exp(1 - 0.7 * n) for n in channels]}, "linear": {"100": [3 / n for n in channels]},
         "random": {"100": [0.1, 1e-13, 1e-14]}}, channels, 0.5,
    )  # fmt: skip
    assert rows[0]["per_channel"] == pytest.approx(0.7)
    assert rows[0]["offset"] == pytest.approx(math.pi**2 / 0.7 - math.log(100))
    assert (rows[1]["power"], rows[1]["claimed_power"]) == (pytest.approx(1), 0.5)
    assert (rows[2]["points"], rows[2]["per_channel"], rows[2]["power"]) == (1, None, None)


def test_static_and_adapted():
    """Adapted rates are better at t < T (Prop. 4.9); with the gates of each position only for a far slow end."""
    positions = [10, 100, 1000]
    paper = error_by_position(16, 1000, positions)["errors"]
    assert all(a <= (1 + AGREES) * b for a, b in zip(paper["static"], paper["static"][1:], strict=False))
    assert all(a < 0.5 * b for a, b in zip(paper["adapted"][:2], paper["static"], strict=False))
    assert paper["adapted"][-1] == paper["static"][-1]
    exponents = [math.log(t) / ((math.log(t) + 3) * math.log(1000)) for t in positions]
    assert exponents == sorted(exponents)
    assert paper["as run"][1] > 10 * paper["adapted"][1]
    assert paper["as run"][2] > paper["static"][2]
    # The algorithm as it runs by default, t_ref = 1, costs a factor of about four for T = 1,000 and 2.3 for T = 10,000.
    for length, low, high in ((1000, 3.5, 4.5), (10_000, 2.2, 2.4)):
        run = error_by_position(16, length, [1000])["errors"]
        assert low < run["as run, t_ref = 1"][0] / run["static"][0] < high
    far = error_by_position(16, 1000, positions, ends=(1e-5, 6))
    assert far["errors"]["as run"][1] < 1.1 * far["errors"]["adapted"][1] < far["errors"]["static"][1]


def test_the_error_as_run_is_that_of_a_linear_program():
    rates = minimax.geometric_rates(6, 500)
    lags = torch.arange(1, 200)
    errors = error_by_position(6, 500, [200])["errors"]
    for name, reference in (("as run", 500), ("as run, t_ref = 1", 1)):
        expected = linear_program(response_as_run(rates, lags, 200, reference).mT, lags.double() ** -0.5)
        assert errors[name][0] == pytest.approx(expected, rel=AGREES)


def test_best_endpoints_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(minimax, "_FOUND", {})
    cache = tmp_path / "ends.json"
    ends = minimax.best_endpoints(3, 50, cache=cache), approx.best_step(3, 50, cache=cache)
    monkeypatch.setattr(minimax, "descend", None)
    monkeypatch.setattr(approx, "descend", None)
    assert (minimax.best_endpoints(3, 50), approx.best_step(3, 50)) == ends
    monkeypatch.setattr(minimax, "_FOUND", {})
    assert (minimax.best_endpoints(3, 50, cache=cache), approx.best_step(3, 50, cache=cache)) == ends
    with pytest.raises(TypeError):
        minimax.best_endpoints(3, 50, continuous=True, cache=cache)  # the cache holds the answer to another question
