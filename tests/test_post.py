"""PoST: an ordered spectrum whose time-scales grow with the position, by the formulas of the paper."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_raises, assert_same, cases, walk

from halflife import decay as decays
from halflife.decay import DECAYS, PoST, SpectralDecay
from halflife.decay import minimax as power_law
from halflife.decay.minimax import LEAST_ERROR, best_endpoints, geometric_rates, minimax_error

HEADS, CHANNELS, LENGTH = 4, 3, 512

# In float32; four times the worst measured error, relative to the largest entry.
TOLERANCE = 4 * 6.0e-7

SPECTRAL = [
    (name, granularity)
    for name in DECAYS
    if issubclass(DECAYS[name], SpectralDecay)
    for granularity in DECAYS[name].granularities
]

each_spectral = pytest.mark.parametrize(("name", "granularity"), SPECTRAL)
# The decays whose log-rates PoST orders. RWKV-7, whose logits are ordered, is in test_rwkv7_decay.py, and a random
# step in test_post_forms.py.
OTHERS = ("rwkv7", "mamba2_headwise")
each_geometric = pytest.mark.parametrize(("name", "granularity"), [case for case in SPECTRAL if case[0] not in OTHERS])
each_reference = pytest.mark.parametrize("reference_length", [1, LENGTH])


def base(name, granularity="scalar", heads=HEADS):
    return decays.build(name, num_heads=heads, head_dim=CHANNELS, granularity=granularity)


def post(name, granularity="scalar", heads=HEADS, **options):
    return PoST(base(name, granularity, heads), train_length=LENGTH, **options)


def trained(name, granularity="scalar"):
    decay = post(name, granularity)
    return walk(decay, [decay.theta, decay.delta])


def geometric(channels, slowest=1 / LENGTH, fastest=1.0):
    return torch.logspace(math.log10(slowest), math.log10(fastest), channels)


def linear_taper(channels):
    return torch.linspace(1, 0, channels)


@each_geometric
def test_starts_geometric_with_a_linear_taper(name, granularity):
    """Time-scales go from T to 1. With reference length 1 the slow end stretches to T·t, and the fast end stays."""
    decay = post(name, granularity)
    channels = math.prod(decay.shape)
    assert_close(decay.timescales(1).flatten(), 1 / geometric(channels), TOLERANCE)
    assert_close(decay.taper(), linear_taper(channels), 1e-6)
    assert_close(decay.timescales(64).flatten()[[0, -1]], torch.tensor([64.0 * LENGTH, 1.0]), TOLERANCE)


@each_geometric
def test_optimal_endpoints(name, granularity):
    """Base rates are those of `best_endpoints`. No rates nearby approximate the power law better."""
    optimal = post(name, granularity, endpoints="optimal", beta=0.7)
    channels = math.prod(optimal.shape)
    low, high = best_endpoints(channels, LENGTH, 0.7)
    assert_close(optimal.timescales(1).flatten(), 1 / geometric(channels, low, high), TOLERANCE)
    least = minimax_error(geometric_rates(channels, LENGTH, low, high), LENGTH, 0.7)
    for ends in ((1 / LENGTH, 1.0), (low / 1.5, high), (low, high * 1.5), (low * 1.5, high / 1.5)):
        assert minimax_error(geometric_rates(channels, LENGTH, *ends), LENGTH, 0.7) > max(least, LEAST_ERROR) * 0.99


def test_optimal_endpoints_while_building_on_meta(monkeypatch):
    monkeypatch.setattr(power_law, "_FOUND", {})
    with torch.device("meta"):
        ends = post("mamba2", endpoints="optimal").base_endpoints
    assert ends == pytest.approx(post("mamba2", endpoints="optimal").base_endpoints)


@each_geometric
@pytest.mark.parametrize("position", [1, 10, LENGTH, 4 * LENGTH])
def test_theorem_4_11(name, granularity, position):
    """With t_ref = T and a geometric base, τ_k(t) = t^{α_k} exactly. At t = T that is the static spectrum."""
    decay = post(name, granularity, reference_length=LENGTH)
    alpha = linear_taper(math.prod(decay.shape))
    assert_close(decay.timescales(position).flatten(), position**alpha, TOLERANCE)


@each_geometric
def test_endpoints(name, granularity):
    decay = post(name, granularity, endpoints=(0.1, 6.0))
    rates = geometric(math.prod(decay.shape), 0.1 / LENGTH, 6)
    assert_close(decay.base_log_rate().exp().flatten(), rates, TOLERANCE)


def test_mamba2_step_starts_at_one_twentieth():
    """Algorithm 2: the step bias is fixed, so that the rate is e^p · 0.05."""
    decay = post("mamba2")
    zeros = torch.zeros(1, 1, HEADS)
    assert_close(decay.step_size(zeros), torch.full_like(zeros, 0.05), 1e-6)
    assert_close(decay.log_rates().exp() * 0.05, geometric(HEADS), TOLERANCE)


@each_spectral
def test_order_and_taper_survive_training(name, granularity):
    decay = trained(name, granularity)
    taper = decay.taper()
    assert (decay.log_rates().diff() > 0).all()
    if name != "mamba2_headwise":  # whose step is random
        assert (decay.base_log_rate().flatten().diff() > 0).all()
    assert ((taper >= 0) & (taper <= 1)).all()
    assert_close(taper[[0, -1]], torch.tensor([1.0, 0.0]), 1e-6)


def test_taper_follows_the_gaps():
    """α_k = clamp((N−k)/(N−1) + ((p_k−p_1) − (k−1)Ḡ)/log T, 0, 1), number by number."""
    decay = trained("mamba2")
    p = decay.log_rates().tolist()
    gap = (p[-1] - p[0]) / (HEADS - 1)
    expected = [
        (HEADS - k) / (HEADS - 1) + ((p[k - 1] - p[0]) - (k - 1) * gap) / math.log(LENGTH) for k in range(1, HEADS + 1)
    ]
    assert_close(decay.taper(), torch.tensor(expected).clamp(0, 1), TOLERANCE)


LAWS = {  # −g without the taper, from log-rates p and activations f
    "mamba2": lambda decay, p, f: p.exp() * F.softplus(f + math.log(math.expm1(0.05))),
    "mamba2_released": lambda decay, p, f: p.exp() * F.softplus(f + math.log(math.expm1(0.05))),
    "mamba2_no_dt": lambda decay, p, f: p.exp() * F.softplus(f),
    "mamba2_no_a": lambda decay, p, f: F.softplus(f + p.exp().expm1().log()),
    "simple": lambda decay, p, f: F.softplus(p.exp().expm1().log() - f),
    "retnet": lambda decay, p, f: p.exp().expand(f.shape),
    "tnl_l": lambda decay, p, f: p.exp().expand(f.shape),
    "tnl_l_released": lambda decay, p, f: p.exp().expand(f.shape),
    "retnet_paper": lambda decay, p, f: p.exp().expand(f.shape),
}


@each_geometric
@each_reference
def test_law(name, granularity, reference_length):
    decay = post(name, granularity, reference_length=reference_length)
    f = torch.randn(2, 9, *decay.shape)
    position = torch.arange(1, 10) + torch.tensor([[0], [1000]])
    taper = (position.unsqueeze(-1) / reference_length) ** -linear_taper(math.prod(decay.shape))
    expected = -LAWS[name](decay, decay.log_rates().view(decay.shape), f) * taper.view(f.shape)
    assert_close(decay(f, position=position), expected, TOLERANCE)


@each_spectral
def test_positions_count_from_one_and_restart(name, granularity):
    decay = post(name, granularity)
    f = torch.randn(1, 9, *decay.shape)
    whole = decay(f)
    assert_same(decay(f, position=torch.arange(1, 10)), whole)
    assert_close(decay(f[:, 5:], position=torch.arange(6, 10)), whole[:, 5:], 1e-6)  # a sequence that continues
    packed = decay(f, position=torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3, 4]]))
    assert_close(packed, torch.cat([whole[:, :5], decay(f[:, 5:])], 1), 1e-6)


@each_spectral
def test_one_channel_has_no_taper(name, granularity):
    decay = PoST(decays.build(name, num_heads=1, head_dim=1, granularity=granularity), train_length=LENGTH)
    f = torch.randn(2, 9, *decay.shape, requires_grad=True)
    g = decay(f)
    assert_same(decay.taper(), torch.zeros(1))
    assert_same(g, decay(f, position=torch.full((9,), 10_000)))
    (g.sum() + 0 * f.sum()).backward()
    assert all(x.grad.isfinite().all() for x in (f, decay.theta))


@each_spectral
def test_parameters_are_the_spectrum_alone(name, granularity):
    """The base rates of the decay are gone, and every remaining parameter gets a gradient."""
    decay = post(name, granularity)
    own = {n for n in decay.state_dict() if n.startswith("decay.")}
    stepped = {key: {"decay.dt_bias"} for key in ("mamba2", "mamba2_headwise", "mamba2_released")}
    left = {**stepped, "rwkv7": {"decay.zigzag"}}
    assert own == left.get(name, set())
    decay(torch.randn(2, 9, *decay.shape)).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() and x.grad.any() for x in decay.parameters())


@pytest.mark.parametrize("name", [name for name in DECAYS if not issubclass(DECAYS[name], SpectralDecay)])
def test_needs_base_rates(name):
    assert_raises(ValueError, "no base rates", post, name)


def test_wraps_once():
    assert_raises(ValueError, "no base rates", PoST, post("mamba2"), train_length=LENGTH)


@cases(
    "options, message",
    ({"train_length": 1}, "train_length ≥ 2"),
    ({"train_length": 8, "reference_length": 0}, "reference_length > 0"),
    ({"train_length": 8, "endpoints": (0.0, 1.0)}, "endpoints and rate_range must give"),
    ({"train_length": 8, "endpoints": (16.0, 1.0)}, "endpoints and rate_range must give"),
    ({"train_length": 8, "endpoints": "best"}, 'two numbers, "optimal" or "moving"; got'),
    ({"train_length": 8, "endpoints": "optimal", "beta": 0.0}, "β > 0"),
    ({"train_length": 8, "beta": 0.7}, 'beta is for endpoints "optimal" and "moving"'),
)
def test_errors_say_what_is_wrong(options, message):
    assert_raises(ValueError, message, PoST, base("mamba2"), **options)


def test_an_initial_decay_that_post_would_replace_is_refused():
    decay = decays.build("simple", num_heads=HEADS, head_dim=CHANNELS, p=0.8)
    assert_raises(ValueError, "p has no meaning under it", PoST, decay, train_length=LENGTH)
