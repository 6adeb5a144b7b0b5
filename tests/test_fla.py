"""The adapter to fla-core, as far as a CPU can test it: conventions against fla's plain recurrences, and limits."""

import importlib
import inspect
import warnings

import helpers
import pytest
import torch
from helpers import (
    OPS,
    SPECS,
    assert_close,
    assert_raises,
    cases,
    each_granularity,
    each_op,
    fla_module,
    on_linux,
    op_inputs,
    put_backend,
    relative_error,
    rounded,
    run_op,
    slices,
)

from halflife import LanguageModel, preset
from halflife.layers.parts import set_backend
from halflife.ops.backends import dispatch as backends
from halflife.ops.backends import fla
from halflife.ops.backends.dispatch import CannotRun
from halflife.ops.call import Call
from halflife.packing import Packing

# Both sides compute in float32. The tolerance is four times the worst measured error, relative to the largest entry.
TOLERANCE = 4 * 3.8e-7
CUDA = torch.device("cuda")


def heads_first(function):
    """Adapt a function that takes and returns `[B, H, T, …]` and scales by K^−½ itself."""

    def call(q, k, v, *, scale, initial_state, output_final_state, **rest):
        q = q * (scale * q.shape[-1] ** 0.5)
        swapped = {name: x.transpose(1, 2) for name, x in {"q": q, "k": k, "v": v, **rest}.items()}
        o, state = function(**swapped, initial_state=initial_state, output_final_state=output_final_state)
        return o.transpose(1, 2), state

    return call


def undecayed(function):
    """Adapt a recurrence that needs zeros to the kernel's `g=None`."""
    return lambda q, k, v, g, **rest: function(q, k, v, q.new_zeros(q.shape[:3]) if g is None else g, **rest)


def unscaled(function):
    """Adapt a recurrence that scales by K^−½ itself and names its decay gk."""
    return lambda q, k, v, g, scale, **rest: function(q * (scale * q.shape[-1] ** 0.5), k, v, gk=g, **rest)


def renamed(function):
    return lambda a, b, **rest: function(alpha=a, beta=b, **rest)


# kernel → module and name of fla's plain recurrence, and the function that adapts its arguments
KERNELS = {
    "simple_gla.chunk_simple_gla": ("simple_gla.naive", "naive_recurrent_simple_gla", undecayed),
    "gla.chunk_gla": ("gla.naive", "naive_recurrent_gla", unscaled),
    "delta_rule.chunk_delta_rule": ("delta_rule.naive", "delta_rule_recurrence", heads_first),
    "gated_delta_rule.chunk_gated_delta_rule": ("gated_delta_rule.naive", "naive_recurrent_gated_delta_rule", None),
    "kda.chunk_kda": ("kda.naive", "naive_recurrent_kda", None),
    "generalized_delta_rule.chunk_dplr_delta_rule": (
        "generalized_delta_rule.dplr.naive", "dplr_recurrence", lambda function: heads_first(renamed(function)),
    ),
}  # fmt: skip


