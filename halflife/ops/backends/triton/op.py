"""Linear attention and the delta rule with no decay or a scalar one, and GateRank on both, as Triton kernels.

The three steps are those of `halflife.ops.linear_attention` and `halflife.ops.delta_rule`. First, each chunk's update
of the state is computed, or the triangular systems of all chunks are inverted. Then a scan or walk over the chunks of
each sequence gives the states entering them, and the values that the delta rule writes. Last come the outputs, which
are those of linear attention that writes these values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halflife.ops.backends.triton import MIXED, delta_backward, linear_backward
from halflife.ops.backends.triton.gates import make_chunks, mode_of
from halflife.ops.backends.triton.states import outputs, products, scan
from halflife.ops.backends.triton.systems import solve, walk
from halflife.ops.call import Call


class _Kernels(torch.autograd.Function):
    """Saves the inputs and the initial state; the backward pass recomputes the rest. Without beta: linear attention."""

    @staticmethod
    def forward(ctx, q, k, v, beta, g_slow, g_fast, initial, scale, chunks):
        gates = (g_slow, g_fast)
        if beta is None:
            states, carried = products(k, v, gates, chunks, 1.0, read=False)
            written, final = v, scan(states, initial, carried, chunks, mode_of(*gates))
        else:
            states, written, final = walk(k, solve(k, v, beta, gates, chunks, keep=False), gates, initial, chunks)
        ctx.save_for_backward(q, k, v, beta, g_slow, g_fast, initial)
        ctx.settings = (scale, chunks)
        return outputs(q, k, written, gates, states, chunks, scale, like=v), final

    @staticmethod
    def backward(ctx, do, dfinal):
        if torch.is_grad_enabled():  # only under create_graph=True; autograd cannot see into the kernels
            raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
        q, k, v, beta, g_slow, g_fast, initial = ctx.saved_tensors
        rest: Any = ((g_slow, g_fast), initial, *ctx.settings, do.contiguous(), dfinal.contiguous())
        if beta is not None:
            return *delta_backward.backward(q, k, v, beta, *rest), None, None
        dq, dk, dv, *others = linear_backward.backward(q, k, v, *rest)
        return dq, dk, dv, None, *others, None, None


@torch.compiler.disable
def run(call: Call) -> tuple[Tensor, Tensor]:
    """Run a call with scalar decays: the outputs `[B, T, H, V]` and the final states `[N, H, num_states · K, V]`."""
    q, k, v = (call[name] for name in ("q", "k", "v"))
    if {q.dtype, k.dtype, v.dtype} == MIXED:
        q, k, v = q.float(), k.float(), v.float()
    gates = (call.get("g_slow"), call.decay)
    chunks = make_chunks(q, call.chunk_size, call.packing.cu_seqlens)
    inputs = (q, k, v, call.get("beta"), *gates, call.first_state(torch.float32))
    given = (None if x is None else x.contiguous() for x in inputs)
    with torch.cuda.device_of(q):
        return _Kernels.apply(*given, float(call.output_scale), chunks)
