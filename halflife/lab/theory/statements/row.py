"""The entry of one statement."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IDENTITY, BOUND, NUMBER = "identity", "bound", "number"


def row(source: str, what: str, kind: str, value: Any) -> dict[str, Any]:
    """Return an entry. Tensors become numbers or lists of numbers."""
    value = value.tolist() if isinstance(value, Tensor) else value
    return {"source": source, "what": what, "kind": kind, "value": value}


def error(value: Tensor, expected: Tensor) -> float:
    """Return the largest |value − expected| relative to the largest |expected|."""
    scale = expected.abs().max()
    return ((value - expected).abs().max() / torch.where(scale > 0, scale, 1.0)).item()


def quotient(value: Tensor, bound: Tensor) -> float:
    """Return the largest value / bound over all draws; the bounds are positive."""
    return (value / bound).max().item()
