"""Every point of the design space builds and runs, or is an error that says why."""

import pytest
import torch
from helpers import assert_raises, cases
from pairwise import crossed

from halflife import decay, layers
from halflife.layers import LAYERS
from halflife.position import lrpe


@crossed(
    name=[*decay.DECAYS, None],
    granularity=["scalar", "vector"],
    update=["linear", "delta", "dplr", "dplr_released"],
    share_keys=[False, True],
    position=["none", "rope", "lrpe", "half_lrpe"],
    post=[None, {"train_length": 16}],
)
def test_every_combination_runs_or_says_why_not(name, granularity, update, share_keys, position, post):
    def build():
        return layers.build(
            "linear", hidden_size=16, num_heads=2, decay=name, granularity=granularity, update=update,
            share_keys=share_keys, position=position, post=post,
        )  # fmt: skip

    strategy = decay.DECAYS[name] if name else None
    impossible = None
    if share_keys and (strategy is None or granularity == "scalar"):
        impossible = "share_keys writes k = 1 − λ.*needs a vector decay"
    elif strategy and granularity not in strategy.granularities:
        impossible = f"is defined for granularity {strategy.granularities[0]}; got {granularity!r}"
    elif post and not (strategy and issubclass(strategy, decay.SpectralDecay)):
        impossible = "no base rates" if strategy else "a layer without a decay has none"
    if impossible:
        assert_raises(ValueError, impossible, build)
        return
    layer = build()
    x = torch.randn(2, 5, 16, requires_grad=True)
    y, _ = layer(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(part.grad.isfinite().all() for part in (x, *layer.parameters()))


POST = {"train_length": 16}


@cases(
    "name, options, message",
    ("liner", {}, "Did you mean 'linear'"),
    ("linear", {"num_heads": 5}, "num_heads must divide hidden_size"),
    ("attention", {"num_heads": 5}, "num_heads must divide hidden_size"),
    ("mamba2", {"num_heads": 5}, "num_heads must divide 2 times hidden_size; got 5 and 64"),
    ("attention", {"num_kv_heads": 3}, "num_kv_heads must divide num_heads; got 3 and"),
    ("mamba2", {"num_groups": 3}, "num_groups must divide num_heads"),
    ("mamba2", {"decay": "simple"}, "design-space block"),
    ("linear", {"granularity": "scalar", "share_keys": True}, "needs a vector decay"),
    ("linear", {"gate": "tanh"}, "unknown gate 'tanh'.*low_rank, swish, sigmoid, low_rank_sigmoid, none"),
    ("linear", {"update": "dlpr"}, "unknown update 'dlpr'.*linear, delta, dplr"),
    ("linear", {"decay_options": {"p": 1}}, "between 0 and 1"),
    ("linear", {"decay_options": {"p": 0}, "post": {"train_length": 16}}, "no base rates"),
    ("rwkv7", {"num_heads": 5}, "num_heads must divide hidden_size"),
    ("tpe", {"state_size": 0}, "state_size of layer tpe must be a whole number, 1 or more; got 0"),
    ("gated_deltanet", {"value_dim": 0}, "value_dim of layer gated_deltanet must be a whole number, 1 or more"),
    ("gated_deltanet", {"head_dim": -1}, "head_dim of layer gated_deltanet must be a whole number, 1 or more"),
    ("mamba2", {"state_size": 2.5}, "state_size of layer mamba2 must be a whole number, 1 or more; got 2.5"),
    ("attention", {"num_kv_heads": 0}, "num_kv_heads of layer attention must be a whole number, 1 or more"),
    ("attention", {"rope_base": 0}, "rope_base must be positive and finite; got 0"),
    ("attention", {"rope_base": float("inf")}, "rope_base must be positive and finite; got inf"),
    ("tpe", {"num_heads": 5}, "num_heads must divide hidden_size"),
    ("linear", {"position": "alibi"}, "unknown position 'alibi'.*none, rope"),
    ("linear", {"activation": "relu"}, "unknown activation"),
    ("linear", {"decay": "simpel"}, "Did you mean 'simple'"),
    ("linear", {"decay": None, "post": {"train_length": 16}}, "without a decay"),
    ("linear", {"decay": "gla", "post": {"train_length": 16}}, "no base rates"),
    ("linear", {"position": "rope", "head_dim": 5}, "even"),
    ("retnet", {"head_dim": 5}, "even"),
    ("attention", {"num_heads": 32}, "even"),
    ("mamba2", {"output_norm": "before"}, "unknown output_norm 'before'.*after_gate, before_gate, none"),
    ("mamba2", {"decay_options": {"min_step": 0.2, "max_step": 0.1}}, "min_step < max_step; got 0.2 and 0.1"),
    ("linear", {"decay": "mamba2_no_a", "decay_options": {"min_step": 0.2}, "post": POST}, "no limits"),
    ("mamba2", {"decay": "mamba2_no_a", "post": POST}, "PoST orders Δ of mamba2_no_a"),
    ("mamba3", {"rate_floor": None, "decay": "mamba2_no_a", "post": POST}, "PoST orders Δ of mamba2_no_a"),
    ("mamba3", {"post": {"train_length": 16}}, "with a rate_floor.*the input sets the decay.*need rate_floor=None"),
    ("mamba3", {"rate_floor": 0.0}, "a rate_floor, which is positive"),
    ("attention", {"qk_norm": "heads"}, "unknown qk_norm 'heads'.*none, head, head_plus_one, all"),
    ("attention", {"rope_fraction": 1.5}, "rope_fraction must lie in"),
    ("attention", {"rope_fraction": 0.05}, "rotates none of the"),
    ("comba", {"gate_rank": {}}, "gate_rank needs .* the linear or the delta update; got .* update 'feedback'"),
    ("deltaproduct", {"log_linear": {}}, "log_linear needs .* the linear update; got .* update 'product'"),
    ("gdn2", {"log_linear": {}}, "log_linear needs .* the linear update; got .* update 'erase_write'"),
    ("ska", {"decay_options": {"p": 0.9}}, "decay_options p need a decay"),
    ("mamba2", {"conv_size": 0}, "conv_size of layer mamba2 must be a whole number, 1 or more; got 0"),
    ("linear", {"conv_size": -1}, "conv_size of layer linear must be a whole number, 0 or more; got -1"),
    ("gla", {"feature_map": "exp"}, "unknown feature_map 'exp'.*none, relu"),
)
def test_options_without_meaning_are_errors(name, options, message):
    assert_raises(ValueError, message, layers.build, name, hidden_size=32, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_says_what_it_is(name):
    assert len(LAYERS.summary(name)) > 20


def test_step_limits_of_mamba2():
    """g = −e^A clamp(softplus(f + Δ)). The limited Δ scales the values too, and PoST's rates at rest are its own."""
    limited = decay.build("mamba2", num_heads=3, head_dim=2, min_step=0.05, max_step=0.3)
    torch.nn.init.zeros_(limited.dt_bias)
    f = torch.linspace(-6, 6, 21).view(1, 7, 3)
    step = (1 + (f + limited.dt_bias).exp()).log().clip(0.05, 0.3)
    torch.testing.assert_close(limited.step_size(f), step)
    torch.testing.assert_close(limited(f), -limited.A_log.exp() * step)
    assert 0 < (step == 0.05).sum() < (step < 0.3).sum() < 21
    for limits in ({"min_step": 0.2}, {"max_step": 0.01}):
        post = decay.PoST(decay.build("mamba2", num_heads=3, head_dim=2, **limits), train_length=100)
        expected = torch.tensor([100.0, 10.0, 1.0])
        torch.testing.assert_close(post.timescales(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
def test_a_head_that_grows_shrinks_the_others_unless_each_has_its_norm(per_head, on_cpu, monkeypatch):
    """A hook sees what the norm gives on a GPU too, where the norm and the map after it are else one op."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", on_cpu)
    torch.manual_seed(0)
    mixer, x, normed = (
        layers.build("mamba2", hidden_size=8, num_heads=2, norm_per_head=per_head),
        torch.randn(1, 5, 8),
        [],
    )
    mixer.norm.register_forward_hook(lambda module, inputs, output: normed.append(output.unflatten(-1, (2, -1))))
    for size in (1.0, 100.0):
        mixer.skip.D.data[0] = size
        mixer(x)
    before, after = (output[..., 1, :] for output in normed)
    assert torch.equal(before, after) == per_head
    assert not torch.equal(normed[0], normed[1])


def test_feature_map_of_gla():
    """q and k go through it after the convolution, and values do not."""
    torch.manual_seed(0)
    plain, mapped = (layers.build("gla", hidden_size=8, num_heads=1, feature_map=name) for name in ("none", "relu"))
    mapped.load_state_dict(plain.state_dict())
    parts = torch.randn(1, 5, 16).split(plain.splits, -1)
    q, k, v = plain.heads(parts, None, torch.arange(5))
    for found, expected in zip(mapped.heads(parts, None, torch.arange(5)), (q.relu(), k.relu(), v), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("position", ["none", "rope", "lrpe"])
def test_dplr_without_decay_is_the_delta_rule(position):
    """DPLR reads the state while it decays, and the delta rule after it. Without decay both are the same map of x."""
    options = {"hidden_size": 32, "decay": None, "granularity": "scalar", "position": position}
    delta = layers.build("linear", update="delta", **options).double()
    dplr = layers.build("linear", update="dplr", **options).double()
    dplr.load_state_dict(delta.state_dict())
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    torch.testing.assert_close(dplr(x)[0], delta(x)[0], rtol=0, atol=1e-14)


def test_dplr_by_the_token_loop():
    """S_t = (diag λ_t − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ. A known implementation writes without β."""
    layer = layers.build("linear", hidden_size=8, num_heads=1, update="dplr", gate="none").double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, v = (part[0] for part in layer.qkv_proj(x).split(8, -1))
    q, k = (torch.nn.functional.silu(part) for part in (q, k))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    beta, decayed = layer.beta_proj(x)[0].sigmoid(), (layer.decay_proj(x)[0, :, 0] + layer.decay.delta[0]).sigmoid()
    state, outputs = torch.zeros(8, 8, dtype=torch.float64), []
    for t in range(5):
        write = beta[t] * k[t].outer(v[t] - k[t] @ state)
        state = decayed[t].unsqueeze(-1) * state + write
        outputs.append(q[t] @ state * 8**-0.5)
    expected = layer.out_proj(torch.nn.functional.rms_norm(torch.stack(outputs), (8,), eps=1e-5))
    torch.testing.assert_close(layer(x)[0][0], expected, rtol=0, atol=1e-14)


def test_lrpe_gives_cosines_of_the_distance():
    q, k = torch.randn(2, 1, 1, 2, 3, dtype=torch.float64)
    frequency = 10_000.0 ** (-torch.arange(6, dtype=torch.float64).unflatten(0, (2, 3)) / 6)
    for t, s in ((7, 3), (2, 2), (1, 40)):
        encoded = [lrpe(x, torch.tensor([position])) for x, position in ((q, t), (k, s))]
        expected = (q * k * (frequency * (t - s)).cos()).sum(-1)
        torch.testing.assert_close((encoded[0] * encoded[1]).sum(-1), expected, rtol=0, atol=1e-14)


def test_lrpe_depends_on_distance_alone():
    """This holds for a vector decay too, because the cosine and the sine of a channel share its decay."""
    layer = layers.build("linear", hidden_size=32, position="lrpe", conv_size=4).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    _, nothing = layer(x[:, :0])
    later = {**nothing, "position": nothing["position"] + 1000}
    torch.testing.assert_close(layer(x, later)[0], layer(x, nothing)[0], rtol=0, atol=1e-12)
    assert nothing["memory"].shape == (2, 4, 16, 8)


def test_tpe_is_a_toeplitz_product():
    """y_t = Σ_s r_{t−s} x_s with r_n = Σ_i a_i b_i λ_i^n, one kernel for each head."""
    layer = layers.build("tpe", hidden_size=6, num_heads=2, state_size=3, chunk_size=4).double()
    x, kernel = torch.randn(1, 11, 6, dtype=torch.float64), layer.kernel
    with torch.no_grad():
        kernel.write.normal_()
        kernel.read.normal_()
    distance = torch.arange(11, dtype=torch.float64)
    powers = (-kernel.log_rate.exp().unsqueeze(-1) * distance).exp()  # [H, N, T]
    r = (kernel.read * kernel.write).unsqueeze(-1).mul(powers).sum(1)  # [H, T]
    lags = torch.arange(11).unsqueeze(1) - torch.arange(11)
    matrix = torch.where(lags >= 0, r[:, lags.clamp(min=0)], 0.0)
    expected = torch.einsum("hts,bshv->bthv", matrix, x.unflatten(-1, (2, 3))).flatten(-2)
    torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["gla", "hgrn2", "lightnet", "mamba2", "simple"])
def test_a_shared_key_is_one_minus_the_decay_of_its_token(name):
    """A token loop gives the same. A known implementation of LightNet takes the decay of the token before."""
    layer = layers.build(
        "linear", hidden_size=8, num_heads=1, decay=name, share_keys=True, gate="none", layer_idx=1, num_layers=3
    ).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    q, v = layer.qkv_proj(x)[0].split(8, -1)
    decayed = layer.decay.scan(layer.decay_proj(x))[0][0, :, 0].exp()
    state, outputs = torch.zeros(8, 8, dtype=torch.float64), []
    for t in range(5):
        state = decayed[t].unsqueeze(-1) * state + (1 - decayed[t]).outer(v[t])
        outputs.append(torch.nn.functional.silu(q[t]) @ state * 8**-0.5)
    expected = layer.out_proj(torch.nn.functional.rms_norm(torch.stack(outputs), (8,), eps=1e-5))
    torch.testing.assert_close(layer(x)[0][0], expected, rtol=0, atol=4 * 2e-13)


def test_tpe_starts_as_the_identity_of_its_model():
    layer = layers.build("tpe", hidden_size=6, num_heads=2)
    assert layer(torch.randn(1, 11, 6))[0].count_nonzero() == 0
