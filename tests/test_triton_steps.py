"""The Triton kernels for one token equal the float64 definition: outputs and states of every form of update and decay.

They are compiled where there is a GPU, and run in Triton's interpreter elsewhere.
"""

import copy
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, call_of, generator, op_inputs, relative_error, rounded
from pairwise import crossed, slow_beyond

from halflife import LanguageModel, ops, preset
from halflife.layers import mlp as mlp_module
from halflife.layers.mamba2 import Mamba2
from halflife.layers.mlp import SwiGLU
from halflife.layers.parts import RMSNorm
from halflife.ops import recurrent
from halflife.ops.backends import dispatch
from halflife.ops.backends.dispatch import CannotRun
from halflife.ops.spec import OPS
from halflife.packing import Packing

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

from halflife.ops.backends.triton import laws, run_step, step
from halflife.ops.backends.triton.passes import maps, token

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = [
    *(f"{op} {decay}" for op in ("linear_attention", "delta_rule", "dplr") for decay in ("none", "scalar", "vector")),
    "gate_rank linear", "gate_rank delta",
]  # fmt: skip
# The worst errors measured over this file's cases, relative to the largest entry of a tensor; four times are allowed.
WORST = {torch.float32: 5.6e-7, torch.bfloat16: 5.8e-3, torch.float16: 4.1e-4}


def inputs(form, *, batch=2, heads=4, groups=2, key=20, value=24, decay=None):
    """The arguments of one token in float64, with grouped queries and keys, in tensors of other strides."""
    op, kind = form.split()
    base = {"linear": "linear_attention", "delta": "delta_rule"}.get(kind, op)
    sizes = {"batch": batch, "heads": heads, "key": key, "value": value, "decay": decay}
    found = op_inputs(base, "scalar" if op == "gate_rank" else kind, 1, **sizes)
    for name in ("q", "k"):
        found[name] = found[name][:, :, :groups]
    if op == "gate_rank":
        draw = generator(form)
        found["g_fast"], state = found.pop("g"), found["initial_state"]
        resets = torch.rand(batch, 1, heads, generator=draw) > 0.5
        found["g_slow"] = torch.where(resets, found["g_fast"] / 3 - 0.01, 0.0)
        found["initial_state"] = state, state.flip(0) / 2
    return op, found


def strided(x):
    """The same numbers as a part of a larger tensor."""
    return x if x.ndim < 3 else torch.cat([x, x], 1)[:, : x.shape[1]]


def in_dtype(found, dtype):
    state = found["initial_state"]
    plain = rounded({name: x for name, x in found.items() if name != "initial_state"}, dtype)
    plain |= {name: found[name].float() for name in ("g_fast", "g_slow") if name in found}
    given = tuple(strided(x.float().to(DEVICE)) for x in (state if isinstance(state, tuple) else (state,)))
    plain = {name: strided(x.to(DEVICE)) for name, x in plain.items()}
    return {**plain, "initial_state": given if isinstance(state, tuple) else given[0]}


def exact(x):
    return tuple(map(exact, x)) if isinstance(x, tuple) else x.double().cpu()


def together(state):
    return torch.cat(state, -2) if isinstance(state, tuple) else state


def check(form, dtype=torch.float32, **sizes):
    op, found = inputs(form, **sizes)
    given = in_dtype(found, dtype)
    o, state = run_step(call_of(op, given, scale=0.3))
    wide = {
        n: tuple(y.double().cpu() for y in x) if isinstance(x, tuple) else x.double().cpu() for n, x in given.items()
    }
    want, want_state = OPS[op].backends["reference"].function(call_of(op, wide, scale=0.3))
    assert o.dtype == dtype
    assert_close(o.cpu(), want, 4 * WORST[dtype])
    assert_close(together(state).cpu(), want_state, 4 * WORST[torch.float32])


