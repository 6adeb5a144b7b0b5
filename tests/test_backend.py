"""The choice of an implementation: its order, its limits, and errors instead of silent replacements."""

import helpers
import pytest
import torch
from helpers import OPS as ON_A_STATE
from helpers import assert_raises, op_inputs, put_backend, rounded, unchecked

from halflife import ops
from halflife.ops.backends import dispatch as backends
from halflife.ops.backends import fla
from halflife.ops.backends.dispatch import CannotRun
from halflife.ops.backends.native import build
from halflife.ops.spec import OPS, Spec
from halflife.report.tables.about import refusals

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EVERY = (*ON_A_STATE, "gate_rank", "koopman_attention", "causal_conv1d")


@pytest.fixture
def op(monkeypatch):
    """An op with all backends, whose state is their name. `op["fla"] = reason` makes a backend refuse."""
    reasons = {}
    spec = Spec("op", OPS["linear_attention"].tensors, OPS["linear_attention"].state)
    monkeypatch.setitem(OPS._entries, "op", spec)
    for name in reversed(backends.ORDER):
        backends.implements(
            "op", name, lambda call, name=name: (call["v"], name),
            why_not=lambda op, device, call, name=name: reasons.get(name), steps=name == "native",
        )  # fmt: skip
    return reasons


