"""Every decay equals the formula of its paper, and keeps its parameters in float32 and in range."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_raises, assert_same, assert_streams, cases

from halflife import decay as decays
from halflife.decay import DECAYS, PoST, SpectralDecay
from halflife.ops import laws

HEADS, CHANNELS, LAYER, LAYERS = 4, 3, 2, 5

# Parameters are float32. The tolerance is four times the worst measured error, relative to the largest entry.
TOLERANCE = 4 * 1.9e-7

CASES = [(name, granularity) for name in DECAYS for granularity in DECAYS[name].granularities]
SPECTRAL = [(name, granularity) for name, granularity in CASES if issubclass(DECAYS[name], SpectralDecay)]

each_case = pytest.mark.parametrize(("name", "granularity"), CASES)
each_spectral = pytest.mark.parametrize(("name", "granularity"), SPECTRAL)


def build(name, granularity="scalar", **options):
    sizes = {"num_heads": HEADS, "head_dim": CHANNELS, "layer_idx": LAYER, "num_layers": LAYERS}
    return decays.build(name, granularity=granularity, **{**sizes, **options})


def activations(decay, batch=2, length=9, dtype=torch.float64):
    return 3 * torch.randn(batch, length, *decay.shape, dtype=dtype)


# Every decay, and every spectral decay under PoST.
KINDS = [(*case, False) for case in CASES] + [(*case, True) for case in SPECTRAL]
each_kind = pytest.mark.parametrize(("name", "granularity", "post"), KINDS)


def build_kind(name, granularity, post):
    decay = build(name, granularity)
    return PoST(decay, train_length=64) if post else decay


def lightnet(decay, f):
    """The ratio of two running sums of e^f: over all earlier tokens, and over the tokens so far."""
    seen = torch.stack([f[:, : t + 1].logsumexp(1) for t in range(f.shape[1])], 1)
    before = torch.cat([torch.full_like(seen[:, :1], -torch.inf), seen[:, :-1]], 1)
    return (before - seen).exp()


def hgrn2(decay, f):
    bound = decay.bound_logits.double().softmax(0).cumsum(0)[LAYER - 1]
    return bound + (1 - bound) * f.sigmoid()


def released_hgrn2(decay, f):
    """A layer alone has its initial bound."""
    return LAYER / LAYERS + (1 - LAYER / LAYERS) * f.sigmoid()


def tnl(decay, f):
    head = torch.arange(1, HEADS + 1, dtype=torch.float64)
    return torch.exp(-8 * head / HEADS * (1 - LAYER / LAYERS)).expand(f.shape)


def released_lightnet(decay, f):
    """With e⁰ in every sum before the first token."""
    return lightnet(decay, torch.cat([torch.zeros_like(f[:, :1]), f], 1))[:, 1:]


def released_tnl(decay, f):
    slope = torch.tensor([0.5 * (2 / 256) ** (head / (HEADS - 1)) for head in range(HEADS)], dtype=torch.float64)
    return torch.exp(-(1 - LAYER / (LAYERS - 1) + 1e-5) * slope).expand(f.shape)


LAWS = {
    "mamba2": lambda decay, f: (-f - decay.dt_bias.double()).sigmoid() ** decay.A_log.double().exp(),
    "mamba2_headwise": lambda decay, f: (-f - decay.dt_bias.double()).sigmoid() ** decay.A_log.double().exp(),
    "mamba2_released": lambda decay, f: (-f - decay.dt_bias.double()).sigmoid() ** decay.A_log.double().exp(),
    "mamba2_no_a": lambda decay, f: (-f - decay.dt_bias.double()).sigmoid(),
    "mamba2_no_dt": lambda decay, f: (-f).sigmoid() ** decay.A_log.double().exp(),
    "mamba2_no_a_dt": lambda decay, f: (-f).sigmoid(),
    "gla": lambda decay, f: f.sigmoid() ** (1 / 16),  # differs from sigmoid(f / 16)
    "gla_released": lambda decay, f: (f / 16).sigmoid(),
    "hgrn2": hgrn2,
    "hgrn2_released": released_hgrn2,
    "lightnet": lightnet,
    "lightnet_released": released_lightnet,
    "tnl": tnl,
    "tnl_l": tnl,  # it starts at TNL's decays
    "tnl_released": released_tnl,
    "tnl_l_released": released_tnl,
    "retnet_paper": lambda decay, f: (1 - 2.0 ** (-5 - torch.arange(HEADS).double())).expand(f.shape),
    "retnet": lambda decay, f: (1 - 2.0 ** (-5 - 3 * torch.arange(HEADS).double() / (HEADS - 1))).expand(f.shape),
    "simple": lambda decay, f: (f + math.log(0.99 / 0.01)).sigmoid(),
    "rwkv7": lambda decay, f: torch.exp(-math.exp(-0.5) * (f + decay.logit.double()).sigmoid()),
}


@each_case
def test_law(name, granularity):
    decay = build(name, granularity)
    f = activations(decay)
    g, expected = decay(f), LAWS[name](decay, f)
    assert g.dtype == torch.float64
    assert_close(g.exp(), expected, TOLERANCE)
    # For λ near 1, g is a stricter comparison than λ. LightNet's first g is −inf.
    assert_close(g[:, 1:], expected[:, 1:].log(), TOLERANCE)


@each_kind
def test_base_log_rate_is_the_rate_at_rest(name, granularity, post):
    decay = build_kind(name, granularity, post)
    assert decay.base_log_rate().shape == decay.timescales().shape == decay.shape
    if "lightnet" not in name:  # LightNet's rate depends on the context alone
        rest = torch.zeros(1, 1, *decay.shape)
        if post and name == "rwkv7":
            rest = rest - decay.decay.zigzag  # base rates do not include the zigzag
        assert_close(decay.base_log_rate().exp(), -decay(rest)[0, 0], TOLERANCE)
    if not post and "lightnet" not in name:
        assert_close(decay.timescales(), (-decay.base_log_rate()).exp(), TOLERANCE)


@pytest.mark.parametrize("p", [0.8, 0.9, 0.95, 0.99])
def test_simple_starts_at_p(p):
    decay = build("simple", p=p)
    assert_close(decay(torch.zeros(1, 1, HEADS)).exp(), torch.full((1, 1, HEADS), p), TOLERANCE)


def test_gla_temperature():
    assert_close(build("gla", tau=4)(torch.zeros(1, 1, HEADS)), torch.full((1, 1, HEADS), -math.log(2) / 4), TOLERANCE)


@pytest.mark.parametrize("granularity", ["scalar", "vector"])
def test_hgrn2_bound_grows_with_depth(granularity):
    layers = [build("hgrn2", granularity, layer_idx=layer) for layer in range(LAYERS)]
    bounds = torch.stack([layer.lower_bound() for layer in layers[1:]]).detach()
    assert_close(
        bounds[:, 0].flatten(), (torch.arange(1, LAYERS) / LAYERS).repeat_interleave(bounds[0, 0].numel()), TOLERANCE
    )
    assert layers[0].lower_bound() is None
    for layer, bound in zip(layers[1:], bounds, strict=True):
        lowest = layer(torch.full((1, 1, *layer.shape), -50.0)).exp()
        assert (lowest >= bound * (1 - 1e-6)).all()


def test_slow_decays_above_a_bound_keep_their_digits():
    """log(γ + e^f) − log(1 + e^f) in float32 is 0 for f above 16."""
    f, bound = torch.tensor([4.0, 8, 12, 16, 20]).expand(1, 1, 5), torch.full((5,), 0.3)
    exact = torch.log1p(-0.7 * torch.sigmoid(-f.double()))
    torch.testing.assert_close(laws.bounded_decay(f, bound)[0].double(), exact, rtol=4e-6, atol=0)


@pytest.mark.parametrize("name", ["tnl", "tnl_l", "tnl_released", "tnl_l_released"])
def test_tnl_forgets_in_every_layer(name):
    """The paper's own code reaches λ > 1 in the last layer."""
    layers = [build(name, layer_idx=layer) for layer in range(LAYERS)]
    g = torch.stack([layer(torch.zeros(1, 1, HEADS))[0, 0] for layer in layers]).detach()
    assert (g < 0).all()
    assert (g.diff(dim=0) > 0).all()


