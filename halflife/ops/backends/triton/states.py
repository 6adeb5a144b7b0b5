"""The outputs of chunks from the values that the delta rule writes, as Triton kernels, and their adjoint.

Products of two inputs are computed in their dtype, after the weighted operand is rounded to it. In a product with a
state, the state stays in float32 (`gates.precision_of`).
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.gates import (
    Chunks,
    Gates,
    chunk_rows,
    decay_matrix,
    dot,
    leave_weights,
    load_gates,
    mode_of,
    precision_of,
    put,
    read_weights,
    shared_rows,
    tile,
    tuned,
)
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.segments import block


@triton.jit
@no_type_check
def pair_products(
    x, y, rows_x, rows_y, inside, D: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, BD: tl.constexpr
):
    """Compute `X Yᵀ` `[C, C]` in float32 from a chunk's rows of `x` and `y [rows, D]`, whose dtypes may differ."""
    out = tl.zeros([C, C], tl.float32)
    for start in range(0, D, BD):
        cols = start + tl.arange(0, BD)
        xs = tile(x, rows_x, cols, inside, D)
        ys = tile(y, rows_y, cols, inside, D)
        if xs.dtype != ys.dtype:
            xs = xs.to(tl.float32)
            ys = ys.to(tl.float32)
        out = dot(xs, tl.trans(ys), out, PRECISION)
    return out


@tuned("K", "V", "C", "MODE", "BACK")
@triton.jit
@no_type_check
def _outputs_kernel(
    q, k, u, g_slow, g_fast, states, out, chunks, scale, H, SQ, SK, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    MODE: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """`scale · [(Q Kᵀ ⊙ D) U + weights ⊙ (Q S)]` of chunk n, head h, a block of V.

    BACK is its adjoint in U, `scale · (Q Kᵀ ⊙ Dᵀ) U + weights ⊙ (Q S)`. There q and k are exchanged, U is the gradient
    of the outputs, and S are the gradients of the leaving states.
    """
    at = tl.program_id(0)
    rows, inside = chunk_rows(chunks, at // H, at % H, H, C)
    rows_q = shared_rows(chunks, at // H, at % H, H, SQ, C)
    rows_k = shared_rows(chunks, at // H, at % H, H, SK, C)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    scores = tl.zeros([C, C], tl.float32)
    fast_part = tl.zeros([C, BV], tl.float32)
    slow_part = tl.zeros([C, BV], tl.float32)
    state = states + at.to(tl.int64) * (2 * K * V if MODE == 2 else K * V)
    for start in range(0, K, BK):
        kk = start + tl.arange(0, BK)
        qs = tile(q, rows_q, kk, inside, K)
        ks = tile(k, rows_k, kk, inside, K)
        scores = dot(qs, tl.trans(ks), scores, PRECISION)
        wide = qs.to(tl.float32)
        fast_part = dot(wide, tile(state, kk, vv, kk < K, V), fast_part, PRECISION)
        if MODE == 2:
            slow = tile(state + K * V, kk, vv, kk < K, V)
            slow_part = dot(wide, slow, slow_part, PRECISION)
    a, b, fast, reset, seg = load_gates(g_slow, g_fast, rows, inside, C, MODE)
    scores *= decay_matrix(a, b, fast, reset, seg, C, MODE, BACK) * scale
    if BACK:
        weight, weight_slow = leave_weights(a, b, fast, reset, seg, C, MODE)
    else:
        weight, weight_slow = read_weights(a, fast, reset, seg)
        weight *= scale
        weight_slow *= scale
    us = tile(u, rows, vv, inside, V)
    result = weight[:, None] * fast_part
    if MODE == 2:
        result += weight_slow[:, None] * slow_part
    result = dot(scores.to(us.dtype), us, result, PRECISION)
    put(out, result, rows, vv, inside, V)


def outputs(
    q: Tensor, k: Tensor, u: Tensor, gates: Gates, states: Tensor, chunks: Chunks, scale: float, like: Tensor,
    back: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `scale · [(Q Kᵀ ⊙ D) U + weights ⊙ (Q S)]`, in the shape and dtype of `like [B, T, H, V]`.

    S are the entering states. `back` computes the adjoint in U. Then u is the gradient of the outputs, and `states` are
    the gradients of the leaving states.
    """
    out, n, key, (heads, value) = torch.empty_like(like), chunks.chunks.shape[0], q.shape[-1], u.shape[2:]
    bk, bv = block(key), block(value)
    if back:
        q, k = k, q
    if n * heads:
        launch(_outputs_kernel, (n * heads, triton.cdiv(value, bv)))(
            q, k, u, *gates, states, out, chunks.chunks, scale, heads, heads // q.shape[2], heads // k.shape[2], key,
            value, chunks.size, mode_of(*gates), back, precision_of(q), bk, bv,
        )  # fmt: skip
    return out
