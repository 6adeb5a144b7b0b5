"""Heads that share queries and keys: of H heads and G groups, head h reads group h // (H / G).

A group is not copied for each of its heads. It enters products by broadcasting, or blocks of it do. The number of
groups divides the number of heads, and where both are equal the functions are those of torch that their names say.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def each_head(x: Tensor, num_heads: int, dim: int = 1) -> Tensor:
    """Repeat the G groups along `dim` for H heads: `x` itself where G = H, a view where G = 1, and else a copy."""
    groups = x.shape[dim]
    if groups == num_heads:
        return x
    shared = x.unsqueeze(dim + 1).expand(*x.shape[: dim + 1], num_heads // groups, *x.shape[dim + 1 :])
    return shared.flatten(dim, dim + 1)


def by_head(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, dim: int = 1) -> Tensor:
    """Compute a pointwise `function(x, y)`, in which `dim` has G groups in x, and H heads in y and in the result."""
    groups, heads = x.shape[dim], y.shape[dim]
    if groups == heads:
        return function(x, y)
    return function(x.unsqueeze(dim + 1), y.unflatten(dim, (groups, heads // groups))).flatten(dim, dim + 1)


def weigh(x: Tensor, weights: Tensor, dim: int = 1) -> Tensor:
    """Compute `x * weights`, for x with G groups and weights with H heads along `dim`."""
    return by_head(torch.mul, x, weights, dim)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Compute `q @ kᵀ` once a group: `[B, G, …, K]` each, with G of their own → `[B, G, …, T, T]` with the least G."""
    groups = math.lcm(q.shape[1], k.shape[1])
    return each_head(q, groups) @ each_head(k, groups).mT


def read_states(q: Tensor, states: Tensor) -> Tensor:
    """Compute `q @ states`: `q [B, G, T, K]`, `states [B, H, K, V]` → `[B, H, T, V]`."""
    groups = q.shape[1]
    if groups == states.shape[1]:
        return q @ states
    return torch.einsum("bgtk,bgpkv->bgptv", q, states.unflatten(1, (groups, -1))).flatten(1, 2)


def grads_of_heads(x: Tensor, heads: int) -> Tensor:
    """Allocate the gradients `[B, T, H, K]` of `x [B, T, G, K]` head by head; float16 would overflow before the sum."""
    dtype = torch.float32 if x.dtype == torch.float16 and x.shape[2] != heads else x.dtype
    return x.new_empty(*x.shape[:2], heads, x.shape[3], dtype=dtype)


def sum_of_heads(grad: Tensor, x: Tensor) -> Tensor:
    """Add the gradients of the heads of each group, in the dtype of `x [B, T, G, K]`."""
    return grad if grad.shape == x.shape else grad.unflatten(2, (x.shape[2], -1)).sum(3).to(x.dtype)
