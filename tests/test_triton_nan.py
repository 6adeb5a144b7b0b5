"""A NaN among the inputs of the Triton kernels reaches what it reaches in the token loop."""

import sys

import pytest
import torch
from helpers import OPS, cases, op_inputs

from halflife import ops

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK, TOKEN, LENGTH = 16, 20, 50


def outputs(op, backend, arguments, cu_seqlens):
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE)
    given = {name: x.to(DEVICE) for name, x in arguments.items()}
    return op(**given, cu_seqlens=bounds, backend=backend, chunk_size=CHUNK)[0].cpu()


def with_nan(arguments, name):
    """Copy the arguments, with a NaN at one token of the first row and head."""
    changed = arguments[name].clone()
    changed[0, TOKEN, 0].view(-1)[-1] = torch.nan
    return arguments | {name: changed}


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, in the interpreter
@cases(
    "op, granularity, name, cu_seqlens",
    ("linear_attention", "scalar", "g", None),
    pytest.param("linear_attention", "vector", "g", None, marks=pytest.mark.slow),
    ("linear_attention", "vector", "g", [0, 30, 50]),
    pytest.param("linear_attention", "gate_rank", "g_fast", None, marks=pytest.mark.slow),
    ("linear_attention", "gate_rank", "g_slow", [0, 30, 50]),
    pytest.param("delta_rule", "scalar", "g", [0, 30, 50], marks=pytest.mark.slow),
    ("delta_rule", "vector", "g", None),
    pytest.param("delta_rule", "gate_rank", "g_slow", None, marks=pytest.mark.slow),
    pytest.param("dplr", "scalar", "g", None, marks=pytest.mark.slow),
    ("dplr", "vector", "a", [0, 30, 50]),
    pytest.param("dplr", "vector", "q", None, marks=pytest.mark.slow),
)
def test_a_nan_is_seen_from_its_token_on(op, granularity, name, cu_seqlens):
    """Its row and head show it as the token loop does, and all else keeps every bit.

    Under the delta rule and DPLR, whose chunks are systems of equations, it also reaches tokens before it in its chunk.
    """
    kind = "scalar" if granularity == "gate_rank" else granularity
    arguments = op_inputs(op, kind, LENGTH, batch=1 if cu_seqlens else 2, key=16, value=16)
    arguments = {key: x.float() for key, x in arguments.items() if key != "initial_state"}
    function = OPS[op]
    if granularity == "gate_rank":
        function, g = ops.gate_rank, arguments.pop("g")
        arguments |= {"g_fast": g, "g_slow": torch.where(g < g.median(), g, 0.0)}
    changed = with_nan(arguments, name)
    got = outputs(function, "triton", changed, cu_seqlens)
    lost = outputs(function, "reference", changed, cu_seqlens).isnan()
    assert lost[0, TOKEN, 0].all()
    assert got[lost].isnan().all()
    if op != "linear_attention" and name != "q":
        lost[0, TOKEN // CHUNK * CHUNK : TOKEN, 0] = True
    assert got[~lost].equal(outputs(function, "triton", arguments, cu_seqlens)[~lost])
