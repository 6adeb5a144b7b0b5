"""Every op, backend, granularity and dtype equals the float64 token loop: outputs, states and all gradients."""

from functools import cache

import pytest
import torch
from helpers import (
    GRANULARITIES,
    LOG_DECAYS,
    OPS,
    assert_close,
    assert_same,
    generator,
    op_inputs,
    rounded,
    run_op,
    slices,
    unchecked,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from halflife import ops
from halflife.ops import backend as backends

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}

each_op = pytest.mark.parametrize("op", OPS)
each_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)
each_backend = pytest.mark.parametrize("backend", ops.available_backends("linear_attention"))
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@cache
def oracle(op, granularity, length, dtype, options=()):
    """The float64 token loop on inputs rounded to `dtype`, so that only the computation is judged."""
    arguments = rounded(op_inputs(op, granularity, length, **dict(options)), dtype)
    return run_op(op, {name: x.double() for name, x in arguments.items()}, backend="reference")


def check(op, granularity, length, backend, dtype, chunk_size=64, **options):
    arguments = rounded(op_inputs(op, granularity, length, **options), dtype)
    got = run_op(op, arguments, backend=backend, chunk_size=chunk_size)
    assert got["state"].dtype == got["dinitial_state"].dtype == torch.promote_types(dtype, torch.float32)
    assert got["o"].dtype == got["dq"].dtype == dtype
    assert_close(got, oracle(op, granularity, length, dtype, tuple(options.items())), TOLERANCE[dtype])


@each_op
@each_granularity
@each_backend
@each_dtype
@pytest.mark.parametrize("length", [0, 1, 7, 63, 64, 65, 257])
def test_lengths(op, granularity, backend, dtype, length):
    check(op, granularity, length, backend, dtype, batch=2 if length < 64 else 1)


@each_op
@each_granularity
@each_backend
@each_dtype
@pytest.mark.parametrize(("key", "value"), [(1, 1), (7, 80), (64, 7), (80, 64)])
def test_head_sizes(op, granularity, backend, dtype, key, value):
    check(op, granularity, 37, backend, dtype, key=key, value=value, chunk_size=16)


@each_op
@pytest.mark.parametrize("granularity", ["scalar", "vector"])
@each_backend
@each_dtype
@pytest.mark.parametrize("decay", [*LOG_DECAYS, "mixed"])
def test_decays(op, granularity, backend, dtype, decay):
    check(op, granularity, 70, backend, dtype, decay=decay, chunk_size=32)


@each_op
@each_granularity
@pytest.mark.parametrize("chunk_size", [1, 16, 32, 48, 64, 128])
def test_chunk_size_changes_nothing(op, granularity, chunk_size):
    check(op, granularity, 100, "chunked", torch.float64, chunk_size=chunk_size)


@each_op
@pytest.mark.parametrize("granularity", ["scalar", "vector"])
@each_backend
def test_zero_decay_is_no_decay(op, granularity, backend):
    arguments = op_inputs(op, granularity, 70, decay=0.0)
    with_zeros = run_op(op, arguments, backend=backend, chunk_size=32)
    del arguments["g"], with_zeros["dg"]
    assert_close(with_zeros, run_op(op, arguments, backend=backend, chunk_size=32), 1e-14)


@each_op
@each_granularity
@each_backend
def test_zero_vectors_stay_finite(op, granularity, backend):
    arguments = {name: torch.zeros_like(x) for name, x in op_inputs(op, granularity, 70).items()}
    for x in run_op(op, rounded(arguments, torch.float32), backend=backend).values():
        assert x.isfinite().all()


@each_op
@each_granularity
def test_gradcheck(op, granularity):
    arguments = op_inputs(op, granularity, 5, heads=1, key=2, value=3)
    names = list(arguments)

    def function(*values):
        return OPS[op](**dict(zip(names, values, strict=True)), output_final_state=True, chunk_size=2)

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in arguments.values()])


@each_op
def test_second_derivatives(op):
    """Right by the token loop, refused by the chunked form."""
    arguments = {name: x.requires_grad_() for name, x in op_inputs(op, "scalar", 3, heads=1, key=1, value=1).items()}

    def grad(backend):
        o, _ = OPS[op](**arguments, backend=backend)
        return torch.autograd.grad(o.square().sum(), arguments["q"], create_graph=True)[0]

    assert grad("reference").requires_grad
    with pytest.raises(RuntimeError, match="reference"):
        grad("chunked")


