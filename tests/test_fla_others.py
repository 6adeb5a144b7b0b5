"""The adapter to fla's log-linear, ridge and forgetting attention, as far as a CPU can test it, and its choice."""

import importlib
import inspect
import json
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_raises, call_of, cases, on_linux, put_backend, slices
from helpers import fla as fla_function

from halflife import ops
from halflife.layers.fox import forgetting_attention
from halflife.ops.backends import choice, fla
from halflife.ops.backends import dispatch as backends
from halflife.ops.backends.dispatch import CannotRun

CUDA, ROOT = torch.device("cuda"), Path(__file__).parent.parent
BOUNDS = [0, 1, 20, 20, 40]


def log_linear(q, k, v, g, level_scales, scale):
    return fla_function("log_linear_attn.naive", "naive_log_linear_attn")(q, k, v, g, level_scales, scale), None


def mesa(q, k, v, g, beta, lamb, h_kk_init, h_kv_init, output_final_state, max_CG_iteration):
    assert output_final_state
    assert max_CG_iteration == 30
    assert h_kk_init.dtype == h_kv_init.dtype == beta.dtype == lamb.dtype == torch.float32
    return fla_function("mesa_net.naive", "naive_mesa_net_exact")(q, k, v, g, lamb, beta, h_kk_init, h_kv_init)


def forgetting(q, k, v, g, scale):
    return (fla_function("forgetting_attn.naive", "naive_forgetting_attn")(q, k, v, g, scale),)


KERNELS = {
    "log_linear_attn.chunk_log_linear_attn": log_linear, "mesa_net.chunk_mesa_net": mesa,
    "forgetting_attn.parallel_forgetting_attn": forgetting,
}  # fmt: skip
TOKENS = ("q", "k", "v", "g", "beta", "level_scales")


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Let backend="fla" run on a CPU: plain functions of fla replace its kernels, whose signatures must fit."""

    def function(name):
        module, _, kernel = name.rpartition(".")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that there is no GPU
            signature = inspect.signature(getattr(importlib.import_module(f"fla.ops.{module}"), kernel))

        def call(*positional, **named):
            given = signature.bind(*positional, **named).arguments
            bounds = given.pop("cu_seqlens", None)
            assert given["g"].isfinite().all()
            assert type(given.get("scale", 1.0)) is float
            found = []
            for row, part in enumerate([slice(None)] if bounds is None else slices(bounds.tolist())):
                if part.start == part.stop is not None:  # an empty sequence
                    states = [x[row : row + 1] for n, x in given.items() if "init" in n] or [None]
                    found.append((given["v"][:, part], *states))
                    continue
                tokens = {n: x[:, part] if n in TOKENS else x for n, x in given.items()}
                if bounds is not None:
                    tokens |= {n: x[row : row + 1] for n, x in given.items() if "init" in n}
                found.append(KERNELS[name](**tokens))
            if name.startswith("forgetting"):
                return found[0][0]
            first, *rest = zip(*found, strict=False)
            return torch.cat(first, 1), *(x[0] if x[0] is None else torch.cat(x) for x in rest)

        return call

    monkeypatch.setattr(fla, "_function", function)
    for op in ("log_linear_attention", "ridge_attention", "forgetting_attention"):
        put_backend(monkeypatch, op, "fla", backends.OPS[op].backends["fla"].function)


def arguments(op, length=40, key=16, value=16, levels=8, sequences=2, dtype=torch.float32, states=True):
    draw = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=draw)

    at = (2 if sequences == 2 else 1, length, 2)
    x = {"q": randn(*at, key), "k": F.normalize(randn(*at, key), dim=-1), "v": randn(*at, value)}
    x = {name: y.to(dtype) for name, y in x.items()}
    x["g"] = -randn(*at).exp() / 4
    x["g"][:, 5::11] = -torch.inf
    if op == "log_linear_attention":
        x["weights"] = F.softplus(randn(*at, levels))
    if op == "ridge_attention":
        x |= {"beta": randn(*at).sigmoid(), "ridge": 0.25 + randn(2, key).square()}
        if states:
            gram = randn(sequences, 2, key, key)
            x |= {"G": gram @ gram.mT / key, "C": randn(sequences, 2, key, value)}
    return x


def run(op, x, backend, bounds=None, size=1.0):
    """Outputs, final states and gradients."""
    x = {name: y.clone().requires_grad_() for name, y in x.items()}
    rest = {name: y for name, y in x.items() if name not in "GC"}
    if op == "forgetting_attention":
        found = [forgetting_attention(**rest, backend=backend)]
    else:
        o, (states, position) = getattr(ops, op)(
            **rest, initial_state=(x["G"], x["C"]) if "G" in x else None, cu_seqlens=bounds, output_final_state=True,
            backend=backend,
        )  # fmt: skip
        found = [o, states, position]
    grads = torch.autograd.grad(size * sum(y.float().square().sum() for y in found), list(x.values()))
    return dict(
        zip([*("o", "state", "rest")[: len(found)], *(f"d{name}" for name in x)], [*found, *grads], strict=True)
    )


@on_linux
@cases(
    "op, packed, tolerance",
    ("log_linear_attention", False, 4 * 3.8e-5),
    ("log_linear_attention", True, 4 * 3.8e-5),
    ("ridge_attention", False, 4 * 1e-3),
    ("ridge_attention", True, 4 * 1e-3),
    ("forgetting_attention", False, 4 * 1.5e-5),
)
def test_equals_the_token_loop(op, packed, tolerance, on_a_cpu):
    """The plain functions sum log-decays in float32, and the adapter rounds ridge attention's queries to float16."""
    bounds = torch.tensor(BOUNDS) if packed else None
    x = arguments(op, sequences=4 if packed else 2)
    got, expected = (run(op, x, backend, bounds) for backend in ("fla", "reference"))
    assert_close(got, expected, tolerance)


