"""The Triton kernels of DPLR equal the float64 token loop: outputs, states and all gradients.

They are compiled where there is a GPU, and run in Triton's interpreter elsewhere.
"""

import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    LOG_DECAYS,
    assert_close,
    assert_same,
    call_of,
    cases,
    check_custom_ops,
    op_inputs,
    rounded,
    run_on,
    slices,
)

from halflife.ops import delta_rule, dplr
from halflife.ops.backends import triton as kernels

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

from halflife.ops.backends.triton import segments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The worst errors measured over this file's cases (interpreted, where bfloat16 is cut off; with rounding as on a GPU
# they are at most 8e-3), relative to the largest entry of a tensor. Four times that is allowed.
WORST = {torch.float32: 4e-7, torch.bfloat16: 2.1e-2, torch.float16: 4.1e-4}

WIDE = ("g", "initial_state")  # float32 beside narrow inputs


def inputs(granularity, length, *, heads=1, key=16, value=16, **options):
    return op_inputs("dplr", granularity, length, heads=heads, key=key, value=value, **options)


def run(arguments, cu_seqlens=None, chunk_size=64, backend="triton", op=dplr):
    return run_on(DEVICE, op, arguments, cu_seqlens, backend, chunk_size)


def check(arguments, dtype=torch.float32, cu_seqlens=None, chunk_size=64, worst=None, op=dplr):
    """Compare the kernels with the token loop, and return the kernels' results."""
    arguments = rounded(arguments, dtype)
    got = run(arguments, cu_seqlens, chunk_size, op=op)
    assert got["state"].dtype == got["dinitial_state"].dtype == torch.float32
    assert {got[name].dtype for name in ("o", *(f"d{x}" for x in arguments if x not in WIDE))} == {dtype}
    want = run({name: x.double() for name, x in arguments.items()}, cu_seqlens, backend="reference", op=op)
    assert_close(got, want, 4 * (worst or WORST[dtype]))
    return got


@cases("granularity, length", ("vector", 0), ("none", 1), ("scalar", 18))
def test_lengths(granularity, length):
    check(inputs(granularity, length))


