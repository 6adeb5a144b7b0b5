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
from halflife.layers import parts as parts_module
from halflife.layers.mlp import SwiGLU
from halflife.layers.parts import RMSNorm
from halflife.ops import recurrent
from halflife.ops.backends import dispatch
from halflife.ops.backends.dispatch import CannotRun
from halflife.ops.koopman import KoopmanCall, attend_token, takes_token
from halflife.ops.spec import OPS
from halflife.packing import Packing
from halflife.position.rope import rotate

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

from halflife.ops.backends.triton import laws, run_step, step
from halflife.ops.backends.triton.dplr import rwkv7_token
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.passes import attend, maps, token

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
    taps = [torch.empty(96, 4, device="meta")], torch.empty(35_000, 96, 3, device="meta")
    given = *taps, None, [], None, [], None, None, None, state, None, [0, 32, 64], 2, True, True, 1.0, 1.0, x.dtype
    token._token(torch.empty(35_000, 1, 96, device="meta"), *given, [], 1.0)
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
    "gated_deltanet+gate_rank": {"num_key_heads": 2, "allow_neg_eigval": True},
    "gla": {"value_dim": 20},
    "mamba2+gate_rank": {"gate_rank": {"gates": "layer", "conv_size": 1, "reset_rate": 0.6}},
    "gated_deltanet": {"gate_rank": {"bias": "before", "reset_rate": 0.5}},
    "kda": {"num_key_heads": 2, "decay_rank": 20},
    "simple+post": {},
    "tnl": {"decay_options": {"trained_rates": True}},
    "retnet+post": {"gate": "none"},
    "gla+post": {"decay_rank": 0, "gate": "sigmoid"},
    "deltanet": {"gate": "low_rank_sigmoid"},
    "rwkv7+post": {"gate_rank": 72},
}  # fmt: skip


def as_on_a_gpu(patch):
    """Let kernels run for single tokens without being asked for, as on a GPU."""
    patch.setattr(recurrent, "runs_kernels", lambda device: True)
    patch.setattr(torch.Tensor, "is_cpu", False)


def token_by_kernel(layer, x, state):
    """What `layer` does on a GPU with one token of each sequence."""
    packing = Packing(*x.shape[:2])
    assert layer.decodes(x, state, packing)
    return layer.mix(x, state, packing, None)