@on_linux
def test_small_gradients_of_ridge_attention_are_scaled(on_a_cpu, monkeypatch):
    """fla's solver takes residuals of 3e-3 as none, so what it is given has entries of about 8 at the most."""
    seen, x = [], arguments("ridge_attention")
    before = mesa

    def watched(**given):
        found = before(**given)
        for y in found:
            y.register_hook(lambda dy: seen.append(dy.abs().max().item()))
        return found

    monkeypatch.setitem(KERNELS, "mesa_net.chunk_mesa_net", watched)
    large, small = (run("ridge_attention", x, "fla", size=size) for size in (1.0, 1e-6))
    assert max(seen[:3]) == max(seen[3:]) == 8
    grads = [name for name in large if name[0] == "d"]
    assert_close({name: 1e6 * small[name] for name in grads}, {name: large[name] for name in grads}, 1e-3)
    y = ops.ridge_attention(*[t.requires_grad_() for n, t in x.items() if n not in "GC"], backend="fla")[0]
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(y.sum(), x["q"], create_graph=True)


def why_not(op, state=None, **sizes):
    x = {n: y.requires_grad_() for n, y in arguments(op, **{"dtype": torch.bfloat16, "states": False, **sizes}).items()}
    if op == "forgetting_attention":
        return fla.why_not_forgetting(op, CUDA, tuple(x.values()))
    return fla.why_not(op, CUDA, call_of(op, {**x, "initial_state": state}))


LOG, RIDGE, FOX = "log_linear_attention", "ridge_attention", "forgetting_attention"


@cases(
    "op, sizes, message",
    (LOG, {"key": 64, "levels": 7}, None),
    (LOG, {"key": 64, "levels": 6}, "6 levels do not reach 40 tokens"),
    (LOG, {"key": 32}, "K is 32, V is 16"),
    (LOG, {"key": 64, "value": 24}, "K is 64, V is 24"),
    (LOG, {"key": 64, "dtype": torch.float32}, "bfloat16 or float16"),
    (RIDGE, {}, None),
    (RIDGE, {"key": 128, "value": 128}, None),
    (RIDGE, {"key": 32}, "K is 32, V is 16"),
    (RIDGE, {"key": 130, "value": 130}, "K = V ≤ 128"),
    (FOX, {}, None),
    (FOX, {"key": 258}, "at most 256"),
    (FOX, {"length": 0}, "no tokens"),
    (FOX, {"dtype": torch.float32}, "bfloat16 or float16"),
)
def test_refused(op, sizes, message, machine):
    machine()
    reason = why_not(op, **sizes)
    assert reason is None if message is None else message in reason


def test_states_of_log_linear_attention_are_refused(machine):
    machine()
    state = (torch.zeros(2, 2, 7, 64, 16), torch.zeros(2, dtype=torch.long))
    assert "starts from no state" in why_not(LOG, state, key=64)


