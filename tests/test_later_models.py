"""Layers that came after the papers: their equations as token loops, fla's plain functions, special cases, windows."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import add_noise, assert_close, assert_raises, cases, fla, on_linux, outer, unit

from halflife import LanguageModel, layers, preset
from halflife.layers import fox
from halflife.ops.linear_attention import longhorn_keys
from halflife.training.estimate import model_costs

HIDDEN, HEADS, LENGTH = 24, 2, 13
DELTA = ("kda", "gdn2", "comba", "deltaproduct")
LAYERS = (*DELTA, "longhorn", "fox")
EXACT = 4 * 1e-15  # four times the worst measured error in float64, relative to the largest entry
FLOAT32 = 4 * 1.8e-7  # the same of fla's functions, which compute in float32


def build(name, **options) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    chunked = {} if name in ("fox", "attention") else {"chunk_size": 4}
    layer = layers.build(name, hidden_size=HIDDEN, num_heads=HEADS, **chunked, **options)
    return add_noise(layer, 0.2).double(), torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64)


def convolved(conv, x):
    taps = F.pad(x.mT, (conv.size - 1, 0)).unfold(-1, conv.size, 1)
    y = (taps * conv.weight.unsqueeze(1)).sum(-1).mT
    return F.silu(y if conv.bias is None else y + conv.bias)


def decay_of(layer, x):
    """`−e^A softplus(f + Δ)`."""
    f = layer.decay_proj.up(layer.decay_proj.down(x))
    step = F.softplus(f.unflatten(-1, (HEADS, -1)).squeeze(-1) + layer.decay.dt_bias)
    return -layer.decay.A_log.exp() * step


def heads(x):
    return x.unflatten(-1, (HEADS, -1))


def arguments(name, layer, x):
    if name == "longhorn":
        values = convolved(layer.conv, (x @ layer.in_proj.weight.T)[..., : layer.conv.weight.shape[0]])
        r, k, q = (values @ layer.x_proj.weight.T).split(layer.splits, -1)
        return {"q": q, "k": k, "v": heads(values), "beta": layer.step_proj(r).sigmoid()}
    if name == "fox":
        q, k, v = (heads(part) for part in (x @ layer.qkv_proj.weight.T).chunk(3, -1))
        return {"q": q, "k": k, "v": v, "g": F.logsigmoid(layer.decay_proj(x))}
    parts = convolved(layer.conv, x @ layer.qkv_proj.weight.T)
    n = layer.update.steps
    q, k, v = (heads(part) for part in parts.split([HIDDEN, n * HIDDEN, n * HIDDEN], -1))
    found = {"g": decay_of(layer, x)}
    if name == "gdn2":
        found |= {"b": heads((x @ layer.erase_proj.weight.T).sigmoid())}
        found |= {"w": heads((x @ layer.write_proj.weight.T).sigmoid())}
    else:
        found["beta"] = (x @ layer.beta_proj.weight.T).sigmoid()
    if name == "comba":
        share = layer.feedback.share.sigmoid().unsqueeze(-1)
        q, found["p"] = q - layer.feedback.output.unsqueeze(-1) * share * k, share * unit(k)
    if name == "deltaproduct":  # the rows of a token are its steps, and each step has all heads
        k, v = (part.reshape(2, LENGTH * n, HEADS, -1) for part in (k, v))
        found["beta"] = 2 * found["beta"].reshape(2, LENGTH * n, HEADS)
    return {"q": unit(q), "k": unit(k), "v": v, **found}


def output(name, layer, x, o):
    if name == "fox":
        return o.flatten(-2) @ layer.out_proj.weight.T
    if name == "longhorn":
        values, z = (x @ layer.in_proj.weight.T).chunk(2, -1)
        y = o + layer.skip.D.unsqueeze(-1) * heads(convolved(layer.conv, values))
        return (y.flatten(-2) * F.silu(z)) @ layer.out_proj.weight.T
    gate = layer.gate
    normed = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gate.norm.weight
    if name in ("kda", "gdn2"):
        g = (x @ gate.down.weight.T @ gate.up.weight.T + gate.up.bias).sigmoid()
    else:
        g = x @ gate.proj.weight.T
        g = g.sigmoid() if name == "comba" else F.silu(g)
    return (normed.flatten(-2) * g) @ layer.out_proj.weight.T


def read(state, q):
    return torch.einsum("bhkv,bhk->bhv", state, q)


def kda_loop(state, t, q, k, v, g, beta):
    state = g[:, t].exp().unsqueeze(-1) * state
    eye = torch.eye(k.shape[-1], dtype=k.dtype) - beta[:, t, :, None, None] * outer(k[:, t], k[:, t])
    return eye @ state + outer(beta[:, t].unsqueeze(-1) * k[:, t], v[:, t]), q[:, t]


def gdn2_loop(state, t, q, k, v, g, b, w):
    state = g[:, t].exp().unsqueeze(-1) * state
    eye = torch.eye(k.shape[-1], dtype=k.dtype) - outer(k[:, t], b[:, t] * k[:, t])
    return eye @ state + outer(k[:, t], w[:, t] * v[:, t]), q[:, t]


def comba_loop(state, t, q, k, v, g, beta, p):
    eye = g[:, t, :, None, None].exp() * torch.eye(k.shape[-1], dtype=k.dtype)
    eye = eye - beta[:, t, :, None, None] * outer(k[:, t], p[:, t])
    return eye @ state + outer(beta[:, t].unsqueeze(-1) * k[:, t], v[:, t]), q[:, t]


def deltaproduct_loop(state, t, q, k, v, g, beta):
    n, state = k.shape[1] // q.shape[1], g[:, t, :, None, None].exp() * state
    for row in range(n * t, n * t + n):
        eye = torch.eye(k.shape[-1], dtype=k.dtype) - beta[:, row, :, None, None] * outer(k[:, row], k[:, row])
        state = eye @ state + outer(beta[:, row].unsqueeze(-1) * k[:, row], v[:, row])
    return state, q[:, t]


def longhorn_loop(state, t, q, k, v, beta):
    key, query = (x[:, t].unsqueeze(1).expand(-1, HEADS, -1) for x in (k, q))
    step = (beta[:, t] / (1 + beta[:, t] * key.square().sum(-1))).unsqueeze(-1)
    state = (1 - step * key.square()).unsqueeze(-1) * state + outer(key, step * v[:, t])
    return state, query


def fox_attention(q, k, v, g):
    o = torch.zeros_like(v)
    for i in range(LENGTH):
        bias = torch.stack([g[:, j + 1 : i + 1].sum(1) for j in range(i + 1)], -1)
        scores = torch.einsum("bhk,bshk->bhs", q[:, i], k[:, : i + 1]) / q.shape[-1] ** 0.5 + bias
        o[:, i] = torch.einsum("bhs,bshv->bhv", scores.softmax(-1), v[:, : i + 1])
    return o


def loop(name, found):
    if name == "fox":
        return fox_attention(**found)
    step = {
        "kda": kda_loop, "gdn2": gdn2_loop, "comba": comba_loop, "deltaproduct": deltaproduct_loop,
        "longhorn": longhorn_loop,
    }[name]  # fmt: skip
    v = found["v"]
    rows, scale = found["k"].shape[-1], 1 if name == "longhorn" else found["q"].shape[-1] ** -0.5
    state, read_out = v.new_zeros(2, HEADS, rows, v.shape[-1]), []
    for t in range(LENGTH):
        state, q = step(state, t, **found)
        read_out.append(read(state, q) * scale)
    return torch.stack(read_out, 1)


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_layers_are_their_equations(name):
    layer, x = build(name)
    expected = output(name, layer, x, loop(name, arguments(name, layer, x)))
    assert_close(layer(x)[0], expected, EXACT)


@torch.no_grad()
def test_longhorn_with_a_step_a_channel():
    """Heads with one channel each are the same model, and so is the paper's form with equal steps in every head."""
    layer, x = build("longhorn", step="channel")
    shared, _ = build("longhorn")
    same = layers.build("longhorn", hidden_size=HIDDEN, num_heads=2 * HIDDEN, head_dim=1).double()
    same.load_state_dict(layer.state_dict())
    assert_close(same(x)[0], layer(x)[0], EXACT)
    heads_of = torch.arange(HEADS).repeat_interleave(HIDDEN)
    weights = shared.state_dict()
    per_head = ("step_proj.weight", "step_proj.bias", "skip.D")
    layer.load_state_dict({key: w[heads_of] if key in per_head else w for key, w in weights.items()})
    assert_close(layer(x)[0], shared(x)[0], EXACT)


