"""Linear attention with no decay or a scalar one, and GateRank on it, as Triton kernels.

The three steps are those of `halflife.ops.linear_attention`. First, each chunk's update of the state is computed. Then
a scan over the chunks of each sequence turns these updates into the states entering the chunks. Last come the outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halflife.ops.backends.triton.gates import make_chunks, mode_of
from halflife.ops.backends.triton.linear_backward import backward
from halflife.ops.backends.triton.states import outputs, products, scan
from halflife.ops.call import Call


class _Linear(torch.autograd.Function):
    """Saves the inputs and the initial state; the backward pass recomputes the states."""

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
        if torch.is_grad_enabled():  # only under create_graph=True; autograd cannot see into the kernels
            raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
        q, k, v, g_slow, g_fast, initial = ctx.saved_tensors
        scale, chunks = ctx.settings
        grads = backward(q, k, v, (g_slow, g_fast), initial, scale, chunks, do.contiguous(), dfinal.contiguous())
        return *grads, None, None


@torch.compiler.disable
def run(call: Call) -> tuple[Tensor, Tensor]:
    """Run the kernels of linear attention, or of GateRank on it, on a call with scalar decays.

    Returns:
        The outputs `[B, T, H, V]` and the final states `[N, H, num_states · K, V]`.
    """
    chunks, gates = make_chunks(call["q"], call.chunk_size, call.packing.cu_seqlens), (call.get("g_slow"), call.decay)
    inputs = (call["q"], call["k"], call["v"], *gates, call.first_state(torch.float32))
    given = (None if x is None else x.contiguous() for x in inputs)
    with torch.cuda.device_of(call["q"]):
        return _Linear.apply(*given, float(call.output_scale), chunks)
