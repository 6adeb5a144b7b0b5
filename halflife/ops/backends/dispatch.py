"""The choice of the implementation that runs an op.

| backend | implementation |
|---|---|
| `reference` | the token loop, which defines the op |
| `mask` | weights of all pairs of tokens, T × T memory |
| `chunked` | plain PyTorch, on any device |
| `fla` | an adapter to the kernels of fla-core, on CUDA devices |
| `triton` | our kernels, on CUDA devices |
| `native` | our kernels, compiled for the CPU of this machine |

`auto` takes the fastest implementation that can run these inputs and is known to be right on their device. A single
token goes through the native step where it can, else through the token loop. A backend asked for by name either runs or
raises an error with the reason; no other one takes its place. The choice never depends on `.training`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halflife.ops.backends import fla, native, triton
from halflife.ops.call import OpCall
from halflife.precision import without_autocast
from halflife.registry import Registry, unknown

Implementation = Callable[..., Any]
# (device, call or None) → the reason why the backend cannot run there, in one sentence, or None if it can. Without a
# call only the device and the installed packages are judged.
Limits = Callable[[torch.device, Any], str | None]

ORDER = ("triton", "fla", "native", "chunked", "mask", "reference")  # best first

_OPS: Registry[dict[str, Implementation]] = Registry("op")
_LIMITS: dict[tuple[str, str], Limits] = {}


class CannotRun(ValueError):
    """A backend asked for by name cannot run these inputs on their device."""


def implements(op: str, backend: str, limits: Limits | None = None) -> Callable[[Implementation], Implementation]:
    """Register the decorated function as the `backend` of `op`, which runs where `limits` gives no reason against it.

    Implementations of an op on a state take an `OpCall` and return `(o [B, T, H, V], final state)`.
    """

    def register(function: Implementation) -> Implementation:
        if op not in _OPS:
            _OPS.add(op)({})
        _OPS[op][backend] = function
        if limits is not None:
            _LIMITS[op, backend] = limits
        return function

    return register


def ops() -> list[str]:
    """Return the names of all ops."""
    return _OPS.names()


def registered(op: str) -> list[str]:
    """Return all backends of `op`, the fastest first, whether or not they can run here."""
    return sorted(_OPS[op], key=ORDER.index)


def why(op: str, backend: str, device: torch.device | str = "cpu", call: Any = None) -> str | None:
    """Return the reason why `backend` cannot run `op` on `device` (and this call, if given), or None if it can."""
    limits = _LIMITS.get((op, backend))
    return None if limits is None else limits(torch.device(device), call)


def available_backends(op: str, device: torch.device | str = "cpu") -> list[str]:
    """Return the backends that can run `op` on `device`; the first one is the choice of `auto`.

    Triton's interpreter (TRITON_INTERPRET=1 on a CPU) is for tests, which ask for it by name. It is not listed.
    """
    device = torch.device(device)
    return [name for name in registered(op) if why(op, name, device) is None and not _interpreted(name, device)]


def _interpreted(backend: str, device: torch.device) -> bool:
    return backend == "triton" and device.type != "cuda"


def choose(op: str, backend: str, device: torch.device, call: Any = None) -> Implementation:
    """Return the implementation of `op` that runs on `device` (and this call, if given).

    Raises:
        ValueError: `backend` is no backend of this op, or cannot run here; the message gives the reason and the
            backends that can.
    """
    if backend == "auto":
        # The mask takes T² memory and the interpreter minutes, so both run only when asked for by name.
        candidates = (name for name in registered(op) if name != "mask" and not _interpreted(name, device))
        return _OPS[op][next(name for name in candidates if why(op, name, device, call) is None)]
    reason = why(op, backend, device, call) if backend in _OPS[op] else "unknown"
    if reason is None:
        return _OPS[op][backend]
    able = ["auto", *(name for name in registered(op) if why(op, name, device, call) is None)]
    if backend not in _OPS[op]:
        raise unknown(f"backend of {op} on {device.type}", backend, able)
    raise CannotRun(f"backend {backend!r} cannot run this {op}: {reason}. Those that can: {', '.join(able)}")


def _traceable(op: str, backend: str) -> str:
    """Return the backend for a call under torch.func or forward-mode differentiation, which need plain operations."""
    if backend not in ("auto", "reference", "mask"):
        raise CannotRun(
            f"backend {backend!r} has no rules for torch.func and forward-mode derivatives of {op}; use 'reference'"
        )
    return "reference" if backend == "auto" else backend


def dispatch(call: OpCall, backend: str, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """Check the arguments of an op, choose its implementation and run it.

    Args:
        call: the arguments.
        backend: see `choose`. With "auto", a single token goes through the native step, or else through the token loop,
            which are the fastest forms while decoding.
        output_final_state: whether to return the final state.

    A call whose initial state is float64 runs in float64, also with other inputs, and so returns a float64 state.

    Returns:
        The outputs `[B, T, H, V]` in v's dtype, and the final state or None.

    Raises:
        ValueError: a shape does not fit, or the backend cannot run.
    """
    call.check()
    dtype, call = call.v.dtype, call.with_wide_inputs()
    if call.is_transformed:
        backend = _traceable(call.op, backend)
    if backend == "auto" and call.is_token and (call.differentiated or why(call.op, "native", call.device, call)):
        backend = "reference"
    implementation = choose(call.op, backend, call.device, call)
    with without_autocast(call.device):
        o, state = implementation(call)
    return o.to(dtype), state if output_final_state else None


# ------------------------------------------------------------------- backends that are imported on their first use


def _triton_limits(op: str, device: torch.device, call: OpCall | None) -> str | None:
    """The limits of our Triton kernels."""
    if call is not None:
        return triton.unsupported(call)
    if device.type != "cuda" and not triton.interpreted():
        return f"our Triton kernels run on CUDA devices (or with TRITON_INTERPRET=1), not on {device.type}"
    return None if importlib.util.find_spec("triton") else "triton is not installed (pip install triton)"


def _triton_kernel(call: OpCall) -> tuple[Tensor, Tensor]:
    """Run our Triton kernels of the delta rule if the call has a writing strength, else those of linear attention."""
    module = "linear" if call.beta is None else "delta"
    return importlib.import_module(f"halflife.ops.backends.triton.{module}").run(call)


for _op in ("linear_attention", "delta_rule", "gate_rank"):
    implements(_op, "triton", partial(_triton_limits, _op))(_triton_kernel)
for _op, _function in fla.OPS.items():
    implements(_op, "fla", partial(fla.unsupported, _op))(_function)
for _op in ("linear_attention", "delta_rule", "gate_rank", "dplr"):
    implements(_op, "native", native.unsupported)(native.run)