@torch.no_grad()
def test_more_steps_a_token():
    layer, x = build("deltaproduct", num_householder=3)
    found = arguments("deltaproduct", layer, x)
    assert_close(layer(x)[0], output("deltaproduct", layer, x, loop("deltaproduct", found)), EXACT)


FLA = {
    "kda": ("kda", "naive_recurrent_kda", {}),
    "gdn2": ("gdn2", "naive_recurrent_gdn2", {}),
    "comba": ("comba", "naive_chunk_comba", {"chunk_size": 4}),
    "deltaproduct": ("gated_delta_product", "naive_recurrent_gated_delta_product", {"num_householder": 2}),
    "fox": ("forgetting_attn", "naive_forgetting_attn", {}),
}


@on_linux
@pytest.mark.parametrize("name", FLA)
@torch.no_grad()
def test_layers_equal_fla(name):
    """fla's functions compute in float32."""
    layer, x = build(name)
    module, function, options = FLA[name]
    found = {key: value.float() for key, value in arguments(name, layer, x).items()}
    o = fla(f"{module}.naive", function)(**found, scale=found["q"].shape[-1] ** -0.5, **options)
    o = o[0] if isinstance(o, tuple) else o
    assert_close(layer(x)[0], output(name, layer, x, o.double()), FLOAT32)


