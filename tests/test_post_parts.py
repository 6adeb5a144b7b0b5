"""The parts of PoST: a sorted spectrum, positions that are held, a stretched gain, a fit to a source."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_raises, assert_streams, cases, outer, token_loop
from test_start import SIZES, saved, text, train  # noqa: F401 (text is a fixture)

from halflife import LanguageModel, decay, layers, preset
from halflife.decay import PoST
from halflife.decay.minimax import best_endpoints, best_weights, geometric_rates, moving_error
from halflife.lab.experiments import EXPERIMENTS
from halflife.lab.experiments.evidence.post_parts import models
from halflife.lab.theory.spectra import response_as_run
from halflife.ops import dplr
from halflife.packing import Packing

T, HEADS = 32, 4


def post(**options):
    return PoST(decay.build("mamba2", num_heads=HEADS, head_dim=6), train_length=T, **options).double()


def test_a_static_spectrum_is_the_decay_with_the_sorted_rates():
    static, f = post(stretch=False), torch.randn(1, 9, HEADS, dtype=torch.float64)
    step = F.softplus(f + static.decay.dt_bias)
    torch.testing.assert_close(static(f), -static.base().exp() * step)
    assert not static.taper().any()
    assert (static.base().diff() > 0).all()
    torch.testing.assert_close(static.timescales(1), static.timescales(5))


def test_positions_are_held():
    held, free, f = post(last_position=T), post(), torch.randn(1, 3, HEADS, dtype=torch.float64)
    beyond = torch.tensor([T, T + 1, 9 * T])
    torch.testing.assert_close(held(f, position=beyond), free(f, position=torch.full((3,), T)))
    torch.testing.assert_close(held(f, position=beyond - T + 1)[:, :2], free(f, position=beyond - T + 1)[:, :2])


def mamba2(**options):
    torch.manual_seed(0)
    options = {"num_heads": HEADS, "state_size": 6, "chunk_size": 4, "post": {"train_length": T}, **options}
    return layers.build("mamba2", hidden_size=16, **options).double()


def test_the_gain_is_stretched_like_the_decay():
    """By the token loop, with Δ t^−α in the input and in the decay."""
    layer, u = mamba2(stretch_gain=True), torch.randn(1, 7, 16, dtype=torch.float64)
    z, xbc, f = layer.in_proj(u).split(layer.splits, -1)
    x, b, c = layer.conv(xbc, None, Packing(*xbc.shape[:2]))[0].split(layer.conv_splits, -1)
    b, c = (part.unsqueeze(2).expand(-1, -1, HEADS, -1) for part in (b, c))
    values = x.unflatten(-1, (HEADS, -1))

    def step(state, row, t):
        size = F.softplus(f[row, t] + layer.decay.decay.dt_bias) * (t + 1) ** -layer.decay.taper()
        kept = torch.exp(-layer.decay.base().exp() * size)
        return kept.view(-1, 1, 1) * state + outer(b[row, t], size.unsqueeze(-1) * values[row, t])

    y = token_loop(c, values, step) + layer.skip.D.unsqueeze(-1) * values
    expected = layer.out_proj(layer.norm(y.flatten(2), z))
    torch.testing.assert_close(layer(u)[0], expected, atol=1e-9, rtol=1e-6)
    assert not torch.allclose(layer(u)[0], mamba2()(u)[0])


@pytest.mark.parametrize("name", ["gated_deltanet", "gla", "retnet"])
def test_the_gain_of_the_design_space_block(name):
    """By the token loop: the factor of the decay multiplies β of the delta rule, and else the key."""
    torch.manual_seed(0)
    mixer = preset(f"{name}+post", hidden_size=16, num_heads=HEADS, train_length=T).mixer_options
    layer = layers.build(name, hidden_size=16, **{**mixer, "stretch_gain": True, "chunk_size": 4}).double()
    x, position = torch.randn(1, 7, 16, dtype=torch.float64), torch.arange(1, 8)
    packing = Packing(*x.shape[:2])
    g = layer.log_decays(layer.decay_input(x), position, {}, packing)[0].g
    qkv = layer.qkv_proj(x)
    qkv = qkv if layer.conv is None else layer.conv(qkv, None, packing)[0]
    q, k, v = layer.heads(qkv.split(layer.splits, -1), None, position)
    stretch = layer.decay.log_stretch(position).exp()
    beta = None if layer.beta_proj is None else layer.beta_proj(x).sigmoid() * stretch

    def step(state, row, t):
        state = g[row, t].exp().view(-1, 1, 1) * state
        if beta is None:
            return state + outer(k[row, t], stretch[t].unsqueeze(-1) * v[row, t])
        error = v[row, t] - torch.einsum("hkv,hk->hv", state, k[row, t])
        return state + outer(k[row, t], beta[row, t].unsqueeze(-1) * error)

    outputs = token_loop(q * layer.head_dim**-0.5, v, step)
    expected = layer.out_proj(layer.gate(outputs, x))
    torch.testing.assert_close(layer(x)[0], expected, atol=1e-9, rtol=1e-6)
    assert (stretch[1:] < 1).any()


def test_the_gain_of_rwkv7_multiplies_what_is_written(monkeypatch):
    calls = []
    monkeypatch.setattr("halflife.layers.rwkv7.dplr", lambda *x, **options: calls.append(x) or dplr(*x, **options))
    x, stretch = torch.randn(1, 5, 16), torch.ones(())
    for gain in (False, True):
        torch.manual_seed(0)
        layer = layers.build("rwkv7", hidden_size=16, num_heads=2, post={"train_length": T}, stretch_gain=gain)
        layer(x)
        stretch = layer.get_submodule("decay").log_stretch(torch.arange(1, 6)).exp()
    (r, k, v, a, b, g), stretched = calls
    for before, after in zip((r, k * stretch, v, a, b * stretch, g), stretched, strict=True):
        torch.testing.assert_close(after, before)


def test_rows_of_the_page_that_stand_for_other_forms():
    """On recall PoST in GLA and RetNet is one model, as `post_paper` is; Δ fixed is Mamba-2's `post_released`."""
    experiment, ids = EXPERIMENTS["post-taken-apart"](), torch.arange(9).view(1, 9)
    settings = experiment.settings_at("smoke", {})

    def logits(name, build=experiment.model):
        torch.manual_seed(0)
        return LanguageModel(build(name, settings))(ids)[0]

    for same in (
        ("gla:post", "retnet:post", "gla+post_paper", "retnet+post_paper"), ("rwkv7:post", "rwkv7+post_paper"),
        ("mamba2:frozen", "mamba2+post_paper", "mamba2+post_released"),
        ("gated_deltanet:frozen", "gated_deltanet+post_paper"),
    ):  # fmt: skip
        assert all(torch.equal(logits(same[0]), logits(name)) for name in same[1:]), same
    for base in ("rwkv7", "gated_deltanet", "gla", "retnet"):  # RWKV-7's has another learning rate
        released = EXPERIMENTS["post-mqar"]().model(f"{base}+post_released", settings)
        assert all(released.mixer_options != experiment.model(one, settings).mixer_options for one in models(base))
    for base in ("rwkv7", "gla", "retnet"):
        assert_raises(ValueError, "has no 'frozen'", experiment.model, f"{base}:frozen", settings)
    gain, frozen = (experiment.model(f"mamba2:{part}", settings).mixer_options for part in ("gain", "frozen-gain"))
    assert frozen == {**gain, "decay_options": {"step_bias": "frozen"}}


