"""The backward pass of linear attention, and of GateRank on it, as Triton kernels.

First the states entering the chunks are recomputed. Then a reverse scan, over what the queries of each chunk read,
gives the gradients of the states leaving the chunks. With both, the gradients of all chunks are computed in parallel.
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
    block,
    carry_weights,
    chunk_rows,
    decay_matrix,
    dot,
    leave_weights,
    load_gates,
    log_grads_of_sums,
    mode_of,
    pair_sums,
    precision_of,
    put,
    put_log_grad,
    read_weights,
    shared_rows,
    tile,
    tuned,
)
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.states import outputs, pair_products, products, scan
from halflife.ops.chunked.groups import grads_of_heads, sum_of_heads


@tuned("K", "V", "C", "MODE")
@triton.jit
@no_type_check
def _inputs_kernel(
    q, k, v, do, g_slow, g_fast, states, dstates, dq, dk, dg_slow, dg_fast, chunks, scale, H, SQ, SK,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dq, dk and the gradients of the log-decays of chunk n, head h.

    They follow from the states entering the chunk and the gradients of those leaving it.
    """
    at = tl.program_id(0)
    rows, inside = chunk_rows(chunks, at // H, at % H, H, C)
    rows_q = shared_rows(chunks, at // H, at % H, H, SQ, C)
    rows_k = shared_rows(chunks, at // H, at % H, H, SK, C)
    scores = pair_products(q, k, rows_q, rows_k, inside, K, C, PRECISION, BK)
    dscores = pair_products(do, v, rows, rows, inside, V, C, PRECISION, BV)
    a, b, fast, reset, seg = load_gates(g_slow, g_fast, rows, inside, C, MODE)
    dscores *= decay_matrix(a, b, fast, reset, seg, C, MODE) * scale
    within, across, gone = pair_sums(scores * dscores, seg, C, MODE)
    dscores = dscores.to(q.dtype.element_ty)
    # The transpose is computed by a second small product, C×C×V (see gates.py).
    dscores_t = pair_products(v, do, rows, rows, inside, V, C, PRECISION, BV)
    dscores_t *= decay_matrix(a, b, fast, reset, seg, C, MODE, True) * scale
    dscores_t = dscores_t.to(q.dtype.element_ty)
    weight, weight_slow = read_weights(a, fast, reset, seg)
    leave_fast, leave_slow = leave_weights(a, b, fast, reset, seg, C, MODE)

    # What queries read and what keys write, times its gradient, and what passes the chunk, for each state.
    read_fast = tl.zeros([C], tl.float32)
    read_slow = tl.zeros([C], tl.float32)
    left_fast = tl.zeros([C], tl.float32)
    left_slow = tl.zeros([C], tl.float32)
    fast_fast = tl.zeros([BK], tl.float32)
    fast_slow = tl.zeros([BK], tl.float32)
    slow_slow = tl.zeros([BK], tl.float32)
    state = states + at.to(tl.int64) * (2 * K * V if MODE == 2 else K * V)
    dstate = dstates + at.to(tl.int64) * (2 * K * V if MODE == 2 else K * V)
    for start in range(0, K, BK):
        kk = start + tl.arange(0, BK)
        there = kk < K
        dqs = tl.zeros([C, BK], tl.float32)
        dks = tl.zeros([C, BK], tl.float32)
        dqs_slow = tl.zeros([C, BK], tl.float32)
        dks_slow = tl.zeros([C, BK], tl.float32)
        for column in range(0, V, BV):
            vv = column + tl.arange(0, BV)
            dos = tile(do, rows, vv, inside, V).to(tl.float32)
            vs = tile(v, rows, vv, inside, V).to(tl.float32)
            entering = tile(state, kk, vv, there, V)
            leaving = tile(dstate, kk, vv, there, V)
            dqs = dot(dos, tl.trans(entering), dqs, PRECISION)
            dks = dot(vs, tl.trans(leaving), dks, PRECISION)
            if MODE != 0:
                fast_fast += tl.sum(entering * leaving, 1)
            if MODE == 2:
                entering_slow = tile(state + K * V, kk, vv, there, V)
                leaving_slow = tile(dstate + K * V, kk, vv, there, V)
                dqs_slow = dot(dos, tl.trans(entering_slow), dqs_slow, PRECISION)
                dks_slow = dot(vs, tl.trans(leaving_slow), dks_slow, PRECISION)
                fast_slow += tl.sum(entering * leaving_slow, 1)
                slow_slow += tl.sum(entering_slow * leaving_slow, 1)
        qs = tile(q, rows_q, kk, inside, K)
        ks = tile(k, rows_k, kk, inside, K)
        dqs *= (weight * scale)[:, None]
        dks *= leave_fast[:, None]
        read_fast += tl.sum(qs.to(tl.float32) * dqs, 1)
        left_fast += tl.sum(ks.to(tl.float32) * dks, 1)
        if MODE == 2:
            dqs_slow *= (weight_slow * scale)[:, None]
            dks_slow *= leave_slow[:, None]
            read_slow += tl.sum(qs.to(tl.float32) * dqs_slow, 1)
            left_slow += tl.sum(ks.to(tl.float32) * dks_slow, 1)
            dqs += dqs_slow
            dks += dks_slow
        dqs = dot(dscores, ks, dqs, PRECISION)
        dks = dot(dscores_t, qs, dks, PRECISION)
        put(dq, dqs, rows, kk, inside, K)
        put(dk, dks, rows, kk, inside, K)

    if MODE != 0:
        to_fast, to_slow, stays = carry_weights(a, b, fast, reset, seg, C)
        joined = to_slow * tl.sum(fast_slow, 0)
        kept = to_fast * tl.sum(fast_fast, 0) + joined
        slow = stays * tl.sum(slow_slow, 0)
        grad_slow, grad_fast = log_grads_of_sums(
            within, across, gone, read_fast, read_slow, left_fast, left_slow, kept, joined, slow, reset, seg, C
        )
        put_log_grad(dg_fast, grad_fast, g_fast, rows, inside)
        if MODE == 2:
            put_log_grad(dg_slow, grad_slow, g_slow, rows, inside)


def backward(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, initial: Tensor, scale: float, chunks: Chunks,
    do: Tensor, dfinal: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v, both log-decays and the initial state."""
    mode = mode_of(*gates)
    states, carried = products(k, v, gates, chunks, 1.0, read=False)
    scan(states, initial, carried, chunks, mode)
    dstates, _ = products(q, do, gates, chunks, scale, read=True)
    dinitial = scan(dstates, dfinal, carried, chunks, mode, back=True)
    dv = outputs(q, k, do, gates, dstates, chunks, scale, like=v, back=True)
    n, key, (heads, value) = chunks.chunks.shape[0], q.shape[-1], v.shape[2:]
    dq, dk = grads_of_heads(q, heads), grads_of_heads(k, heads)
    dg_slow, dg_fast = (None if g is None else torch.empty_like(g) for g in gates)
    if n * heads:
        launch(_inputs_kernel, (n * heads,))(
            q, k, v, do, *gates, states, dstates, dq, dk, dg_slow, dg_fast, chunks.chunks, scale, heads,
            heads // q.shape[2], heads // k.shape[2], key, value, chunks.size,
            mode, precision_of(q), block(key, 32), block(value, 32),
        )  # fmt: skip
    return sum_of_heads(dq, q), sum_of_heads(dk, k), dv, dg_slow, dg_fast, dinitial
