"""Which implementation of an op runs.

`reference` is the token loop, the definition; `chunked` is plain PyTorch on any device. `auto` takes the
fastest one that is available and known to be right where the tensors are. Nothing is swapped silently:
a name that cannot run is an error that says why. The choice never looks at `.training`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
