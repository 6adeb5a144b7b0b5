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
def _scores(at, which, chosen, cc, C: tl.constexpr, DTYPE: tl.constexpr, BACK: tl.constexpr):
    """Load the chosen ones of the gradients of a kind of scores, or of their transpose (BACK)."""
    found = tl.where(chosen, tl.load(at + which * C * C + cc[:, None] * C + cc[None, :]), 0.0)
    if BACK:
        found = tl.trans(found)
    return factor(found, DTYPE)


@triton.jit
@no_type_check
def inputs_kernel(
    q, k, a, b, g, values, corrected, dscores, states, others, dx, dz, partial, dg, table, scale, T, LENGTH,
    PER, TOKENS, H: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, MODE: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients of q and a (`dx`, `dz`) of one chunk, head and block of channels, from S, dO and R.

    They go with what q and a add to the gradient of g (`partial`). BACK: those of k and b, from G (`states`), V and U,
    and that of g (`dg`), which also needs S (`others`). No b is k: BACK gives the gradient of both (`dx`) from Y.
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
    here = slot * H + h
    dscores += here * (KINDS * C * C)
    kk = part * BK + tl.arange(0, BK)
    gs = load_log_decays(g, token, h, cc, kk, inside, H, K, C, BK, MODE, PRECISION == "ieee")
    dxs = tl.zeros([C, BK], tl.float32)
    dzs = tl.zeros([C, BK], tl.float32)
    passed = tl.zeros([BK], tl.float32)
    for start in tl.static_range(0, V, BV):
        vv = start + tl.arange(0, BV)
        state = load(states + here * (K * V), vv, kk, vv < V, K, K, WHOLE)
        dxs = product(load(values + token * VT + h * VH, cc, vv, inside, VT, V, ALL), state, dxs, PRECISION)
        if corrected is not None:
            dzs = product(load(corrected + (token * H + h) * V, cc, vv, inside, H * V, V, ALL), state, dzs, PRECISION)
    qs = load(q + token * QT + (h // SQ) * QH, cc, kk, inside, QT, K, WHOLE)
    ks = load(k + token * KT + (h // SK) * KH, cc, kk, inside, KT, K, WHOLE)
    gave = load(a + row, cc, kk, inside, H * K, K, WHOLE)
    if b is not None:
        wrote = load(b + row, cc, kk, inside, H * K, K, WHOLE)
    last = tl.exp(gs.to(tl.float32))
    if BACK:
        weights = tl.exp(add_up(jj > ii, gs, PRECISION))
        dxs *= weights
        left_over = dxs * ks.to(tl.float32)
        if b is not None:
            dzs *= weights
            left_over += dzs * wrote.to(tl.float32)
        change = add_up(jj < ii, left_over, PRECISION)
        later = tl.zeros([C, BK], tl.float32)
        sooner = later
    else:
        weights = tl.exp(add_up(jj < ii, gs, PRECISION))
        dxs *= weights * last * scale
        dzs *= weights
        change = tl.zeros([C, BK], tl.float32)
        later = dxs * qs.to(tl.float32)
        sooner = dzs * gave.to(tl.float32)
    mild, passes, limit = passes_of(add_up(jj <= ii, gs, PRECISION), LEVELS, PRECISION)
    for step in tl.range(0, passes):
        level = LEVELS - step
        side = direction(cc, level, C)[:, None]
        weights = tl.exp(tl.minimum(side * add_up(between(ii, jj, level, C, 0), gs, PRECISION), 0.0))
        left = -side * add_up(between(ii, jj, level, C, 1), gs, PRECISION)
        left = tl.exp(tl.minimum(left, tl.where(step == 0, limit, 0.0)))
        chosen = of_pass(ii, jj, mild[:, None], level, LEVELS)
        apart = chosen & (ii != jj + 1)
        none = tl.zeros([C, BK], tl.float32)
        if BACK:
            asked = factor(qs.to(tl.float32) * (last * weights), DTYPE)
            read = factor(gave.to(tl.float32) * weights, DTYPE)
            found = product(_scores(dscores, 0, chosen, cc, C, DTYPE, True), asked, none, PRECISION)
            found = product(_scores(dscores, READ, apart, cc, C, DTYPE, True), read, found, PRECISION) * left
            dxs += found
            later -= found * ks.to(tl.float32)
            if b is not None:
                found = product(_scores(dscores, 1, chosen, cc, C, DTYPE, True), asked, none, PRECISION)
                found = product(_scores(dscores, 3, apart, cc, C, DTYPE, True), read, found, PRECISION) * left
                dzs += found
                later -= found * wrote.to(tl.float32)
        else:
            keys = factor(ks.to(tl.float32) * left, DTYPE)
            found = product(_scores(dscores, 0, chosen, cc, C, DTYPE, False), keys, none, PRECISION)
            if b is not None:
                written = factor(wrote.to(tl.float32) * left, DTYPE)
                found = product(_scores(dscores, 1, chosen, cc, C, DTYPE, False), written, found, PRECISION)
            found *= weights * last
            dxs += found
            later += found * qs.to(tl.float32)
            found = product(_scores(dscores, READ, apart, cc, C, DTYPE, False), keys, none, PRECISION)
            if b is not None:
                found = product(_scores(dscores, 3, apart, cc, C, DTYPE, False), written, found, PRECISION)
            found *= weights
            dzs += found
            sooner += found * gave.to(tl.float32)
    # Pairs that no log-decay weighs: of a query with its own token, and of a with the token before.
    own = tl.load(dscores + cc * (C + 1)).to(tl.float32)[:, None]
    if b is not None:
        own_b = tl.load(dscores + C * C + cc * (C + 1)).to(tl.float32)[:, None]
    if BACK:
        near = cc + 1 < size
        next_k = tl.load(dscores + READ * C * C + cc * (C + 1) + C, mask=near, other=0.0).to(tl.float32)[:, None]
        after = load(a + row + H * K, cc, kk, near, H * K, K, WHOLE).to(tl.float32)
        dxs += own * qs.to(tl.float32) + next_k * after
        if b is not None:
            next_b = tl.load(dscores + 3 * C * C + cc * (C + 1) + C, mask=near, other=0.0).to(tl.float32)[:, None]
            dzs += own_b * qs.to(tl.float32) + next_b * after
    else:
        near = (cc > 0) & inside
        last_k = tl.load(dscores + READ * C * C + cc * (C + 1) - 1, mask=near, other=0.0).to(tl.float32)[:, None]
        before = load(k + (token - 1) * KT + (h // SK) * KH, cc, kk, near, KT, K, WHOLE).to(tl.float32)
        dxs += own * ks.to(tl.float32)
        dzs += last_k * before
        if b is not None:
            last_b = tl.load(dscores + 3 * C * C + cc * (C + 1) - 1, mask=near, other=0.0).to(tl.float32)[:, None]
            dxs += own_b * wrote.to(tl.float32)
            dzs += last_b * load(b + row - H * K, cc, kk, near, H * K, K, WHOLE).to(tl.float32)
    store(dx + row, dxs, cc, kk, inside, H * K, K, WHOLE)
    if dz is not None:
        store(dz + row, dzs, cc, kk, inside, H * K, K, WHOLE)
    if MODE != 0:
        change += add_up(jj >= ii, later, PRECISION)
        if BACK:
            for start in tl.static_range(0, V, BV):
                vv = start + tl.arange(0, BV)
                state = load(states + here * (K * V), vv, kk, vv < V, K, K, WHOLE).to(tl.float32)
                other = load(others + here * (K * V), vv, kk, vv < V, K, K, WHOLE).to(tl.float32)
                passed += tl.sum(state * other, 0)
            change += (tl.exp(tl.sum(gs.to(tl.float32), 0)) * passed)[None, :]
        else:
            change += add_up(jj > ii, sooner, PRECISION)
        if MODE == 1:
            rows = partial + part * H * TOKENS + (token + cc) * H + h
            total = tl.sum(change, 1)
            if BACK:
                given = tl.load(g + (token + cc) * H + h, mask=inside, other=0.0).to(tl.float32)
                total = tl.where(given < FLOOR, 0.0, total + tl.load(rows, mask=inside, other=0.0))
            tl.store(rows, total, mask=inside)
        elif BACK:
            given = load(g + row, cc, kk, inside, H * K, K, WHOLE).to(tl.float32)
            change += load(partial + row, cc, kk, inside, H * K, K, WHOLE)
            store(dg + row, tl.where(given < FLOOR, 0.0, change), cc, kk, inside, H * K, K, WHOLE)
        else:
            store(partial + row, change, cc, kk, inside, H * K, K, WHOLE)
