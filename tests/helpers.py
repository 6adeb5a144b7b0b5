"""What the test files share."""

import inspect
import zlib
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from halflife import ops

OPS = {"linear_attention": ops.linear_attention, "delta_rule": ops.delta_rule, "dplr": ops.dplr}
GRANULARITIES = ("none", "scalar", "vector")

each_op = pytest.mark.parametrize("op", OPS)
each_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)
each_backend = pytest.mark.parametrize("backend", ops.available_backends("linear_attention"))

# Native kernels compute in float32 and bfloat16 alone.
WIDEST = {"native": torch.float32}


def widest(backend, arguments):
    """float64 arguments in the widest dtype that `backend` takes."""
    return rounded(arguments, WIDEST.get(backend, torch.float64))


def bound(backend, exact):
    """The tolerance of a test that is `exact` in float64: four times the worst measured for a narrower backend."""
    return 4 * 7.0e-7 if backend in WIDEST else exact


# Log-decays from none at all to a full reset, as models meet them.
LOG_DECAYS = (0.0, -1e-6, -0.05, -5.0, -20.0, -1000.0, -torch.inf)


def unchecked(function):
    """The function without what is wrapped around it: for ours, the shape checks of `conftest.py`."""
    return inspect.unwrap(function)


def generator(*key):
    """Random numbers that depend on `key` alone, not on which tests ran before."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def op_inputs(op, granularity, length, *, batch=1, heads=2, key=6, value=5, decay=None, sequences=None):
    """Arguments of an op in float64 as a dict; `decay` is one log-decay, "mixed" ones, or None for moderate ones."""
    draw = generator(op, granularity, length, key, value, decay)

    def randn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    shape = (batch, length, heads)
    arguments = {
        "q": randn(*shape, key),
        "k": F.normalize(randn(*shape, key), dim=-1),
        "v": randn(*shape, value),
        "initial_state": randn(sequences or batch, heads, key, value),
    }
    if op == "delta_rule":
        arguments["beta"] = 2 * randn(*shape).sigmoid()  # above 1: negative eigenvalues
    if op == "dplr":
        # RWKV-7's: the removed direction has norm 1, its rate lies between 0 and 1, so that the state cannot grow.
        direction = F.normalize(randn(*shape, key), dim=-1)
        arguments |= {"a": -direction, "b": direction * randn(*shape, key).sigmoid()}
    if granularity != "none":
        size = (*shape, key) if granularity == "vector" else shape
        if decay is None:
            g = -randn(*size).exp() / 4
        elif decay == "mixed":
            g = torch.tensor(LOG_DECAYS, dtype=torch.float64)[torch.randint(len(LOG_DECAYS), size, generator=draw)]
        else:
            g = torch.full(size, decay, dtype=torch.float64)
        arguments["g"] = g
    return arguments


def rounded(arguments, dtype):
    """Arguments in `dtype`; the state and the log-decays never narrower than float32, as layers give them."""
    wide = torch.promote_types(dtype, torch.float32)
    return {name: x.to(wide if name in ("g", "initial_state") else dtype) for name, x in arguments.items()}


def with_grads(outputs, arguments):
    """`{"o", "state", "d…" for every argument}`, the gradients those of one fixed random sum of `(o, state)`."""
    outputs = {name: x for name, x in zip(("o", "state"), outputs, strict=True) if x is not None}
    draw = generator("loss")
    # Drawn in bfloat16, so that every dtype has the same weights to the bit.
    loss = sum((x * torch.randn(x.shape, generator=draw).bfloat16().to(x.dtype)).sum() for x in outputs.values())
    # With no tokens, the token loop does not use its inputs at all.
    grads = torch.autograd.grad(loss, list(arguments.values()), allow_unused=True, materialize_grads=True)
    return {**outputs, **{f"d{name}": grad for name, grad in zip(arguments, grads, strict=True)}}


def leaves(arguments):
    """The same arguments, each wanting a gradient."""
    return {name: x.detach().requires_grad_() for name, x in arguments.items()}


def run_op(op, arguments, **options):
    """Outputs and gradients of one call, `with_grads`."""
    arguments = leaves(arguments)
    return with_grads(OPS[op](**arguments, output_final_state=True, **options), arguments)


def slices(cu_seqlens):
    """The packed sequences as slices of the token axis."""
    return [slice(a, b) for a, b in pairwise(cu_seqlens)]


def relative_error(got, expected):
    """Largest difference, relative to the largest entry; infinite for a NaN, an inf or another shape."""
    if got.shape != expected.shape or not torch.isfinite(got).all():
        return float("inf")
    if got.numel() == 0:
        return 0.0
    got, expected = got.double(), expected.double()
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def assert_close(got, expected, tolerance):
    """Tensors, or dicts of tensors, equal up to `tolerance` relative to the largest entry of each."""
    if not isinstance(expected, dict):
        got, expected = {"": got}, {"": expected}
    assert got.keys() == expected.keys()
    errors = {name: relative_error(got[name], expected[name]) for name in expected}
    assert all(error <= tolerance for error in errors.values()), f"{errors} above {tolerance}"


def assert_same(got, expected):
    """Equal to the bit."""
    if not isinstance(expected, dict):
        got, expected = {"": got}, {"": expected}
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert not different, f"differ: {different}"
