"""Adapter to fla-core's kernels (flash-linear-attention): the inputs that they can run, and their conventions.

Both sides take `[B, T, H, D]`, natural logarithms (fla converts them to base 2 itself) and float32 states
`[N, H, K, V]`. In DPLR `a` reads the state before the decay on both sides. These points differ:

- `scale` is passed as a float. Triton compiles the integer 1 into the kernel, and NVIDIA's assembler then writes
  outside of shared memory on Hopper.
- fla computes −inf − (−inf) = NaN, so log-decays are clamped where e^g is 0 in float32.
- Each kernel takes either scalar or vector decays. DPLR takes vector decays only.
- The gated delta rule (scalar and vector decays) takes groups of q and k, and the other kernels do not.
- `cu_seqlens` are int64, and the initial state is float32.
- The kernels are called without their option to normalise queries and keys.

fla is imported only when one of its kernels is asked for, or when `auto` considers it on a CUDA device.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from functools import cache

import torch
from torch import Tensor

from halflife.ops.arguments import not_plain
from halflife.ops.call import Call
from halflife.ops.chunked.decays import FLOOR

MATRICES = ("q", "k", "v", "a", "b")
# Earlier versions give wrong gradients of the delta rule on Hopper and past 2³¹ elements. Later ones are not tested.
VERSIONS = ((0, 6), (0, 7))


def why_not(op: str, device: torch.device, call: Call | None = None) -> str | None:
    """Return the reason why fla cannot run `op` on `device`, or would give wrong results; None if it can.

    Without a call, only the device and the installed packages are judged.
    """
    if device.type != "cuda":
        return f"fla's kernels run on CUDA devices, not on {device.type}"
    versions = _versions()
    if isinstance(versions, str):
        return versions
    if not VERSIONS[0] <= versions[0] < VERSIONS[1]:
        least, below = (".".join(map(str, version)) for version in VERSIONS)
        return f"the adapter is for fla-core ≥ {least}, < {below}; {'.'.join(map(str, versions[0]))} is installed"
    return None if call is None else _refused(call) or _known_wrong(call, device, versions[1])


def _refused(call: Call) -> str | None:
    """The reason why fla's kernels refuse (or misread) tensors of these shapes and dtypes, or None."""
    op, q, key, value = call.op, call["q"], call.sizes["K"], call.sizes["V"]
    if (odd := not_plain(*call.tensors.values(), *(call.state or ()))) is not None:
        return odd
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"fla multiplies in bfloat16 or float16 (float32 in TF32, three digits); the inputs are {q.dtype}"
    if len({x.dtype for x in (call.get(name) for name in MATRICES) if x is not None}) > 1:
        return "fla takes all of its matrices in one dtype"
    if q.shape[1] == 0:
        return "fla cannot launch on no tokens"
    if min(key, value) < 16 or key % 2 or value % 2:
        return f"fla's head sizes are even and at least 16; K is {key}, V is {value}"
    if op != "linear_attention" and key > 256:
        return f"fla's {op} holds states of at most 256 rows; K is {key}"
    heads, groups = call.sizes["H"], (q.shape[2], call["k"].shape[2])
    if groups != (heads, heads) and (groups[0] != groups[1] or op != "delta_rule" or call["g"] is None):
        return (
            f"fla shares heads of q and k in its gated delta rule alone, and equally many of both; q and k have "
            f"{groups[0]} and {groups[1]} for {heads} of v"
        )
    if q.shape[0] * heads > 65535:
        return f"fla launches at most 65535 heads over the batch; these are {q.shape[0] * heads}"
    return None


