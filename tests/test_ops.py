"""Every op, backend, granularity and dtype equals the float64 token loop in outputs, states and all gradients."""

from functools import cache

import pytest
import torch
from helpers import (
    GRANULARITIES,
    LOG_DECAYS,
    OPS,
    assert_close,
    assert_raises,
    assert_same,
    bound,
    cases,
    each_backend,
    each_granularity,
    each_op,
    generator,
    leaves,
    op_inputs,
    put_backend,
    rounded,
    run_op,
    unchecked,
    widest,
    with_grads,
)
from jaxtyping import TypeCheckError
from pairwise import crossed, slow_beyond

from halflife import ops, preset
from halflife.lab.theory.approximation import adapted_rates

# The worst error measured over this file's cases, relative to the largest entry of a tensor. Four times that is
# allowed. In float64, 70 steps of −750 (the lower bound of a log-decay) cost a slow decay beside them two digits.
WORST = {
    "linear_attention": {torch.float64: 4.0e-15, torch.float32: 9.4e-7, torch.bfloat16: 3.6e-3},
    "delta_rule": {torch.float64: 4.6e-15, torch.float32: 2.9e-6, torch.bfloat16: 3.8e-3},
    "dplr": {torch.float64: 4.5e-15, torch.float32: 1.1e-6, torch.bfloat16: 3.6e-3},
}
WORST_WITH_RESETS = 6.3e-13
DTYPES = (torch.float64, torch.float32, torch.bfloat16)

# The others are compared with the float64 token loop.
FORMS = [
    (backend, dtype)
    for backend in ops.available_backends("linear_attention") for dtype in DTYPES
    if (backend, dtype) not in (("reference", torch.float64), ("native", torch.float64))
]  # fmt: skip


@cache
def oracle(op, granularity, length, dtype, options=()):
    """Run the float64 token loop on inputs rounded to `dtype`, so that only the computation is compared."""
    arguments = rounded(op_inputs(op, granularity, length, **dict(options)), dtype)
    return run_op(op, {name: x.double() for name, x in arguments.items()}, backend="reference")


def check(op, granularity, length, backend, dtype, chunk_size=64, **options):
    arguments = rounded(op_inputs(op, granularity, length, **options), dtype)
    got = run_op(op, arguments, backend=backend, chunk_size=chunk_size)
    assert got["state"].dtype == got["dinitial_state"].dtype == torch.promote_types(dtype, torch.float32)
    assert got["o"].dtype == got["dq"].dtype == dtype
    worst = WORST[op][dtype]
    if options.get("decay") in (-1000, -torch.inf, "mixed"):
        worst = max(worst, WORST_WITH_RESETS)
    assert_close(got, oracle(op, granularity, length, dtype, tuple(options.items())), 4 * worst)


# Rows with each value once have each form of each op. The values that come first stand in most rows.
OP_FORMS = [(op, *form) for op in OPS for form in FORMS]


@crossed(strength=1, form=OP_FORMS, granularity=GRANULARITIES[::-1], length=[65, 7, 0, 1, 63, 64, 257])
def test_lengths(form, granularity, length):
    op, backend, dtype = form
    check(op, granularity, length, backend, dtype, batch=2 if length < 64 else 1)


@crossed(strength=1, form=OP_FORMS, granularity=GRANULARITIES[::-1], sizes=[(7, 80), (1, 1), (64, 7), (80, 64)])
def test_head_sizes(form, granularity, sizes):
    (op, backend, dtype), (key, value) = form, sizes
    check(op, granularity, 37, backend, dtype, batch=3, key=key, value=value, chunk_size=16)


@crossed(op=OPS, granularity=GRANULARITIES, form=[form for form in FORMS if form[0] == "native"] or FORMS[:1])
def test_large_heads(op, granularity, form):
    check(op, granularity, 20, *form, key=256, value=256, chunk_size=16)