def test_a_released_tnl_l_can_leave_its_start_near_one():
    """Forty steps of Adam at 0.01 move λ of the last layer below 0.9. With a log-rate they would not move it at all."""
    decay, rest = build("tnl_l_released", layer_idx=LAYERS - 1), torch.zeros(1, 1, HEADS)
    log_rate = decay.rate.detach().log().requires_grad_()
    start = decay(rest).exp()
    assert start.min() > 1 - 1e-5
    for parameter, law in ((decay.rate, decay.rate.abs), (log_rate, log_rate.exp)):
        optimizer = torch.optim.Adam([parameter], 0.01)
        for _ in range(40):
            optimizer.zero_grad()
            (torch.exp(-law()) - 0.8).square().sum().backward()
            optimizer.step()
    assert decay(rest).exp().max() < 0.9
    assert torch.exp(-log_rate.exp()).min() > 1 - 2e-5
    with torch.no_grad():
        decay.rate.neg_()
    assert (decay(rest) < 0).all()


def test_mamba2_initialisation():
    decay = build("mamba2", num_heads=4000)
    rate, step = decay.A_log.exp(), F.softplus(decay.dt_bias)
    assert 1 <= rate.min() < 1.1
    assert 15.9 < rate.max() <= 16 * (1 + 1e-6)
    assert rate.mean().item() == pytest.approx(8.5, rel=0.05)
    assert 1e-3 * (1 - 1e-4) <= step.min() < 1.1e-3
    assert 0.09 < step.max() <= 0.1 * (1 + 1e-4)
    assert step.log().mean().item() == pytest.approx(math.log(1e-2), rel=0.05)  # log-uniform rates