def stand_in(kernel, recurrence):
    """Return `recurrence` with the kernel's signature. It checks the kernel's demands on its arguments."""
    signature = inspect.signature(kernel)

    def call(*positional, **named):
        given = {name: None for name in ("g", "initial_state", "cu_seqlens") if name in signature.parameters}
        given |= signature.bind(*positional, **named).arguments
        cu_seqlens, state = given.pop("cu_seqlens"), given["initial_state"]
        assert type(given["scale"]) is float
        assert state is None or state.dtype == torch.float32
        assert all(given[name].isfinite().all() for name in ("g", "gk") if given.get(name) is not None)
        if cu_seqlens is None:
            return recurrence(**given)
        assert cu_seqlens.dtype == torch.int64
        results = []
        for row, part in enumerate(slices(cu_seqlens.tolist())):
            tensors = {n: x[:, part] for n, x in given.items() if isinstance(x, torch.Tensor) and x is not state}
            first = None if state is None else state[row : row + 1]
            results.append(recurrence(**{**given, **tensors, "initial_state": first}))
        return torch.cat([o for o, _ in results], 1), torch.cat([final for _, final in results])

    return call


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Let backend="fla" run on a CPU: recurrences replace the kernels, without limits. Returns the kernels called."""
    called = []
    for name, (where, recurrence, wrap) in KERNELS.items():
        function = getattr(fla_module(where), recurrence)
        path, _, kernel = name.rpartition(".")
        replacement = stand_in(getattr(fla_module(path), kernel), wrap(function) if wrap else function)

        def record(*arguments, name=name, replacement=replacement, **options):
            called.append(name)
            return replacement(*arguments, **options)

        monkeypatch.setattr(fla_module(path), kernel, record)
    for op in OPS:
        put_backend(monkeypatch, op, "fla", SPECS[op].backends["fla"].function)
    return called


EXPECTED = {
    ("linear_attention", "none"): "simple_gla.chunk_simple_gla",
    ("linear_attention", "scalar"): "simple_gla.chunk_simple_gla",
    ("linear_attention", "vector"): "gla.chunk_gla",
    ("delta_rule", "none"): "delta_rule.chunk_delta_rule",
    ("delta_rule", "scalar"): "gated_delta_rule.chunk_gated_delta_rule",
    ("delta_rule", "vector"): "kda.chunk_kda",
}


@on_linux
@each_op
@each_granularity
@pytest.mark.parametrize("scale", [None, 1])
@pytest.mark.parametrize("with_state", [True, False])
def test_equals_the_token_loop(op, granularity, scale, with_state, on_a_cpu):
    arguments = rounded(op_inputs(op, granularity, 40, batch=2), torch.float32)
    if not with_state:
        del arguments["initial_state"]
    got = run_op(op, arguments, scale=scale, backend="fla")
    assert on_a_cpu == [EXPECTED.get((op, granularity), "generalized_delta_rule.chunk_dplr_delta_rule")]
    assert_close(got, run_op(op, arguments, scale=scale, backend="reference"), TOLERANCE)


@each_op
@each_granularity
def test_groups(op, granularity, machine):
    """The gated delta rule takes them, if q and k have equally many; the other kernels would read other heads."""
    machine()
    call = call_of(op, granularity, heads=4)
    for q, k in ((2, 2), (1, 4), (4, 2)):
        given = call.with_tensors(q=call["q"][:, :, :q], k=call["k"][:, :, :k])
        reason = fla.why_not(op, CUDA, given)
        if op == "delta_rule" and granularity != "none" and q == k:
            assert reason is None
        else:
            assert f"q and k have {q} and {k} for 4 of v" in reason


@on_linux
@each_op
@each_granularity
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed(op, granularity, dtype, on_a_cpu):
    bounds = torch.tensor([0, 1, 20, 20, 40], dtype=dtype)
    arguments = rounded(op_inputs(op, granularity, 40, sequences=4), torch.float32)
    got = run_op(op, arguments, cu_seqlens=bounds, backend="fla")
    assert_close(got, run_op(op, arguments, cu_seqlens=bounds, backend="reference"), TOLERANCE)


@on_linux
def test_layers_share_the_boundaries(on_a_cpu, monkeypatch):
    """fla finds what it computed from them for the first layer. There it waits for a device that alone knows them."""
    monkeypatch.setattr(Packing, "is_known", False)
    index, kernels, waits = fla_module("utils.index"), fla_module("gla"), []
    count, run = index._segmented_arange, kernels.chunk_gla
    monkeypatch.setattr(index, "_segmented_arange", lambda counts: waits.append(1) or count(counts))

    def chunk_gla(*arguments, cu_seqlens, **options):
        index.prepare_chunk_indices(cu_seqlens, 64)
        return run(*arguments, cu_seqlens=cu_seqlens, **options)

    monkeypatch.setattr(kernels, "chunk_gla", chunk_gla)
    model = LanguageModel(preset("gla", hidden_size=32, num_layers=3, vocab_size=8, num_heads=2))
    set_backend(model, "fla")
    for bounds in (torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor([0, 5, 9])):
        model(torch.zeros(1, 9, dtype=torch.long), cu_seqlens=bounds)
    assert (len(on_a_cpu), len(waits)) == (6, 2)


@on_linux
@pytest.mark.parametrize(("op", "chunk", "index"), [
    ("linear_attention", 64, [[0, 0], [1, 0], [1, 1], [3, 0]]),
    ("dplr", 16, [[0, 0], *([1, i] for i in range(5)), [3, 0]]),
])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"cu_seqlens_cpu": None}])
def test_fla_does_not_wait_for_lengths_that_the_host_knows(op, chunk, index, options, monkeypatch):
    """Tensors of the meta device have no values that could be waited for."""
    found, given = [], call_of(op, "none", length=80, batch=1).tensors
    for device in ("cpu", "meta"):
        packing = Packing.of(torch.tensor([0, 1, 66, 66, 80]), 1, 80).to(device)
        tensors = {name: None if x is None else x.to(device) for name, x in given.items()}
        bounds = fla._bounds(Call.of(op, tensors, cu_seqlens=packing))
        with monkeypatch.context() as inside:
            inside.setattr(fla_module("utils.index"), "_segmented_arange", lambda _: pytest.fail("computed again"))
            found.append(fla_module("utils.index").prepare_chunk_indices(bounds, chunk, **options))
    assert found[0].tolist() == index
    assert found[1].shape == found[0].shape


@on_linux
@each_op
@pytest.mark.parametrize("granularity", ["scalar", "vector"])
def test_full_resets(op, granularity, on_a_cpu):
    """−inf reaches the kernels as a finite number. The gradient of such a log-decay is exactly 0."""
    arguments = rounded(op_inputs(op, granularity, 40, decay="mixed"), torch.float32)
    got = run_op(op, arguments, backend="fla")
    expected = run_op(op, arguments, backend="reference")
    assert got["dg"][arguments["g"] <= -1000].count_nonzero() == 0
    assert_close(got, expected, TOLERANCE)


@on_linux
@each_op
@each_granularity
@pytest.mark.parametrize("packed", [False, True])
def test_as_an_op_of_a_compiler(op, granularity, packed, on_a_cpu, monkeypatch):
    """The black box of compiled code gives what the kernels give, with gradients of each input."""
    bounds = torch.tensor([0, 7, 7, 20]) if packed else None
    arguments = rounded(op_inputs(op, granularity, 20, sequences=3 if packed else 1), torch.float32)
    if packed:
        del arguments["initial_state"]
    expected = run_op(op, arguments, cu_seqlens=bounds, backend="fla")
    count = len(on_a_cpu)
    monkeypatch.setattr(fla.torch.compiler, "is_compiling", lambda: True)
    assert_close(run_op(op, arguments, cu_seqlens=bounds, backend="fla"), expected, TOLERANCE)
    assert len(on_a_cpu) == 3 * count  # its backward pass runs the forward pass again


@on_linux
@each_op
def test_low_precision_keeps_its_dtypes(op, on_a_cpu):
    """Inputs keep their dtype, decays and states are float32, and outputs have the dtype of v."""
    arguments = rounded(op_inputs(op, "scalar", 20), torch.bfloat16)
    got = run_op(op, arguments, backend="fla")
    assert got["o"].dtype == got["dq"].dtype == torch.bfloat16
    assert got["state"].dtype == got["dg"].dtype == torch.float32
    # Both sides round inputs and outputs only. o is rounded to bfloat16, by half a unit in the last of 8 bits.
    assert relative_error(got["o"], run_op(op, arguments, backend="reference")["o"]) < 2**-8


WIDE = {"key": 64, "value": 64}


def call_of(op="linear_attention", granularity="scalar", dtype=torch.bfloat16, gradients=True, **sizes):
    """Return a call of the op as `dispatch` makes it."""
    found = rounded(op_inputs(op, granularity, **{"length": 3, "key": 16, "value": 16, **sizes}), dtype)
    del found["initial_state"]
    return helpers.call_of(op, {name: x.detach().requires_grad_(gradients) for name, x in found.items()})


@each_op
@each_granularity
def test_fits(op, granularity, machine):
    machine()
    assert fla.why_not(op, CUDA) is None
    assert fla.why_not(op, CUDA, call_of(op, granularity)) is None
    assert fla.why_not(op, CUDA, call_of(op, granularity, torch.float16, key=256, value=256)) is None


@each_op
@cases(
    "change, message",
    ({"dtype": torch.float32}, "bfloat16 or float16.*torch.float32"),
    ({"dtype": torch.float64}, "torch.float64"),
    ({"length": 0}, "no tokens"),
    ({"key": 8}, "K is 8"),
    ({"key": 17}, "K is 17"),
    ({"value": 6}, "V is 6"),
    ({"batch": 3, "heads": 30_000, "length": 1, "key": 16, "value": 16}, "90000"),
)
def test_shapes_and_dtypes_refused(op, change, message, machine):
    machine()
    assert_raises(CannotRun, message, backends.choose, op, "fla", CUDA, call_of(op, **change))


def test_large_heads(machine):
    machine()
    assert fla.why_not("linear_attention", CUDA, call_of(key=512)) is None
    for op in ("delta_rule", "dplr"):
        assert "at most 256 rows" in fla.why_not(op, CUDA, call_of(op, key=258))


def test_one_dtype(machine):
    machine()
    call = call_of()
    assert "one dtype" in fla.why_not(call.op, CUDA, call.with_tensors(v=call["v"].half()))


@pytest.mark.parametrize("triton", [(3, 4, 0), (3, 6, 0), (3, 7, 0)])
def test_gated_gradients_on_hopper(triton, machine):
    """Calls with scalar decay and gradients are refused, because fla's kernels raise (earlier ones were wrong)."""
    machine(capability=9, triton=triton)
    for op in ("linear_attention", "delta_rule"):
        assert "wrong on Hopper" in fla.why_not(op, CUDA, call_of(op, **WIDE))
        for fit in ({"gradients": False}, {"granularity": "none"}, {"granularity": "vector"}):
            assert fla.why_not(op, CUDA, call_of(op, **fit, **WIDE)) is None
        with torch.no_grad():
            assert fla.why_not(op, CUDA, call_of(op, **WIDE)) is None
    assert fla.why_not("dplr", CUDA, call_of("dplr")) is None
    assert fla.why_not("linear_attention", CUDA) is None


