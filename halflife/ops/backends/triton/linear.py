"""Linear attention with no or a scalar decay, and GateRank on it, as Triton kernels.

Three steps, as in `halflife.ops.linear_attention`: what each chunk writes, a scan over the chunks of a sequence that
turns it into the states entering them, and the outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halflife.ops.backends.triton.gates import Gates, first_state, make_chunks, mode_of
from halflife.ops.backends.triton.linear_backward import backward
from halflife.ops.backends.triton.states import outputs, products, scan


class _Linear(torch.autograd.Function):
    """Saves the inputs and the initial state; the backward pass forms the states again."""

    @staticmethod
    def forward(ctx, q, k, v, g_slow, g_fast, initial, scale, chunks):
        gates = (g_slow, g_fast)
        states, carried = products(k, v, gates, chunks, 1.0, read=False)
        final = scan(states, initial, carried, chunks, mode_of(*gates))
        ctx.save_for_backward(q, k, v, g_slow, g_fast, initial)
        ctx.settings = (scale, chunks)
        return outputs(q, k, v, gates, states, chunks, scale, like=v), final

    @staticmethod
    def backward(ctx, do, dfinal):
        if torch.is_grad_enabled():  # only under create_graph=True, for which the kernels are no graph
            raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
        q, k, v, g_slow, g_fast, initial = ctx.saved_tensors
        scale, chunks = ctx.settings
        grads = backward(q, k, v, (g_slow, g_fast), initial, scale, chunks, do.contiguous(), dfinal.contiguous())
        return *grads, None, None


@torch.compiler.disable
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(o [B, T, H, V], final state [N, H, K, V])`; g `[B, T, H]` or None. See `halflife.ops.linear_attention`."""
    return _run(q, k, v, (None, g), scale, initial_state, cu_seqlens, chunk_size)


@torch.compiler.disable
def gate_rank(
    q: Tensor, k: Tensor, v: Tensor, beta: None, g_slow: Tensor, g_fast: Tensor, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """GateRank on linear attention (no beta): `(o [B, T, H, V], final state [N, H, 2K, V])`, the fast state above the
    slow one. See `halflife.ops.gate_rank`."""
    return _run(q, k, v, (g_slow, g_fast), scale, initial_state, cu_seqlens, chunk_size)


def _run(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    chunks = make_chunks(q, chunk_size, cu_seqlens)
    initial = first_state(q, v, gates, initial_state, cu_seqlens)
    given = (None if x is None else x.contiguous() for x in (q, k, v, *gates, initial))
    with torch.cuda.device_of(q):
        return _Linear.apply(*given, float(scale), chunks)
