"""Shapes and gradients of the custom ops in csrc/koopman*.cpp, as `fakes` has those of the other ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LANE = 16  # rows and columns of a matrix are multiples of it (csrc/matrix.h)


@torch.library.register_fake("halflife::koopman")
def _forward(
    q, k, v, memory, pending, gamma, mix, cu_seqlens, ridge, power, chunk_size, whole_sequence, prefix, borders
) -> list[Tensor]:
    heads, rank, width = k.shape[2], _round_up(k.shape[3]), _round_up(v.shape[3])
    if borders < 0:  # the number of saved sums depends on the counts of pending tokens
        borders = torch.library.get_ctx().new_dynamic_size()
    return [
        v.new_empty(*q.shape[:3], v.shape[3]), *(torch.empty_like(x) for x in memory), torch.empty_like(pending),
        memory[0].new_empty(borders, heads, rank, 2 * rank + width), memory[0].new_empty(borders, heads),
        pending.new_empty(1),
    ]  # fmt: skip


def _round_up(n: int) -> int:
    return (n + _LANE - 1) // _LANE * _LANE


@torch.library.register_fake("halflife::koopman_backward")
def _backward(q, k, v, memory, pending, gamma, mix, *_) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, *memory, gamma, mix)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, memory, pending, gamma, mix, cu_seqlens, *settings, _ = inputs
    *_, left, borders, norms, retries = output
    ctx.save_for_backward(q, k, v, *memory, pending, gamma, mix, cu_seqlens, borders, norms)
    ctx.settings = settings
    ctx.mark_non_differentiable(left, borders, norms, retries)


def _grad(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    if torch.is_grad_enabled():  # only under create_graph=True, for which the saved states are constants
        raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
    q, k, v, *memory, pending, gamma, mix, cu_seqlens, borders, norms = ctx.saved_tensors
    dy, *dfinal = grads[: 1 + len(memory)]
    dq, dk, dv, *dmemory, dgamma, dmix = torch.ops.halflife.koopman_backward(
        q, k, v, memory, pending, gamma, mix, cu_seqlens, *ctx.settings, borders, norms,
        dy if dy.stride(-1) == 1 else dy.contiguous(), [x.contiguous() for x in dfinal],
    )  # fmt: skip
    return dq, dk, dv, dmemory, None, dgamma, dmix, *[None] * 7


torch.library.register_autograd("halflife::koopman", _grad, setup_context=_save)


@torch.library.register_fake("halflife::koopman_wait")
def _wait(q, k, v, gram, transition, values, norm, inverse, *waiting) -> tuple[Tensor, ...]:
    return v.new_empty(v.shape), *(torch.empty_like(x) for x in waiting[:3])


@torch.library.register_fake("halflife::koopman_enter")
def _enter(q, k, v, *memory) -> list[Tensor]:
    after = [torch.empty_like(x) for x in memory[:6]]  # the four sums, the last key and the inverse
    return [v.new_empty(v.shape), *after, v.new_empty((), dtype=torch.long)]