@each_op
@each_granularity
def test_scale_and_state_are_optional(op, granularity):
    arguments = op_inputs(op, granularity, 9)
    initial = arguments.pop("initial_state")
    o, state = OPS[op](**arguments)
    assert state is None
    assert_close(o, OPS[op](**arguments, initial_state=torch.zeros_like(initial), scale=6**-0.5)[0], 1e-15)
    assert_close(o * 6**0.5, OPS[op](**arguments, scale=1)[0], 1e-14)


# ------------------------------------------------------------------------------ cuts, packing, causality


def piece(arguments, tokens, state):
    """The arguments of one piece of the tokens, with a state of its own."""
    parts = {name: x[:, tokens] for name, x in arguments.items() if name != "initial_state"}
    return {**parts, "initial_state": state}


def total_grads(arguments, o, state):
    """Gradients of one fixed loss, by which two ways to the same outputs are compared."""
    draw = generator("pieces")
    loss = sum((x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum() for x in (o, state))
    grads = torch.autograd.grad(loss, list(arguments.values()), allow_unused=True, materialize_grads=True)
    return {"o": o, "state": state, **dict(zip(arguments, grads, strict=True))}


@settings(max_examples=15, deadline=None, database=None, derandomize=True)
@given(st.lists(st.integers(0, 40), max_size=5).map(sorted), st.sampled_from([1, 4, 16]))
@each_op
@each_granularity
def test_cut_anywhere_equals_uncut(op, granularity, cuts, chunk_size):
    arguments = {name: x.requires_grad_() for name, x in op_inputs(op, granularity, 40).items()}
    options = {"output_final_state": True, "chunk_size": chunk_size}
    state, outputs = arguments["initial_state"], []
    for tokens in slices([0, *cuts, 40]):
        o, state = OPS[op](**piece(arguments, tokens, state), **options)
        outputs.append(o)
    got = total_grads(arguments, torch.cat(outputs, 1), state)
    assert_close(got, total_grads(arguments, *OPS[op](**arguments, **options)), 1e-13)


def packed_and_separate(op, granularity, lengths, chunk_size, dtype):
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    arguments = rounded(op_inputs(op, granularity, bounds[-1], sequences=len(lengths)), dtype)
    arguments = {name: x.requires_grad_() for name, x in arguments.items()}
    options = {"output_final_state": True, "chunk_size": chunk_size}
    packed = OPS[op](**arguments, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), **options)
    separate = [
        OPS[op](**piece(arguments, tokens, arguments["initial_state"][row : row + 1]), **options)
        for row, tokens in enumerate(slices(bounds))
    ]
    joined = torch.cat([o for o, _ in separate], 1), torch.cat([state for _, state in separate])
    return total_grads(arguments, *packed), total_grads(arguments, *joined)


@settings(max_examples=15, deadline=None, database=None, derandomize=True)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.sampled_from([1, 4, 16]))
@each_op
@each_granularity
def test_packed_equals_separate(op, granularity, lengths, chunk_size):
    assert_close(*packed_and_separate(op, granularity, lengths, chunk_size, torch.float64), 1e-13)


@each_op
@each_granularity
def test_packed_equals_separate_to_the_bit(op, granularity):
    """Where no sequence is shorter than a chunk the arithmetic is the same."""
    assert_same(*packed_and_separate(op, granularity, [16, 33, 48, 17], 16, torch.float32))


@each_op
@each_backend
def test_packed_nothing(op, backend):
    arguments = op_inputs(op, "scalar", 0, sequences=2)
    o, state = OPS[op](**arguments, cu_seqlens=torch.tensor([0, 0, 0]), output_final_state=True, backend=backend)
    assert o.shape == arguments["v"].shape
    assert_same(state, arguments["initial_state"])


@each_op
@each_granularity
@each_backend
@pytest.mark.parametrize("cut", [1, 17, 64, 100])
def test_prefix_does_not_move_when_the_suffix_does(op, granularity, backend, cut):
    arguments = rounded(op_inputs(op, granularity, 130), torch.float32)
    before, _ = OPS[op](**arguments, chunk_size=32, backend=backend)
    for x in piece(arguments, slice(cut, None), None).values():
        if x is not None:
            x.mul_(3)
    after, _ = OPS[op](**arguments, chunk_size=32, backend=backend)
    assert_same(after[:, :cut], before[:, :cut])
    assert not torch.equal(after[:, cut:], before[:, cut:])


