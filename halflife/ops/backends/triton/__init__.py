"""Our Triton kernels of linear attention, the delta rule, DPLR, GateRank, Koopman attention, single tokens and passes.

The other modules of this package import triton. `run` loads them, and `import halflife` needs torch alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
from typing import Any

import torch
from torch import Tensor

from halflife.ops.arguments import alike, cached_constant, dense, not_plain
from halflife.ops.backends.dispatch import add_skip, folded
from halflife.ops.call import Call

SIZES = range(1, 257)
MOST_SEQUENCES = 65_000  # CUDA's limit of 65,535 segments, of which packed sequences have up to 250 more
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIXED = {torch.float32, torch.float16}  # all become float32
MATRICES = ("q", "k", "v", "beta", "a", "b")
OPS: dict[str, Any] = {}  # name → op, see `op.declare`


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (`TRITON_INTERPRET=1`, set before triton is imported)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def why_not(op: str, device: torch.device, call: Call | None = None) -> str | None:
    """Return the reason why the kernels cannot run `op` on `device` (and this call, if given); None if they can."""
    return (None if call is None else _misfit(op, call)) or _absent(device)


def why_not_step(op: str, device: torch.device, call: Call | None = None) -> str | None:
    """As `why_not`, of the kernels for one token, which take any decay and heads of any size up to 256."""
    if call is not None:
        given = (*call.tensors.values(), *(call.state or ()))
        if (odd := not_plain(*given)) is not None:
            return odd
        if call.sizes.get("K", 1) > SIZES[-1]:
            return f"the Triton kernel for a token of {op} takes keys of at most {SIZES[-1]}; got K = {call.sizes['K']}"
        if any(x.dtype not in DTYPES for x in given if x is not None):
            return f"the Triton kernel for a token of {op} takes {_names(DTYPES)}"
    return _absent(device)


def why_not_pass(op: str, device: torch.device, tensors: Any = None) -> str | None:
    """As `why_not`, of the kernels that are passes over memory, whose arguments are tensors or a call."""
    if tensors is not None:
        given = tensors
        if isinstance(tensors, Call):
            if tensors.output_dtype not in DTYPES:
                return f"the Triton kernels of {op} have no results in {tensors.output_dtype}"
            given = (*tensors.tensors.values(), *(tensors.state or ()))
        if (odd := not_plain(*given)) is not None:
            return odd
        if any(x is not None and x.is_floating_point() and x.dtype not in DTYPES for x in given):
            return f"the Triton kernels of {op} take {_names(DTYPES)}"
    return _absent(device)


def too_wide(op: str, size: int) -> str | None:
    """The reason why a kernel that has all channels of a head in one program cannot take `size` of them, or None."""
    if size <= SIZES[-1]:
        return None
    return f"the Triton kernel of {op} takes heads of at most {SIZES[-1]} channels; got {size}"


def _absent(device: torch.device) -> str | None:
    """The reason why no Triton kernel runs on `device`, or None."""
    if not interpreted() and device.type != "cuda":
        return f"our Triton kernels run on CUDA devices (or with TRITON_INTERPRET=1), not on {device.type}"
    return None if importlib.util.find_spec("triton") else "triton is not installed (pip install triton)"


def _misfit(op: str, call: Call) -> str | None:
    """The reason why the shapes and dtypes of a call do not fit the kernels, or None."""
    matrices = [x for name in ("q", "k", "v", "a", "b") if (x := call.get(name)) is not None]
    gates = [x for name in ("beta", "g_slow", "g_fast", "g", "gain", "skip") if (x := call.get(name)) is not None]
    if (odd := not_plain(*matrices, *gates, *(call.state or ()))) is not None:
        return odd
    wrong = [f"{letter} = {call.sizes[letter]}" for letter in "KV" if call.sizes[letter] not in SIZES]
    if wrong:
        return f"the Triton kernels of {op} take heads of {SIZES[0]} to {SIZES[-1]}; got {', '.join(wrong)}"
    if call.sizes["N"] > MOST_SEQUENCES:
        return f"the Triton kernels of {op} take at most {MOST_SEQUENCES} sequences; got {call.sizes['N']}"
    dtypes = {x.dtype for x in matrices}
    if not dtypes <= set(DTYPES) or (len(dtypes) > 1 and dtypes != MIXED):
        found = _names(x.dtype for x in matrices)
        return f"the Triton kernels of {op} take their matrices in one of {_names(DTYPES)}; got {found}"
    if any(x.dtype not in DTYPES for x in gates):
        return f"the Triton kernels of {op} take gates in {_names(DTYPES)}; got {_names(x.dtype for x in gates)}"
    return None


def _names(dtypes) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@cached_constant
def load() -> None:
    """Import the kernels and declare their ops."""
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        importlib.import_module(module.name)


def custom_op(name: str) -> Any:
    """The custom op `halflife::triton_<name>`, loaded."""
    load()
    return OPS[f"triton_{name}"]


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Run a call of a walk over tokens: the outputs `[B, T, H, V]` and the final states `[N, H, num_states · K, V]`."""
    beta, decay, plain = call.get("beta"), call.decay, call
    vector = decay is not None and decay.ndim == 4
    if vector or beta is not None:
        call = folded(call)
    q, k, v = [call[name] for name in ("q", "k", "v")]
    if {q.dtype, k.dtype, v.dtype} == MIXED:
        q, k, v = q.float(), k.float(), v.float()
    initial = None if call.state is None else call.first_state(torch.float32)
    if vector:
        kernels = custom_op("vector" if beta is None else "kda")
        gates = [*(() if beta is None else (beta,)), decay, initial]
    elif beta is None:
        kernels, gates = custom_op("linear"), [call.get("g_slow"), decay]
        gates += [call.get("gain"), call.get("skip"), initial]
    else:
        kernels, gates = custom_op("delta"), [beta, call.get("g_slow"), decay, initial]
    o, final, *_ = kernels(
        q, k, v, *[None if x is None else x.contiguous() for x in gates], call.packing.cu_seqlens,
        float(call.output_scale), call.chunk_size,
    )  # fmt: skip
    return add_skip(o, plain.get("skip"), plain["v"]) if vector or beta is not None else o, final


