"""The delta rule with no decay or a scalar one, and GateRank on it, as Triton kernels.

The three steps are those of `halflife.ops.delta_rule`. First, the triangular systems of all chunks are inverted. Then a
walk over the chunks of each sequence computes the states entering them and the values that they write. Last, the
outputs are those of linear attention which writes these values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halflife.ops.backends.triton.delta_backward import backward
from halflife.ops.backends.triton.gates import make_chunks
from halflife.ops.backends.triton.states import outputs
from halflife.ops.backends.triton.systems import solve, walk
from halflife.ops.call import Call


class _Delta(torch.autograd.Function):
    """Saves the inputs and the initial state; the backward pass recomputes the rest."""

    @staticmethod
    def forward(ctx, q, k, v, beta, g_slow, g_fast, initial, scale, chunks):
        gates = (g_slow, g_fast)
        states, written, final = walk(k, solve(k, v, beta, gates, chunks, keep=False), gates, initial, chunks)
        ctx.save_for_backward(q, k, v, beta, g_slow, g_fast, initial)
        ctx.settings = (scale, chunks)
        return outputs(q, k, written, gates, states, chunks, scale, like=v), final

    @staticmethod
    def backward(ctx, do, dfinal):
        if torch.is_grad_enabled():  # only under create_graph=True; autograd cannot see into the kernels
            raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
        q, k, v, beta, g_slow, g_fast, initial = ctx.saved_tensors
        (scale, chunks), gates = ctx.settings, (g_slow, g_fast)
        grads = backward(q, k, v, beta, gates, initial, scale, chunks, do.contiguous(), dfinal.contiguous())
        return *grads, None, None


@torch.compiler.disable
def run(call: Call) -> tuple[Tensor, Tensor]:
    """Run the kernels of the delta rule, or of GateRank on it, on a call with scalar decays.

    Returns:
        The outputs `[B, T, H, V]` and the final states `[N, H, num_states · K, V]`.
    """
    chunks, gates = make_chunks(call["q"], call.chunk_size, call.packing.cu_seqlens), (call.get("g_slow"), call.decay)
    inputs = (call["q"], call["k"], call["v"], call["beta"], *gates, call.first_state(torch.float32))
    given = (None if x is None else x.contiguous() for x in inputs)
    with torch.cuda.device_of(call["q"]):
        return _Delta.apply(*given, float(call.output_scale), chunks)