@on_linux
@torch.no_grad()
def test_two_functions_of_fla_read_combas_state_at_different_times():
    """The chunked one and the kernels read it before it decays, as the paper does, and the recurrent one after it."""
    found = {key: value.float() for key, value in arguments("comba", *build("comba")).items()}
    chunked, _ = fla("comba.naive", "naive_chunk_comba")(**found, chunk_size=4)
    late, _ = fla("comba.naive", "naive_recurrent_comba")(**found)
    gamma = found["g"].exp().unsqueeze(-1)
    late_by_decay, _ = fla("comba.naive", "naive_recurrent_comba")(**{**found, "p": found["p"] / gamma})
    assert_close(late_by_decay, chunked, FLOAT32)
    assert not torch.allclose(late, chunked, rtol=1e-3)


@torch.no_grad()
def test_gdn2_with_equal_gates_is_kda():
    """Zero weights give b = w = 1/2 = β."""
    gdn2, x = build("gdn2")
    kda, _ = build("kda")
    gdn2.erase_proj.weight.zero_()
    gdn2.write_proj.weight.zero_()
    shared = {key: value for key, value in gdn2.state_dict().items() if not key.startswith(("erase", "write"))}
    kda.load_state_dict({**shared, "beta_proj.weight": torch.zeros_like(kda.beta_proj.weight)})
    assert_close(gdn2(x)[0], kda(x)[0], EXACT)


@torch.no_grad()
def test_one_step_is_gated_deltanet():
    one, x = build("deltaproduct", num_householder=1, allow_neg_eigval=False)
    plain, _ = build("gated_deltanet")
    plain.load_state_dict(one.state_dict())
    assert_close(one(x)[0], plain(x)[0], EXACT)


@torch.no_grad()
def test_comba_without_feedback_is_dplr():
    """With σ(b) = 1 and d = 0 it is the design-space block under DPLR."""
    comba, x = build("comba", correction=0.0)
    block, _ = build("linear", decay="mamba2", granularity="scalar", update="dplr", conv_size=4, gate="sigmoid")
    comba.feedback.share.fill_(50.0)
    comba.feedback.output.zero_()
    block.load_state_dict({key: value for key, value in comba.state_dict().items() if "feedback" not in key})
    assert_close(comba(x)[0], block(x)[0], EXACT)