def test_free_rates_that_start_geometric():
    """They have the time-scales of a static spectrum, and the parameters of Mamba-2's decay."""
    sizes = {"num_heads": HEADS, "head_dim": 6}
    free = decay.build("mamba2", **sizes, rate_start="geometric", train_length=T)
    static = PoST(decay.build("mamba2", **sizes), train_length=T, stretch=False)
    torch.testing.assert_close(free.timescales(), static.timescales(), rtol=1e-5, atol=0)
    assert {name for name, _ in free.named_parameters()} == {"A_log", "dt_bias"}
    for options in ({"rate_start": "geometric"}, {"train_length": T}):
        with pytest.raises(ValueError, match="rate_start 'geometric' needs train_length"):
            decay.build("mamba2", **sizes, **options)


def test_rates_of_retnet_that_train_or_start_geometric():
    """The rates are those of RetNet or of a static spectrum, and have a gradient only if they are trained."""
    sizes, f = {"num_heads": HEADS, "head_dim": 6}, torch.zeros(1, 3, HEADS)
    own = decay.build("retnet", **sizes)
    static = PoST(decay.build("retnet", **sizes), train_length=T, stretch=False)
    for like, start in ((own, {}), (static, {"rate_start": "geometric", "train_length": T})):
        for trained in (False, True):
            one = decay.build("retnet", **sizes, trained_rates=trained, **start)
            torch.testing.assert_close(one.timescales(), like.timescales(), rtol=1e-5, atol=0)
            assert [name for name, _ in one.named_parameters()] == ["log_rate"] * trained
            if trained:
                one(f).sum().backward()
                torch.testing.assert_close(one.log_rate.grad, -3 * one.log_rate.exp())
    with pytest.raises(ValueError, match=r"unknown rate_start 'geometrc'\. Did you mean 'geometric'"):
        decay.build("retnet", **sizes, rate_start="geometrc", train_length=T)
    with pytest.raises(ValueError, match="rate_start 'geometric' needs train_length"):
        decay.build("retnet", **sizes, train_length=T)
    with pytest.raises(ValueError, match="train_length must be at least 2"):
        decay.build("retnet", **sizes, rate_start="geometric", train_length=1)
    with pytest.raises(ValueError, match="have no meaning under it"):
        PoST(decay.build("retnet", **sizes, trained_rates=True), train_length=T)