@crossed(strength=1, form=FORMS, dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_forms(form, dtype):
    check(form, dtype)


@crossed(
    strength=1, form=["linear_attention scalar", "delta_rule vector", "gate_rank delta"],
    sizes=[(1, 1), (7, 80), (64, 16), (256, 3)], decay=[0.0, -1e-9, -0.6931, -0.6932, -1000.0, -torch.inf],
)  # fmt: skip
def test_sizes_and_extreme_decays(form, sizes, decay):
    check(form, batch=1, heads=2, groups=1, key=sizes[0], value=sizes[1], decay=decay)


def test_grids_of_many_rows_are_within_cudas_limits(monkeypatch):
    """Only the first axis of a grid may have more than 65,535 programs."""
    grids = []
    for module in (step, token, laws):
        monkeypatch.setattr(module, "launch", lambda kernel, grid: grids.append(grid) or (lambda *_, **__: None))
    x, state = (torch.empty(35_000, rows, 2, 16, device="meta") for rows in (1, 2))
    step._step(x, x, x, *[None] * 7, 1.0)
    taps = torch.empty(96, 4, device="meta"), None, torch.empty(35_000, 96, 3, device="meta")
    token._token(
        torch.empty(35_000, 1, 96, device="meta"),
        *taps,
        *[None] * 5,
        state,
        None,
        [0, 32, 64],
        2,
        True,
        1.0,
        1.0,
        x.dtype,
    )
    laws._log_decay(torch.empty(1, 5_000_000, 64, device="meta"), *[None] * 4, "softplus", 1.0, 0.0, None, False)
    assert len(grids) == 3
    assert max(grid[0] for grid in grids) > max(size for grid in grids for size in grid[1:])
    assert all(size <= 65_535 for grid in grids for size in grid[1:])


@pytest.mark.parametrize("form", ["delta_rule scalar", "gate_rank linear"])
def test_no_state_is_a_state_of_zeros(form):
    op, found = inputs(form)
    given = in_dtype(found, torch.float32)
    state = given.pop("initial_state")
    zeros = tuple(torch.zeros_like(x) for x in state) if isinstance(state, tuple) else torch.zeros_like(state)
    got, want = (run_step(call_of(op, {**given, **x})) for x in ({}, {"initial_state": zeros}))
    assert torch.equal(got[0], want[0])
    assert torch.equal(together(got[1]), together(want[1]))


def test_slow_decays_do_not_drift():
    """e^g alone rounds to the same side at every token, 30 times here; the split decay does not."""
    draw = generator("drift")
    g = -1e-4 * torch.rand(1, 1, 1, 64, generator=draw)
    state, exact = (torch.rand(1, 1, 64, 8, generator=draw).to(DEVICE),) * 2
    for _ in range(30):
        k, v = 1e-2 * torch.randn(1, 1, 1, 64, generator=draw), 1e-2 * torch.randn(1, 1, 1, 8, generator=draw)
        given = {"q": k, "k": k, "v": v, "g": g}
        call = call_of("linear_attention", {n: x.to(DEVICE) for n, x in given.items()} | {"initial_state": state})
        _, state = run_step(call)
        exact = g.double().exp()[0].to(DEVICE).unsqueeze(-1) * exact + (k.double().mT @ v.double())[0].to(DEVICE)
    assert relative_error(state.cpu(), exact.cpu()) < 3e-7


def test_a_token_by_name_takes_the_step():
    """With gradients the kernels for sequences run, or a name says why not."""
    op, found = inputs("delta_rule vector")
    given = in_dtype(found, torch.float32)
    call = call_of(op, given)
    taken = dispatch.step_of(call, "triton", torch.device(DEVICE))
    assert taken is OPS[op].steps["triton"].function
    assert dispatch.step_of(call, "auto", torch.device("cuda")) is taken
    assert dispatch.step_of(call, "auto", torch.device("cpu")) is not taken
    o, state = ops.delta_rule(**given, output_final_state=True, backend="triton")
    want, want_state = ops.delta_rule(**given, output_final_state=True, backend="reference")
    assert_close({"o": o, "state": state}, {"o": want, "state": want_state}, 1e-6)
    large = torch.zeros(1, 1, 1, 300, device=DEVICE)
    with pytest.raises(CannotRun, match="heads of 1 to 256"):
        ops.linear_attention(large, large, large, backend="triton")


@pytest.mark.parametrize("form", ["gate_rank delta", pytest.param("dplr vector", marks=pytest.mark.slow)])
def test_as_a_custom_op(form):
    """What torch.compile relies on: schemas, shapes and strides of fake tensors."""
    op, found = inputs(form)
    call = call_of(op, in_dtype(found, torch.bfloat16))
    given = [call.get(name) for name in ("q", "k", "v")]
    given += [call.decay, *(call.get(name) for name in ("beta", "a", "b", "g_slow")), *(*call.state, None)[:2], 0.3]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.halflife.triton_step, tuple(given), test_utils=checks)


PRESETS = ("mamba2+post+gate_rank", "gated_deltanet+post", "gla", "rwkv7", "kda")


