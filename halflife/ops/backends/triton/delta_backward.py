"""The backward pass of the delta rule, and of GateRank on it, as Triton kernels.

Systems, states and written values are recomputed. Let G be the gradient of the state leaving a chunk. Then the gradient
of the values written is `dU = (Q Kᵀ ⊙ D)ᵀ dO + (w K) G`. The reverse walk `G ← carryᵀ(G) + (w Q)ᵀ dO − Yᵀ dU` is the
only sequential step. The adjoint of a chunk's system, `R = (I + L)⁻ᵀ dU`, gives all other gradients, chunk by chunk.
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
    carry_weights,
    chunk_rows,
    decay_matrix,
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
from halflife.ops.backends.triton.segments import block
from halflife.ops.backends.triton.states import pair_products
from halflife.ops.backends.triton.systems import Solved, empty_states, solve, walk, walk_columns
from halflife.ops.chunked.groups import grads_of_heads, sum_of_heads


@tuned("K", "V", "C", "MODE")
@triton.jit
@no_type_check
def _read_grads_kernel(
    q, k, do, g_slow, g_fast, out, chunks, scale, H, SQ, SK, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    MODE: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """`scale · (Q Kᵀ ⊙ D)ᵀ dO` of chunk n, head h, a block of V: the part of dU from the outputs of the same chunk."""
    at = tl.program_id(0)
    rows, inside = chunk_rows(chunks, at // H, at % H, H, C)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    rows_q = shared_rows(chunks, at // H, at % H, H, SQ, C)
    rows_k = shared_rows(chunks, at // H, at % H, H, SK, C)
    scores_t = pair_products(k, q, rows_k, rows_q, inside, K, C, PRECISION, BK)
    a, b, fast, reset, seg = load_gates(g_slow, g_fast, rows, inside, C, MODE)
    scores_t *= decay_matrix(a, b, fast, reset, seg, C, MODE, True) * scale
    dos = tile(do, rows, vv, inside, V).to(tl.float32)
    put(out, tl.dot(scores_t, dos, input_precision=PRECISION), rows, vv, inside, V)


@tuned("K", "V", "C", "MODE")
@triton.jit
@no_type_check
def _walk_back_kernel(
    q, k, do, y, y_slow, g_slow, g_fast, partial, last, first, dstates, dwritten, chunks, sequences, scale, H, SQ, SK,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The reverse walk over the chunks of one sequence and head, for a block of V.

    Each step stores the gradient G of the leaving state and `dU = partial + (w K) G`, and computes the gradient of the
    entering state. `last` and `first` are the gradients of the final and of the initial states.
    """
    STATE: tl.constexpr = 2 * K * V if MODE == 2 else K * V
    program = tl.program_id(0)
    head = program % H
    start = tl.load(sequences + 2 * (program // H))
    count = tl.load(sequences + 2 * (program // H) + 1)
    kk = tl.arange(0, BK)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    there = kk < K
    place = program.to(tl.int64) * STATE
    state = tile(last + place, kk, vv, there, V)
    slow_state = tl.zeros([BK, BV], tl.float32)
    if MODE == 2:
        slow_state = tile(last + place + K * V, kk, vv, there, V)
    for step in range(0, count.to(tl.int32)):
        chunk = start + count - 1 - step
        rows, inside = chunk_rows(chunks, chunk, head, H, C)
        here = dstates + (chunk * H + head) * STATE
        put(here, state, kk, vv, there, V)
        a, b, fast, reset, seg = load_gates(g_slow, g_fast, rows, inside, C, MODE)
        left, left_slow = leave_weights(a, b, fast, reset, seg, C, MODE)
        kept, joined, stays = carry_weights(a, b, fast, reset, seg, C)
        weight, weight_slow = read_weights(a, fast, reset, seg)
        ks = tile(k, shared_rows(chunks, chunk, head, H, SK, C), kk, inside, K).to(tl.float32)
        dus = tile(partial, rows, vv, inside, V)
        dus += left[:, None] * tl.dot(ks, state, input_precision=PRECISION)
        if MODE == 2:
            put(here + K * V, slow_state, kk, vv, there, V)
            dus += left_slow[:, None] * tl.dot(ks, slow_state, input_precision=PRECISION)
        put(dwritten, dus, rows, vv, inside, V)
        qs = tl.trans(tile(q, shared_rows(chunks, chunk, head, H, SQ, C), kk, inside, K).to(tl.float32))
        dos = tile(do, rows, vv, inside, V).to(tl.float32) * scale
        state *= kept
        if MODE == 2:
            state += joined * slow_state
        state = tl.dot(qs, dos * weight[:, None], state, input_precision=PRECISION)
        state -= tl.dot(tl.trans(tile(y, rows, kk, inside, K)), dus, input_precision=PRECISION)
        if MODE == 2:
            slow_state = tl.dot(qs, dos * weight_slow[:, None], stays * slow_state, input_precision=PRECISION)
            slow_state -= tl.dot(tl.trans(tile(y_slow, rows, kk, inside, K)), dus, input_precision=PRECISION)
    put(first + place, state, kk, vv, there, V)
    if MODE == 2:
        put(first + place + K * V, slow_state, kk, vv, there, V)


@tuned("V", "C")
@triton.jit
@no_type_check
def _adjoint_kernel(
    inverse, beta, dwritten, adjoint, dv, chunks, H,
    V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """`R = (I + L)⁻ᵀ dU` and `dV = β R` of chunk n, head h, a block of V."""
    at = tl.program_id(0)
    rows, inside = chunk_rows(chunks, at // H, at % H, H, C)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    solved = tl.trans(tile(inverse, rows, tl.arange(0, C), inside, C))
    rs = tl.dot(solved, tile(dwritten, rows, vv, inside, V), input_precision=PRECISION)
    strength = tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)
    put(adjoint, rs, rows, vv, inside, V)
    put(dv, rs * strength[:, None], rows, vv, inside, V)


@triton.jit
@no_type_check
def _state_products(
    do, adjoint, written, state, dstate, rows, inside, kk, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute `(dO Sᵀ, R Sᵀ, U Gᵀ)`, each `[C, BK]`, for a block of rows of an entering state S and a gradient G."""
    there = kk < K
    by_queries = tl.zeros([C, BK], tl.float32)
    by_keys = tl.zeros([C, BK], tl.float32)
    left = tl.zeros([C, BK], tl.float32)
    for column in range(0, V, BV):
        vv = column + tl.arange(0, BV)
        entering = tl.trans(tile(state, kk, vv, there, V))
        leaving = tl.trans(tile(dstate, kk, vv, there, V))
        dos = tile(do, rows, vv, inside, V).to(tl.float32)
        by_queries = tl.dot(dos, entering, by_queries, input_precision=PRECISION)
        by_keys = tl.dot(tile(adjoint, rows, vv, inside, V), entering, by_keys, input_precision=PRECISION)
        left = tl.dot(tile(written, rows, vv, inside, V), leaving, left, input_precision=PRECISION)
    return by_queries, by_keys, left


@triton.jit
@no_type_check
def _overlap(state, dstate, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Compute the scalar `Σ S ⊙ G` of a state and a gradient."""
    total = tl.zeros([BK], tl.float32)
    for start in range(0, K, BK):
        kk = start + tl.arange(0, BK)
        for column in range(0, V, BV):
            vv = column + tl.arange(0, BV)
            total += tl.sum(tile(state, kk, vv, kk < K, V) * tile(dstate, kk, vv, kk < K, V), 1)
    return tl.sum(total, 0)


@tuned("K", "V", "C", "MODE")
@triton.jit
@no_type_check
def _inputs_kernel(
    q, k, v, beta, g_slow, g_fast, do, written, adjoint, states, dstates, dq, dk, dbeta, dg_slow, dg_fast,
    chunks, scale, H, SQ, SK, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr,
    PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dq, dk, dbeta and the gradients of the log-decays of chunk n, head h."""
    at = tl.program_id(0)
    rows, inside = chunk_rows(chunks, at // H, at % H, H, C)
    strength = tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)
    rows_q = shared_rows(chunks, at // H, at % H, H, SQ, C)
    rows_k = shared_rows(chunks, at // H, at % H, H, SK, C)
    scores = pair_products(q, k, rows_q, rows_k, inside, K, C, PRECISION, BK)
    overlap = pair_products(k, k, rows_k, rows_k, inside, K, C, PRECISION, BK)
    dscores = pair_products(do, written, rows, rows, inside, V, C, PRECISION, BV)
    dsystem = -pair_products(adjoint, written, rows, rows, inside, V, C, PRECISION, BV)
    dstrength = tl.zeros([C], tl.float32)
    for start in range(0, V, BV):
        vv = start + tl.arange(0, BV)
        dstrength += tl.sum(tile(adjoint, rows, vv, inside, V) * tile(v, rows, vv, inside, V).to(tl.float32), 1)
    a, b, fast, reset, seg = load_gates(g_slow, g_fast, rows, inside, C, MODE)
    decay = decay_matrix(a, b, fast, reset, seg, C, MODE)
    index = tl.arange(0, C)
    dscores *= decay * scale
    dsystem = tl.where(index[:, None] > index[None, :], dsystem * decay, 0.0)
    dstrength += tl.sum(dsystem * overlap, 1)
    dsystem *= strength[:, None]
    within, across, gone = pair_sums(dscores * scores + dsystem * overlap, seg, C, MODE)
    # dk needs the transposes too. Each is computed by a second small product, C×C×V (see gates.py).
    decay = decay_matrix(a, b, fast, reset, seg, C, MODE, True)
    dscores_t = pair_products(written, do, rows, rows, inside, V, C, PRECISION, BV) * decay * scale
    dsystem_t = -pair_products(written, adjoint, rows, rows, inside, V, C, PRECISION, BV) * decay * strength[None, :]
    dsystem += tl.where(index[:, None] < index[None, :], dsystem_t, 0.0)
    weight, weight_slow = read_weights(a, fast, reset, seg)
    leave, leave_slow = leave_weights(a, b, fast, reset, seg, C, MODE)

    # What queries and keys read and what keys write, times its gradient, for each state.
    read_fast = tl.zeros([C], tl.float32)
    read_slow = tl.zeros([C], tl.float32)
    left_fast = tl.zeros([C], tl.float32)
    left_slow = tl.zeros([C], tl.float32)
    state = states + at.to(tl.int64) * (2 * K * V if MODE == 2 else K * V)
    dstate = dstates + at.to(tl.int64) * (2 * K * V if MODE == 2 else K * V)
    for start in range(0, K, BK):
        kk = start + tl.arange(0, BK)
        qs = tile(q, rows_q, kk, inside, K).to(tl.float32)
        ks = tile(k, rows_k, kk, inside, K).to(tl.float32)
        dqs = tl.dot(dscores, ks, input_precision=PRECISION)
        dks = tl.dot(dscores_t, qs, input_precision=PRECISION)
        dks = tl.dot(dsystem, ks, dks, input_precision=PRECISION)
        by_queries, by_keys, by_left = _state_products(
            do, adjoint, written, state, dstate, rows, inside, kk, K, V, C, PRECISION, BK, BV
        )
        by_queries *= (weight * scale)[:, None]
        by_keys *= -weight[:, None]
        by_left *= leave[:, None]
        through = tl.sum(by_keys * ks, 1)
        dstrength += through
        read_fast += tl.sum(by_queries * qs, 1) + through * strength
        left_fast += tl.sum(by_left * ks, 1)
        dqs += by_queries
        dks += by_keys * strength[:, None] + by_left
        if MODE == 2:
            by_queries, by_keys, by_left = _state_products(
                do, adjoint, written, state + K * V, dstate + K * V, rows, inside, kk, K, V, C, PRECISION, BK, BV
            )
            by_queries *= (weight_slow * scale)[:, None]
            by_keys *= -weight_slow[:, None]
            by_left *= leave_slow[:, None]
            through = tl.sum(by_keys * ks, 1)
            dstrength += through
            read_slow += tl.sum(by_queries * qs, 1) + through * strength
            left_slow += tl.sum(by_left * ks, 1)
            dqs += by_queries
            dks += by_keys * strength[:, None] + by_left
        put(dq, dqs, rows, kk, inside, K)
        put(dk, dks, rows, kk, inside, K)
    tl.store(dbeta + rows, dstrength.to(dbeta.dtype.element_ty), mask=inside)

    if MODE != 0:
        to_fast, to_slow, stays = carry_weights(a, b, fast, reset, seg, C)
        kept = to_fast * _overlap(state, dstate, K, V, BK, BV)
        joined = 0.0
        slow = 0.0
        if MODE == 2:
            joined = to_slow * _overlap(state, dstate + K * V, K, V, BK, BV)
            slow = stays * _overlap(state + K * V, dstate + K * V, K, V, BK, BV)
        grad_slow, grad_fast = log_grads_of_sums(
            within, across, gone, read_fast, read_slow, left_fast, left_slow, kept + joined, joined, slow, reset, seg, C
        )
        put_log_grad(dg_fast, grad_fast, g_fast, rows, inside)
        if MODE == 2:
            put_log_grad(dg_slow, grad_slow, g_slow, rows, inside)


def _walk_back(
    q: Tensor, k: Tensor, do: Tensor, solved: Solved, gates: Gates, dfinal: Tensor, chunks: Chunks, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The float32 gradients of the leaving states `[n, H, K', V]`, the written values and the initial states."""
    key, (heads, value), sequences, n = q.shape[-1], do.shape[2:], chunks.sequences.shape[0], chunks.chunks.shape[0]
    mode, precision, columns = mode_of(*gates), precision_of(q), walk_columns(key, value)
    sq, sk = (heads // max(1, x.shape[2]) for x in (q, k))
    partial, dwritten, dinitial = torch.empty_like(solved.x), torch.empty_like(solved.x), torch.empty_like(dfinal)
    dstates = empty_states(dfinal, chunks)
    if n * heads:
        launch(_read_grads_kernel, (n * heads, triton.cdiv(value, block(value))))(
            q, k, do, *gates, partial, chunks.chunks, scale, heads, sq, sk, key, value, chunks.size,
            mode, precision, block(key), block(value),
        )  # fmt: skip
    if sequences * heads:
        launch(_walk_back_kernel, (sequences * heads, triton.cdiv(value, columns)))(
            q, k, do, solved.y[0], solved.y[-1], *gates, partial, dfinal, dinitial, dstates, dwritten,
            chunks.chunks, chunks.sequences, scale, heads, sq, sk, key, value, chunks.size,
            mode, precision, block(key, 256), columns,
        )  # fmt: skip
    return dstates, dwritten, dinitial


def backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gates: Gates, initial: Tensor,
    scale: float, chunks: Chunks, do: Tensor, dfinal: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v, beta, both log-decays and the initial state."""
    n, key, (heads, value) = chunks.chunks.shape[0], q.shape[-1], v.shape[2:]
    solved = solve(k, v, beta, gates, chunks, keep=True)
    states, written, _ = walk(k, solved, gates, initial, chunks)
    dstates, dwritten, dinitial = _walk_back(q, k, do, solved, gates, dfinal, chunks, scale)
    adjoint = torch.empty_like(dwritten)
    dq, dk, dv, dbeta = grads_of_heads(q, heads), grads_of_heads(k, heads), torch.empty_like(v), torch.empty_like(beta)
    dg_slow, dg_fast = (None if g is None else torch.empty_like(g) for g in gates)
    if n * heads:
        launch(_adjoint_kernel, (n * heads, triton.cdiv(value, block(value))))(
            solved.inverse, beta, dwritten, adjoint, dv, chunks.chunks, heads,
            value, chunks.size, precision_of(q), block(value),
        )  # fmt: skip
        launch(_inputs_kernel, (n * heads,))(
            q, k, v, beta, *gates, do, written, adjoint, states, dstates, dq, dk, dbeta, dg_slow, dg_fast,
            chunks.chunks, scale, heads, heads // q.shape[2], heads // k.shape[2], key, value, chunks.size,
            mode_of(*gates), precision_of(q), block(key, 32), block(value, 32),
        )  # fmt: skip
    return sum_of_heads(dq, q), sum_of_heads(dk, k), dv, dbeta, dg_slow, dg_fast, dinitial