@pytest.mark.parametrize("op", [LOG, RIDGE, FOX])
def test_on_hopper(op, machine):
    """Gradients with the Triton that miscompiles gated ones, and heads that are no multiples of 64."""
    wide = {"key": 64, "value": 64}
    machine(capability=9, triton=(3, 6, 0))
    assert "wrong on Hopper" in why_not(op, **wide)
    with torch.no_grad():
        assert why_not(op, **wide) is None
    machine(capability=9)
    assert why_not(op, **wide) is None
    assert "multiples of 64" in why_not(op, **(wide | {"value": 16} if op != RIDGE else {"key": 32, "value": 32}))


def test_forgetting_attention_of_groups_has_no_gradient(machine):
    machine()
    q, k, v, g = arguments(FOX, dtype=torch.bfloat16).values()
    k, v = k[:, :, :1], v[:, :, :1]
    assert fla.why_not_forgetting(FOX, CUDA, (q, k, v, g)) is None
    assert "the 1 heads of k, not of the 2 of q" in fla.why_not_forgetting(FOX, CUDA, (q, k, v, g.requires_grad_()))
    assert_raises(CannotRun, "not on cpu", forgetting_attention, q, k, v, g, "fla")


# ------------------------------------------------------------------------------------------------- the choice


def linear(heads, gradients, decay="scalar"):
    shape = (1, 3, heads)
    q, k, v = (torch.zeros(*shape, 16, dtype=torch.bfloat16, requires_grad=gradients) for _ in range(3))
    g = {"none": None, "scalar": torch.zeros(shape), "vector": torch.zeros(*shape, 16)}[decay]
    return call_of("linear_attention", {"q": q, "k": k, "v": v, "g": g})


def test_the_faster_one_comes_first(monkeypatch):
    row = {"few": ["triton", "fla"], "many": ["fla", "triton"]}
    monkeypatch.setattr(choice, "FASTER", {"linear_attention, scalar": row})
    for heads, gradients, best in ((2, False, "triton"), (2, True, "fla"), (100, False, "fla"), (100, True, "triton")):
        assert choice.order("linear_attention", linear(heads, gradients))[0] == best
    assert choice.order("linear_attention", linear(100, False, "none")) == choice.ORDER
    assert choice.order("linear_attention", None) == choice.ORDER
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        assert choice.order("linear_attention", linear(2, True)) == choice.ORDER
    assert choice.order("ridge_attention", call_of("ridge_attention", arguments(RIDGE, states=False)))[0] == "fla"
    assert set(choice.FLA_FIRST) == set(choice.ORDER)


def test_auto_takes_the_faster_one(monkeypatch, machine):
    """Among those that can run: fla refuses gated gradients on Hopper."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(choice, "FASTER", {"linear_attention, scalar": {"few": ["fla", "fla"]}})
    found = backends.OPS["linear_attention"].backends
    machine()
    assert backends.choose("linear_attention", "auto", CUDA, linear(2, True)) is found["fla"].function
    machine(capability=9, triton=(3, 6, 0))
    assert backends.choose("linear_attention", "auto", CUDA, linear(2, True)) is found["triton"].function


def test_the_table_is_that_of_the_results(monkeypatch, tmp_path):
    """`make gpu-offline` writes it. Where a GPU measured both backends with today's kernels, that decides."""
    if sys.platform != "linux":
        pytest.skip("triton has Linux wheels only")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("offline_fla")
    monkeypatch.setattr(script, "sources", cache(script.sources))
    data = json.loads((ROOT / "benchmarks/results/offline.json").read_text())
    assert script.choice(data) == choice.FASTER
    case = "delta_rule, none"
    data["fla"][case] = {"few": [0.0, 100.0], "many": [100.0, 0.0]}
    assert script.choice(data, tmp_path)[case] == {"few": ["fla", "triton"], "many": ["triton", "fla"]}
    rows = [{"part": "head", "sources": script.sources()}]
    rows += [
        {"part": "ops", "op": case, "K": 64, "B": 16, "T": 2048, "backend": backend, "forward_ms": 1, "both_ms": ms}
        for backend, ms in (("triton", 2), ("fla", 3))
    ]
    (tmp_path / "nvidia-x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert script.choice(data, tmp_path)[case] == {"few": ["fla", "triton"], "many": ["triton", "triton"]}
    (tmp_path / "nvidia-y.jsonl").write_text(json.dumps({"part": "head", "sources": {}}))
    assert script.choice(data, tmp_path)[case]["many"] == ["triton", "fla"]