def run_dplr(call: Call) -> tuple[Tensor, Tensor]:
    """Run a call of DPLR with any decay: the outputs `[B, T, H, V]` and the final states `[N, H, K, V]`."""
    matrices = [call[name] for name in ("q", "k", "v", "a", "b")]
    if {x.dtype for x in matrices if x is not None} == MIXED:
        matrices = [None if x is None else x.float() for x in matrices]
    initial = None if call.state is None else call.first_state(torch.float32).contiguous()
    o, final, *_ = custom_op("dplr")(
        *matrices, call.decay, initial, call.packing.cu_seqlens, float(call.output_scale), call.chunk_size
    )
    return o, final


def run_step(call: Call) -> tuple[Tensor, Any]:
    """Run a call of one token a sequence: the outputs `[B, 1, H, V]`, and the next state, or GateRank's two."""
    call = folded(call)
    q, k, v, beta, a, b = [None if (x := call.get(name)) is None else dense(x) for name in MATRICES]
    g, g_slow = call.decay, call.get("g_slow")
    g = dense(g) if g is not None and g.ndim == 4 else g
    state, slow = alike(*call.state) if call.state is not None else (None, None)
    scale = float(call.output_scale)
    o, *states = custom_op("step")(q, k, v, g, beta, a, b, g_slow, state, slow, scale)
    return o, states[0] if len(states) == 1 else tuple(states)


def read_operators(
    q: Tensor, sums: Tensor, norms: Tensor, gamma: Tensor, weights: Tensor, ridge: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Read operators of Koopman attention: the outputs in `dtype`, and how many factorisations failed.

    The queries are `[rows, n, S, H, R]`, the outputs `[rows, n, S, H, P]`, the sums `[G M Cᵀ]` of chunks
    `[n, rows, H, R, 2 R + P]`, m² `[n, rows, H]`, γ `[H]` and μ `[K + 1, H]`; `ops.koopman.op` has the equations.
    """
    tensors = (x.contiguous() for x in (q, sums, norms, gamma, weights))
    y, failures, _ = custom_op("koopman")(*tensors, ridge, dtype)
    return y, failures
