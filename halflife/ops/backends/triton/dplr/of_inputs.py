"""The gradients of the inputs of DPLR, chunk by chunk.

From the state S that enters a chunk, the gradient G of the state that leaves it, U and R (see `reduced.py`), those of
the scores and of the weighted rows are

    dA_qk = dO Vᵀ,   dA_qb = dO Uᵀ,   dA_ak = R Vᵀ,   dA_ab = R Uᵀ,
    dq̃ = dO Sᵀ,      dã = R Sᵀ,       dk̃ = V Gᵀ,      db̃ = U Gᵀ.

Where b is k (KDA), k̃ and b̃ are one, and the sums of both columns need Y = U + V alone:

    dA_qk = dO Yᵀ,   dA_ak = R Yᵀ,   dk̃ = Y Gᵀ.

The log-decay of t weighs scores of tokens i ≥ t > j, what tokens i ≥ t read from S, what tokens j < t write into the
outgoing state, and S itself (see `chunked/decays.py`); a token i > t for a, which reads the state before its decay.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.delta.pairs import product
from halflife.ops.backends.triton.dplr.factors import (
    add_up,
    between,
    direction,
    factor,
    load_log_decays,
    of_pass,
    passes_of,
)
from halflife.ops.backends.triton.gates import FLOOR
from halflife.ops.backends.triton.segments import chunk_tokens
from halflife.ops.backends.triton.walks import load, store


@triton.jit
@no_type_check
def scores_kernel(
    do, values, solved, adjoint, dscores, table, scale, T, LENGTH, PER, H: tl.constexpr, VT: tl.constexpr,
    VH: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients `[4, C, C]` of the scores qk, qb, ak and ab of one chunk and head.

    Without values they are `[2, C, C]`, of qk and ak, from Y in `solved`.
    """
    KINDS: tl.constexpr = 2 if values is None else 4
    ALL: tl.constexpr = V if V % BV == 0 else BV
    h = tl.program_id(1)
    token, size, slot = chunk_tokens(table, tl.program_id(0), T, LENGTH, PER, C)
    if size <= 0:
        return
    cc = tl.arange(0, C)
    inside = cc < size
    column = (token * H + h) * V
    if values is not None:
        values += token * VT + h * VH
    qk = tl.zeros([C, C], tl.float32)
    qb = tl.zeros([C, C], tl.float32)
    ak = tl.zeros([C, C], tl.float32)
    ab = tl.zeros([C, C], tl.float32)
    for start in tl.range(0, V, BV):
        vv = start + tl.arange(0, BV)
        us = tl.trans(load(solved + column, cc, vv, inside, H * V, V, ALL))
        dos = load(do + column, cc, vv, inside, H * V, V, ALL)
        rs = load(adjoint + column, cc, vv, inside, H * V, V, ALL)
        vs = us
        if values is not None:
            vs = tl.trans(load(values, cc, vv, inside, VT, V, ALL))
            qb = product(dos, us, qb, PRECISION)
            ab = product(rs, us, ab, PRECISION)
        qk = product(dos, vs, qk, PRECISION)
        ak = product(rs, vs, ak, PRECISION)
    at = dscores + (slot * H + h) * (KINDS * C * C)
    every = cc < C
    store(at, qk * scale, cc, cc, every, C, C, C)
    store(at + KINDS // 2 * C * C, ak, cc, cc, every, C, C, C)
    if values is not None:
        store(at + C * C, qb * scale, cc, cc, every, C, C, C)
        store(at + 3 * C * C, ab, cc, cc, every, C, C, C)


@triton.jit
@no_type_check
def _scores(at, which, chosen, cc, C: tl.constexpr, DTYPE: tl.constexpr):
    """Load the chosen ones of the gradients of a kind of scores."""
    return factor(tl.where(chosen, tl.load(at + which * C * C + cc[:, None] * C + cc[None, :]), 0.0), DTYPE)


@triton.jit
@no_type_check
def inputs_kernel(
    q, k, a, b, g, do, adjoint, values, solved, dscores, states, dstates, dq, dk, da, db, dg, table, scale, T, LENGTH,
    PER, TOKENS, H: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k, a, b and g of one chunk, head and block of channels, from S, G, dO, R, V and U.

    No b is k: `values` is Y, and the gradient of k that of both. That of a scalar decay is a part for each block.
    """
    KINDS: tl.constexpr = 2 if b is None else 4
    READ: tl.constexpr = KINDS // 2  # the first kind of scores of a
    WHOLE: tl.constexpr = K if K % BK == 0 else BK
    ALL: tl.constexpr = V if V % BV == 0 else BV
    DTYPE: tl.constexpr = q.dtype.element_ty
    PARTS: tl.constexpr = (K + BK - 1) // BK
    part = tl.program_id(1) % PARTS
    h = tl.program_id(1) // PARTS
    token, size, slot = chunk_tokens(table, tl.program_id(0), T, LENGTH, PER, C)
    if size <= 0:
        return
    cc = tl.arange(0, C)
    ii = cc[:, None]
    jj = cc[None, :]
    inside = cc < size
    row = (token * H + h) * K
    column = (token * H + h) * V
    here = slot * H + h
    q += token * QT + (h // SQ) * QH
    k += token * KT + (h // SK) * KH
    values += token * VT + h * VH
    dscores += here * (KINDS * C * C)
    states += here * (K * V)
    dstates += here * (K * V)
    kk = part * BK + tl.arange(0, BK)
    gs = load_log_decays(g, token, h, cc, kk, inside, H, K, C, BK, MODE, PRECISION == "ieee")
    qs = load(q, cc, kk, inside, QT, K, WHOLE)
    ks = load(k, cc, kk, inside, KT, K, WHOLE)
    gave = load(a + row, cc, kk, inside, H * K, K, WHOLE)
    if b is not None:
        wrote = load(b + row, cc, kk, inside, H * K, K, WHOLE)
    none = tl.zeros([C, BK], tl.float32)
    dqs = none
    das = none
    dks = none
    dbs = none
    mild, passes, limit = passes_of(add_up(jj <= ii, gs, PRECISION), LEVELS, PRECISION)
    for step in tl.range(0, passes):
        tl.debug_barrier()  # without it scores of all kinds are loaded before the loop, and hold registers
        level = LEVELS - step
        side = direction(cc, level, C)[:, None]
        weights = tl.exp(tl.minimum(side * add_up(between(ii, jj, level, C, 0), gs, PRECISION), 0.0))
        left = -side * add_up(between(ii, jj, level, C, 1), gs, PRECISION)
        left = tl.exp(tl.minimum(left, tl.where(step == 0, limit, 0.0)))
        chosen = of_pass(ii, jj, mild[:, None], level, LEVELS)
        apart = chosen & (ii != jj + 1)
        asking = weights * tl.exp(gs.to(tl.float32))
        keys = factor(ks.to(tl.float32) * left, DTYPE)
        asked = factor(qs.to(tl.float32) * asking, DTYPE)
        found = _scores(dscores, 0, chosen, cc, C, DTYPE)
        to_q = product(found, keys, none, PRECISION)
        to_k = product(tl.trans(found), asked, none, PRECISION)
        read = factor(gave.to(tl.float32) * weights, DTYPE)
        found = _scores(dscores, READ, apart, cc, C, DTYPE)
        to_a = product(found, keys, none, PRECISION)
        dks += product(tl.trans(found), read, to_k, PRECISION) * left
        if b is not None:
            keys = factor(wrote.to(tl.float32) * left, DTYPE)
            found = _scores(dscores, 1, chosen, cc, C, DTYPE)
            to_q = product(found, keys, to_q, PRECISION)
            to_b = product(tl.trans(found), asked, none, PRECISION)
            found = _scores(dscores, 3, apart, cc, C, DTYPE)
            to_a = product(found, keys, to_a, PRECISION)
            dbs += product(tl.trans(found), read, to_b, PRECISION) * left
        dqs += to_q * asking
        das += to_a * weights
    # What a log-decay weighs: `later` is of tokens from its own on, `sooner` of those after it.
    later = -dks * ks.to(tl.float32)
    if b is not None:
        later -= dbs * wrote.to(tl.float32)
    read = none
    asked = none
    for start in tl.static_range(0, V, BV):
        vv = start + tl.arange(0, BV)
        state = load(states, vv, kk, vv < V, K, K, WHOLE)
        asked = product(load(do + column, cc, vv, inside, H * V, V, ALL), state, asked, PRECISION)
        read = product(load(adjoint + column, cc, vv, inside, H * V, V, ALL), state, read, PRECISION)
    weights = tl.exp(add_up(jj < ii, gs, PRECISION))
    dqs += asked * (weights * tl.exp(gs.to(tl.float32)) * scale)
    das += read * weights
    later += dqs * qs.to(tl.float32)
    change = add_up(jj > ii, das * gave.to(tl.float32), PRECISION)
    change += add_up(jj >= ii, later, PRECISION)
    # Pairs that no log-decay weighs: of a query with its own token, and of a with the token before.
    own = tl.load(dscores + cc * (C + 1)).to(tl.float32)[:, None]
    near = (cc > 0) & inside
    met = tl.load(dscores + READ * C * C + cc * (C + 1) - 1, mask=near, other=0.0).to(tl.float32)[:, None]
    dqs += own * ks.to(tl.float32)
    das += met * load(k - KT, cc, kk, near, KT, K, WHOLE).to(tl.float32)
    if b is not None:
        own_b = tl.load(dscores + C * C + cc * (C + 1)).to(tl.float32)[:, None]
        met = tl.load(dscores + 3 * C * C + cc * (C + 1) - 1, mask=near, other=0.0).to(tl.float32)[:, None]
        dqs += own_b * wrote.to(tl.float32)
        das += met * load(b + row - H * K, cc, kk, near, H * K, K, WHOLE).to(tl.float32)
    store(dq + row, dqs, cc, kk, inside, H * K, K, WHOLE)
    store(da + row, das, cc, kk, inside, H * K, K, WHOLE)
    to_k = none
    to_b = none
    passed = tl.zeros([BK], tl.float32)
    for start in tl.static_range(0, V, BV):
        vv = start + tl.arange(0, BV)
        state = load(dstates, vv, kk, vv < V, K, K, WHOLE)
        to_k = product(load(values, cc, vv, inside, VT, V, ALL), state, to_k, PRECISION)
        if b is not None:
            to_b = product(load(solved + column, cc, vv, inside, H * V, V, ALL), state, to_b, PRECISION)
        if MODE != 0:
            other = load(states, vv, kk, vv < V, K, K, WHOLE).to(tl.float32)
            passed += tl.sum(state.to(tl.float32) * other, 0)
    weights = tl.exp(add_up(jj > ii, gs, PRECISION))
    to_k *= weights
    left_over = to_k * ks.to(tl.float32)
    near = cc + 1 < size
    after = load(a + row + H * K, cc, kk, near, H * K, K, WHOLE).to(tl.float32)
    met = tl.load(dscores + READ * C * C + cc * (C + 1) + C, mask=near, other=0.0).to(tl.float32)[:, None]
    dks += to_k + own * qs.to(tl.float32) + met * after
    store(dk + row, dks, cc, kk, inside, H * K, K, WHOLE)
    if b is not None:
        to_b *= weights
        left_over += to_b * wrote.to(tl.float32)
        met = tl.load(dscores + 3 * C * C + cc * (C + 1) + C, mask=near, other=0.0).to(tl.float32)[:, None]
        dbs += to_b + own_b * qs.to(tl.float32) + met * after
        store(db + row, dbs, cc, kk, inside, H * K, K, WHOLE)
    if MODE != 0:
        change += add_up(jj < ii, left_over, PRECISION)
        change += (tl.exp(tl.sum(gs.to(tl.float32), 0)) * passed)[None, :]
        change = tl.where(gs <= FLOOR, 0.0, change)
        if MODE == 1:
            tl.store(dg + part * H * TOKENS + (token + cc) * H + h, tl.sum(change, 1), mask=inside)
        else:
            store(dg + row, change, cc, kk, inside, H * K, K, WHOLE)
