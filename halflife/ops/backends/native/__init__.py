"""Kernels compiled for the CPU of this machine: the chunked algebra in one pass, from csrc/.

`build` compiles and loads them. A call reaches C++ through the custom ops `halflife::state_op` and its backward, which
`torch.compile` and `torch.export` see as single nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halflife.ops.arguments import PLAIN, dense, not_plain
from halflife.ops.backends.native import build
from halflife.ops.call import Call

DTYPES = {torch.float32, torch.bfloat16, torch.float16}
MIXED = {torch.float32, torch.float16}  # values in float32 have outputs that do not overflow
MATRICES = ("q", "k", "v", "a", "b")
_LARGEST = 128  # tokens a chunk


def why_not(op: str, device: torch.device, call: Call | None = None) -> str | None:
    """Return the reason why the kernels cannot run `op` on `device` (and this call, if given), or None if they can."""
    if call is None:
        return _why_not(len(MATRICES), op, device)
    given = (*map(call.tensors.get, MATRICES), *call.tensors.values(), *(call.state or ()))
    return _why_not(len(MATRICES), op, device, given, MIXED)


def why_not_matrices(count: int) -> Callable[..., str | None]:
    """The `why_not` of kernels whose first `count` tensors are matrices in one dtype."""
    return partial(_why_not, count)


def _why_not(
    count: int, op: str, device: torch.device, tensors: Any = None, mixed: set[torch.dtype] | None = None
) -> str | None:
    if device.type != "cpu":
        return f"native kernels run on CPUs, not on {device.type}"
    if tensors is not None:
        is_pass = mixed is None and not isinstance(tensors, Call)
        if isinstance(tensors, Call):
            if tensors.output_dtype not in DTYPES:
                return f"native kernels of {op} have no results in {tensors.output_dtype}"
            tensors = (*tensors.tensors.values(), *(tensors.state or ()))
        for x in tensors:
            if x is not None and type(x) not in PLAIN:
                return not_plain(x)
            if is_pass and x is not None and 0 in x.shape[-1:]:  # by which passes divide
                return f"native kernels of {op} take at least one channel"
        first = tensors[0].dtype
        for x in tensors[:count]:
            if x is not None and (x.dtype not in DTYPES or (x.dtype != first and {x.dtype, first} != mixed)):
                found = names({x.dtype for x in tensors[:count] if x is not None})
                return f"native kernels take all matrices in one of float32, bfloat16 and float16; got {found}"
    return build.why_not()


def op(name: str) -> Callable[..., Any]:
    """The custom op `halflife::name`, loaded."""
    build.load()
    return getattr(torch.ops.halflife, name)


def names(dtypes: set[torch.dtype]) -> str:
    """The names of dtypes, for messages."""
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Run an op on a state: outputs `[B, T, H, V]` and final states `[N, H, num_states · K, V]`."""
    build.load()
    initial = call.first_state().contiguous()
    save = call.differentiated
    given = call.tensors.get
    q, k, v, a, b = [None if (x := given(name)) is None else dense(x) for name in MATRICES]
    gates = (call.decay, given("beta"), given("g_slow"), given("gain"))
    g, beta, g_slow, gain = [None if x is None else dense(x.float()) for x in gates]
    inputs = call.op, q, k, v, g, beta, a, b, g_slow, gain, initial
    if call.is_token and not save:
        return torch.ops.halflife.state_step(*inputs, call.output_scale)
    o, state, _ = torch.ops.halflife.state_op(
        *inputs, call.packing.cu_seqlens, call.output_scale, min(call.chunk_size, _LARGEST), save
    )
    return o, state


def formulas() -> dict[Any, Any]:
    """The operations of each custom op, for torch's `FlopCounterMode`; empty where the kernels are not built."""
    if build.why_not() is not None:
        return {}
    build.load()
    from halflife.ops.backends.native import fakes

    return {torch.ops.halflife.state_op: fakes.operations, torch.ops.halflife.linear: fakes.operations_of_linear}


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x Wᵀ + bias` by oneDNN; `x [N, D]` and `weight [E, D]` may be transposed views."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