@each_op
@each_granularity
@each_backend
def test_packed_documents_do_not_leak(op, granularity, backend):
    """With a decay so slow that a leak would show; the gradients must not cross either."""
    bounds, others = [0, 20, 57, 90], [0, 2]
    arguments = op_inputs(op, granularity, 90, sequences=3, decay=-1e-4)
    options = {"cu_seqlens": torch.tensor(bounds), "chunk_size": 16, "output_final_state": True, "backend": backend}
    changed = {name: x.clone() for name, x in arguments.items()}
    for x in piece(changed, slice(20, 57), changed["initial_state"][1:2]).values():
        x.mul_(2).add_(0.1)
    changed = {name: x.requires_grad_() for name, x in changed.items()}
    (o, state), (o2, state2) = OPS[op](**arguments, **options), OPS[op](**changed, **options)
    for row in others:
        tokens = slices(bounds)[row]
        assert_same({"o": o2[:, tokens], "state": state2[row]}, {"o": o[:, tokens], "state": state[row]})
    loss = o2[:, :20].sum() + o2[:, 57:].sum() + state2[others].sum()
    grads = dict(zip(changed, torch.autograd.grad(loss, list(changed.values())), strict=True))
    for x in piece(grads, slice(20, 57), grads["initial_state"][1]).values():
        assert x.count_nonzero() == 0


# ------------------------------------------------------------------------- autocast, backends, errors


@each_op
@each_granularity
@each_backend
def test_autocast_changes_nothing(op, granularity, backend):
    """float32 inputs stay float32 throughout, in a backward pass inside the context too."""
    arguments = rounded(op_inputs(op, granularity, 70), torch.float32)
    plain = run_op(op, arguments, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(run_op(op, arguments, backend=backend), plain)


@each_op
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 5, 2, 3)}, "q and k must both be"),
        ({"q": torch.zeros(5, 2, 4)}, "q and k must both be"),
        ({"v": torch.zeros(1, 4, 2, 3)}, "v must be"),
        ({"g": torch.zeros(1, 5, 1)}, "g must be None"),
        ({"g": torch.zeros(1, 5, 2, 3)}, "g must be None"),
        ({"initial_state": torch.zeros(1, 2, 3, 4)}, "initial_state must be"),
        ({"cu_seqlens": torch.tensor([0, 5]), "initial_state": torch.zeros(2, 2, 4, 3)}, "initial_state must be"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "rise from 0 to T = 5"),
        ({"cu_seqlens": torch.tensor([1, 5])}, "rise from 0"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 5])}, "rise from 0"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "must be integers"),
        ({"cu_seqlens": torch.tensor([[0, 5]])}, "must be integers"),
        ({"backend": "cuda"}, "unknown backend.*auto, chunked, reference"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
    ],
)
def test_errors_say_what_is_wrong(op, change, message):
    arguments = rounded(op_inputs(op, "none", 5, key=4, value=3), torch.float32)
    with pytest.raises(ValueError, match=message):
        unchecked(OPS[op])(**{**arguments, **change})


@each_op
def test_packed_batch_must_be_one(op):
    with pytest.raises(ValueError, match="batch size 1"):
        OPS[op](**op_inputs(op, "none", 5, batch=2), cu_seqlens=torch.tensor([0, 5]))


def test_beta_must_fit():
    arguments = op_inputs("delta_rule", "none", 5)
    with pytest.raises(ValueError, match="beta must be"):
        unchecked(ops.delta_rule)(**{**arguments, "beta": arguments["beta"][..., :1]})


def test_annotations_are_checked_under_pytest():
    """Otherwise the shapes written in signatures could be wrong."""
    with pytest.raises(TypeCheckError):
        ops.linear_attention(torch.zeros(1, 5, 2, 4), torch.zeros(1, 4, 2, 4), torch.zeros(1, 5, 2, 3))


@pytest.mark.parametrize("op", [*OPS, "causal_conv1d"])
def test_available_backends(op):
    assert op in ops.ops()
    assert {"reference", "chunked"} <= set(ops.available_backends(op))
    assert ops.available_backends(op)[-1] == "reference"


def test_selfcheck_passes_here():
    report = ops.selfcheck("cpu")
    assert report.ok, str(report)
    assert {check.op for check in report.checks} == set(OPS)


@each_op
def test_selfcheck_sees_a_broken_backend(op, monkeypatch):
    right = backends._OPS[op]["chunked"]

    def broken(*arguments):
        o, state = right(*arguments)
        return o + 1e-3, state

    monkeypatch.setitem(backends._OPS[op], "chunked", broken)
    report = ops.selfcheck("cpu", length=20)
    assert not report.ok
    assert {(c.op, c.backend) for c in report.checks if not c.ok} == {(op, "chunked")}
    assert "WRONG" in str(report)