@torch.no_grad()
def test_fox_that_forgets_nothing_is_attention():
    fox, x = build("fox", num_kv_heads=1)
    plain, _ = build("attention", num_kv_heads=1, position="none")
    plain.load_state_dict({key: value for key, value in fox.state_dict().items() if "decay" not in key})
    fox.decay_proj.up.bias.fill_(800.0)
    assert_close(fox(x)[0], plain(x)[0], EXACT)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_longhorns_decay_of_long_keys(backend):
    """In float32, decays of long keys are finite and right to one rounding, and slow decays keep their digits."""
    k = torch.tensor([[[1e8, 1e4, 0.0], [1e-8, 0.0, 0.0], [3.0, 4.0, 1e-3]]]).requires_grad_()
    g, written = longhorn_keys(torch.full((1, 3, 1), 0.7).logit(), k, torch.float32, backend)
    removed = 0.7 * k.double().square() / (1 + 0.7 * k.double().square().sum(-1, keepdim=True))
    assert torch.allclose(g[:, :, 0].double().exp(), 1 - removed, rtol=0, atol=2e-7)
    slow = removed < 0.5
    assert torch.allclose(g[:, :, 0].double()[slow], (-removed[slow]).log1p(), rtol=1e-6, atol=0)
    assert (g <= 0).all()
    assert torch.autograd.grad(g.sum() + written.sum(), k)[0].isfinite().all()


@torch.no_grad()
def test_fox_reads_queries_in_blocks(monkeypatch):
    layer, x = build("fox")
    whole, _ = layer(x)
    monkeypatch.setattr(fox, "MAX_WEIGHTS", 5 * len(x) * layer.num_heads * LENGTH)  # five queries
    assert_close(layer(x)[0], whole, EXACT)
    bounds = torch.tensor([0, 2, LENGTH])
    assert_close(layer(x[:1], cu_seqlens=bounds)[0][:, 2:], layer(x[:1, 2:])[0], EXACT)


def test_initial_values_are_the_authors():
    def mixer(name) -> Any:
        torch.manual_seed(0)
        return layers.build(name, hidden_size=256, num_heads=64)

    for name, slowest in (("kda", 1), ("gdn2", 1), ("comba", 0), ("deltaproduct", 0)):
        layer = mixer(name)
        rate, step = layer.decay.A_log.exp(), F.softplus(layer.decay.dt_bias)
        assert slowest <= rate.min() < slowest + 1
        assert 15 < rate.max() <= 16
        assert 0.00099 < step.min() < 0.002
        assert 0.05 < step.max() < 0.101
    assert mixer("kda").decay.A_log.numel() == 64
    assert mixer("kda").decay.dt_bias.shape == (64, 4)
    feedback = mixer("comba").feedback
    assert (feedback.share == 1).all()
    assert (feedback.output == 1).all()
    small: Any = layers.build("comba", hidden_size=8, correction=0.02)
    assert (small.feedback.output == 0.02).all()
    assert not mixer("longhorn").step_proj.bias.any()
    assert (mixer("longhorn").skip.D == 1).all()
    assert not mixer("fox").decay_proj.up.bias.any()


def test_parameters_are_counted():
    """The numbers of parameters follow from the shapes of the projections."""
    d, h, k = HIDDEN, HEADS, HIDDEN // HEADS
    qkv, conv, out, decay = 3 * d * d, 3 * d * 4, d * d, d * h + 2 * h
    low_rank = 2 * (d * k + k * d) + d + k  # decay and gate, with the gate's bias and the norm
    expected = {
        "kda": qkv + conv + out + low_rank + h + d + d * h,
        "gdn2": qkv + conv + out + low_rank + h + d + 2 * d * d,
        "comba": qkv + conv + out + decay + d * h + d * d + k + 2 * h,
        "deltaproduct": 5 * d * d + 5 * d * 4 + out + decay + 2 * d * h + d * d + k,
        "longhorn": 4 * d * d + 2 * d * 5 + 2 * d * (2 + 32) + 2 * h + h + h + 2 * d * d,
        "fox": qkv + out + d * h + h,
    }
    for name, number in expected.items():
        assert sum(p.numel() for p in build(name)[0].parameters()) == number, name


@pytest.mark.slow
def test_operations_are_counted():
    """Beside two for each weight, the operations are those of a model's op. Two steps have twice those of one."""

    def beside_weights(name):
        config = preset(name, hidden_size=64, num_layers=4, vocab_size=64, num_heads=2)
        maps = [m for m in LanguageModel(config).modules() if isinstance(m, torch.nn.Linear)]
        used = 64 * 64 + sum(m.weight.numel() for m in maps)  # the tied head, and the maps
        operations = model_costs(config).operations
        return [operations.at(length) - 2 * used for length in (128, 1024)]

    delta, dplr, softmax = (beside_weights(name) for name in ("gated_deltanet", "simple+dplr", "llama"))
    assert beside_weights("kda") == delta
    assert beside_weights("deltaproduct") == [2 * x for x in delta]
    assert beside_weights("gdn2") == beside_weights("comba") == dplr
    assert beside_weights("fox") == softmax
    assert softmax[0] < softmax[1]
    assert 0 < beside_weights("longhorn")[0] < beside_weights("longhorn_paper")[0]