@crossed(strength=1, form=OP_FORMS, granularity=["vector", "scalar"], decay=["mixed", *LOG_DECAYS])
def test_decays(form, granularity, decay):
    op, backend, dtype = form
    check(op, granularity, 70, backend, dtype, decay=decay, chunk_size=32)


@each_op
@pytest.mark.parametrize("granularity", ["scalar", "vector"])
@each_backend
def test_a_full_reset_has_no_gradient(op, granularity, backend):
    """It is exactly 0, without the rounding error of terms that cancel."""
    arguments = rounded(op_inputs(op, granularity, 70, decay="mixed"), torch.float32)
    gradient = run_op(op, arguments, backend=backend)["dg"]
    assert gradient[arguments["g"] <= -1000].count_nonzero() == 0
    assert gradient[arguments["g"] > -1].any()


@each_op
@each_granularity
@pytest.mark.parametrize("chunk_size", slow_beyond([1, 16, 48, 128], [1, 16, 32, 48, 64, 128]))
def test_chunk_size_changes_nothing(op, granularity, chunk_size):
    check(op, granularity, 100, "chunked", torch.float64, chunk_size=chunk_size)


@each_op
@pytest.mark.parametrize("granularity", ["scalar", "vector"])
@each_backend
def test_zero_decay_is_no_decay(op, granularity, backend):
    arguments = widest(backend, op_inputs(op, granularity, 70, decay=0.0))
    with_zeros = run_op(op, arguments, backend=backend, chunk_size=32)
    del arguments["g"], with_zeros["dg"]
    assert_close(with_zeros, run_op(op, arguments, backend=backend, chunk_size=32), bound(backend, 1e-14))


@each_op
@each_granularity
@each_backend
def test_zero_vectors_stay_finite(op, granularity, backend):
    arguments = {name: torch.zeros_like(x) for name, x in op_inputs(op, granularity, 70).items()}
    for x in run_op(op, rounded(arguments, torch.float32), backend=backend).values():
        assert x.isfinite().all()


@each_op
@each_granularity
@pytest.mark.parametrize("fast", slow_beyond([True], [True, False]))
def test_gradcheck(op, granularity, fast):
    """Along random directions, and entry by entry."""
    arguments = op_inputs(op, granularity, 5, heads=1, key=2, value=3)
    names = list(arguments)

    def function(*values):
        return OPS[op](**dict(zip(names, values, strict=True)), output_final_state=True, chunk_size=2)

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in arguments.values()], fast_mode=fast)


@each_op
def test_second_derivatives(op):
    """The token loop gives the right ones, and the chunked form refuses."""
    arguments = leaves(op_inputs(op, "scalar", 3, heads=1, key=1, value=1))

    def grad(backend):
        o, _ = OPS[op](**arguments, backend=backend)
        return torch.autograd.grad(o.square().sum(), arguments["q"], create_graph=True)[0]

    assert grad("reference").requires_grad
    assert_raises(RuntimeError, "reference", grad, "chunked")


@each_granularity
@each_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gain_multiplies_values(granularity, backend, dtype):
    """Of grouped queries in tensors of other strides, over several chunks."""
    if backend == "native" and dtype == torch.float64:
        return
    given = rounded(op_inputs("linear_attention", granularity, 70, batch=2, heads=4, value=20), dtype)
    given["q"] = given["q"][:, :, :2]
    given["gain"] = torch.rand(2, 70, 8, generator=generator("gain")).to(given["initial_state"])[..., ::2]
    got = run_op("linear_attention", given, backend=backend, chunk_size=16)
    assert got["dgain"].dtype == given["gain"].dtype
    exact = leaves({name: x.double() for name, x in given.items()})
    product = {name: x for name, x in exact.items() if name != "gain"}
    product["v"] = exact["v"] * exact["gain"].unsqueeze(-1)
    with_product = ops.linear_attention(**product, output_final_state=True, backend="reference")
    assert_close(got, with_grads(with_product, exact), 4 * WORST["linear_attention"][dtype])