@pytest.fixture
def gpu(monkeypatch):
    """Treat CPU tensors as those of a CUDA machine with fla-core. Triton is interpreted, and fla checks shapes only."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(fla, "_versions", lambda: ((0, 6, 0), (3, 8, 0)))
    monkeypatch.setattr(fla, "_capability", lambda device: 9)


def taken(op, backend, device, call=None):
    """Return the name of the backend that `choose` returns."""
    function = backends.choose(op, backend, device, call)
    return next(name for name, known in OPS[op].backends.items() if known.function is function)


def call_of(op, granularity="scalar", dtype=torch.bfloat16, key=16, value=16):
    found = rounded(
        op_inputs("linear_attention" if op == "gate_rank" else op, granularity, 3, key=key, value=value), dtype
    )
    del found["initial_state"]
    if op == "gate_rank":
        found["g_fast"] = found["g_slow"] = found.pop("g")
    return helpers.call_of(op, found)


def test_the_best_that_fits(op):
    """The choice does not depend on the order of registration. After each refusal the next backend is chosen."""
    for best in ("triton", "fla", "native", "chunked", "reference"):
        assert taken("op", "auto", CUDA) == best
        assert ops.available_backends("op", CUDA)[0] == ("mask" if best == "reference" else best)
        op[best] = "not today"


def test_auto_never_takes_the_mask_or_the_interpreter(op):
    assert taken("op", "auto", CPU) == "fla"
    assert "triton" not in ops.available_backends("op", CPU)
    op |= {"fla": "no", "native": "no", "chunked": "no"}
    assert taken("op", "auto", CPU) == "reference"
    assert taken("op", "mask", CPU) == "mask"
    assert taken("op", "triton", CPU) == "triton"


def test_a_name_that_cannot_run_says_why(op):
    op["triton"] = "it is out of order"
    with pytest.raises(CannotRun, match=r"'triton' cannot run this op: it is out of order\. Those .*: auto, fla,"):
        backends.choose("op", "triton", CUDA)
    with pytest.raises(
        ValueError, match=r"unknown backend of op on cuda 'fa'.*mean 'fla'.*: auto, fla, native, chunked"
    ):
        backends.choose("op", "fa", CUDA)
    assert backends.why_not("op", "triton", CUDA) == "it is out of order"
    assert backends.why_not("op", "fla", CUDA) is None


def test_a_single_token_goes_through_the_native_step_or_the_token_loop(op):
    def run(backend, length, cu_seqlens=None):
        q = torch.zeros(1, length, 1, 4)
        tensors = {"q": q, "k": q, "v": q, "g": None}
        return unchecked(backends.dispatch)("op", tensors, None, cu_seqlens, backend, True)[1]

    op["fla"] = "no"
    assert run("auto", 1) == run("auto", 2) == "native"
    op |= {"fla": None, "native": "no"}
    assert run("auto", 1) == "reference"
    assert run("auto", 2) == run("auto", 1, torch.tensor([0, 1])) == "fla"
    assert run("chunked", 1) == "chunked"


def test_limits_see_the_call(op, monkeypatch):
    seen, call = [], call_of("linear_attention")
    backends.implements("op", "fla", print, why_not=lambda op, device, call: seen.append((device, call)))
    backends.why_not("op", "fla", CPU, call)
    assert any(device == CPU and given is call for device, given in seen)
    ops.available_backends("op", "cpu")
    assert seen[-1] == (CPU, None)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("built", [True, False])
def test_on_a_cpu(name, built, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(build, "why_not", lambda: None if built else "not built here")
    first = ["native"] if built and "native" in backends.registered(name) else []
    assert ops.available_backends(name) == [*first, "chunked", *(["mask"] if name == "gate_rank" else []), "reference"]
    assert taken(name, "auto", CPU) == [*first, "chunked"][0]
    for backend in set(backends.registered(name)) - set(ops.available_backends(name)):
        assert_raises(CannotRun, r"CUDA|not built here", backends.choose, name, backend, CPU)


@pytest.mark.parametrize("name", [*ON_A_STATE, "gate_rank"])
def test_native_takes_all_but_float64(name, monkeypatch):
    monkeypatch.setattr(build, "why_not", lambda: None)
    for dtype, expected in ((torch.float32, "native"), (torch.float16, "native"), (torch.float64, "chunked")):
        assert taken(name, "auto", CPU, call_of(name, dtype=dtype)) == expected
    with pytest.raises(CannotRun, match="in one of float32, bfloat16 and float16; got float64"):
        backends.choose(name, "native", CPU, call_of(name, dtype=torch.float64))
    mixed = call_of(name).with_tensors(v=torch.zeros(1, 3, 2, 16))
    assert_raises(CannotRun, "got bfloat16, float32", backends.choose, name, "native", CPU, mixed)


@pytest.mark.parametrize("name", [*ON_A_STATE, "gate_rank"])
def test_public_ops_raise(name):
    call = call_of(name, dtype=torch.float32)
    others = {
        "linear_attention": "g", "delta_rule": "beta g", "dplr": "a b g", "gate_rank": "g_slow g_fast",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"CUDA devices.*Those that can: auto|unknown backend"):
        getattr(ops, name)(
            call["q"], call["k"], call["v"], *(call[other] for other in others[name].split()), backend="fla"
        )


@pytest.mark.parametrize(
    ("name", "fit", "expected"),
    [
        ("linear_attention", {}, "triton"),
        ("linear_attention", {"granularity": "none"}, "triton"),
        ("linear_attention", {"granularity": "vector"}, "triton"),
        ("linear_attention", {"granularity": "vector", "dtype": torch.float32}, "triton"),
        ("linear_attention", {"dtype": torch.float32}, "triton"),
        ("linear_attention", {"dtype": torch.float64}, "chunked"),
        ("linear_attention", {"key": 8}, "triton"),
        ("linear_attention", {"key": 512}, "chunked"),  # V is 16: fla takes multiples of 64 on Hopper
        ("linear_attention", {"key": 512, "value": 64}, "fla"),
        ("delta_rule", {}, "triton"),
        ("delta_rule", {"granularity": "vector"}, "triton"),
        ("delta_rule", {"dtype": torch.float64}, "chunked"),
        ("dplr", {}, "triton"),
        ("dplr", {"granularity": "vector", "dtype": torch.float32}, "triton"),
        ("gate_rank", {}, "triton"),
        ("gate_rank", {"dtype": torch.float32}, "triton"),
        ("gate_rank", {"dtype": torch.float64}, "chunked"),
        ("gate_rank", {"key": 8}, "triton"),
    ],
)
def test_auto_on_a_gpu(name, fit, expected, gpu):
    assert taken(name, "auto", CUDA, call_of(name, **fit)) == expected


def test_listed_on_a_gpu(gpu):
    assert ops.available_backends("linear_attention", "cuda") == ["triton", "fla", "chunked", "reference"]
    assert ops.available_backends("dplr", "cuda:1") == ["triton", "fla", "chunked", "reference"]
    assert ops.available_backends("gate_rank", CUDA) == ["triton", "chunked", "mask", "reference"]
    assert ops.available_backends("causal_conv1d", CUDA) == ["triton", "chunked", "reference"]


@pytest.mark.parametrize("name", ["linear_attention", "delta_rule", "gate_rank"])
def test_the_interpreter_by_name(name, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "triton" not in ops.available_backends(name)
    assert taken(name, "triton", CPU, call_of(name)) == "triton"
    assert taken(name, "auto", CPU, call_of(name)) in ("native", "chunked")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert_raises(CannotRun, "TRITON_INTERPRET=1", backends.choose, name, "triton", CPU, call_of(name))


def test_info_says_why_not(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = {name: (why, missed) for (name, why), missed in refusals("cpu").items()}
    assert found.keys() - {"native"} == {"triton", "fla"}  # native where no kernels are built
    ours = {name for name in OPS.names() if "triton" in OPS[name].backends}
    assert {"linear_attention", "koopman_attention", "causal_conv1d", "rms_norm", "mimo_output"} < ours
    assert set(found["triton"][1]) == ours
    others = {"log_linear_attention", "ridge_attention", "forgetting_attention"}
    assert set(found["fla"][1]) == {*ON_A_STATE, *others}
    assert all("CUDA" in why for name, (why, _) in found.items() if name != "native")


def test_selfcheck_of_some(monkeypatch):
    report = ops.selfcheck(length=5, ops=["gate_rank"], backends=["chunked", "mask"])
    assert report.ok
    assert {(c.op, c.backend) for c in report.checks} == {("gate_rank", "chunked"), ("gate_rank", "mask")}
    assert {c.variant for c in report.checks} == {"linear", "delta", "gain"}
    assert not ops.selfcheck(length=5, backends=["nothing"]).ok


@pytest.mark.parametrize("backend", ["chunked", "mask"])
def test_selfcheck_sees_a_broken_gate_rank(backend, monkeypatch):
    """The error may be in one of the two states alone."""

    def broken(call):
        o, state = right(call)
        slow = torch.arange(state.shape[-2]) >= state.shape[-2] // 2
        return o, torch.where(slow.unsqueeze(-1), 1.001 * state, state)

    right = put_backend(monkeypatch, "gate_rank", backend, broken)
    assert {c.backend for c in ops.selfcheck(length=20, ops=["gate_rank"]).checks if not c.ok} == {backend}


def test_selfcheck_reports_what_breaks_down(monkeypatch):
    def broken(call):
        raise RuntimeError("shared memory exceeded\nby far")

    put_backend(monkeypatch, "dplr", "chunked", broken)
    report = ops.selfcheck(length=5, ops=["dplr"])
    assert not report.ok
    wrong = [check for check in report.checks if not check.ok]
    assert {check.backend for check in wrong} == {"chunked"}
    assert "WRONG (RuntimeError: shared memory exceeded)" in str(wrong[0])


def test_selfcheck_leaves_out_what_a_backend_refuses(monkeypatch):
    def only_float32(op, device, call):
        return None if call is None or call["q"].dtype == torch.float32 else "float32 only"

    put_backend(monkeypatch, "dplr", "chunked", OPS["dplr"].backends["chunked"].function, only_float32)
    report = ops.selfcheck(length=5, ops=["dplr"], backends=["chunked"])
    assert report.ok
    assert {check.dtype for check in report.checks} == {torch.float32}


@pytest.mark.parametrize("kind", ["mps", "xpu"])
@pytest.mark.parametrize("name", sorted(OPS.names()))
def test_other_accelerators_run_plain_pytorch(name, kind):
    """Their tensors go to the chunked form, or to the token loop of an op that has no other."""
    known = {key: entry.function for key, entry in OPS[name].backends.items()}
    assert backends.choose(name, "auto", torch.device(kind)) is known.get("chunked", known["reference"])


def test_cards_of_amd_have_no_capability_of_nvidia(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2")
    fla._capability.cache_clear()
    assert fla._wrong_on_hopper(CUDA, (3, 5, 0), 48, 48, True) is None
    fla._capability.cache_clear()