@cases(
    "name, options, message",
    ("kda", {"update": "linear"}, "update is 'delta' in KDA"),
    ("gdn2", {"gate_rank": {}}, "gate_rank needs a scalar decay and the linear or the delta update"),
    ("gdn2", {"decay": None}, "needs a decay"),
    ("comba", {"granularity": "vector"}, "granularity is 'scalar' in Comba"),
    ("deltaproduct", {"num_householder": 0}, "num_householder of layer deltaproduct must be a whole number"),
    ("attention", {"window": 0}, "window of layer attention must be a whole number, 1 or more"),
    ("attention", {"position": "lrpe"}, "unknown position 'lrpe'"),
    ("attention", {"backend": "nativ"}, "unknown backend 'nativ'. Did you mean 'native'"),
    ("longhorn", {"num_heads": 7}, "num_heads must divide"),
    ("longhorn", {"step": "heads"}, "Did you mean 'head'"),
)
def test_options_without_meaning_are_errors(name, options, message):
    assert_raises(ValueError, message, layers.build, name, hidden_size=HIDDEN, **options)


def test_options_of_a_decay_keep_its_initial_rates():
    for name in ("comba", "deltaproduct"):
        decay = layers.build(name, hidden_size=HIDDEN, decay_options={"min_step": 0.01}).decay
        assert (decay.rate_start, decay.min_step) == ("uniform_0_16", 0.01)
    assert layers.build("mesa", hidden_size=HIDDEN, decay="simple").decay.shape == (4,)


@pytest.mark.parametrize("name", ["attention", "fox"])
@pytest.mark.parametrize("window", [1, 4, LENGTH])
@torch.no_grad()
def test_a_window_masks_older_tokens(name, window):
    """A query's output depends on the last W tokens alone, and equals full attention over them, without positions."""
    layer, x = build(name, window=window, num_kv_heads=1, position="none")
    full, _ = build(name, num_kv_heads=1, position="none")
    full.load_state_dict(layer.state_dict())
    y, state = layer(x)
    for t in range(LENGTH):
        assert_close(y[:, t], full(x[:, max(0, t + 1 - window) : t + 1])[0][:, -1], EXACT)
    assert state["keys"].shape == (2, window - 1, 1, HIDDEN // HEADS)


def test_a_window_has_a_constant_state():
    options = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "mixer_options": {"window": 5}}
    model = LanguageModel(preset("llama", **options))
    assert model.state_size(1) == model.state_size(30) == 2 * 2 * 4 * 16


@torch.no_grad()
def test_attention_without_positions_ignores_order():
    layer, x = build("attention", position="none")
    shuffled = x[:, [*torch.randperm(LENGTH - 1).tolist(), LENGTH - 1]]
    assert_close(layer(shuffled)[0][:, -1], layer(x)[0][:, -1], EXACT)


@torch.no_grad()
def test_log_forget_gates_are_float32_in_the_cache():
    layer = layers.build("fox", hidden_size=HIDDEN).to(torch.bfloat16)
    y, state = layer(torch.randn(1, 5, HIDDEN, dtype=torch.bfloat16))
    assert (y.dtype, state["forget"].dtype, state["keys"].dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert math.isclose(state["forget"].mean().item(), math.log(0.5), abs_tol=0.5)


@pytest.mark.parametrize("name", ["deltaproduct", "mesa", "fox", "gdn2", "kda", "comba"])
def test_a_layer_makes_each_map_once(name, monkeypatch):
    """The weights that are allocated are those that the layer keeps."""
    made, register = [], torch.nn.Module.register_parameter

    def spy(module, key, parameter):
        if key not in module._parameters and parameter is not None:
            made.append(parameter.numel())
        register(module, key, parameter)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", spy)
    with torch.device("meta"):
        layer = layers.build(name, hidden_size=64, num_heads=2)
    assert sum(made) == sum(p.numel() for p in layer.parameters())
