"""PoST's figures of how channels are distributed over time-scales."""

import numpy as np
import pytest

from halflife.report.figures import allocation
from halflife.report.figures.grids import SLOWEST


def model(name, layers, channels="heads"):
    rows = [{"layer": i, "spectra": {"1": {"timescales": list(scales)}}} for i, scales in enumerate(layers)]
    return {"model": name, "channels": channels, "layers": rows}


GEOMETRIC = [np.geomspace(1, 512, 8)] * 3
DATA = {"models": [model("mamba2", [[20.0] * 8, [None] + [30.0] * 7]), model("mamba2+post", GEOMETRIC), model("x", [])]}


@pytest.mark.parametrize("logs", [np.array([2.0]), np.zeros(5), np.random.default_rng(0).normal(1, 0.7, 200)])
def test_densities_hold_one(logs):
    x, y = allocation.density(logs)
    assert np.trapezoid(y, x) == pytest.approx(1, abs=3e-3)  # the part of a Gaussian beyond three widths
    assert (x[0] < logs.min()) & (x[-1] > logs.max())


def test_a_density_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    logs = np.random.default_rng(1).normal(2, 0.5, 64)
    x, y = allocation.density(logs)
    width = 1.06 * logs.std() * len(logs) ** -0.2
    expected = stats.norm.pdf(x[:, None], logs, width).mean(1)
    assert np.allclose(y, expected, rtol=1e-12)


def test_a_geometric_spectrum_is_a_straight_line():
    """Check the right panel of `distributions`, whose axis is logarithmic."""
    _, right = allocation.distributions(DATA).axes
    line = right.lines[1]
    x, y = line.get_xdata(), np.log10(line.get_ydata())
    assert right.get_yscale() == "log"
    assert np.allclose(np.diff(y) / np.diff(x), np.log10(512))


def test_heads_are_not_sorted():
    """Each layer and head has a cell, in the model's order. Infinite time-scales are at the end of the scale."""
    figure = allocation.heads(DATA)
    maps = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert maps[0].shape == (2, 8)
    assert maps[0][1, 0] == np.log10(SLOWEST)
    assert np.allclose(maps[1][0], np.log10(GEOMETRIC[0]))
    figure.draw_without_rendering()


def test_figures_are_the_same_of_data_read_again():
    """In `halflife figures`, NaN replaces the null of decays.json."""
    again = {"models": [model("mamba2", [[20.0] * 8, [float("nan")] + [30.0] * 7])]}
    for axes, expected in zip(allocation.distributions(again).axes, allocation.distributions(DATA).axes, strict=True):
        assert np.array_equal(axes.lines[0].get_ydata(), expected.lines[0].get_ydata())
        assert np.isfinite(axes.lines[0].get_ydata()).all()


@pytest.mark.parametrize("draw", [allocation.distributions, allocation.heads])
def test_nothing_to_show_says_so(draw):
    figure = draw({"models": [model("llama", [])]})
    assert "no layer with a decay" in [text.get_text() for axes in figure.axes for text in axes.texts]
