"""The Triton kernels of linear attention with a vector decay equal the float64 token loop, as in `test_triton.py`."""

import sys

import pytest
import torch
from helpers import (
    assert_close,
    assert_raises,
    assert_same,
    check_custom_ops,
    everywhere,
    generator,
    leaves,
    rounded,
    run_on,
    slow_after_resets,
)
from pairwise import crossed

from halflife.ops import linear_attention

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

from halflife.ops.backends.triton import segments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The worst errors measured over this file's cases (interpreted), relative to the largest entry of a tensor. Four times
# that is allowed. The interpreter cuts bfloat16 off.
WORST = {torch.float32: 2.6e-7, torch.bfloat16: 1.4e-2, torch.float16: 6.1e-4}


def inputs(length, *, batch=1, heads=1, groups=None, key=16, value=16, sequences=None, change=None):
    """The arguments in float64; `change` changes the moderate log-decays in place."""
    draw = generator("vector", length, batch, heads, key, value)

    def randn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    g = -randn(batch, length, heads, key).exp() / 8
    if change is not None:
        change(g)
    return {
        "q": randn(batch, length, groups or heads, key), "k": randn(batch, length, groups or heads, key),
        "v": randn(batch, length, heads, value), "g": g,
        "initial_state": randn(sequences or batch, heads, key, value),
    }  # fmt: skip


def run(arguments, backend="triton", cu_seqlens=None, chunk_size=64):
    return run_on(DEVICE, linear_attention, arguments, cu_seqlens, backend, chunk_size)


def check(arguments, dtype=torch.float32, **options):
    """Compare the kernels with the token loop, and return the kernels' results."""
    arguments = rounded(arguments, dtype)
    got = run(arguments, **options)
    wide = {name: x.double() for name, x in arguments.items()}
    assert got["state"].dtype == got["dg"].dtype == torch.float32
    assert got["o"].dtype == got["dq"].dtype == dtype
    assert_close(got, run(wide, "reference", cu_seqlens=options.get("cu_seqlens")), 4 * WORST[dtype])
    return got


@pytest.mark.parametrize("length", [1, 7, *(pytest.param(x, marks=pytest.mark.slow) for x in (32, 65))])
def test_lengths(length):
    check(inputs(length))


def test_no_tokens():
    arguments = rounded(inputs(0), torch.float32)
    assert_same(run(arguments)["state"], arguments["initial_state"])


@pytest.mark.parametrize(("dtype", "length"), [(torch.bfloat16, 40), (torch.float16, 33)])
def test_narrow_inputs(dtype, length):
    """Chunks have 32 tokens here, and 16 in float32."""
    check(inputs(length, key=24, value=32), dtype)


def test_narrow_log_decays():
    arguments = {name: x.to(torch.bfloat16) for name, x in inputs(20).items()}
    arguments["initial_state"] = arguments["initial_state"].float()
    got = run(arguments)
    assert got["dg"].dtype == torch.bfloat16
    wide = {name: x.double() for name, x in arguments.items()}
    assert_close(got, run(wide, "reference"), 4 * WORST[torch.bfloat16])


@pytest.mark.parametrize(("key", "value"), [(40, 5), pytest.param(16, 80, marks=pytest.mark.slow)])
def test_head_sizes(key, value):
    """Sizes that are padded within a block, or fill more than one."""
    check(inputs(17, key=key, value=value))


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), [(256, 80), (80, 256), (96, 96)])
@pytest.mark.parametrize("dtype", WORST)
def test_large_heads(key, value, dtype):
    check(inputs(40, key=key, value=value), dtype)