@pytest.mark.parametrize("name", slow_beyond(PRESETS[:1], PRESETS))
def test_models_decode_as_on_a_gpu(name, monkeypatch):
    """Tokens that go through the kernels, with decays and gates, give what the definition gives."""
    torch.manual_seed(0)
    config = preset(name, hidden_size=32, num_layers=2, vocab_size=16, num_heads=2)
    model = LanguageModel(config).to(DEVICE).eval()
    for parameter in model.parameters():  # RWKV-7's output maps start at zero
        parameter.data += 0.05 * torch.randn_like(parameter)
    ids = torch.randint(16, (2, 6), device=DEVICE)
    with torch.no_grad():
        want, state = model(ids)[0][:, 3:], model(ids[:, :3])[1]
        step_of, launched, got = dispatch.step_of, [], []
        cuda = torch.device("cuda")
        monkeypatch.setattr(dispatch, "step_of", lambda call, backend, device: step_of(call, backend, cuda))
        for op, backends in ((op, OPS[op].steps) for op in OPS.names()):
            for kind, known in backends.items():

                def run(call, op=op, function=known.function):
                    launched.append(op)
                    return function(call)

                monkeypatch.setitem(backends, kind, replace(known, function=run))
        for t in range(3, 6):
            logits, state = model(ids[:, t : t + 1], state)
            got.append(logits)
    assert len(launched) == 6
    assert_close(torch.cat(got, 1).cpu(), want.cpu(), 2e-5)


LAYERS = {
    "mamba2": {"num_groups": 2, "state_size": 24, "head_dim": 40},
    "mamba2+post+gate_rank": {"num_groups": 1, "state_size": 24},
    "gated_deltanet": {},
    "gated_deltanet+gate_rank": {"num_key_heads": 2, "allow_neg_eigval": True},
}


def token_by_kernel(layer, x, state):
    """What `layer` does on a GPU with one token of each sequence."""
    packing = Packing(*x.shape[:2])
    position = packing.positions(state["position"], x.device)
    if isinstance(layer, Mamba2):
        z, xbc, f = layer.in_proj(x).split(layer.splits, -1)
        y, new = layer._token(x, xbc, f, position, state, packing)
        return layer._mapped(y.flatten(-2), z), new
    assert layer.one_kernel
    o, new = layer.decay(
        layer.decay_input(x), position=position, parts=True,
        then=lambda parts: layer._token(x, layer.qkv_proj(x), parts.g, state, packing),
    )  # fmt: skip
    return layer.out_proj(layer.gate(o, x)), new


@torch.no_grad()
@crossed(strength=1, name=LAYERS, dtype=[torch.float32, torch.bfloat16])
def test_a_token_of_a_layer(name, dtype, monkeypatch):
    """From the projection to the next states, against float64, for sequences at different positions."""
    torch.manual_seed(0)
    monkeypatch.setattr(recurrent, "runs_kernels", lambda device: True)
    config = preset(name, hidden_size=64, num_layers=1, num_heads=4, mixer_options=LAYERS[name])
    exact = LanguageModel(config).blocks[0].mixer.bfloat16().double().eval()
    layer = copy.deepcopy(exact).to(dtype).to(DEVICE)
    x = torch.randn(2, 8, 64).bfloat16().double()
    _, state = exact(x[:, :7])
    state["position"] += torch.tensor([0, 900])
    state["conv"] = state["conv"].to(dtype).double()
    given = {key: part.to(DEVICE, part.dtype if key == "position" else torch.float32) for key, part in state.items()}
    given["conv"] = given["conv"].to(dtype)
    (y, new), (want, after) = token_by_kernel(layer, x[:, 7:].to(DEVICE, dtype), given), exact(x[:, 7:], state)
    assert list(new) == [key for key in after if key != "position"]
    got = {"y": y, **new}
    wanted = {"y": want, **{key: after[key] for key in new}}
    errors = {key: relative_error(got[key].double().cpu(), wanted[key]) for key in got}
    assert max(errors.values()) < 4 * WORST[dtype], errors


