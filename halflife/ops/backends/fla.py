"""Adapter to fla-core's kernels (flash-linear-attention): what it can run, and its conventions turned into ours.

Theirs and ours are both `[B, T, H, D]`, natural logarithms (fla turns them into base 2 itself), float32 states
`[N, H, K, V]`, and `a` of DPLR reads the state before the decay. What differs:

- `scale` goes over as a float: as the integer 1, Triton compiles it in, and NVIDIA's assembler then writes outside of
  shared memory on Hopper.
- −inf − (−inf) is NaN there, so log-decays are floored where e^g is 0 in float32.
- A decay is one a head or one a channel as each kernel has it: DPLR has none but vectors.
- `cu_seqlens` are int64, the initial state is float32.
- Keys and queries are never normalised there.

Only imported when one of its kernels is asked for, or might be: on a CUDA device.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from functools import cache
from typing import Any

import torch
from torch import Tensor

from halflife.ops.chunked.decays import FLOOR

# Earlier ones are wrong in the delta rule's gradients on Hopper and past 2³¹ elements; later ones are not read yet.
VERSIONS = ((0, 6), (0, 7))

# -------------------------------------------------------------------------------------------------- limits


def unsupported(op: str, device: torch.device, inputs: tuple[Any, ...] | None = None) -> str | None:
    """Why fla cannot run `op` there, or would be wrong; None if it can.

    Args:
        op: "linear_attention", "delta_rule" or "dplr".
        device: where the tensors are.
        inputs: `q, k, v, …, g` of the op; None judges the device and what is installed.
    """
    if device.type != "cuda":
        return f"fla's kernels run on CUDA devices, not on {device.type}"
    versions = _versions()
    if isinstance(versions, str):
        return versions
    if not VERSIONS[0] <= versions[0] < VERSIONS[1]:
        least, below = (".".join(map(str, version)) for version in VERSIONS)
        return f"the adapter is for fla-core ≥ {least}, < {below}; {'.'.join(map(str, versions[0]))} is installed"
    return None if inputs is None else _shapes(op, *inputs) or _known_wrong(op, device, versions[1], inputs)


def _shapes(op: str, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> str | None:
    """Why fla's kernels refuse (or misread) tensors of these shapes and dtypes."""
    key, value = q.shape[-1], v.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"fla multiplies in bfloat16 or float16 (float32 in TF32, three digits); the inputs are {q.dtype}"
    if len({x.dtype for x in (q, k, v, *rest[: 2 if op == "dplr" else 0]) if x is not None}) > 1:
        return "fla wants its matrices in one dtype"
    if q.shape[1] == 0:
        return "fla cannot launch on no tokens"
    if min(key, value) < 16 or key % 2 or value % 2:
        return f"fla's head sizes are even and at least 16; K is {key}, V is {value}"
    if op != "linear_attention" and key > 256:
        return f"fla's {op} holds states of at most 256 rows; K is {key}"
    if q.shape[0] * q.shape[2] > 65535:
        return f"fla launches at most 65535 heads over the batch; these are {q.shape[0] * q.shape[2]}"
    return None


def _known_wrong(op: str, device: torch.device, triton: tuple[int, ...], inputs: tuple[Any, ...]) -> str | None:
    """Why the results would be wrong on this device with this Triton."""
    major, vector = _capability(device), inputs[-1] is not None and inputs[-1].ndim == 4
    release = ".".join(map(str, triton))
    if op == "dplr" or vector:  # kernels of their own
        return None
    differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if major == 9 and (3, 4) <= triton < (3, 7, 1) and inputs[-1] is not None and differentiated:
        return f"fla's gated gradients are wrong on Hopper with Triton 3.4.0 to 3.7.0; {release} is installed"
    if op == "delta_rule" and major >= 10 and triton < (3, 8):
        return f"fla's delta rule races and gives NaN on Blackwell with Triton below 3.8; {release} is installed"
    return None


def _capability(device: torch.device) -> int:
    """The major compute capability of an NVIDIA device (9: Hopper, 10 and above: Blackwell); 0 for AMD's."""
    return 0 if torch.version.hip else torch.cuda.get_device_capability(device)[0]


@cache
def _versions() -> tuple[tuple[int, ...], tuple[int, ...]] | str:
    """The versions of fla-core and Triton, or why they cannot be used."""
    if importlib.util.find_spec("fla") is None:
        return "fla-core is not installed (pip install fla-core)"
    try:
        fla, triton = (importlib.import_module(name) for name in ("fla", "triton"))
        importlib.import_module("fla.ops.simple_gla")
    except Exception as error:  # whatever a foreign import raises
        return f"fla-core cannot be imported: {type(error).__name__}: {error}"
    return _release(fla.__version__), _release(triton.__version__)


def _release(version: str) -> tuple[int, ...]:
    """`"3.7.1+git"` → `(3, 7, 1)`."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


# ------------------------------------------------------------------------------------------------- kernels


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`chunk_gla` for vector decays, else `chunk_simple_gla`."""
    name = "gla" if g is not None and g.ndim == 4 else "simple_gla"
    return _run(f"{name}.chunk_{name}", (q, k, v), {"g": g}, scale, initial_state, cu_seqlens)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`chunk_delta_rule`, `chunk_gated_delta_rule` (scalar decays) or `chunk_kda` (vector decays)."""
    if g is None:
        return _run("delta_rule.chunk_delta_rule", (q, k, v), {"beta": beta}, scale, initial_state, cu_seqlens)
    name = "kda" if g.ndim == 4 else "gated_delta_rule"
    return _run(f"{name}.chunk_{name}", (q, k, v), {"g": g, "beta": beta}, scale, initial_state, cu_seqlens)


def dplr(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`chunk_dplr_delta_rule`, which has vector decays alone."""
    if g is None:
        g = q.new_zeros(q.shape, dtype=torch.float32)
    elif g.ndim == 3:
        g = g.unsqueeze(-1).expand(q.shape)
    name = "generalized_delta_rule.chunk_dplr_delta_rule"
    return _run(name, (q, k, v), {"a": a, "b": b, "gk": g}, scale, initial_state, cu_seqlens)


OPS = {"linear_attention": linear_attention, "delta_rule": delta_rule, "dplr": dplr}


def _run(
    name: str, matrices: tuple[Tensor, Tensor, Tensor], gates: dict[str, Tensor | None], scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`fla.ops.<name>` on q, k, v and its gates: `(o, final state [N, H, K, V])`."""
    module, _, function = name.rpartition(".")
    gates = {n: _floored(x) if n in ("g", "gk") and x is not None else x for n, x in gates.items()}
    o, state = getattr(importlib.import_module(f"fla.ops.{module}"), function)(
        *matrices,
        **gates,
        scale=float(scale),
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=True,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(matrices[0].device, torch.int64),
    )
    return o.to(matrices[2].dtype), state


def _floored(g: Tensor) -> Tensor:
    """Log-decays in float32, not below what e^g can tell from 0 (and with gradient 0 there)."""
    return g.float().clamp(min=FLOOR[torch.float32])