@torch.no_grad()
@pytest.mark.parametrize("name", slow_beyond(["mamba2+post+gate_rank", "gated_deltanet", "rwkv7+post"], LAYERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_of_a_layer(name, dtype, monkeypatch):
    """From the projection to the next states, against float64, for sequences at different positions."""
    torch.manual_seed(0)
    as_on_a_gpu(monkeypatch)
    config = preset(name, hidden_size=64, num_layers=1, num_heads=4, mixer_options=LAYERS[name])
    asked = []
    for module in (token, rwkv7_token):
        monkeypatch.setattr(module, "launch", lambda kernel, grid: asked.append(kernel) or launch(kernel, grid))
    exact = LanguageModel(config).blocks[0].mixer.double().eval()
    for parameter in exact.parameters():  # some start at zero
        parameter += 0.05 * torch.randn_like(parameter)
    exact.bfloat16().double()
    layer = copy.deepcopy(exact).to(dtype).to(DEVICE)
    x = torch.randn(2, 8, 64).bfloat16().double()
    _, state = exact(x[:, :7])
    state["position"] += torch.tensor([0, 900])
    if "conv" in state:
        state["conv"] = state["conv"].to(dtype).double()
    given = {key: part.to(DEVICE, part.dtype if key == "position" else torch.float32) for key, part in state.items()}
    given |= {"conv": given["conv"].to(dtype)} if "conv" in given else {}
    (y, new), (want, after) = token_by_kernel(layer, x[:, 7:].to(DEVICE, dtype), given), exact(x[:, 7:], state)
    assert len(asked) == 1
    assert list(new) == [key for key in after if key != "position"]
    got = {"y": y, **new}
    wanted = {"y": want, **{key: after[key] for key in new}}
    errors = {key: relative_error(got[key].double().cpu(), wanted[key]) for key in got}
    assert max(errors.values()) < 4 * WORST[dtype], errors


@crossed(
    strength=1, dtype=[torch.float32, torch.bfloat16], heads=[(4, 4), (6, 2), (3, 1)], size=[8, 24, 7],
    held=[1, 15, 16, 70], parts=[1, 64], rows=[1, 3],
)  # fmt: skip
def test_attention_of_a_token(dtype, heads, size, held, parts, rows, monkeypatch):
    """Of sequences that have filled their caches differently, whose other slots hold anything."""
    monkeypatch.setattr(attend, "PARTS", parts)
    draw = generator(f"{heads}, {size}, {held}")
    (queries, keys), angle = heads, torch.randn(rows, 1, size // 2, generator=draw)
    q, k, v = (torch.randn(rows, 2, n, 2 * size, generator=draw)[:, 1:, :, :size] for n in (queries, keys, keys))
    cache = torch.randn(2, rows, held, keys, size, generator=draw)
    given = [x.to(dtype) for x in (q, k, v, *cache)]
    seen = torch.tensor([held, held // 2, 0])[:rows]
    angles = None if size % 2 else (angle.cos(), angle.sin())
    moved = [x.to(DEVICE) for x in given]
    on_device = None if angles is None else tuple(x.to(DEVICE) for x in angles)
    found = recurrent.attention_of_token(*moved[:3], on_device, *moved[3:], seen.to(DEVICE))
    q, k, v, *cache = (x.double() for x in given)
    if angles is not None:
        q, k = (rotate(x, angle.double().unsqueeze(-2)).to(dtype).double() for x in (q, k))
    wanted = [F.pad(x, (0, 0, 0, 0, 0, 1)) for x in cache]
    for x, new in zip(wanted, (k, v), strict=True):
        x[torch.arange(rows), seen] = new[:, 0]
    mask = (torch.arange(held + 1) <= seen[:, None])[:, None, None]
    sides = (x.transpose(1, 2).repeat_interleave(queries // keys, 1) for x in wanted)
    want = F.scaled_dot_product_attention(q.transpose(1, 2), *sides, attn_mask=mask).transpose(1, 2)
    for got, exactly in zip(found, (want, *wanted), strict=True):
        assert got.dtype == dtype
        assert_close(got.cpu(), exactly, 4 * WORST[dtype])


@torch.no_grad()
def check_koopman(monkeypatch, dtype, mix, held, sizes, normalization, power, size, count):
    """Tokens wait for their chunk, fill it, and begin the next one; in each sequence another number waits."""
    draw = generator(f"{mix}, {held}, {sizes}")
    rank, width = sizes
    q, k, v = (torch.randn(2, held + count, 2, n, generator=draw).to(dtype).double() for n in (rank, rank, width))
    gamma, eta, raw = torch.randn(3, 2, generator=draw)
    power = max(power, int(mix == "powers"))
    weights = torch.randn(power + 1, 2, generator=draw) if mix == "powers" else raw
    exact = {"logits": raw.sigmoid(), "powers": weights}.get(mix, mix)
    options = {"normalization": normalization, "chunk_size": size, "ridge": 0.1, "power": power}
    options |= {"gamma": 1 + gamma.sigmoid() / 2, "mix": exact}
    want, state, whole = [], [], []
    for row in range(2):
        after, parts = None, [x[row : row + 1] for x in (q, k, v)]
        for found, tokens in ((state, slice(row, held)), (whole, slice(held, None))):
            y, after = ops.koopman_attention(
                *(x[:, tokens] for x in parts), initial_state=after, output_final_state=True, backend="reference",
                **options,
            )  # fmt: skip
            found.append(after)
        want.append(y * eta.double().unsqueeze(-1))
    state, whole = ({name: torch.cat([part[name] for part in parts]) for name in parts[0]} for parts in (state, whole))
    state = {name: x.float().to(DEVICE) if x.is_floating_point() else x.to(DEVICE) for name, x in state.items()}
    monkeypatch.setattr(recurrent, "runs_kernels", lambda device: True)
    options |= {"gamma": 1.0} | ({} if isinstance(mix, float) else {"mix": 1.0})
    learned = [x.to(DEVICE) for x in (gamma, weights, eta)]
    learned[1] = None if isinstance(mix, float) else learned[1]
    got = []
    for t in range(held, held + count):
        call = KoopmanCall(*(x[:, t : t + 1].to(DEVICE, dtype) for x in (q, k, v)), initial_state=state, **options)
        assert takes_token(call, "auto")
        y, state = attend_token(call, *learned)
        got.append(y)
    assert y.dtype == dtype
    assert_close(torch.cat(got, 1).cpu(), torch.cat(want), 4 * WORST[dtype])
    assert_close({name: x.cpu() for name, x in state.items()}, whole, 4 * WORST[torch.float32])


def test_koopman_attention_of_a_token(monkeypatch):
    check_koopman(monkeypatch, torch.float32, "logits", 4, (8, 20), "causal", 1, 5, 1)


@pytest.mark.slow
@crossed(
    dtype=[torch.float32, torch.bfloat16], mix=["logits", "powers", 0.0, 1.0], held=[2, 3, 4, 12],
    sizes=[(8, 20), (24, 16), (40, 7)], normalization=["causal", "trace", "paper"], power=[1, 0, 2], size=[5, 1],
)  # fmt: skip
def test_koopman_attention_of_tokens(dtype, mix, held, sizes, normalization, power, size, monkeypatch):
    check_koopman(monkeypatch, dtype, mix, held, sizes, normalization, power, size, 3)


def exact_map(x, norm, eps, weights, *, branch=None, gate=None, kind="none", groups=1, keeps=False):
    a = x if branch is None else x + branch
    f = 1.0 if gate is None else (gate * gate.sigmoid() if kind.startswith("silu") else gate.sigmoid())
    a, after = (a * f, 1.0) if kind.endswith("before") else (a, f)
    n = a * after
    if norm is not None:
        size = a.shape[-1] // groups
        n = F.rms_norm(a.unflatten(-1, (groups, size)), [size], eps=eps).flatten(-2) * after
        n = n * norm.repeat(a.shape[-1] // len(norm))
    y = torch.cat([n @ weight.T for weight in weights], -1)
    return [y, *([] if branch is None else [a]), *([n] if keeps else [])]


@crossed(
    strength=1, form=["sum", "norm", "none", "silu_before", "sigmoid_before", "silu_after", "sigmoid_after"],
    dtype=[torch.float32, torch.bfloat16, torch.float16], columns=[16, 64, 512], batch=[1, 3],
    groups=[1, 2, 5], sizes=[(13,), (8, 1), (3, 17, 8, 1, 9)],
)  # fmt: skip
def test_maps_with_the_norm_before_them(form, dtype, columns, batch, groups, sizes, monkeypatch):
    """Of tokens that are parts of wider tensors; blocks of channels, of groups and of rows are partly empty."""
    monkeypatch.setattr(maps, "COLUMNS", columns)
    draw = generator(f"{form}, {groups}")

    def randn(*shape):
        return torch.randn(*shape, generator=draw).to(DEVICE, dtype)

    given = {"x": randn(batch, 1, 80)[..., ::2], "norm": randn(40), "eps": 1e-3, "groups": groups}
    given["weights"] = [randn(size, 40) / 6 for size in sizes]
    if form == "sum":
        given |= {"branch": randn(batch, 2, 60)[:, :1, 10:50], "keeps": True, "groups": 1}
    elif form == "norm":
        given["norm"] = randn(40 // groups)
    elif form == "none":  # SwiGLU and its map
        given |= {"norm": None, "gate": randn(batch, 1, 40), "kind": "silu_before"}
    else:
        given |= {"gate": randn(batch, 1, 80)[..., 40:], "kind": form}
    wide = {name: x.double().cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    wide["weights"] = [x.double().cpu() for x in given["weights"]]
    got, want = recurrent.maps_of_norm(**given), exact_map(**wide)
    assert {x.dtype for x in got} == {dtype}
    for x, y in zip(got, want, strict=True):
        assert_close(x.cpu(), y, 4 * WORST[dtype])


@torch.no_grad()
def test_where_a_kernel_takes_maps(monkeypatch):
    """Of up to four tokens, with the norm before them; else, or if somebody looks, each runs alone."""
    torch.manual_seed(0)
    mlp, norm = SwiGLU(32, 48).to(DEVICE), RMSNorm(32, eps=1e-5).to(DEVICE)
    as_on_a_gpu(monkeypatch)
    taken = []
    given = recurrent.maps_of_norm
    for module in (mlp_module, parts_module):
        monkeypatch.setattr(module, "maps_of_norm", lambda *a, **o: taken.append(1) or given(*a, **o))

    def run(x, y):
        taken.clear()
        total, n, known = parts_module.normed(norm, x, y, mlp)
        with known:
            return {"sum": total, "norm": n, "mlp": mlp(n)}, len(taken)

    sizes = {(1, 1): 2, (4, 1): 2, (5, 1): 0, (1, 2): 0}
    for (batch, length), kernels in sizes.items():
        x, y = torch.randn(2, batch, length, 32, device=DEVICE)
        got, count = run(x, y)
        assert count == kernels
        n = norm.double()(x.double() + y.double())
        want = {"sum": x.double() + y.double(), "norm": n, "mlp": mlp.double()(n)}
        mlp.float(), norm.float()
        assert_close(got, want, 4 * WORST[torch.float32])
    x, y = torch.randn(2, 1, 1, 32, device=DEVICE)
    for module, kernels in ((norm, 1), (mlp.up, 2), (mlp.down, 1)):
        with module.register_forward_hook(lambda *_: None):
            assert run(x, y)[1] == kernels
    with torch.enable_grad():
        assert run(x, y)[1] == 0
    _, n, known = parts_module.normed(norm, x, y, mlp)
    with known:
        assert mlp.gate(n) is mlp.gate(n)
        assert_close(mlp.gate(y), F.linear(y, mlp.gate.weight), 1e-6)  # of another input
        assert "forward" in vars(mlp.gate)
    assert "forward" not in vars(mlp.gate)
    mlp.pass_backend = "chunked"
    assert run(x, y)[1] == 0


DECODED = (
    ("mamba2+post+gate_rank", 1), ("mamba2+post+gate_rank", 4), ("gated_deltanet", 2), ("gla", 3), ("llama", 1),
    ("simple", 1), ("kda", 1), ("comba", 1), ("mesa", 1), ("mamba2+ska", 1), ("rwkv7", 1), ("rwkv7", 5), ("hgrn2", 2),
    ("retnet", 2), ("mamba3", 1), ("mamba3_echo", 1),
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "batch"), [DECODED[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in DECODED[1:])]
)
def test_models_decode_by_kernels(name, batch, monkeypatch):
    """Whole models whose layers take the way of a GPU."""
    torch.manual_seed(0)
    model = LanguageModel(preset(name, hidden_size=32, num_layers=2, vocab_size=16, num_heads=2)).to(DEVICE).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    ids = torch.randint(16, (batch, 6), device=DEVICE)
    (_, state), (want, whole), got = model(ids[:, :4]), model(ids), []
    as_on_a_gpu(monkeypatch)
    for t in range(4, 6):
        logits, state = model(ids[:, t : t + 1], state)
        got.append(logits)
    assert_close(torch.cat(got, 1), want[:, 4:], 2e-5)
    for after, exact in zip(state, whole, strict=True):
        assert_close(after, exact, 2e-5)


def test_where_a_kernel_takes_tokens(monkeypatch):
    """One token of each sequence with states, without gradients, of a layer whose backend is not another one."""
    layer = LanguageModel(preset("mamba2", hidden_size=64, num_layers=1, num_heads=2)).blocks[0].mixer
    x, rows = torch.randn(1, 1, 64), Packing(1, 1)
    with torch.no_grad():
        state = layer(x)[1]
        assert not layer.decodes(x, state, rows)
        as_on_a_gpu(monkeypatch)
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
