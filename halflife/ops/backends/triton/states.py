"""States and outputs of chunks as Triton kernels, for linear attention and for the outputs of the delta rule.

`products` computes the update that each chunk adds to a state, `scan` turns the updates into the states entering the
chunks, and `outputs` reads them. `products` and `outputs` run in parallel over chunks, and `scan` over the entries of
the state. Each of them also serves the backward pass. There `products` has the weights of queries, `scan` goes from the
last chunk to the first, and `outputs` computes its adjoint in the values, which has the same form.

Accumulators, states and weights are float32. A product of two inputs is computed in their dtype, after the weighted
operand is rounded to it. In a product with a state, the state stays in float32 (`gates.precision_of`).
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.gates import (
    GATE_RANK,
    Chunks,
    Gates,
    block,
    carry_weights,
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

_SCAN_BLOCK = 512


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


@tuned("K", "V", "C", "MODE", "READ")
@triton.jit
@no_type_check
def _products_kernel(
    x, y, g_slow, g_fast, out, carried, chunks, scale, H, S, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    MODE: tl.constexpr, READ: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """`(w ⊙ x)ᵀ y` of chunk n, head h, a block of K and one of V. w are the weights of queries (READ) or of keys.

    S heads share a row of x.
    """
    at = tl.program_id(0)
    rows, inside = chunk_rows(chunks, at // H, at % H, H, C)
    kk = tl.program_id(1) * BK + tl.arange(0, BK)
    vv = tl.program_id(2) * BV + tl.arange(0, BV)
    a, b, fast, reset, seg = load_gates(g_slow, g_fast, rows, inside, C, MODE)
    if READ:
        weight, weight_slow = read_weights(a, fast, reset, seg)
    else:
        weight, weight_slow = leave_weights(a, b, fast, reset, seg, C, MODE)
        if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
            kept, joined, slow = carry_weights(a, b, fast, reset, seg, C)
            place = carried + at.to(tl.int64) * 3
            tl.store(place, kept)
            tl.store(place + 1, joined)
            tl.store(place + 2, slow)
    xs = tl.trans(tile(x, shared_rows(chunks, at // H, at % H, H, S, C), kk, inside, K).to(tl.float32) * scale)
    ys = tile(y, rows, vv, inside, V)
    zeros = tl.zeros([BK, BV], tl.float32)
    if MODE == 2:
        state = out + at.to(tl.int64) * (2 * K * V)
        product = dot((xs * weight_slow[None, :]).to(ys.dtype), ys, zeros, PRECISION)
        put(state + K * V, product, kk, vv, kk < K, V)
    else:
        state = out + at.to(tl.int64) * (K * V)
    put(state, dot((xs * weight[None, :]).to(ys.dtype), ys, zeros, PRECISION), kk, vv, kk < K, V)


@triton.jit
@no_type_check
def _scan_kernel(
    states, first, last, carried, sequences, H, SIZE: tl.constexpr,
    MODE: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scan over the chunks of one sequence and head, for a block of the state's entries.

    It computes `state ← carry(state) + update` from chunk to chunk, and stores the state before each update in its
    place. BACK goes from the last chunk to the first and carries gradients.
    """
    STATE: tl.constexpr = 2 * SIZE if MODE == 2 else SIZE
    program = tl.program_id(0).to(tl.int64)
    row = program // H
    head = program % H
    start = tl.load(sequences + 2 * row)
    count = tl.load(sequences + 2 * row + 1)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < SIZE
    fast = tl.load(first + program * STATE + entry, mask=mask, other=0.0)
    slow = tl.zeros([BLOCK], tl.float32)
    if MODE == 2:
        slow = tl.load(first + program * STATE + SIZE + entry, mask=mask, other=0.0)
    for step in range(0, count.to(tl.int32)):
        chunk = start + step
        if BACK:
            chunk = start + count - 1 - step
        place = chunk * H + head
        here = states + place * STATE + entry
        kept = tl.load(carried + 3 * place)
        added = tl.load(here, mask=mask, other=0.0)
        tl.store(here, fast, mask=mask)
        if MODE == 2:
            joined = tl.load(carried + 3 * place + 1)
            stays = tl.load(carried + 3 * place + 2)
            added_slow = tl.load(here + SIZE, mask=mask, other=0.0)
            tl.store(here + SIZE, slow, mask=mask)
            if BACK:
                fast = kept * fast + joined * slow + added
                slow = stays * slow + added_slow
            else:
                slow = stays * slow + joined * fast + added_slow
                fast = kept * fast + added
        else:
            fast = kept * fast + added
    tl.store(last + program * STATE + entry, fast, mask=mask)
    if MODE == 2:
        tl.store(last + program * STATE + SIZE + entry, slow, mask=mask)


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


def products(x: Tensor, y: Tensor, gates: Gates, chunks: Chunks, scale: float, read: bool) -> tuple[Tensor, Tensor]:
    """Compute the update `scale · (w ⊙ x)ᵀ y` that each chunk adds to a state: `x [B, T, G, K]`, `y [B, T, H, V]`.

    w are the weights of queries (`read`, in the backward pass) or of keys. It returns the updates `[n, H, K', V]` in
    float32 (K' = 2K with two states), and the factors of states that pass each chunk `[n, H, 3]`
    (`gates.carry_weights`), which are not computed for `read`.
    """
    key, (heads, value), mode, n = x.shape[-1], y.shape[2:], mode_of(*gates), chunks.chunks.shape[0]
    out = x.new_empty(n, heads, key * (2 if mode == GATE_RANK else 1), value, dtype=torch.float32)
    carried = x.new_empty(n, heads, 3, dtype=torch.float32)
    bk, bv = block(key), block(value)
    if n * heads:
        launch(_products_kernel, (n * heads, triton.cdiv(key, bk), triton.cdiv(value, bv)))(
            x, y, *gates, out, carried, chunks.chunks, scale, heads, heads // x.shape[2], key, value, chunks.size,
            mode, read, precision_of(x), bk, bv,
        )  # fmt: skip
    return out, carried


def scan(states: Tensor, first: Tensor, carried: Tensor, chunks: Chunks, mode: int, back: bool = False) -> Tensor:
    """Replace the update of each chunk by the state entering it, in place, and return the state after the last chunk.

    The states start from `first [N, H, K', V]`. With `back` they are gradients of the states leaving the chunks.
    """
    last = torch.empty_like(first)
    sequences, heads, rows, value = first.shape
    size = rows * value // (2 if mode == GATE_RANK else 1)
    if sequences * heads:
        launch(_scan_kernel, (sequences * heads, triton.cdiv(size, _SCAN_BLOCK)))(
            states, first, last, carried, chunks.sequences, heads, size, mode, back, _SCAN_BLOCK
        )
    return last


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
