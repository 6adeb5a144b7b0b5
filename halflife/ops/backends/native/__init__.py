"""Kernels compiled for the CPU of this machine: the chunked algebra in one pass, from csrc/.

`build` compiles and loads them. A call reaches C++ through the custom ops `halflife::state_op` and its backward, which
`torch.compile` and `torch.export` see as single nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halflife.ops.backends.constant import constant_while_tracing
from halflife.ops.backends.native import build
from halflife.ops.call import OpCall

_DTYPES = (torch.float32, torch.bfloat16)
_LARGEST = 128  # tokens a chunk


def unsupported(device: torch.device, call: OpCall | None = None) -> str | None:
    """Return the reason why the kernels cannot run on `device` (and this call, if given), or None if they can."""
    if device.type != "cpu":
        return f"native kernels run on CPUs, not on {device.type}"
    if call is not None:
        dtypes = {x.dtype for x in (call.q, call.k, call.v, call.a, call.b) if x is not None}
        if len(dtypes) > 1 or call.q.dtype not in _DTYPES:
            return f"native kernels take all matrices in float32 or all in bfloat16; got {_names(dtypes)}"
    return refusal()


# torch.compile calls these two while it traces and takes their results as constants.
@constant_while_tracing
def refusal() -> str | None:
    """Return the reason why the kernels cannot run in this process, or None if they can."""
    return build.why_not()


@constant_while_tracing
def load() -> None:
    """Load the kernels of this machine into torch."""
    build.load()


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def run(call: OpCall) -> tuple[Tensor, Tensor]:
    """Run an op on a state: outputs `[B, T, H, V]` and final states `[N, H, num_states · K, V]`."""
    load()
    initial = call.first_state().contiguous()
    save = call.differentiated
    q, k, v, a, b = (_dense(x) for x in (call.q, call.k, call.v, call.a, call.b))
    g, beta, g_slow = (None if x is None else _dense(x.float()) for x in (call.g, call.beta, call.g_slow))
    inputs = call.op, q, k, v, g, beta, a, b, g_slow, initial
    if call.is_token and not save:
        return torch.ops.halflife.state_step(*inputs, call.output_scale)
    o, state, _ = torch.ops.halflife.state_op(
        *inputs, call.packing.cu_seqlens, call.output_scale, min(call.chunk_size, _LARGEST), save
    )
    return o, state


def _dense(x: Tensor | None) -> Tensor | None:
    """A tensor whose last axis has stride 1; the kernels read all others as they are."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous()


def formulas() -> dict[Any, Any]:
    """The operations of each custom op, for torch's `FlopCounterMode`; empty where the kernels are not built."""
    if refusal() is not None:
        return {}
    load()
    from halflife.ops.backends.native import fakes

    return {torch.ops.halflife.state_op: fakes.operations, torch.ops.halflife.linear: fakes.operations_of_linear}
