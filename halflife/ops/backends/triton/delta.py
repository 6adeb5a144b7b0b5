"""The delta rule with no or a scalar decay, and GateRank on it, as Triton kernels.

Three steps, as in `halflife.ops.delta_rule`: every chunk's triangular system is inverted, a walk over the chunks of a
sequence forms the states entering them and the values that they write, and the outputs are those of linear attention
that writes these values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halflife.ops.backends.triton.delta_backward import backward
from halflife.ops.backends.triton.gates import Gates, first_state, make_chunks
from halflife.ops.backends.triton.states import outputs
from halflife.ops.backends.triton.systems import solve, walk


class _Delta(torch.autograd.Function):
    """Saves the inputs and the initial state; the backward pass forms the rest again."""

    @staticmethod
    def forward(ctx, q, k, v, beta, g_slow, g_fast, initial, scale, chunks):
        gates = (g_slow, g_fast)
        states, written, final = walk(k, solve(k, v, beta, gates, chunks, keep=False), gates, initial, chunks)
        ctx.save_for_backward(q, k, v, beta, g_slow, g_fast, initial)
        ctx.settings = (scale, chunks)
        return outputs(q, k, written, gates, states, chunks, scale, like=v), final

    @staticmethod
    def backward(ctx, do, dfinal):
        if torch.is_grad_enabled():  # only under create_graph=True, for which the kernels are no graph
            raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
        q, k, v, beta, g_slow, g_fast, initial = ctx.saved_tensors
        (scale, chunks), gates = ctx.settings, (g_slow, g_fast)
        grads = backward(q, k, v, beta, gates, initial, scale, chunks, do.contiguous(), dfinal.contiguous())
        return *grads, None, None


@torch.compiler.disable
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(o [B, T, H, V], final state [N, H, K, V])`; g `[B, T, H]` or None. See `halflife.ops.delta_rule`."""
    return _run(q, k, v, beta, (None, g), scale, initial_state, cu_seqlens, chunk_size)


@torch.compiler.disable
def gate_rank(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g_slow: Tensor, g_fast: Tensor, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """GateRank on the delta rule: `(o [B, T, H, V], final state [N, H, 2K, V])`, the fast state above the slow one.
    See `halflife.ops.gate_rank`."""
    return _run(q, k, v, beta, (g_slow, g_fast), scale, initial_state, cu_seqlens, chunk_size)


def _run(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gates: Gates, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    chunks = make_chunks(q, chunk_size, cu_seqlens)
    initial = first_state(q, v, gates, initial_state, cu_seqlens)
    given = (None if x is None else x.contiguous() for x in (q, k, v, beta, *gates, initial))
    with torch.cuda.device_of(q):
        return _Delta.apply(*given, float(scale), chunks)