def test_end_points_for_gates_that_move():
    """They are better at T than those of the paper and those for static rates; t_ref = 1 and T give the same rates."""
    channels = 6
    sizes = {"num_heads": channels, "head_dim": 6}
    ends = best_endpoints(channels, T, moving=True)
    best, paper, static = (
        moving_error(geometric_rates(channels, T, *x), T, 0.5)
        for x in (ends, (1 / T, 1.0), best_endpoints(channels, T))
    )
    assert best < 0.1 * static < 0.1 * paper
    rates, lags = geometric_rates(channels, T), torch.arange(1, T)
    columns, target = response_as_run(rates, lags, T, T).mT, lags.double() ** -0.5
    error = (target - columns @ best_weights(columns, target)[0]).abs().max().item()
    assert moving_error(rates, T, 0.5) == pytest.approx(error, rel=1e-3)
    at_t = [
        PoST(decay.build("mamba2", **sizes), train_length=T, endpoints="moving", reference_length=reference)
        .double()
        .timescales(T)
        for reference in (1, T)
    ]
    torch.testing.assert_close(at_t[0], at_t[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(1 / at_t[1][0], torch.tensor(ends[0], dtype=torch.float64), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["mamba2", "gated_deltanet", "rwkv7"])
def test_the_gain_streams(name):
    sizes = {"hidden_size": 16, "num_layers": 1, "vocab_size": 11, "num_heads": HEADS, "train_length": T}
    model = LanguageModel(preset(f"{name}+post", **sizes, mixer_options={"stretch_gain": True})).double()
    assert_streams(model, torch.randint(0, 11, (2, 9)), 1e-12)


@cases(
    "options, message",
    ({"last_position": 0.5}, "last_position must be at least 1"),
    ({"stretch": False, "reference_length": T}, "no meaning without stretch"),
    ({"stretch": False, "last_position": T}, "no meaning without stretch"),
    ({"stretch": False, "endpoints": "moving"}, "for rates that stretch"),
    ({"endpoints": "best"}, '"optimal" or "moving"'),
)
def test_errors_of_post(options, message):
    assert_raises(ValueError, message, post, **options)


def test_a_gain_without_post():
    assert_raises(ValueError, "give post too", mamba2, stretch_gain=True, post=None)


@cases(
    "name, post, message",
    ("gated_deltanet", None, "give post too"),
    ("rwkv7", None, "give post too"),
    ("gated_deltanet", {"train_length": T, "reference_length": T}, "its state diverges"),
    ("kda", {"train_length": T}, "needs a scalar decay"),
)
def test_a_gain_without_meaning(name, post, message):
    with pytest.raises(ValueError, match=message):
        layers.build(name, hidden_size=16, num_heads=HEADS, post=post, stretch_gain=True)
