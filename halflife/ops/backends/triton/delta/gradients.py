"""The gradients of the delta rule's inputs, and of those of GateRank on it, chunk by chunk.

From the state S that enters a chunk and the gradient G of the state that leaves it, the written values U and the
adjoint R of the system are computed again (see `written.py` and `adjoint.py`). Then

    dS = (dO Uᵀ) ⊙ D,           W = −β ⊙ (R Uᵀ) ⊙ D below the diagonal,           dV = β ⊙ R,
    dQ = dS K + w ⊙ (dO Sᵀ),    dK = dSᵀ Q + (W + Wᵀ) K + l ⊙ (U Gᵀ) − β ⊙ w ⊙ (R Sᵀ).

dSᵀ and Wᵀ are computed in place of dS and W, some parts of dK as dKᵀ, and R as Rᵀ, so that no result of a product is an
operand's transpose (see `gates.py`).
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.delta.pairs import by_pair, load_scaled, load_triangle, pair_by, product
from halflife.ops.backends.triton.gates import pair_sums, put_log_grad
from halflife.ops.backends.triton.segments import chunk_tokens
from halflife.ops.backends.triton.sums import stored_carries, stored_decays, stored_leaves, stored_reads
from halflife.ops.backends.triton.walks import load, store


@triton.jit
@no_type_check
def gradients_kernel(
    q, k, v, do, beta, inverse, sums, g_fast, states, powers, dstates, dpowers, dq, dk, dv, dbeta, dg_fast, found,
    passes, reads, table, scale, T, LENGTH, PER, TOKENS, H: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr,
    QT: tl.constexpr, QH: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, STAGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients of one chunk and head. BV covers V, and rows of states are read in blocks of BK.

    What the gradients of GateRank's log-decays are made of would hold registers for long, so it is stored (`found`,
    `passes`, `reads`) for `linear_grads.log_grads_kernel`.
    """
    STATE: tl.constexpr = 2 * K * V if MODE == 2 else K * V
    SCALED: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    POWERS: tl.constexpr = 2 * SCALED if MODE == 2 else SCALED
    WHOLE: tl.constexpr = K if K % BK == 0 else BK
    h = tl.program_id(0) % H
    token, size, slot = chunk_tokens(table, tl.program_id(0) // H, T, LENGTH, PER, C)
    if size <= 0:
        return
    cc = tl.arange(0, C)
    vv = tl.arange(0, BV)
    there = vv < V
    inside = cc < size
    rows = (token + cc) * H + h
    at = token if MODE == 0 else sums + h * TOKENS + token
    here = slot * H + h
    entering = states + here * STATE
    leaving = dstates + here * STATE
    power = powers + here * POWERS + vv // COLUMNS
    dpower = dpowers + here * POWERS + vv // COLUMNS
    q += token * QT + (h // SQ) * QH
    k += token * KT + (h // SK) * KH
    dq += (token * H + h) * K
    dk += (token * H + h) * K

    # U, Rᵀ, and what states and their gradients give; the last here, where registers are free
    read = tl.zeros([C, BV], tl.float32)
    met = tl.zeros([BV, C], tl.float32)
    read_slowly = tl.zeros([C, BV], tl.float32)
    met_slowly = tl.zeros([BV, C], tl.float32)
    passed = tl.zeros([BV], tl.float32)
    joins = passed
    stayed = passed
    scores = tl.zeros([C, C], tl.float32)
    overlap = tl.zeros([C, C], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        kk = start + tl.arange(0, BK)
        ks = load(k, cc, kk, inside, KT, K, WHOLE)
        qs = load(q, cc, kk, inside, QT, K, WHOLE)
        scores = product(qs, tl.trans(ks), scores, PRECISION)
        overlap = product(ks, tl.trans(ks), overlap, PRECISION)
        state = load_scaled(entering, power, vv, kk, there, K, WHOLE)
        read = product(ks, tl.trans(state), read, PRECISION)
        dstate = load_scaled(leaving, dpower, vv, kk, there, K, WHOLE)
        met = product(dstate, tl.trans(ks), met, PRECISION)
        if MODE != 0:
            passed += tl.sum(state * dstate, 1)
        if MODE == 2:
            dslow = load_scaled(leaving + K * V, dpower + SCALED, vv, kk, there, K, WHOLE)
            met_slowly = product(dslow, tl.trans(ks), met_slowly, PRECISION)
            joins += tl.sum(state * dslow, 1)
            slow = load_scaled(entering + K * V, power + SCALED, vv, kk, there, K, WHOLE)
            read_slowly = product(ks, tl.trans(slow), read_slowly, PRECISION)
            stayed += tl.sum(slow * dslow, 1)
    kept, joined, stays = stored_carries(at, H * TOKENS, size, MODE)
    kept *= tl.sum(passed)
    if MODE == 2:
        tl.store(passes + here * 3, kept)
        tl.store(passes + here * 3 + 1, joined * tl.sum(joins))
        tl.store(passes + here * 3 + 2, stays * tl.sum(stayed))
    strength = tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)
    weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
    left, left_slow = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
    read *= weight[:, None]
    met *= left[None, :]
    if MODE == 2:
        read += read_slowly * weight_slow[:, None]
        met += met_slowly * left_slow[None, :]
    vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
    if MODE != 2:
        dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
    solved, solved_low = load_triangle(inverse, token, h, H, size, cc, inside, C)
    us = (vs.to(tl.float32) - read) * strength[:, None]
    us = pair_by(solved, solved_low, us, tl.zeros([C, BV], tl.float32), PRECISION)
    decays = stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE)
    if MODE == 2:  # later, where it needs fewer registers
        dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
    rs = product(tl.trans(dos), scores * decays * scale, met, PRECISION)
    rs = by_pair(rs, solved, solved_low, tl.zeros([BV, C], tl.float32), PRECISION)
    store(dv + (token * H + h) * V, tl.trans(rs * strength[None, :]), cc, vv, inside, H * V, V, BV)
    if MODE != 2:
        vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)  # again, to hold fewer registers before
    dstrength = tl.sum(rs * tl.trans(vs).to(tl.float32), 0)

    # dSᵀ and Wᵀ
    numbers = token if MODE != 2 else found + h * TOKENS + token + cc
    decays = stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE, True)
    dscores = product(us, tl.trans(dos), tl.zeros([C, C], tl.float32), PRECISION) * decays * scale
    system = product(us, rs, tl.zeros([C, C], tl.float32), PRECISION)
    system = tl.where(cc[:, None] < cc[None, :], -system * decays, 0.0)
    dstrength += tl.sum(system * overlap, 0)
    system *= strength[None, :]
    seg = tl.zeros([C], tl.float32)
    if MODE == 2:
        seg = tl.load(at + 4 * H * TOKENS + cc, mask=inside, other=0.0).to(tl.float32)
    if MODE != 0:
        pairs = tl.trans(dscores) * scores + tl.trans(system * overlap)
        within, across, gone = pair_sums(pairs, seg, C, MODE)
        if MODE == 2:
            tl.store(numbers, within, mask=inside)
            tl.store(numbers + 3 * H * TOKENS, across, mask=inside)
            tl.store(numbers + 4 * H * TOKENS, gone, mask=inside)

    # dQ, in a loop of its own, so that the operands of dK hold no registers
    read_fast = within if MODE == 1 else tl.zeros([C], tl.float32)
    read_slow = tl.zeros([C], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        kk = start + tl.arange(0, BK)
        ks = load(k, cc, kk, inside, KT, K, WHOLE)
        weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
        state = load_scaled(entering, power, vv, kk, there, K, WHOLE)
        dqs = product(dos, state, tl.zeros([C, BK], tl.float32), PRECISION) * (weight * scale)[:, None]
        if MODE != 0:
            qs = load(q, cc, kk, inside, QT, K, WHOLE)
            read_fast += tl.sum(dqs * qs.to(tl.float32), 1)
        if MODE == 2:
            state = load_scaled(entering + K * V, power + SCALED, vv, kk, there, K, WHOLE)
            more = product(dos, state, tl.zeros([C, BK], tl.float32), PRECISION) * (weight_slow * scale)[:, None]
            read_slow += tl.sum(more * qs.to(tl.float32), 1)
            dqs += more
        dqs += tl.trans(product(tl.trans(ks), dscores, tl.zeros([BK, C], tl.float32), PRECISION))
        store(dq, dqs, cc, kk, inside, H * K, K, WHOLE)

    # dK
    left_fast = tl.zeros([C], tl.float32)
    left_slowly = tl.zeros([C], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        kk = start + tl.arange(0, BK)
        ks = load(k, cc, kk, inside, KT, K, WHOLE)
        qs = load(q, cc, kk, inside, QT, K, WHOLE)
        strength = tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)  # loaded anew, to hold fewer registers
        weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
        left, left_slow = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
        state = load_scaled(entering, power, vv, kk, there, K, WHOLE)
        dks_t = product(tl.trans(state), rs, tl.zeros([BK, C], tl.float32), PRECISION) * -weight[None, :]
        through = tl.sum(dks_t * tl.trans(ks).to(tl.float32), 0)
        dstrength += through
        dstate = load_scaled(leaving, dpower, vv, kk, there, K, WHOLE)
        dks = product(us, dstate, tl.zeros([C, BK], tl.float32), PRECISION) * left[:, None]
        if MODE != 0:
            read_fast += through * strength
            left_fast += tl.sum(dks * ks.to(tl.float32), 1)
        if MODE == 2:
            dstate = load_scaled(leaving + K * V, dpower + SCALED, vv, kk, there, K, WHOLE)
            state = load_scaled(entering + K * V, power + SCALED, vv, kk, there, K, WHOLE)
            more = product(us, dstate, tl.zeros([C, BK], tl.float32), PRECISION) * left_slow[:, None]
            left_slowly += tl.sum(more * ks.to(tl.float32), 1)
            dks += more
            more_t = product(tl.trans(state), rs, tl.zeros([BK, C], tl.float32), PRECISION) * -weight_slow[None, :]
            through = tl.sum(more_t * tl.trans(ks).to(tl.float32), 0)
            dstrength += through
            read_slow += through * strength
            dks_t += more_t
        dks = product(dscores, qs, dks, PRECISION)
        dks = product(system, ks, dks, PRECISION)
        dks_t = product(tl.trans(ks), system, dks_t * strength[None, :], PRECISION)
        store(dk, dks + tl.trans(dks_t), cc, kk, inside, H * K, K, WHOLE)
    tl.store(dbeta + rows, dstrength.to(dbeta.dtype.element_ty), mask=inside)
    if MODE == 1:
        later = cc[:, None] >= cc[None, :]  # [i, t]; sums in which nothing cancels
        grad_fast = tl.sum(tl.where(later, read_fast[:, None], left_fast[:, None]), 0) + kept
        put_log_grad(dg_fast, grad_fast, g_fast, rows, inside)
    if MODE == 2:
        tl.store(numbers + H * TOKENS, left_fast, mask=inside)
        tl.store(numbers + 2 * H * TOKENS, left_slowly, mask=inside)
        reads += h * TOKENS + token + cc
        tl.store(reads, read_fast, mask=inside)
        tl.store(reads + H * TOKENS, read_slow, mask=inside)