def exact_map(x, norm, eps, weight, other=None, *, branch=None, gate=None, groups=1):
    a = x if branch is None else x + branch
    a = a if gate is None else a * F.silu(gate)
    n = F.rms_norm(a.unflatten(-1, (groups, -1)), [a.shape[-1] // groups], eps=eps).flatten(-2) * norm
    y = n @ weight.T if other is None else F.silu(n @ weight.T) * (n @ other.T)
    return [y, *([] if branch is None else [a])]


@crossed(
    strength=1, form=["sum and swiglu", "sum", "gate", "groups"], dtype=[torch.float32, torch.bfloat16, torch.float16],
    columns=[16, 512], batch=[1, 3],
)  # fmt: skip
def test_a_map_with_the_norm_before_it(form, dtype, columns, batch, monkeypatch):
    """Of tokens that are parts of wider tensors; blocks of channels and of rows are partly empty."""
    monkeypatch.setattr(maps, "COLUMNS", columns)
    draw = generator(form)

    def randn(*shape):
        return torch.randn(*shape, generator=draw).to(DEVICE, dtype)

    given = {"x": randn(batch, 1, 80)[..., ::2], "norm": randn(40), "weight": randn(13, 40) / 6, "eps": 1e-3}
    if "sum" in form:
        given["branch"] = randn(batch, 2, 60)[:, :1, 10:50]
    if "swiglu" in form:
        given["other"] = randn(13, 40) / 6
    if form in ("gate", "groups"):
        given |= {"gate": randn(batch, 1, 80)[..., 40:], "groups": 2 if form == "groups" else 1}
    wide = {name: x.double().cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    got, want = recurrent.map_of_norm(**given), exact_map(**wide)
    assert {x.dtype for x in got} == {dtype}
    for x, y in zip(got, want, strict=True):
        assert_close(x.cpu(), y, 4 * WORST[dtype])


@torch.no_grad()
def test_swiglu_of_a_token_is_two_kernels(monkeypatch):
    """The sum, the norm and the first maps of up to four sequences; else, or if somebody looks, each runs alone."""
    torch.manual_seed(0)
    mlp, norm = SwiGLU(32, 48).to(DEVICE), RMSNorm(32, eps=1e-5).to(DEVICE)
    monkeypatch.setattr(recurrent, "runs_kernels", lambda device: True)
    taken = []
    given = recurrent.map_of_norm
    monkeypatch.setattr(mlp_module, "map_of_norm", lambda *a, **o: taken.append(1) or given(*a, **o))
    sizes = {(1, 1): True, (4, 1): True, (5, 1): False, (1, 2): False}
    for (batch, length), by_kernel in sizes.items():
        x, y = torch.randn(2, batch, length, 32, device=DEVICE)
        got = mlp.of_sum(x, y, norm)
        assert bool(taken) == by_kernel
        taken.clear()
        want = x.double() + y.double(), mlp.double()(norm.double()(x.double() + y.double()))
        mlp.float(), norm.float()
        assert_close(dict(zip("xy", got, strict=True)), dict(zip("xy", want, strict=True)), 4 * WORST[torch.float32])
    x, y = torch.randn(2, 1, 1, 32, device=DEVICE)
    for module in (mlp, mlp.gate, norm):
        with module.register_forward_hook(lambda *_: None):
            mlp.of_sum(x, y, norm)
    with torch.enable_grad():
        mlp.of_sum(x, y, norm)
    mlp.pass_backend = "chunked"
    mlp.of_sum(x, y, norm)
    assert not taken


def test_where_a_kernel_takes_tokens(monkeypatch):
    """One token of each sequence with states, without gradients, of a layer whose backend is not another one."""
    layer = LanguageModel(preset("mamba2", hidden_size=64, num_layers=1, num_heads=2)).blocks[0].mixer
    x, rows = torch.randn(1, 1, 64), Packing(1, 1)
    with torch.no_grad():
        state = layer(x)[1]
        assert not layer.decodes(x, state, rows)
        monkeypatch.setattr(recurrent, "runs_kernels", lambda device: True)
        assert layer.decodes(x, state, rows)
        assert not layer.decodes(x, {}, rows)
        assert not layer.decodes(x, state, Packing(1, 2))
        assert not layer.decodes(x, state, Packing(1, 1, torch.tensor([0, 1])))
        assert not layer.decodes(x.double(), state, rows)
        taken = []
        with layer.decay.register_forward_hook(lambda module, given, parts: taken.append(parts.g)):
            watched, _ = token_by_kernel(layer, x, state)
        assert taken[0].shape == (1, 1, 2)  # numbers, where a kernel would have computed them
        assert_close(watched, token_by_kernel(layer, x, state)[0], 4 * WORST[torch.float32])
        layer.backend = "reference"
        assert not layer.decodes(x, state, rows)
    layer.backend = "triton"
    assert not layer.decodes(x, state, rows)