@pytest.mark.parametrize("granularity", ["scalar", "vector"])
def test_lightnet_streams(granularity):
    decay = build("lightnet", granularity)
    f = activations(decay)
    assert decay(f)[:, 0].exp().count_nonzero() == 0

    def run(f, state):
        g, state = decay.scan(f, state=state)
        return g.exp(), state

    assert_streams(run, f, 1e-14)


@pytest.mark.parametrize("granularity", ["scalar", "vector"])
def test_lightnet_restarts_in_each_packed_sequence(granularity):
    decay = build("lightnet", granularity)
    bounds = [0, 4, 4, 5, 9]
    f = activations(decay, batch=1)
    _, state = decay.scan(activations(decay, batch=4))
    g, last = decay.scan(f, state=state, cu_seqlens=torch.tensor(bounds))
    for row, (a, b) in enumerate(pairwise(bounds)):
        alone, alone_last = decay.scan(f[:, a:b], state=state[row : row + 1])
        assert_same({"g": g[:, a:b], "last": last[row : row + 1]}, {"g": alone, "last": alone_last})


def test_lightnet_shared_keys_are_a_running_softmax():
    """With k = 1 − λ, the weight of token j is exp(f_j) / Σ exp(f) at every later time."""
    decay = build("lightnet", "vector")
    f = activations(decay)
    g = decay(f)
    weight = -torch.expm1(g)[:, 0]
    for t in range(1, f.shape[1]):
        weight = weight * g[:, t].exp()
        assert_close(weight, f[:, : t + 1].softmax(1)[:, 0], 1e-13)


