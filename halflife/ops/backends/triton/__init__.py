"""Our own Triton kernels: linear attention, the delta rule and GateRank with no or a scalar decay.

Triton is imported by the modules below this one, where they are used: `import halflife` needs torch alone.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

SIZES = range(16, 257)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: `TRITON_INTERPRET=1`, set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def unsupported(op: str, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor | None) -> str | None:
    """Why the kernels of `op` cannot run on these inputs, in one sentence; None if they can.

    Args:
        op: the op's name.
        q, k: queries and keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        gates: what else has one row a token: beta and log-decays; None is no gate.
    """
    sizes = {"K": q.shape[-1], "V": v.shape[-1]}
    wrong = [f"{name} = {size}" for name, size in sizes.items() if size not in SIZES]
    given = [x for x in gates if x is not None]
    if any(x.ndim != 3 for x in given):
        return f"the Triton kernels of {op} take one log-decay a head [B, T, H], not one a channel"
    if wrong:
        return f"the Triton kernels of {op} take heads of {SIZES[0]} to {SIZES[-1]}; got {', '.join(wrong)}"
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        found = _names(x.dtype for x in (q, k, v))
        return f"the Triton kernels of {op} take q, k, v in one of {_names(DTYPES)}; got {found}"
    if any(x.dtype not in DTYPES for x in given):
        return f"the Triton kernels of {op} take gates in {_names(DTYPES)}; got {_names(x.dtype for x in given)}"
    if not interpreted() and q.device.type != "cuda":
        return f"the Triton kernels of {op} run on CUDA devices (or with TRITON_INTERPRET=1); got {q.device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return None


def _names(dtypes) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
