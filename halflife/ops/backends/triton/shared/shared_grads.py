"""Gradients of queries and keys that heads share, in linear attention with or without a scalar decay and GateRank.

Two walks of `walks.py` store the states that enter chunks and the gradients of states after them. A program here has
one chunk and goes over the heads of a group, of which it adds

    dQ = (Σ_h (dO Vᵀ) ⊙ D) K + Σ_h r ⊙ (dO Sᵀ)    or    dK = (Σ_h (V dOᵀ) ⊙ Dᵀ) Q + Σ_h l ⊙ (V Gᵀ)

in registers, so that no gradients of single heads are in memory. It also has all that the gradients of log-decays are
made of: what queries read and the rest are two parts of them, from the two kinds of programs.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.gates import dot, pair_sums
from halflife.ops.backends.triton.linear_grads import put_sums
from halflife.ops.backends.triton.segments import ENOUGH, Settings, architecture, block, chunk_tokens
from halflife.ops.backends.triton.sums import stored_carries, stored_decays, stored_leaves, stored_reads
from halflife.ops.backends.triton.walks import beside_state, factors, load, load_state, store, weighted

LARGEST = 128 * 64  # entries of a state that a program holds beside its gradients


def tiles_of(q: Tensor, v: Tensor, most: int) -> Settings:
    """The settings of the kernel, whose chunks have at most `most` tokens."""
    exact = q.dtype == torch.float32
    sizes = block(q.shape[3], 256), block(v.shape[3], 256)
    chunk = 16 if exact else 64 if architecture(q) == "hopper" else 32
    return Settings(min(chunk, most), *sizes, 4, 1 if exact else 2)


def heads_of_program(shared: int, others: int) -> int:
    """How many of the heads that share queries a program has, so that with `others` the programs fill a GPU."""
    while shared % 2 == 0 and others < ENOUGH:
        shared, others = shared // 2, others * 2
    return shared


@triton.jit
@no_type_check
def add_read(total, x, state, weight, PRECISION: tl.constexpr):
    """Compute `total + weight ⊙ (x stateᵀ)`, float32 `[C, K]`."""
    wide = beside_state(weighted(x, weight))
    return dot(wide, tl.trans(state.to(wide.dtype)), total, PRECISION)


@triton.jit
@no_type_check
def read_of(own, state, x, weight, C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr):
    """What each row of `own` reads from a state, times the row of x and its weight: float32 `[C]`."""
    wide = beside_state(own)
    read = dot(wide, state.to(wide.dtype), tl.zeros([C, BV], tl.float32), PRECISION)
    return tl.sum(read * x.to(tl.float32), 1) * weight


@triton.jit
@no_type_check
def shared_grads_kernel(
    q, k, v, do, sums, before, after, g, gain, dq, dk, dg, dgain, dskip, table, scale, T,
    LENGTH, PER, TOKENS, H: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk and HEADS of the S heads that share queries: the gradients of these, or of keys, or of numbers a head.

    `before` has the states that enter chunks, and `after` the gradients of those after them.
    """
    kind = tl.program_id(0) % 3
    group = tl.program_id(0) // 3 % (H // HEADS)
    chunk = tl.program_id(0) // (3 * (H // HEADS))  # on one axis, because the second one has at most 65,535 programs
    first = group * HEADS
    token, size, place = chunk_tokens(table, chunk, T, LENGTH, PER, C)
    cc = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    inside = cc < size
    exists = size > 0  # behind the end of a segment is no chunk
    token = tl.where(exists, token, 0)
    place = tl.where(exists, place, 0)
    size = tl.where(exists, size, 1)
    queries_at = q + token * QT + (first // S) * QH
    keys_at = k + token * KT + (first // S) * KH
    out = (token * (H // HEADS) + group) * K
    nothing = tl.zeros([C], tl.float32)
    if MODE != 0:
        dg += kind * H * TOKENS
    if kind == 0:
        qs = load(queries_at, cc, kk, inside, QT, K, BK)
        ks = load(keys_at, cc, kk, inside, KT, K, BK)
        total = tl.zeros([C, BK], tl.float32)
        for n in tl.range(0, HEADS, num_stages=STAGES):
            h = first + n
            at = token if MODE == 0 else sums + h * TOKENS + token
            dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
            weight, _ = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
            state = load_state(before + (place * H + h) * K * V, kk, vv, K, V)
            if MODE != 0:
                read = read_of(qs, state, dos, weight, C, BV, PRECISION) * scale
                put_sums(nothing, read, nothing, 0.0, g, dg, (token + cc) * H + h, inside, C)
            total = add_read(total, dos, state, weight, PRECISION)
            vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
            scores = dot(dos, tl.trans(vs), tl.zeros([C, C], tl.float32), PRECISION)
            scores *= stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE)
            if gain is not None:
                scores *= factors(gain, token, cc, inside, h, H)[None, :]
            wide = beside_state(ks)
            total = dot(scores.to(wide.dtype), wide, total, PRECISION)
        store(dq + out, total * scale, cc, kk, inside, (H // HEADS) * K, K, BK)
    elif kind == 1:
        qs = load(queries_at, cc, kk, inside, QT, K, BK)
        total = tl.zeros([C, BK], tl.float32)
        for n in tl.range(0, HEADS, num_stages=STAGES):
            h = first + n
            at = token if MODE == 0 else sums + h * TOKENS + token
            here = (place * H + h) * K * V
            dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
            vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
            scores = dot(vs, tl.trans(dos), tl.zeros([C, C], tl.float32), PRECISION)
            scores *= stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE, True) * scale
            weight, _ = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
            if gain is not None:
                factor = factors(gain, token, cc, inside, h, H)
                scores *= factor[:, None]
                weight *= factor
            wide = beside_state(qs)
            total = dot(scores.to(wide.dtype), wide, total, PRECISION)
            grad = load_state(after + here, kk, vv, K, V)
            total = add_read(total, vs, grad, weight, PRECISION)
            if MODE != 0:
                kept, _, _ = stored_carries(at, H * TOKENS, size, MODE)
                state = load_state(before + here, kk, vv, K, V).to(tl.float32)
                kept *= tl.sum(state * grad.to(tl.float32))
                put_sums(nothing, nothing, nothing, kept, g, dg, (token + cc) * H + h, inside, C)
        store(dk + out, total, cc, kk, inside, (H // HEADS) * K, K, BK)
    elif MODE != 0 or gain is not None or dskip is not None:
        qs = load(queries_at, cc, kk, inside, QT, K, BK)
        ks = load(keys_at, cc, kk, inside, KT, K, BK)
        for n in tl.range(0, HEADS, num_stages=STAGES):
            h = first + n
            at = token if MODE == 0 else sums + h * TOKENS + token
            vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
            weight, _ = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
            grad = load_state(after + (place * H + h) * K * V, kk, vv, K, V)
            left = read_of(ks, grad, vs, weight, C, BV, PRECISION)
            dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
            scores = dot(dos, tl.trans(vs), tl.zeros([C, C], tl.float32), PRECISION)
            if dskip is not None:
                of_skip = tl.sum(tl.where(cc[:, None] == cc[None, :], scores, 0.0))
                tl.store(dskip + chunk * H + h, tl.where(exists, of_skip, 0.0))
            scores *= dot(qs, tl.trans(ks), tl.zeros([C, C], tl.float32), PRECISION)
            scores *= stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE) * scale
            if gain is not None:
                tl.store(dgain + (token + cc) * H + h, tl.sum(scores, 0) + left, mask=inside)
                factor = factors(gain, token, cc, inside, h, H)
                scores *= factor[None, :]
                left *= factor
            if MODE != 0:
                within, _, _ = pair_sums(scores, nothing, C, MODE)
                put_sums(within, nothing, left, 0.0, g, dg, (token + cc) * H + h, inside, C)
