"""Linear attention with a vector decay: the gradients of queries, keys and log-decays, chunk by chunk.

With the sums E of `levels.py`, the rows X, dS = dO Vᵀ and its symmetric form F, each level adds

    D = e^E ⊙ (F X),     to dq in second halves and to dk in first ones,     dE = D ⊙ (q or k),     dg += N_sᵀ dE.

Reads of the entering state S and writes into the leaving one, whose gradient is G, are two further levels:

    D = e^P ⊙ (dO Sᵀ),   D = e^R ⊙ (V Gᵀ),     P = the sum up to a token, R = the sum after it.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.gates import FLOOR, dot
from halflife.ops.backends.triton.segments import chunk_tokens
from halflife.ops.backends.triton.vector.levels import (
    clamped,
    is_second,
    level_grads,
    level_pairs,
    level_sums,
    summed_decays,
    summed_grads,
    sums,
    weights,
)
from halflife.ops.backends.triton.walks import beside_state, head_of, load, store


@triton.jit
@no_type_check
def grads_kernel(
    q, k, v, do, g, states, after, dq, dk, dg, table, scale, T, LENGTH, PER, H: tl.constexpr, SQ: tl.constexpr,
    SK: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, VT: tl.constexpr,
    VH: tl.constexpr, DQT: tl.constexpr, DKT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """One chunk and head, and BK rows of its state. `states` enter the chunks, and `after` are gradients of those that
    leave them, which are `[V, K]` if TURNED, else `[K, V]`."""
    PARTS: tl.constexpr = (K + BK - 1) // BK
    DTYPE: tl.constexpr = q.dtype.element_ty
    part = tl.program_id(0) % PARTS
    h = tl.program_id(0) // PARTS % H
    token, size, slot = chunk_tokens(table, tl.program_id(0) // (PARTS * H), T, LENGTH, PER, C)
    if size <= 0:
        return
    cc = tl.arange(0, C)
    kk = part * BK + tl.arange(0, BK)
    inside = cc < size
    slot = (slot * H + h) * K * V
    row = (token * H + h) * K
    qs = load(q + token * QT + (h // SQ) * QH, cc, kk, inside, QT, K, BK)
    ks = load(k + token * KT + (h // SK) * KH, cc, kk, inside, KT, K, BK)
    given = load(g + row, cc, kk, inside, H * K, K, BK)
    later = tl.zeros([C, C], tl.float32)
    earlier = tl.zeros([C, C], tl.float32)
    dqs = tl.zeros([C, BK], tl.float32)
    dks = tl.zeros([C, BK], tl.float32)
    carried = tl.zeros([BK], tl.float32)
    for block in range(0, V, BV):
        vv = block + tl.arange(0, BV)
        vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
        dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
        at = slot + (kk[None, :] + vv[:, None] * K if TURNED else kk[None, :] * V + vv[:, None])
        real = (kk < K)[None, :] & (vv < V)[:, None]
        state = tl.load(states + at, mask=real, other=0.0)
        grad = tl.load(after + at, mask=real, other=0.0)
        later = dot(dos, tl.trans(vs), later, PRECISION)
        wide = beside_state(dos)
        dqs = dot(wide, state.to(wide.dtype), dqs, PRECISION)
        earlier = dot(vs, tl.trans(dos), earlier, PRECISION)
        wide = beside_state(vs)
        dks = dot(wide, grad.to(wide.dtype), dks, PRECISION)
        carried += tl.sum(state.to(tl.float32) * grad.to(tl.float32), 0)
    gs = clamped(given)
    parts = summed_decays(gs, DTYPE)
    pairs = (tl.where(cc[:, None] > cc[None, :], later, earlier) * scale).to(qs.dtype)
    same = tl.sum(tl.where(cc[:, None] == cc[None, :], later, 0.0), 1)[:, None] * scale

    dqs *= weights(cc[None, :] <= cc[:, None], parts, PRECISION) * scale
    dgs = sums(cc[None, :] >= cc[:, None], summed_grads(dqs * qs.to(tl.float32), DTYPE), PRECISION)
    dqs += same * ks.to(tl.float32)
    dks *= weights(cc[None, :] > cc[:, None], parts, PRECISION)
    dgs += sums(cc[None, :] < cc[:, None], summed_grads(dks * ks.to(tl.float32), DTYPE), PRECISION)
    dks += same * qs.to(tl.float32)
    for level in range(LEVELS):
        second = is_second(cc, level)[:, None]
        weight = weights(level_sums(cc, cc, level), parts, PRECISION)
        rows = tl.where(second, qs.to(tl.float32), ks.to(tl.float32))
        met = tl.where(level_pairs(cc, cc, level), pairs, 0.0)
        found = dot(met, (rows * weight).to(qs.dtype), tl.zeros([C, BK], tl.float32), PRECISION) * weight
        dqs += tl.where(second, found, 0.0)
        dks += tl.where(second, 0.0, found)
        dgs += sums(level_grads(cc, cc, level), summed_grads(found * rows, DTYPE), PRECISION)
    dgs += (tl.exp(tl.sum(gs, 0)) * carried)[None, :]
    dgs = tl.where(given.to(tl.float32) < FLOOR, 0.0, dgs)
    store(head_of(dq, token, h, H, K, DQT), dqs, cc, kk, inside, DQT, K, BK)
    store(head_of(dk, token, h, H, K, DKT), dks, cc, kk, inside, DKT, K, BK)
    store(dg + row, dgs, cc, kk, inside, H * K, K, BK)
