"""Products of 16 bits on a CPU without instructions for them, which torch takes in 3 to 40 times the time of float32.

Here they are taken in float32, of the same numbers, and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.arguments import is_transformed
from halflife.precision import lacks_products, product_dtype, without_autocast

FEWEST_ROWS = 4  # for which it pays to read a weight of 16 bits in float32


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x Wᵀ + b` as `F.linear`; on a CPU without products of 16 bits in float32, of the same numbers and rounded once.

    The backward pass keeps the numbers of 16 bits.

    Args:
        x, weight, bias: `[..., D]`, `[N, D]`, and `[N]` or None.

    Raises:
        RuntimeError: x and weight have different dtypes, and autocast does not give them one.
    """
    dtype = product_dtype(x)
    alike = weight.is_cpu and product_dtype(weight) == dtype  # F.linear refuses others
    if not (lacks_products(x) and alike and x.shape[:-1].numel() >= FEWEST_ROWS) or is_transformed():
        return F.linear(x, weight, bias)
    y: Tensor = _WideProduct.apply(x.to(dtype), weight.to(dtype))  # pyright: ignore[reportAssignmentType]
    return y if bias is None else y + bias.to(dtype)


def times(a: Tensor, b: Tensor) -> Tensor:
    """`a [..., M, D] @ b [..., D, N]`; what `product` takes in float32 is so here too, and then has the dtype of a."""
    if not lacks_products(a):
        return a @ b
    with without_autocast(a.device):
        return (a.float() @ b.float()).to(a.dtype)


class _WideProduct(torch.autograd.Function):
    """`x Wᵀ` by `times`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight.t())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = times(dy, weight) if ctx.needs_input_grad[0] else None
        rows, inputs = (part.reshape(-1, part.shape[-1]) for part in (dy, x))  # `is_grads_batched` has no flatten
        return dx, times(rows.t(), inputs) if ctx.needs_input_grad[1] else None
