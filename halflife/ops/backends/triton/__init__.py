"""Our Triton kernels of linear attention, the delta rule and GateRank, with no decay or a scalar one.

The modules of this package import triton, and they are imported on first use. `import halflife` needs torch alone.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from halflife.ops.call import OpCall

SIZES = range(16, 257)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (`TRITON_INTERPRET=1`, set before triton is imported)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def unsupported(call: OpCall) -> str | None:
    """Return the reason why the kernels cannot run this call, in one sentence; None if they can."""
    op, q, k, v = call.op, call.q, call.k, call.v
    if any(x.ndim != 3 for x in call.gates):
        return f"the Triton kernels of {op} take one log-decay a head [B, T, H], not one a channel"
    sizes = {"K": q.shape[-1], "V": v.shape[-1]}
    wrong = [f"{name} = {size}" for name, size in sizes.items() if size not in SIZES]
    if wrong:
        return f"the Triton kernels of {op} take heads of {SIZES[0]} to {SIZES[-1]}; got {', '.join(wrong)}"
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        found = _names(x.dtype for x in (q, k, v))
        return f"the Triton kernels of {op} take q, k, v in one of {_names(DTYPES)}; got {found}"
    if any(x.dtype not in DTYPES for x in call.gates):
        return f"the Triton kernels of {op} take gates in {_names(DTYPES)}; got {_names(x.dtype for x in call.gates)}"
    if not interpreted() and q.device.type != "cuda":
        return f"the Triton kernels of {op} run on CUDA devices (or with TRITON_INTERPRET=1); got {q.device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return None


def _names(dtypes) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
