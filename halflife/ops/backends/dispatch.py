"""Which implementation of an op runs.

`reference` is the token loop, the definition; `chunked` is plain PyTorch on any device; `triton` is our own kernels and
`fla` an adapter to fla-core's, both for CUDA devices; `mask` is quadratic in T. `auto` takes the fastest one that can
run these inputs and is known to be right where they are; for a single token that is the token loop. Nothing is swapped
silently: a name that cannot run is an error that says why. The choice never looks at `.training`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halflife.ops.backends import fla, triton
from halflife.registry import Registry, unknown

Implementation = Callable[..., Any]
# (device, the op's inputs or None) → why it cannot run there, in one sentence, or None. Without inputs only the device
# and the installed packages are judged.
Limits = Callable[[torch.device, tuple[Any, ...] | None], str | None]

ORDER = ("triton", "fla", "chunked", "mask", "reference")  # best first

_OPS: Registry[dict[str, Implementation]] = Registry("op")
_LIMITS: dict[tuple[str, str], Limits] = {}


class CannotRun(ValueError):
    """A backend asked for by name that cannot run these inputs where they are."""


def implements(op: str, backend: str, limits: Limits | None = None) -> Callable[[Implementation], Implementation]:
    """Decorator: the function below is `backend`'s implementation of `op`, which runs where `limits` allow it."""

    def register(function: Implementation) -> Implementation:
        if op not in _OPS:
            _OPS.add(op)({})
        _OPS[op][backend] = function
        if limits is not None:
            _LIMITS[op, backend] = limits
        return function

    return register


def ops() -> list[str]:
    """The names of all ops."""
    return _OPS.names()


def registered(op: str) -> list[str]:
    """The backends that `op` has anywhere, best first."""
    return sorted(_OPS[op], key=ORDER.index)


def why(op: str, backend: str, device: torch.device | str = "cpu", inputs: tuple[Any, ...] | None = None) -> str | None:
    """Why `backend` cannot run `op` on `device` (and on these inputs, if given), in one sentence; None if it can."""
    limits = _LIMITS.get((op, backend))
    return None if limits is None else limits(torch.device(device), inputs)


def available_backends(op: str, device: torch.device | str = "cpu") -> list[str]:
    """The backends that can run `op` on `device`, the one that `auto` takes first.

    Triton's interpreter (TRITON_INTERPRET=1 on a CPU) is not among them: it serves tests, by name.
    """
    device = torch.device(device)
    return [name for name in registered(op) if why(op, name, device) is None and not _interpreted(name, device)]


def _interpreted(backend: str, device: torch.device) -> bool:
    return backend == "triton" and device.type != "cuda"


def choose(op: str, backend: str, device: torch.device, inputs: tuple[Any, ...] | None = None) -> Implementation:
    """The implementation of `op` that runs on `device`, and on these inputs if given.

    Raises:
        ValueError: `backend` is no backend of this op, or cannot run here; the message says why, and which can.
    """
    if backend == "auto":
        # The mask costs T² memory, the interpreter minutes: both only for those who ask.
        asked = (name for name in registered(op) if name != "mask" and not _interpreted(name, device))
        return _OPS[op][next(name for name in asked if why(op, name, device, inputs) is None)]
    fit = [name for name in registered(op) if why(op, name, device, inputs) is None]
    if backend not in _OPS[op]:
        raise unknown(f"backend of {op} on {device.type}", backend, ["auto", *fit])
    if backend not in fit:
        reason = why(op, backend, device, inputs)
        raise CannotRun(f"backend {backend!r} cannot run this {op}: {reason}. Those that can: auto, {', '.join(fit)}")
    return _OPS[op][backend]


def dispatch(
    op: str,
    backend: str,
    inputs: tuple[Any, ...],
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Runs an op on a state whose arguments have been checked: `(o, final state or None)`.

    Args:
        op, backend: see `choose`. With "auto", a single token goes through the token loop, which is its definition
            and, while decoding, the fastest.
        inputs: `q, k, v, …, g`, each `[B, T, H, …]`; g may be None.
        scale, initial_state, output_final_state, cu_seqlens, chunk_size: as in the op's signature.
    """
    q = inputs[0]
    if backend == "auto" and q.shape[1] == 1 and cu_seqlens is None:
        backend = "reference"
    run = choose(op, backend, q.device, inputs)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        o, state = run(*inputs, scale, initial_state, cu_seqlens, chunk_size)
    return o, state if output_final_state else None


# --------------------------------------------------------- backends that are imported when they are asked for


def _no_kernel(op: str, device: torch.device, inputs: tuple[Any, ...] | None) -> str | None:
    """The limits of our Triton kernels."""
    if inputs is not None:
        return triton.unsupported(op, *inputs)
    if device.type != "cuda" and not triton.interpreted():
        return f"our Triton kernels run on CUDA devices (or with TRITON_INTERPRET=1), not on {device.type}"
    return None if importlib.util.find_spec("triton") else "triton is not installed (pip install triton)"


def _kernel(op: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Our Triton kernel of `op`; GateRank has one under each update."""
    delta = op == "delta_rule" or (op == "gate_rank" and arguments[3] is not None)
    module = importlib.import_module(f"halflife.ops.backends.triton.{'delta' if delta else 'linear'}")
    return getattr(module, op)(*arguments)


for _op in ("linear_attention", "delta_rule", "gate_rank"):
    implements(_op, "triton", partial(_no_kernel, _op))(partial(_kernel, _op))
for _op, _function in fla.OPS.items():
    implements(_op, "fla", partial(fla.unsupported, _op))(_function)