@pytest.mark.parametrize("groups", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_groups(groups):
    """Heads that share queries and keys, in a batch."""
    check(inputs(9, batch=2, heads=2, groups=groups), chunk_size=8)


@pytest.mark.parametrize("bounds", [(0, 5, 5, 24, 24), (0, 0, 0)])
def test_packed(bounds):
    """A boundary inside a chunk, and empty sequences."""
    check(inputs(bounds[-1], sequences=len(bounds) - 1), cu_seqlens=bounds)


@pytest.fixture
def short_segments(monkeypatch):
    """Segments of one chunk, which are joined by a scan."""
    monkeypatch.setattr(segments, "LEAST_CHUNKS", 1)


@pytest.mark.parametrize("bounds", [pytest.param(None, marks=pytest.mark.slow), (0, 5, 5, 38, 38)])
def test_segments(short_segments, bounds):
    check(inputs(38, sequences=4 if bounds else 1), cu_seqlens=bounds)


def test_no_initial_state_is_zeros(short_segments):
    """Nor do final states without a gradient change anything."""
    arguments = rounded(inputs(20), torch.float32)
    arguments["initial_state"].zero_()
    zeros = run(arguments)
    del arguments["initial_state"], zeros["dinitial_state"]
    assert_same(run(arguments), zeros)
    given = leaves({name: x.to(DEVICE) for name, x in arguments.items()})
    results = [
        torch.autograd.grad(linear_attention(**given, backend=backend)[0].square().sum(), list(given.values()))
        for backend in ("triton", "reference")
    ]
    for got, expected in zip(*results, strict=True):
        assert_close(got, expected, 4 * WORST[torch.float32])


@pytest.mark.slow
@crossed(dtype=[torch.bfloat16, torch.float16], bounds=[None, (0, 40, 70)])
def test_segments_of_narrow_inputs(short_segments, dtype, bounds):
    batch = 1 if bounds else 2
    check(inputs(70, batch=batch, heads=2, sequences=2), dtype, cu_seqlens=bounds)


def some(value):
    def change(g):
        g[:, ::7, :, ::2] = value

    return change


DECAYS = {
    **{str(g): everywhere(g) for g in (0.0, -1e-6, -20.0, -torch.inf)},
    **{f"some {g}": some(g) for g in (-1000.0, -torch.inf)},
    "slow after resets": slow_after_resets,
}


FAST = ("-20.0", "some -inf", "slow after resets")


@pytest.mark.parametrize(
    "decay", [*FAST, *(pytest.param(x, marks=pytest.mark.slow) for x in sorted(DECAYS.keys() - set(FAST)))]
)
def test_decays(decay):
    check(inputs(33, change=DECAYS[decay]))


@pytest.mark.slow
@pytest.mark.parametrize("decay", DECAYS)
def test_decays_of_narrow_inputs(decay):
    check(inputs(70, change=DECAYS[decay]), torch.bfloat16)


def test_a_full_reset_has_no_gradient():
    arguments = rounded(inputs(20, change=some(-torch.inf)), torch.float32)
    gradient = run(arguments)["dg"]
    assert gradient[arguments["g"].isinf()].count_nonzero() == 0
    assert gradient[arguments["g"] > -1].any()


def test_no_decay_is_that_of_the_scalar_kernels():
    arguments = rounded(inputs(20, change=everywhere(0.0)), torch.float32)
    got = run(arguments)
    plain = run({name: x for name, x in arguments.items() if name != "g"})
    assert_close({name: got[name] for name in plain}, plain, 4 * WORST[torch.float32])


def test_nothing_flows_backwards():
    """Other tokens and decays after t change no bit of the outputs up to t."""
    arguments = rounded(inputs(20), torch.float32)
    changed = {name: x.clone() for name, x in arguments.items()}
    for name in "qkvg":
        changed[name][:, 13:] = -1000 if name == "g" else 1 - changed[name][:, 13:]
    assert_same(run(changed)["o"][:, :13], run(arguments)["o"][:, :13])


@pytest.mark.slow
@pytest.mark.parametrize(("bounds", "from_zeros"), [(None, True), (None, False), ([0, 2, 5], False)])
def test_ops_are_registered_right(bounds, from_zeros):
    arguments = rounded(inputs(5, sequences=2 if bounds else None), torch.float32)
    if from_zeros:
        del arguments["initial_state"]
    assert check_custom_ops(lambda: run(arguments, cu_seqlens=bounds)) == {"triton_vector", "triton_vector_backward"}


def test_second_derivatives_say_what_has_them():
    arguments = leaves(rounded(inputs(5), torch.float32))
    o, _ = linear_attention(**{name: x.to(DEVICE) for name, x in arguments.items()}, backend="triton")
    assert_raises(RuntimeError, "reference", torch.autograd.grad, o.sum(), arguments["q"], create_graph=True)
