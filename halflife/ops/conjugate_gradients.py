"""Conjugate gradients for batches of symmetric positive systems, with the derivative of the solution."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halflife.ops.arguments import is_traced, may_branch

Product = Callable[[Tensor], Tensor]  # applies the matrices to vectors `[…, K]`
TINY = 1e-30  # keeps 0 / 0 away where a right-hand side or a residual is 0


def check_solver(iterations: int, tolerance: float) -> None:
    """Raises a ValueError unless there is an iteration and the tolerance is not negative."""
    if iterations < 1 or tolerance < 0:
        raise ValueError(f"need iterations ≥ 1 and tolerance ≥ 0; got {iterations} and {tolerance}")


def conjugate_gradients(product: Product, diagonal: Tensor, b: Tensor, *, iterations: int, tolerance: float) -> Tensor:
    """Solve `A x = b` for symmetric positive matrices, one for each vector `[…, K]`; `product` applies all of them.

    The iteration starts at `b / diagonal`, the solution if A had no other entries than its diagonal. A vector whose
    residual is at most `tolerance · ‖b‖` is not changed any more. The loop ends when this holds for all, but not on
    accelerators and in graphs (`may_branch`).
    """
    x = b / diagonal
    residual = b - product(x)
    direction, square = residual, residual.square().sum(-1, keepdim=True)
    enough = (tolerance**2 * b.square().sum(-1, keepdim=True)).clamp(min=TINY)
    for _ in range(iterations):
        open_ = square > enough
        if may_branch(b.device) and not is_traced(b) and not open_.any():
            break
        applied = product(direction)
        step = torch.where(open_, square / (direction * applied).sum(-1, keepdim=True).clamp(min=TINY), 0)
        x, residual = x + step * direction, residual - step * applied
        after = residual.square().sum(-1, keepdim=True)
        direction, square = residual + after / square.clamp(min=TINY) * direction, torch.where(open_, after, square)
    return x


class Solution(torch.autograd.Function):
    """A solution x of A x = q with its derivatives: those of the residual `q − A x`, through A⁻¹."""

    @staticmethod
    def forward(ctx, residual: Tensor, x: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        ctx.solve = solve
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        with torch.no_grad():
            return ctx.solve(grad), None, None