def _known_wrong(call: Call, device: torch.device, triton: tuple[int, ...]) -> str | None:
    """The reason why the results would be wrong on this device with this version of Triton, or None."""
    g = call["g"]
    if call.op == "dplr" or (g is not None and g.ndim == 4):  # other kernels, without these faults
        return None
    major, release = _capability(device), ".".join(map(str, triton))
    if major == 9 and (3, 4) <= triton < (3, 7, 1) and g is not None and call.differentiated:
        return f"fla's gated gradients are wrong on Hopper with Triton 3.4.0 to 3.7.0; {release} is installed"
    key, value = call.sizes["K"], call.sizes["V"]
    # Without a decay K = 32, V = 48 crashed on an H100, and K = V = 64 was right (docs/log.md, 2026-11-26).
    if major == 9 and (key % 64 or value % 64):
        return f"fla's kernels crash on Hopper with some heads; sizes must be multiples of 64; K is {key}, V is {value}"
    if call.op == "delta_rule" and major >= 10 and triton < (3, 8):
        return f"fla's delta rule races and gives NaN on Blackwell with Triton below 3.8; {release} is installed"
    return None


def _capability(device: torch.device) -> int:
    """The major compute capability of an NVIDIA device (9: Hopper, 10 and above: Blackwell); 0 for AMD's."""
    return 0 if torch.version.hip else torch.cuda.get_device_capability(device)[0]


@cache
def _versions() -> tuple[tuple[int, ...], tuple[int, ...]] | str:
    """The versions of fla-core and Triton, or the reason why they cannot be used."""
    if importlib.util.find_spec("fla") is None:
        return "fla-core is not installed (pip install fla-core)"
    try:
        fla, triton = (importlib.import_module(name) for name in ("fla", "triton"))
        importlib.import_module("fla.ops.simple_gla")
    except Exception as error:  # a foreign import may raise anything
        return f"fla-core cannot be imported: {type(error).__name__}: {error}"
    return _release(fla.__version__), _release(triton.__version__)


def _release(version: str) -> tuple[int, ...]:
    """`"3.7.1+git"` → `(3, 7, 1)`."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def linear_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Run `chunk_gla` for vector decays, else `chunk_simple_gla`."""
    g = call["g"]
    name = "gla" if g is not None and g.ndim == 4 else "simple_gla"
    return _run(f"{name}.chunk_{name}", call, g=_clamped(g))


def delta_rule(call: Call) -> tuple[Tensor, Tensor]:
    """Run `chunk_delta_rule`, `chunk_gated_delta_rule` (scalar decays) or `chunk_kda` (vector decays)."""
    g, beta = call["g"], call["beta"]
    if g is None:
        return _run("delta_rule.chunk_delta_rule", call, beta=beta)
    name = "kda" if g.ndim == 4 else "gated_delta_rule"
    return _run(f"{name}.chunk_{name}", call, g=_clamped(g), beta=beta)


def dplr(call: Call) -> tuple[Tensor, Tensor]:
    """Run `chunk_dplr_delta_rule`, which takes vector decays only."""
    g, shape = call["g"], call["q"].shape
    if g is None:
        g = call["q"].new_zeros(shape, dtype=torch.float32)
    elif g.ndim == 3:
        g = g.unsqueeze(-1).expand(shape)
    return _run("generalized_delta_rule.chunk_dplr_delta_rule", call, a=call["a"], b=call["b"], gk=_clamped(g))


def _run(name: str, call: Call, **gates: Tensor | None) -> tuple[Tensor, Tensor]:
    """Call `fla.ops.<name>` on q, k, v and these gates; return `(o, final state [N, H, K, V])`."""
    module, _, function = name.rpartition(".")
    bounds = call.packing.cu_seqlens
    o, state = getattr(importlib.import_module(f"fla.ops.{module}"), function)(
        call["q"], call["k"], call["v"], **gates, scale=float(call.output_scale),
        initial_state=None if call.state is None else call.state[0].float(), output_final_state=True,
        cu_seqlens=None if bounds is None else bounds.to(torch.int64),
    )  # fmt: skip
    return o.to(call.output_dtype), state


def _clamped(g: Tensor | None) -> Tensor | None:
    """Log-decays in float32, clamped (with gradient 0) where e^g is 0 in float32; None stays None."""
    return None if g is None else g.float().clamp(min=FLOOR[torch.float32])