@each_op
@each_granularity
def test_scale_and_state_are_optional(op, granularity):
    arguments = op_inputs(op, granularity, 9)
    initial = arguments.pop("initial_state")
    o, state = OPS[op](**arguments)
    assert state is None
    assert_close(o, OPS[op](**arguments, initial_state=torch.zeros_like(initial), scale=6**-0.5)[0], 1e-15)
    assert_close(o * 6**0.5, OPS[op](**arguments, scale=1)[0], 1e-14)


@each_op
@each_granularity
@each_backend
def test_autocast_changes_nothing(op, granularity, backend):
    """float32 inputs stay float32 in the forward pass, and in a backward pass inside the context."""
    arguments = rounded(op_inputs(op, granularity, 70), torch.float32)
    plain = run_op(op, arguments, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(run_op(op, arguments, backend=backend), plain)


@each_op
@cases(
    "change, message",
    ({"k": torch.zeros(1, 5, 2, 3)}, r"k must be \[B, T, G, K\] = \[1, 5, G, 4\], where .*; got \[1, 5, 2, 3\]"),
    ({"k": torch.zeros(1, 5, 3, 4)}, r"k must be .*, where G divides H = 2; got \[1, 5, 3, 4\]"),
    ({"q": torch.zeros(5, 2, 4)}, r"q must be \[B, T, G, K\]"),
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
    ({"backend": "cuda"}, "unknown backend.*auto, .*chunked, reference"),
    ({"chunk_size": 0}, "chunk_size must be an integer of at least 1"),
)
def test_errors_say_what_is_wrong(op, change, message):
    arguments = rounded(op_inputs(op, "none", 5, key=4, value=3), torch.float32)
    assert_raises(ValueError, message, unchecked(OPS[op]), **{**arguments, **change})


@each_op
def test_packed_batch_must_be_one(op):
    with pytest.raises(ValueError, match="batch size 1"):
        OPS[op](**op_inputs(op, "none", 5, batch=2), cu_seqlens=torch.tensor([0, 5]))


def test_beta_must_fit():
    arguments = op_inputs("delta_rule", "none", 5)
    with pytest.raises(ValueError, match="beta must be"):
        unchecked(ops.delta_rule)(**{**arguments, "beta": arguments["beta"][..., :1]})


def test_annotations_are_checked_under_pytest():
    """This fails if the shapes in signatures, or the other types, are not checked."""
    with pytest.raises(TypeCheckError):
        adapted_rates(torch.zeros(2, 3), 1.0)
    assert_raises(TypeError, "violates type hint", preset, 3)


@pytest.mark.parametrize("op", [*OPS, "gate_rank", "koopman_attention", "causal_conv1d"])
def test_available_backends(op):
    assert op in ops.ops()
    assert {"reference", "chunked"} <= set(ops.available_backends(op))
    assert ops.available_backends(op)[-1] == "reference"


@pytest.mark.slow
def test_selfcheck_passes_here():
    report = ops.selfcheck("cpu")
    assert report.ok, str(report)
    assert {check.op for check in report.checks} == set(ops.ops())


def test_selfcheck_of_a_few_tokens():
    """No query of Koopman attention reads an operator then, so its gradients are 0."""
    report = ops.selfcheck("cpu", length=9, ops=["koopman_attention"])
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "op", slow_beyond(("gate_rank", "koopman_attention"), [*OPS, "gate_rank", "koopman_attention"])
)
def test_selfcheck_sees_a_broken_backend(op, monkeypatch):
    def broken(*arguments):
        o, *rest = right(*arguments)
        return 1.001 * o, *rest

    right = put_backend(monkeypatch, op, "chunked", broken)
    report = ops.selfcheck("cpu", length=20, ops=[op])  # ridge attention reads by linear attention
    assert not report.ok
    assert {(c.op, c.backend) for c in report.checks if not c.ok} == {(op, "chunked")}
    assert "WRONG" in str(report)