@cases(
    "granularity, length, dtype",
    ("scalar", 10, torch.float16),
    pytest.param("vector", 35, torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("none", 70, torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("vector", 40, torch.float16, marks=pytest.mark.slow),
)
def test_narrow_inputs(granularity, length, dtype):
    check(inputs(granularity, length, key=24), dtype)


@cases(
    "key, value",
    (20, 40),
    pytest.param(80, 24, marks=pytest.mark.slow),
    pytest.param(256, 80, marks=pytest.mark.slow),
    pytest.param(64, 200, marks=pytest.mark.slow),
)
def test_head_sizes(key, value):
    """Head sizes are padded within a block, or fill more than one block."""
    check(inputs("vector", 18, key=key, value=value))


@cases(
    "dtype, decay, bounds, heads, shared",
    (torch.float32, "mixed", (0, 5, 5, 18), 1, 1),
    pytest.param(torch.bfloat16, None, None, 2, 1, marks=pytest.mark.slow),
    pytest.param(torch.float32, None, None, 2, 2, marks=pytest.mark.slow),
    pytest.param(torch.float32, "mixed", (0, 5, 5, 18), 2, 1, marks=pytest.mark.slow),
    pytest.param(torch.float32, -torch.inf, None, 2, 1, marks=pytest.mark.slow),
    pytest.param(torch.float16, None, None, 2, 2, marks=pytest.mark.slow),
)
def test_the_delta_rule_under_a_vector_decay(dtype, decay, bounds, heads, shared):
    """Its kernels are those of DPLR, with `a = −β e^g ⊙ k`, `b = k` and values `β v`."""
    sizes = {"heads": heads, "key": 20, "value": 24, "sequences": len(bounds) - 1 if bounds else None}
    arguments = op_inputs("delta_rule", "vector", 18, decay=decay, **sizes)
    arguments["k"] = arguments["k"][:, :, :shared]
    check(arguments, dtype, bounds, op=delta_rule)


@cases(
    "granularity, dtype, shared, bounds",
    ("vector", torch.bfloat16, 1, None),
    pytest.param("scalar", torch.float32, 2, (0, 5, 5, 18), marks=pytest.mark.slow),
    pytest.param("none", torch.float16, 1, None, marks=pytest.mark.slow),
)
def test_without_b_it_is_k(granularity, dtype, shared, bounds):
    arguments = inputs(granularity, 18, heads=2, sequences=3 if bounds else None)
    arguments["k"] = F.normalize(arguments["k"], dim=-1)[:, :, :shared]
    arguments["a"] = -1.5 * arguments["k"].expand_as(arguments["b"])
    written = rounded({**arguments, "b": arguments["k"].expand_as(arguments["b"])}, torch.float64)
    del arguments["b"]
    got = check(arguments, dtype, bounds)
    assert "db" not in got
    arguments = rounded(arguments, torch.float64)
    for backend in ("reference", "chunked"):
        want = run(written, bounds, backend=backend)
        want["dk"] = want["dk"] + want.pop("db").unflatten(2, (shared, -1)).sum(3)
        assert_close(run(arguments, bounds, backend=backend), want, 1e-14)


@cases("bounds", (0, 5, 5, 23, 23), pytest.param((0, 0, 0), marks=pytest.mark.slow))
def test_packed(bounds):
    """One boundary is inside a chunk. Empty sequences at the start, between and at the end keep their states."""
    arguments = inputs("vector", bounds[-1], sequences=len(bounds) - 1)
    got = check(arguments, cu_seqlens=bounds)
    for row, tokens in enumerate(slices(bounds)):
        if tokens.start == tokens.stop:
            assert_same(got["state"][row], arguments["initial_state"][row].float())


@cases(
    "bounds, dtype",
    (None, torch.float32),
    pytest.param((0, 5, 5, 38, 38), torch.float32, marks=pytest.mark.slow),
    pytest.param(None, torch.bfloat16, marks=pytest.mark.slow),
)
def test_segments(monkeypatch, bounds, dtype):
    """Segments of one chunk, of a batch and of packed sequences, which are joined by their transitions."""
    monkeypatch.setattr(segments, "LEAST_CHUNKS", 1)
    arguments = inputs("vector", 38, sequences=4 if bounds else 1)
    check(arguments, dtype, cu_seqlens=bounds, chunk_size=16)


@pytest.mark.slow
@cases("chunk_size", 1, 31, 1000)
def test_chunk_sizes_heads_and_sequences(chunk_size):
    check(inputs("vector", 40, batch=2, heads=3), chunk_size=chunk_size)


@cases("shared", (1, 2), pytest.param((1, 1), marks=pytest.mark.slow))
def test_groups(shared):
    """q and k with fewer heads than v: the results of repeated heads, and gradients that are sums over them."""
    arguments = rounded(inputs("vector", 17, heads=2), torch.float32)
    grouped = {**arguments, **{name: arguments[name][:, :, :count] for name, count in zip("qk", shared, strict=True)}}
    want = run({name: x.double() for name, x in grouped.items()}, backend="reference")
    assert_close(run(grouped), want, 4 * WORST[torch.float32])


@cases(
    "decay",
    "mixed",
    *(pytest.param(decay, marks=pytest.mark.slow) for decay in (0.0, -1e-6, -0.3, -1.0, -20.0, -1000.0, -torch.inf)),
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_decays(decay, dtype):
    """Tokens of one chunk are mild, or not, or some of both; a full reset has no gradient."""
    arguments = inputs("vector", 34, decay=decay)
    got = check(arguments, dtype)
    assert got["dg"][arguments["g"] < -110].count_nonzero() == 0


@pytest.mark.slow
@cases("granularity, floor", *((granularity, floor) for granularity in ("scalar", "vector") for floor in LOG_DECAYS))
def test_some_strong_decays(granularity, floor):
    arguments = inputs(granularity, 40)
    arguments["g"][:, ::7] = floor
    check(arguments)


@pytest.mark.slow
@cases("strength, worst", (1.0, 3e-7), (2.0, 6.7e-6))
def test_the_same_direction_again_and_again(strength, worst):
    """This is the worst system: every token overlaps fully with every other; 2 reflects."""
    arguments = inputs("none", 40)
    direction = F.normalize(arguments["a"][:, :1].expand(-1, 40, -1, -1).clone(), dim=-1)
    check({**arguments, "a": -strength * direction, "b": direction}, worst=worst)


def test_nothing_flows_backwards():
    """Other tokens and decays after t change no bit of the outputs up to t, also where they change the passes."""
    arguments = rounded(inputs("vector", 40, decay=-0.1), torch.bfloat16)
    changed = {name: x.clone() for name, x in arguments.items()}
    for name, x in changed.items():
        if name != "initial_state":
            x[:, 20:] = -1000 if name == "g" else 1 - x[:, 20:]
    assert_same(run(changed)["o"][:, :20], run(arguments)["o"][:, :20])


@pytest.mark.slow
def test_zero_vectors_stay_finite():
    arguments = {name: torch.zeros_like(x) for name, x in inputs("vector", 20).items()}
    assert all(x.isfinite().all() for x in run(rounded(arguments, torch.float32)).values())


@pytest.mark.slow
@cases("op, granularity, bounds", ("dplr", "none", None), ("dplr", "vector", [0, 2, 5]), ("kda", "vector", [0, 5]))
def test_ops_are_registered_right(op, granularity, bounds):
    rule = "delta_rule" if op == "kda" else "dplr"
    sizes = {"heads": 1, "key": 16, "value": 16, "sequences": len(bounds) - 1 if bounds else None}
    arguments = rounded(op_inputs(rule, granularity, 5, **sizes), torch.float32)
    found = check_custom_ops(lambda: run(arguments, bounds, op=delta_rule if op == "kda" else dplr))
    assert found == {f"triton_{op}", f"triton_{op}_backward"}


def test_what_the_kernels_do_not_take():
    arguments = rounded(inputs("vector", 3), torch.float32)
    narrow = {name: x.half() if name != "v" else x for name, x in arguments.items() if name != "initial_state"}
    for message, changes in {
        None: {},
        "V = 257": {"v": arguments["v"].new_zeros(1, 3, 1, 257), "initial_state": None},
        "float64": {name: arguments[name].double() for name in "qkvab"},
        "bfloat16": {"a": arguments["a"].bfloat16()},
    }.items():
        call = call_of("dplr", {**arguments, **changes})
        reason = kernels.why_not("dplr", call.device, call)
        assert reason is None if message is None else message in reason
    assert dplr(**narrow, backend="triton")[0].dtype == torch.float32  # as in a float16 model
