"""Which implementation of an op runs.

`reference` is the token loop, the definition; `chunked` is plain PyTorch on any device. `auto` takes the fastest one
that is available and known to be right where the tensors are; for a single token that is the token loop. Nothing is
swapped silently: a name that cannot run is an error that says why. The choice never looks at `.training`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halflife.registry import Registry, unknown

Implementation = Callable[..., Any]

_OPS: Registry[dict[str, Implementation]] = Registry("op")


def implements(op: str, backend: str) -> Callable[[Implementation], Implementation]:
    """Decorator: the function below is `backend`'s implementation of `op`."""

    def register(function: Implementation) -> Implementation:
        if op not in _OPS:
            _OPS.add(op)({})
        _OPS[op][backend] = function
        return function

    return register


def ops() -> list[str]:
    """The names of all ops."""
    return _OPS.names()


def available_backends(op: str, device: torch.device | str = "cpu") -> list[str]:
    """The backends that can run `op` on `device`, the one that `auto` takes first."""
    names = list(_OPS[op])
    return sorted(names, key=lambda name: name == "reference")


def choose(op: str, backend: str, device: torch.device) -> Implementation:
    """The implementation of `op` that runs on `device`.

    Raises:
        ValueError: `backend` is no backend of this op; the message lists those that are.
    """
    names = available_backends(op, device)
    if backend == "auto":
        return _OPS[op][names[0]]
    if backend not in names:
        raise unknown(f"backend of {op} on {device.type}", backend, ["auto", *names])
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
    run = choose(op, backend, q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        o, state = run(*inputs, scale, initial_state, cu_seqlens, chunk_size)
    return o, state if output_final_state else None