@each_kind
def test_log_decay_is_never_positive(name, granularity, post):
    decay = build_kind(name, granularity, post)
    sweep = torch.linspace(-40, 40, 4001).view(1, -1, *[1] * len(decay.shape))
    assert (decay(sweep.expand(1, -1, *decay.shape)) <= 0).all()


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("name", [name for name in DECAYS if name.startswith("mamba2")])
def test_the_step_size_may_be_given(name, post):
    if (name, post) in (("mamba2_no_a", True), ("mamba2_no_a_dt", True)):
        pytest.skip("PoST orders Δ itself, or there is nothing to order")
    decay = build_kind(name, DECAYS[name].granularities[-1], post)
    f = activations(decay)
    assert_same(decay(f, step=decay.step_size(f)), decay(f))
    assert_same(decay(f, step=2 * decay.step_size(f)), 2 * decay(f))


@each_kind
@pytest.mark.parametrize("extreme", [-1e4, 1e4])
def test_extreme_activations(name, granularity, post, extreme):
    decay = build_kind(name, granularity, post)
    f = torch.randn(2, 5, *decay.shape)
    f[:, 2] = extreme
    f.requires_grad_()
    g = decay(f)
    assert (g <= 0).all()
    assert g[:, 1:].isfinite().all()
    loss = g.exp().sum() + g[:, 1:].sum() + 0 * f.sum()  # fixed decays do not use f
    for gradient in torch.autograd.grad(loss, [f, *decay.parameters()]):
        assert gradient.isfinite().all()


@each_kind
@pytest.mark.parametrize("narrow", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16()])
def test_parameters_stay_float32(name, granularity, post, narrow):
    decay = build_kind(name, granularity, post)
    before = {name: x.clone() for name, x in decay.state_dict().items()}
    assert_same(narrow(decay).state_dict(), before)
    assert all(x.dtype == torch.float32 for x in decay.state_dict().values())
    assert decay(activations(decay, dtype=torch.bfloat16)).dtype == torch.float32
    assert all(x.dtype == torch.float64 for x in decay.double().state_dict().values())


@each_kind
def test_reset_parameters_is_idempotent_and_survives_the_meta_device(name, granularity, post):
    torch.manual_seed(1)
    decay = build_kind(name, granularity, post)
    if post and name == "mamba2_headwise":  # its construction draws Δ several times
        torch.manual_seed(1)
        decay.reset_parameters()
    before = {name: x.clone() for name, x in decay.state_dict().items()}
    with torch.device("meta"):
        from_meta = build_kind(name, granularity, post)
    from_meta.to_empty(device="cpu")
    for module in (decay, from_meta):
        torch.manual_seed(1)
        module.reset_parameters()
        assert_same(module.state_dict(), before)


def test_unknown_names_and_activations_that_do_not_fit():
    assert_raises(ValueError, r"Did you mean 'mamba2'\? Choose from: .*lightnet.*simple", build, "mamba")
    assert_raises(ValueError, r"f must be \[B, T, 4, 3\]", build("gla", "vector"), torch.zeros(1, 2, HEADS))


@cases(
    "name, options, message",
    ("gla", {"granularity": "matrix"}, "granularity scalar and vector; got 'matrix'"),
    ("retnet", {"granularity": "vector"}, "granularity scalar; got 'vector'"),
    ("tnl", {"granularity": "vector"}, "granularity scalar"),
    ("gla", {"num_heads": 0}, "num_heads"),
    ("gla", {"head_dim": 0}, "head_dim"),
    ("gla", {"layer_idx": LAYERS}, "layer_idx"),
    ("gla", {"tau": 0.0}, "tau must be positive"),
    ("simple", {"p": 1.0}, "between 0 and 1"),
    ("lightnet", {"first": "one"}, "unknown first 'one'"),
)
def test_errors_say_what_is_wrong(name, options, message):
    assert_raises(ValueError, message, build, name, **options)


@pytest.mark.parametrize("name", DECAYS)
def test_every_strategy_says_what_it_is(name):
    assert DECAYS.summary(name).startswith("λ")
    assert "Source:" in DECAYS[name].__doc__
