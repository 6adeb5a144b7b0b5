"""Shapes and gradients of the custom ops in csrc/, for autograd, `torch.compile` and `torch.export`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halflife.ops.backends.native import koopman_fakes  # noqa: F401 (registers those of Koopman attention)

_BORDER, _LANE = 4, 16  # chunks from one saved state to the next, and the smallest chunk (csrc/walk.cpp)


@torch.library.register_fake("halflife::state_op")
def _forward(op, q, k, v, *inputs):
    *_, initial, cu_seqlens, _, chunk_size, save = inputs
    borders = initial.new_empty(_num_borders(q, cu_seqlens, chunk_size) if save else 0, *initial.shape[1:])
    return v.new_empty(v.shape), torch.empty_like(initial), borders


def _num_borders(q: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> int:
    """The saved states (`max_borders` in csrc/walk.cpp)."""
    batch, length = q.shape[:2]
    if cu_seqlens is not None:
        return length // (_BORDER * _LANE) + cu_seqlens.shape[0] - 1
    chunk = _chunk(chunk_size, length)
    chunks = (length + chunk - 1) // chunk
    return batch * ((chunks + _BORDER - 1) // _BORDER)


@torch.library.register_fake("halflife::state_step")
def _step(op, q, k, v, *inputs):
    return v.new_empty(v.shape), torch.empty_like(inputs[-2])


def operations(op, q, k, v, g, beta, a, b, g_slow, gain, initial, cu_seqlens, scale, chunk_size, *_, **__) -> int:
    """Return the operations of `state_op`: products inside chunks, with the state, and with the inverse of a system.

    The arguments are those of the op, with shapes in the place of tensors, as torch's counter of operations gives them.
    """
    (batch, length, heads, value), key = v, q[-1]
    chunk, wide = _chunk(chunk_size, length), initial[-2]
    products = chunk * (key + value) + 2 * wide * value
    if beta is not None:
        products += chunk * (key + value + wide) + wide * value
    if a is not None:
        products += chunk * (2 * key + 3 * value + wide) + 2 * wide * value
    return 2 * products * batch * length * heads


def operations_of_linear(x, weight, **_) -> int:
    """Return the operations of `halflife::linear`; the arguments are shapes."""
    return 2 * x[0] * x[1] * weight[0]


def _chunk(chunk_size: int, length: int) -> int:
    chunk = _LANE
    while chunk < min(chunk_size, length):
        chunk *= 2
    return chunk


@torch.library.register_fake("halflife::state_op_backward")
def _backward(op, q, *inputs):
    tensors, dfinal = (q, *inputs[:8]), inputs[-1]
    return [*(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors), torch.empty_like(dfinal)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    op, *tensors, _, cu_seqlens, scale, chunk_size, _ = inputs
    ctx.save_for_backward(*tensors, output[2], cu_seqlens)
    ctx.settings = op, scale, chunk_size
    ctx.mark_non_differentiable(output[2])


def _grad(ctx: Any, dout: Tensor, dfinal: Tensor, _: Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled():  # only under create_graph=True, for which the saved states are constants
        raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
    *tensors, borders, cu_seqlens = ctx.saved_tensors
    op, scale, chunk_size = ctx.settings
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    *grads, dinitial = torch.ops.halflife.state_op_backward(
        op, *tensors, borders, cu_seqlens, scale, chunk_size, dout, dfinal.contiguous()
    )
    grads = [None if x is None else grad for x, grad in zip(tensors, grads, strict=True)]
    return None, *grads, dinitial, None, None, None, None


torch.library.register_autograd("halflife::state_op", _grad, setup_context=_save)