@cases("capability, triton", (8, (3, 6, 0)), (9, (3, 3, 1)), (9, (3, 7, 1)), (0, (3, 6, 0)), (10, (3, 8, 0)))
def test_gated_gradients_elsewhere(capability, triton, machine):
    machine(capability=capability, triton=triton)
    for op in ("linear_attention", "delta_rule"):
        assert fla.why_not(op, CUDA, call_of(op, **WIDE)) is None


@pytest.mark.parametrize("granularity", ["none", "scalar"])
def test_heads_that_crash_on_hopper(granularity, machine):
    """K = 32 and V = 48 gave an illegal memory access on an H100."""
    machine(capability=9)
    for op in ("linear_attention", "delta_rule"):
        for sizes in ({"key": 32, "value": 64}, {"key": 64, "value": 48}):
            assert "crash on Hopper" in fla.why_not(op, CUDA, call_of(op, granularity, **sizes))
        assert fla.why_not(op, CUDA, call_of(op, granularity, **WIDE)) is None
    assert fla.why_not("dplr", CUDA, call_of("dplr", granularity, key=32, value=48)) is None


def test_delta_rule_on_blackwell(machine):
    machine(capability=10, triton=(3, 7, 1))
    assert "Blackwell" in fla.why_not("delta_rule", CUDA, call_of("delta_rule", gradients=False))
    assert fla.why_not("linear_attention", CUDA, call_of()) is None


