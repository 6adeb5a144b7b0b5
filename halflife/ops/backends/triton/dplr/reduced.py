"""What a chunk does to a state, reduced to products with it.

With the sums c of log-decays in a chunk, `ã_i = e^{c_{i−1}} a_i`, `q̃_i = e^{c_i} q_i`, `k̃_j = e^{c_C − c_j} k_j`, b̃
like k̃, and the scores `A_xy` of `factors.py` (j < i for a, j ≤ i for q), the corrections U (rows u_t = S_{t−1}ᵀ a_t)
solve `(I − A_ab) U = A_ak V + ã S`. So with `Z = (I − A_ab)⁻¹` and `M = Z A_ak`,

    U = W S + M V,          W = Z ã,
    O = Q̂ S + P V,          Q̂ = q̃ + A_qb W,    P = A_qk + A_qb M,
    S ← e^{c_C} S + b̃ᵀ (W S) + K̂ᵀ V,           K̂ = k̃ + Mᵀ b̃.

The backward pass has the same form from the end, with the gradient G of the state for S and dO for V:

    R = B̂ G + Nᵀ dO,        B̂ = Zᵀ b̃,           N = A_qb Z,
    dV = K̂ G + Pᵀ dO,       G ← e^{c_C} G + ãᵀ (B̂ G) + Q̂ᵀ dO.

R is the adjoint of U's system. The inverse is exact float32. Where b is k (KDA), `A_ab = A_ak` and `A_qb = A_qk`, so
with the written values Y = U + V

    Y = W S + Z V,          P = N = A_qk Z,          K̂ = B̂ = Zᵀ k̃.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.delta.inverse import unit_lower_inverse
from halflife.ops.backends.triton.delta.pairs import product
from halflife.ops.backends.triton.dplr.factors import (
    add_up,
    add_up_columns,
    between,
    direction,
    factor,
    load_log_decays,
    of_pass,
    passes_of,
)
from halflife.ops.backends.triton.segments import chunk_tokens
from halflife.ops.backends.triton.walks import load, store


@triton.jit
@no_type_check
def _put(at, value, rows, cols, inside, stride, SIZE: tl.constexpr):
    """Store a transposed `value [cols, rows]`."""
    mask = (cols < SIZE)[:, None] & inside[None, :]
    tl.store(at + rows[None, :] * stride + cols[:, None], value.to(at.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def reduce_kernel(
    q, k, a, b, g, reads, writes, adds, asks, pairs, kept, tilted, solved_b, inner, outer, table, scale, T, LENGTH,
    PER, H: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr, KT: tl.constexpr,
    KH: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, MODE: tl.constexpr,
    PRECISION: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """W, b̃, K̂, Q̂, P and e^{c_C} (`reads` to `kept`) of one chunk and head; ã, B̂, M, N if they are not None.

    No b is k. Then `inner` is Z, and B̂ and N are K̂ and P.
    """
    WHOLE: tl.constexpr = K if K % BK == 0 else BK
    h = tl.program_id(1)
    token, size, slot = chunk_tokens(table, tl.program_id(0), T, LENGTH, PER, C)
    if size <= 0:
        return
    cc = tl.arange(0, C)
    inside = cc < size
    q += token * QT + (h // SQ) * QH
    k += token * KT + (h // SK) * KH
    row = (token * H + h) * K
    ii = cc[:, None]
    jj = cc[None, :]
    ab = tl.zeros([C, C], tl.float32)
    ak = tl.zeros([C, C], tl.float32)
    qb = tl.zeros([C, C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    for start in tl.range(0, K, BK, num_stages=1):
        kk = start + tl.arange(0, BK)
        gs = load_log_decays(g, token, h, cc, kk, inside, H, K, C, BK, MODE, PRECISION == "ieee")
        kt = tl.trans(load(k, cc, kk, inside, KT, K, WHOLE))
        if b is not None:
            bt = tl.trans(load(b + row, cc, kk, inside, H * K, K, WHOLE))
        qs = load(q, cc, kk, inside, QT, K, WHOLE).to(tl.float32)
        gave = load(a + row, cc, kk, inside, H * K, K, WHOLE).to(tl.float32)
        if b is not None:
            qb += tl.where(ii == jj, tl.sum(qs * tl.trans(bt).to(tl.float32), 1)[:, None], 0.0)
        qk += tl.where(ii == jj, tl.sum(qs * tl.trans(kt).to(tl.float32), 1)[:, None], 0.0)
        qs *= tl.exp(gs.to(tl.float32))
        mild, passes, limit = passes_of(add_up(jj <= ii, gs, PRECISION), LEVELS, PRECISION)
        for step in tl.range(0, passes):
            level = LEVELS - step
            weights = direction(cc, level, C)[:, None] * add_up(between(ii, jj, level, C, 0), gs, PRECISION)
            weights = tl.exp(tl.minimum(weights, 0.0))
            left = add_up_columns(tl.trans(gs), between(jj, ii, level, C, 1), PRECISION)
            left = tl.exp(tl.minimum(left * -direction(cc, level, C)[None, :], tl.where(step == 0, limit, 0.0)))
            here = of_pass(ii, jj, mild[:, None], level, LEVELS)
            none = tl.zeros([C, C], tl.float32)
            x = factor(gave * weights, q.dtype.element_ty)
            keys = factor(kt.to(tl.float32) * left, q.dtype.element_ty)
            ak += tl.where(here, product(x, keys, none, PRECISION), 0.0)
            if b is not None:
                wrote = factor(bt.to(tl.float32) * left, q.dtype.element_ty)
                ab += tl.where(here, product(x, wrote, none, PRECISION), 0.0)
            x = factor(qs * weights, q.dtype.element_ty)
            qk += tl.where(here, product(x, keys, none, PRECISION), 0.0)
            if b is not None:
                qb += tl.where(here, product(x, wrote, none, PRECISION), 0.0)
    qb *= scale
    qk *= scale
    near = (token * H + h) * C
    if b is None:
        solved = unit_lower_inverse(-ak, C)
        to_outputs = product(qk, solved, tl.zeros([C, C], tl.float32), PRECISION)
        store(pairs + near, to_outputs, cc, cc, inside, H * C, C, C)
        if inner is not None:
            store(inner + near, solved, cc, cc, inside, H * C, C, C)
    else:
        solved = unit_lower_inverse(-ab, C)
        from_keys = product(solved, ak, tl.zeros([C, C], tl.float32), PRECISION)
        store(pairs + near, product(qb, from_keys, qk, PRECISION), cc, cc, inside, H * C, C, C)
        to_outputs = product(qb, solved, tl.zeros([C, C], tl.float32), PRECISION)
        if inner is not None:
            store(inner + near, from_keys, cc, cc, inside, H * C, C, C)
            store(outer + near, to_outputs, cc, cc, inside, H * C, C, C)
    here = slot * H + h
    for start in tl.range(0, K, BK, num_stages=1):
        kk = start + tl.arange(0, BK)
        gs = load_log_decays(g, token, h, cc, kk, inside, H, K, C, BK, MODE, PRECISION == "ieee")
        tl.store(kept + here * K + kk, tl.exp(tl.sum(gs.to(tl.float32), 0)), mask=kk < K)
        weights = tl.exp(add_up(jj < ii, gs, PRECISION))
        gave = load(a + row, cc, kk, inside, H * K, K, WHOLE).to(tl.float32) * weights
        if tilted is not None:
            store(tilted + row, gave, cc, kk, inside, H * K, K, WHOLE)
        read = product(solved, gave, tl.zeros([C, BK], tl.float32), PRECISION)
        store(reads + row, read, cc, kk, inside, H * K, K, WHOLE)
        qs = load(q, cc, kk, inside, QT, K, WHOLE).to(tl.float32) * (tl.exp(gs.to(tl.float32)) * weights * scale)
        store(asks + row, product(to_outputs, gave, qs, PRECISION), cc, kk, inside, H * K, K, WHOLE)
        left = tl.exp(add_up_columns(tl.trans(gs), jj < ii, PRECISION))
        kt = tl.trans(load(k, cc, kk, inside, KT, K, WHOLE)).to(tl.float32) * left
        if b is None:
            _put(writes + row, kt, cc, kk, inside, H * K, K)
            kt = product(kt, solved, tl.zeros([BK, C], tl.float32), PRECISION)
            _put(adds + row, kt, cc, kk, inside, H * K, K)
        else:
            bt = tl.trans(load(b + row, cc, kk, inside, H * K, K, WHOLE)).to(tl.float32) * left
            _put(writes + row, bt, cc, kk, inside, H * K, K)
            _put(adds + row, product(bt, from_keys, kt, PRECISION), cc, kk, inside, H * K, K)
            if solved_b is not None:
                bt = product(bt, solved, tl.zeros([BK, C], tl.float32), PRECISION)
                _put(solved_b + row, bt, cc, kk, inside, H * K, K)
