"""Linear attention with no, scalar or vector decay.

    S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ,      o_t = S_tᵀ q_t · scale

The update of RetNet, TNL, Mamba-2, GLA, HGRN2, LightNet and Simple Decay (Katharopoulos et al. 2020; the
chunked form after Dao & Gu 2024 and Yang et al. 2024).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halflife.ops import chunking, recurrent
from halflife.ops.backend import choose, implements
from halflife.shapes import Float, Int


def linear_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H *K"] | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Linear attention: `S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ`, `o_t = S_tᵀ q_t · scale`.

    Args:
        q, k: queries and keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        g: log-decay ≤ 0, `[B, T, H]` (one a head) or `[B, T, H, K]` (one a channel); −inf forgets all;
            None is no decay.
        scale: factor of the output; None means `K ** -0.5`.
        initial_state: `[B, H, K, V]`, or `[N, H, K, V]` when packed; None means zeros.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1): 0, …, T.
        chunk_size: tokens a chunk (rounded up to a power of two): speed and memory, not the result.
        backend: "auto", or one of `available_backends("linear_attention")`.

    Returns:
        `o [B, T, H, V]` in v's dtype, and the final state (float32, or float64 for float64 inputs), or None.

    Raises:
        ValueError: a shape does not fit, or the backend cannot run; the message says what would.
    """
    recurrent.check_inputs(q, k, v, g, initial_state, cu_seqlens)
    run = choose("linear_attention", backend, q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        o, state = run(q, k, v, g, scale, initial_state, cu_seqlens, chunk_size)
    return o, state if output_final_state else None


@implements("linear_attention", "reference")
def reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, token by token."""
    return recurrent.token_loop(_token, (q, k, v), g, scale, initial_state, cu_seqlens)


def _token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token: `state [B, H, K, V]`, `q, k [B, H, K]`, `v [B, H, V]`, `g [B, H, 1 or K]`."""
    if g is not None:
        state = state * g.exp().unsqueeze(-1)
    state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state


@implements("linear_attention", "chunked")
def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same by matrix products inside chunks of C tokens, the state carried from chunk to chunk."""
    layout = chunking.make_layout(q.shape[1], chunk_size, cu_seqlens, q.device)
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    initial = recurrent.first_state(q, v, initial_state, sequences)
    q, k, v = (layout.align(x) for x in (q, k, v))
    g = None if g is None else layout.align(g)
    o, state = _Chunked.apply(q, k, v, g, initial, scale, layout)
    return layout.restore(o), state


class _Chunked(torch.autograd.Function):
    """Saves its inputs and the state at each block's start; the backward pass recomputes the rest."""

    @staticmethod
    def forward(ctx, q, k, v, g, initial, scale, layout):
        o, final, borders = torch.empty_like(v), initial.clone(), []
        dtype, state = initial.dtype, initial[:0]
        for rows, chunks in layout.blocks(*q.shape[0:3:2], q.device):
            borders.append(state)
            block = _Block(q, k, v, g, scale, dtype, layout, rows, chunks)
            entering, state = block.states(state, initial, final)
            inside = block.decay.scores(block.q, block.k) @ block.v
            chunking.put(o, inside.add_((block.q * block.decay.rows) @ entering), rows, chunks, layout.chunk)
        ctx.save_for_backward(q, k, v, g, initial, *borders)
        ctx.scale, ctx.layout = scale, layout
        return o, final

    @staticmethod
    @chunking.by_hand
    def backward(ctx, do, dfinal):
        q, k, v, g, initial, *borders = ctx.saved_tensors
        layout, dtype = ctx.layout, initial.dtype
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dg = None if g is None else torch.empty_like(g)
        dinitial, unused, dstate = dfinal.clone(), initial.clone(), dfinal[:0]
        walk = list(layout.blocks(*q.shape[0:3:2], q.device))
        for (rows, chunks), state in zip(reversed(walk), reversed(borders), strict=True):
            block = _Block(q, k, v, g, ctx.scale, dtype, layout, rows, chunks)
            entering, _ = block.states(state, initial, unused)
            dob = chunking.take(do, rows, chunks, layout.chunk, dtype)
            parts = block.gradients(dob, entering, dstate, dinitial, dfinal)
            dstate = parts.pop()
            for out, part in zip((dq, dk, dv, dg), parts, strict=True):
                if out is not None:
                    chunking.put(out, part, rows, chunks, layout.chunk)
        return dq, dk, dv, dg, dinitial, None, None


class _Block:
    """A block of chunks: `q` (scaled), `k`, `v` as `[b, H, c, C, D]` and the decays inside its chunks."""

    def __init__(self, q, k, v, g, scale, dtype, layout, rows, chunks):
        self.where = (layout, rows, chunks)
        self.scale, self.chunk = scale, layout.chunk
        q, self.k, self.v = (chunking.take(x, rows, chunks, layout.chunk, dtype) for x in (q, k, v))
        self.q = q * scale  # out of place: a block may be a view of the input
        self.g = None if g is None else chunking.take(g, rows, chunks, layout.chunk, dtype)
        self.decay = chunking.make_decay(self.g, layout.chunk, dtype, q.device)

    def states(self, state: Tensor, initial: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """The states entering each chunk, and the one leaving the block."""
        update = (self.k * self.decay.cols).transpose(-1, -2) @ self.v
        total = self.decay.total.expand(*update.shape[:3], -1, -1)
        return chunking.scan(
            lambda c, s: torch.addcmul(update[:, :, c], total[:, :, c], s), state, *self.where, initial, final
        )

    def gradients(self, do, entering, dstate, dinitial, dfinal) -> list[Any]:
        """`[dq, dk, dv, dg, gradient of the state entering the block]`."""
        q, k, v, decay = self.q, self.k, self.v, self.decay
        read = (q * decay.rows).transpose(-1, -2) @ do
        total = decay.total.expand(*read.shape[:3], -1, -1)
        leaving, dstate = chunking.scan_back(
            lambda c, ds: torch.addcmul(read[:, :, c], total[:, :, c], ds), dstate, *self.where, dinitial, dfinal
        )
        dscores = do @ v.transpose(-1, -2)
        diagonal = dscores.diagonal(dim1=-2, dim2=-1).clone().unsqueeze(-1)
        dscores.diagonal(dim1=-2, dim2=-1).zero_()
        dq, dk = decay.scores_grad(dscores, q, k)
        dq += (do @ entering.transpose(-1, -2)).mul_(decay.rows)
        left = (v @ leaving.transpose(-1, -2)).mul_(decay.cols)
        dv = decay.scores(q, k).transpose(-1, -2) @ do
        dv += (k * decay.cols) @ leaving
        dg = None
        if self.g is not None:
            reads = torch.mul(q, dq).addcmul_(k, dk, value=-1)
            dg = decay.log_grad(reads, k * left, total * entering * leaving)
            dg = dg.masked_fill_(self.g < chunking.FLOOR[dg.dtype], 0)
        dq.addcmul_(diagonal, k).mul_(self.scale)
        dk.addcmul_(diagonal, q).add_(left)
        return [dq, dk, dv, dg, dstate]