@pytest.mark.parametrize("release", [(0, 5, 2), (0, 7, 0), (1, 0)])
def test_versions(release, machine):
    machine(release=release)
    message = fla.why_not("linear_attention", CUDA)
    assert "fla-core ≥ 0.6, < 0.7" in message
    assert ".".join(map(str, release)) in message
    assert "fla" not in backends.available_backends("linear_attention", "cuda")


@each_op
def test_no_gpu(op, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(CannotRun, match=r"not on cpu.*Those that can: auto, .*chunked, reference"):
        backends.choose(op, "fla", torch.device("cpu"), call_of(op))
    assert "fla" not in backends.available_backends(op, "cpu")


@on_linux
def test_installed_versions_are_read():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        release, triton = fla._versions()
    assert fla.VERSIONS[0] <= release < fla.VERSIONS[1]
    assert triton >= (3, 2)


def test_fla_not_installed_or_broken(monkeypatch):
    fla._versions.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in fla.why_not("dplr", CUDA)

    def broken(name):
        raise OSError("no driver")

    fla._versions.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", broken)
    assert "cannot be imported: OSError: no driver" in fla.why_not("dplr", CUDA)
    fla._versions.cache_clear()


@pytest.mark.parametrize(("text", "release"), [("3.7.1", (3, 7, 1)), ("3.4.0+git1a2b", (3, 4, 0)), ("0.6", (0, 6))])
def test_release(text, release):
    assert fla._release(text) == release
