"""The short convolution equals torch's, for cut and packed sequences, in both implementations."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_raises, assert_same, cases, leaves, slices, unchecked, with_grads
from hypothesis import given, settings
from hypothesis import strategies as st

from halflife.ops import causal_conv1d
from halflife.ops.backends import dispatch, native
from halflife.ops.backends.native import build


def inputs(length, *, batch=2, channels=3, width=4, sequences=None):
    shapes = {
        "x": (batch, length, channels),
        "weight": (channels, width),
        "bias": (channels,),
        "initial_state": (sequences or batch, channels, width - 1),
    }
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def by_torch(x, weight, bias, initial_state):
    """Define the convolution by `F.conv1d`: return the outputs and the last W − 1 inputs."""
    if x.shape[1] == 0:  # conv1d refuses an empty input
        return x, initial_state
    extended = torch.cat([initial_state, x.transpose(1, 2)], -1)
    y = F.conv1d(extended, weight.unsqueeze(1), bias, groups=len(weight))
    return F.silu(y).transpose(1, 2), extended[..., extended.shape[-1] - initial_state.shape[-1] :]


@pytest.fixture(params=["chunked", "reference"])
def conv(request):
    """Return `causal_conv1d` of each implementation, with the final state."""
    return lambda **arguments: causal_conv1d(**arguments, output_final_state=True, backend=request.param)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 29])
def test_equals_torch(conv, length, width):
    arguments = leaves(inputs(length, width=width))
    assert_close(with_grads(conv(**arguments), arguments), with_grads(by_torch(**arguments), arguments), 1e-14)


def test_defaults_are_no_bias_zero_state_and_silu():
    arguments = inputs(7)
    x, weight = arguments["x"], arguments["weight"]
    y, state = causal_conv1d(x, weight)
    assert state is None
    assert_close(y, by_torch(x, weight, None, torch.zeros(2, 3, 3, dtype=torch.float64))[0], 1e-14)
    assert_close(F.silu(causal_conv1d(x, weight, activation=None)[0]), y, 1e-15)


@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(st.lists(st.integers(0, 12), max_size=6).map(sorted))
def test_cut_anywhere_equals_uncut(cuts):
    arguments = inputs(12)
    whole, last = by_torch(**arguments)
    outputs = []
    for tokens in slices([0, *cuts, 12]):
        piece = {**arguments, "x": arguments["x"][:, tokens]}
        y, arguments["initial_state"] = causal_conv1d(**piece, output_final_state=True)
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), whole, 1e-14)
    assert_same(arguments["initial_state"], last)


@pytest.mark.parametrize("lengths", [[5, 0, 1, 2, 9], [3], [0, 0], [1, 1, 1, 1]], ids=str)
def test_packed_equals_separate(conv, lengths):
    """Sequences shorter than W − 1 keep a part of their state. The gradients agree too."""
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    arguments = leaves(inputs(bounds[-1], batch=1, sequences=len(lengths)))
    packed = conv(**arguments, cu_seqlens=torch.tensor(bounds))
    x, weight, bias, state = arguments.values()
    separate = [by_torch(x[:, t], weight, bias, state[i : i + 1]) for i, t in enumerate(slices(bounds))]
    joined = torch.cat([y for y, _ in separate], 1), torch.cat([last for _, last in separate])
    assert_close(with_grads(packed, arguments), with_grads(joined, arguments), 1e-14)


@pytest.mark.parametrize("bounds", [None, [0, 1, 1, 5]])
def test_gradcheck(conv, bounds):
    arguments = leaves(inputs(5, batch=1, channels=2, sequences=3 if bounds else None))
    packed = {"cu_seqlens": torch.tensor(bounds)} if bounds else {}

    def function(*values):
        return conv(**dict(zip(arguments, values, strict=True)), **packed)

    assert torch.autograd.gradcheck(function, list(arguments.values()))


def test_no_tap_crosses_a_boundary_or_looks_ahead(conv):
    arguments = inputs(20, batch=1, sequences=3)
    boundaries = torch.tensor([0, 6, 8, 20])
    before, states = conv(**arguments, cu_seqlens=boundaries)
    arguments["x"][:, 6:8] += 1
    arguments["x"][:, 15:] += 1
    after, states_after = conv(**arguments, cu_seqlens=boundaries)
    for same in (slice(0, 6), slice(8, 15)):
        assert_same(after[:, same], before[:, same])
    assert_same(states_after[0], states[0])


def test_bfloat16_computes_in_float32(conv):
    """The result is rounded once, at its end. It is within half a bfloat16 step of the exact result."""
    narrow = {name: x.bfloat16() for name, x in inputs(40).items()}
    y, after = conv(**{**narrow, "weight": narrow["weight"].float(), "bias": narrow["bias"].float()})
    assert y.dtype == after.dtype == torch.bfloat16
    exact, _ = by_torch(**{name: x.double() for name, x in narrow.items()})
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_results_wider_than_the_inputs():
    """Kernels compute in float32, so they refuse float64 results of narrower inputs."""
    narrow = {name: x.float() for name, x in inputs(40).items()}
    found = causal_conv1d(**narrow, output_final_state=True, dtype=torch.float64)
    assert_close(dict(enumerate(found)), dict(enumerate(by_torch(**{n: x.double() for n, x in narrow.items()}))), 1e-14)
    here = torch.device("cpu")
    for backend in (name for name in ("native", "triton") if dispatch.why_not("causal_conv1d", name, here) is None):
        with pytest.raises(ValueError, match=r"no results in torch\.float64"):
            causal_conv1d(**narrow, dtype=torch.float64, backend=backend)


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
def test_a_compiler_knows_the_dtype_of_the_last_inputs():
    """The last inputs of tokens in bfloat16 are in bfloat16, whatever the dtype of the state before was."""
    given = torch.randn(1, 9, 16, dtype=torch.bfloat16), torch.randn(16, 4), None, torch.randn(1, 16, 3), None, True
    assert native.op("causal_conv")(*given)[1].dtype == torch.bfloat16
    torch.library.opcheck(torch.ops.halflife.causal_conv.default, given, test_utils="test_faketensor")


@cases(
    "change, message",
    ({"x": torch.zeros(5, 3)}, r"x must be \[B, T, D\]"),
    ({"weight": torch.zeros(2, 4)}, r"weight must be \[D, W\]"),
    ({"weight": torch.zeros(3, 0)}, r"weight must be \[D, W\] with at least one tap"),
    ({"bias": torch.zeros(1)}, "bias must be"),
    ({"activation": "relu"}, "activation must be"),
    ({"initial_state": torch.zeros(1, 3, 4)}, "initial_state must be"),
    ({"cu_seqlens": torch.tensor([0, 4])}, "rise from 0"),
    ({"splits": (1, 1)}, r"splits must add up to the 3 channels of x; got \[1, 1\]"),
    ({"splits": (-1, 4)}, r"splits must add up to the 3 channels of x; got \[-1, 4\]"),
    ({"splits": ()}, "splits must add up to the 3 channels"),
)
def test_errors_say_what_is_wrong(change, message):
    arguments = {"x": torch.zeros(1, 5, 3), "weight": torch.zeros(3, 4)}
    assert_raises(ValueError, message, unchecked(causal_conv1d), **{**arguments, **change})


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 2, 5])])
def test_second_derivatives(cu_seqlens):
    x, taps = torch.randn(1, 5, 3).double().requires_grad_(), torch.randn(3, 4).double().requires_grad_()
    convolve = partial(causal_conv1d, cu_seqlens=cu_seqlens, backend="chunked")
    assert torch.autograd.gradgradcheck(lambda x, w: convolve(x, w)[0], (x, taps))
