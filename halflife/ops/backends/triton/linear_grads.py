"""Gradients of linear attention with no decay or a scalar one, and of GateRank on it: keys, values and log-decays.

A walk from the end of a segment holds the gradient G of the state in registers, and computes for each chunk

    dS = (dO Vᵀ) ⊙ D,   dK = dSᵀ Q + l ⊙ (V Gᵀ),   dV = (Q Kᵀ ⊙ D)ᵀ dO + l ⊙ (K G)

with the weights l of keys of `gates.py`; a `gain` multiplies what `walks.py` says. The gradient of a log-decay needs
the state S that enters a chunk too, as the product ⟨S, G⟩. The walk for dQ stores every second one, for half the bytes.
Where the rows of a state do not fit one program, each program has some, and dV is a walk of its own.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.gates import dot, log_grads_of_sums, pair_sums, put_log_grad
from halflife.ops.backends.triton.segments import chunk_tokens, segment_tokens
from halflife.ops.backends.triton.sums import stored_carries, stored_decays, stored_leaves, stored_reads
from halflife.ops.backends.triton.walks import (
    beside_state,
    factors,
    head_of,
    load,
    load_state,
    store,
    store_state,
    weighted,
)

FOUND = (0, 2, 5)  # numbers a token that gradients of log-decays are sums of, by MODE


@triton.jit
@no_type_check
def passing(
    k, v, sums, stride, gain, states, fast, slow, cc, kk, vv, token, segment, h, odd, size, kept, joined, stays,
    H: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The parts of states that pass a chunk, times gradients of states after it: fast · fast, fast · slow, slow · slow.

    `states` has those entering even chunks. The one entering an `odd` chunk is that after the chunk before, whose
    values, times what its keys read from the gradients, are the part of the product that it wrote.
    """
    here = states + (((token - odd * C) // (2 * C) + segment) * H + h) * (2 * K * V if MODE == 2 else K * V)
    state = load_state(here, kk, vv, K, V).to(tl.float32)
    passed = tl.sum(state * fast)
    met = 0.0
    stayed = 0.0
    if MODE == 2:
        met = tl.sum(state * slow)
        state = load_state(here + K * V, kk, vv, K, V).to(tl.float32)
        stayed = tl.sum(state * slow)
    back = odd * C  # an even chunk loads zeros as keys, which is faster than a branch
    before = cc < back
    ks = load(k - back * KT, cc, kk, before, KT, K, BK)
    vs = load(v - back * VT, cc, vv, before, VT, V, BV)
    left, left_slow = stored_leaves(sums - back, stride, cc, before, tl.where(odd == 1, C, size), C, MODE)
    if gain is not None:
        factor = factors(gain, -back, cc, before, 0, H)
        left *= factor
        left_slow *= factor
    to_fast, to_slow, slow_kept = stored_carries(sums - back, stride, tl.where(odd == 1, C, size), MODE)
    to_fast = tl.where(odd == 1, to_fast, 1.0)
    wide = beside_state(ks)
    values = vs.to(tl.float32)
    written = tl.sum(dot(wide, fast.to(wide.dtype), tl.zeros([C, BV], tl.float32), PRECISION) * values, 1)
    passed = to_fast * passed + tl.sum(written * left)
    if MODE == 2:
        to_slow = tl.where(odd == 1, to_slow, 0.0)
        slow_kept = tl.where(odd == 1, slow_kept, 1.0)
        written = tl.sum(dot(wide, slow.to(wide.dtype), tl.zeros([C, BV], tl.float32), PRECISION) * values, 1)
        stayed = slow_kept * stayed + to_slow * met + tl.sum(written * left_slow)
        met = to_fast * met + tl.sum(written * left)
    return kept * passed, joined * met, stays * stayed


@triton.jit
@no_type_check
def share_of(reads, stride, inside, part, PARTS: tl.constexpr, READS: tl.constexpr, C: tl.constexpr):
    """The sum of this program's share of READS rows `[C]`, which are `stride` apart, among PARTS programs."""
    total = tl.zeros([C], tl.float32)
    for turn in tl.static_range((READS + PARTS - 1) // PARTS):
        other = part + turn * PARTS
        there = inside & (tl.arange(0, C) < tl.where(other < READS, C, 0))
        total += tl.load(reads + other * stride, mask=there, other=0.0)
    return total


@triton.jit
@no_type_check
def put_sums(within, read, left, passed, g, dg, rows, inside, C: tl.constexpr):
    """Store the gradients of the log-decays of a chunk, or parts of them, from sums in which nothing cancels."""
    index = tl.arange(0, C)
    later = index[:, None] >= index[None, :]  # [i, t]
    grad = tl.sum(tl.where(later, (within + read)[:, None], left[:, None]), 0) + passed
    put_log_grad(dg, grad, g, rows, inside)


@triton.jit
@no_type_check
def put_log_grads(
    within, across, gone, left_fast, left_slow, passed, met, stayed, sums, reads, part, stride, g_slow, g_fast, dg_slow,
    dg_fast, rows, inside, C: tl.constexpr, MODE: tl.constexpr, PARTS: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the log-decays of a chunk from these sums; programs of other rows store their own."""
    read_fast = share_of(reads, MODE * stride, inside, part, PARTS, READS, C)
    if MODE == 2:
        read_slow = share_of(reads + stride, MODE * stride, inside, part, PARTS, READS, C)
        reset = (tl.load(g_slow + rows, mask=inside, other=0.0) != 0).to(tl.int32)
        seg = tl.load(sums + 4 * stride + tl.arange(0, C), mask=inside, other=0.0).to(tl.float32)
        grad_slow, grad_fast = log_grads_of_sums(
            within, across, gone, read_fast, read_slow, left_fast, left_slow, passed + met, met, stayed, reset, seg, C
        )
        put_log_grad(dg_slow, grad_slow, g_slow, rows, inside)
        put_log_grad(dg_fast, grad_fast, g_fast, rows, inside)
    else:
        put_sums(within, read_fast, left_fast, passed, g_fast, dg_fast, rows, inside, C)


@triton.jit
@no_type_check
def grads_kernel(
    q, k, v, do, sums, states, entering, leaving, dk, dv, found, passes, reads, g_slow, g_fast, gain, skip, dg_slow,
    dg_fast, dgain, dskip, table, scale, T, LENGTH, PER, TOKENS, H: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr,
    QT: tl.constexpr, QH: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr,
    DKT: tl.constexpr, DVT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr,
    PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    """The walk from the end of a segment for one head and BK rows of its state. What is None is not read or written.

    `entering` is the gradient of the state after the segment (None is zeros), and `leaving` becomes that of the state
    before it. `dv` needs all rows. Gradients of log-decays are sums over the blocks of rows, and each program stores
    its own; a program of all rows has no registers for them, and stores what they are made of (`found`, `passes`).
    """
    PARTS: tl.constexpr = (K + BK - 1) // BK
    STATE: tl.constexpr = 2 * K * V if MODE == 2 else K * V
    LATE: tl.constexpr = gain is not None and found is None  # whether factors need the registers of these sums first
    h = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    segment = tl.program_id(1)
    first, tokens = segment_tokens(table, segment, T, LENGTH, PER)
    cc = tl.arange(0, C)
    kk = part * BK + tl.arange(0, BK)
    vv = tl.arange(0, BV)
    place = (segment.to(tl.int64) * H + h) * STATE
    fast = tl.zeros([BK, BV], tl.float32)
    slow = tl.zeros([BK, BV], tl.float32)
    if entering is not None:
        fast = load_state(entering + place, kk, vv, K, V)
        if MODE == 2:
            slow = load_state(entering + place + K * V, kk, vv, K, V)
    if MODE != 0:
        dg_fast += part * H * TOKENS
    if MODE == 2:
        dg_slow += part * H * TOKENS
    count = tl.cdiv(tokens, C)
    of_skip = 0.0
    for step in tl.range(0, count, num_stages=STAGES):
        index = count - 1 - step
        inside = cc < tokens - index * C
        token = first + index * C
        at = token if MODE == 0 else sums + h * TOKENS + token
        size = tl.minimum(C, tokens - index * C)
        kept, joined, stays = stored_carries(at, H * TOKENS, size, MODE)
        keys_at = k + token * KT + (h // SK) * KH
        values_at = v + token * VT + h * VH
        factors_at = None if gain is None else gain + token * H + h
        if MODE != 0 and not LATE:
            passed, met, stayed = passing(
                keys_at, values_at, at, H * TOKENS, factors_at, states, fast, slow, cc, kk, vv, token, segment, h,
                index % 2, size, kept, joined, stays, H, KT, VT, K, V, C, BK, BV, MODE, PRECISION,
            )  # fmt: skip
            if found is not None:
                chunk = passes + ((token // C + segment) * H + h) * 3
                tl.store(chunk, passed)
                tl.store(chunk + 1, met)
                tl.store(chunk + 2, stayed)
        # Tiles are loaded where they are used, some of them again, so that they hold no registers in between.
        ks = load(keys_at, cc, kk, inside, KT, K, BK)
        qs = load(q + token * QT + (h // SQ) * QH, cc, kk, inside, QT, K, BK)
        scores = dot(ks, tl.trans(qs), tl.zeros([C, C], tl.float32), PRECISION)
        decays = stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE, True) * scale
        dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
        left, left_slow = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
        if dv is not None:
            wide = beside_state(ks)
            dvs = dot(wide, fast.to(wide.dtype), tl.zeros([C, BV], tl.float32), PRECISION) * left[:, None]
            if MODE == 2:
                through = dot(wide, slow.to(wide.dtype), tl.zeros([C, BV], tl.float32), PRECISION)
                dvs += through * left_slow[:, None]
            dvs = dot((scores * decays).to(dos.dtype), dos, dvs, PRECISION)
            if gain is not None:
                dvs *= factors(gain, token, cc, inside, h, H)[:, None]
            if skip is not None:
                dvs += tl.load(skip + h).to(tl.float32) * dos.to(tl.float32)
            store(head_of(dv, token, h, H, V, DVT), dvs, cc, vv, inside, DVT, V, BV)

        vs = load(values_at, cc, vv, inside, VT, V, BV)
        dscores = dot(vs, tl.trans(dos), tl.zeros([C, C], tl.float32), PRECISION)
        if skip is not None:
            of_skip += tl.sum(vs.to(tl.float32) * dos.to(tl.float32))
        dscores *= decays
        if gain is not None:
            of_gain = tl.sum(scores * dscores, 1)
            dscores *= factors(gain, token, cc, inside, h, H)[:, None]
        if MODE != 0:
            seg = tl.zeros([C], tl.float32)
            if MODE == 2:
                seg = tl.load(at + 4 * H * TOKENS + cc, mask=inside, other=0.0).to(tl.float32)
            within, across, gone = pair_sums(tl.trans(scores * dscores), seg, C, MODE)
        wide = beside_state(vs)
        # G is a result of products, but with at most 32 tokens this one is none of wgmma (see gates.py).
        dks = dot(wide, tl.trans(fast.to(wide.dtype)), tl.zeros([C, BK], tl.float32), PRECISION) * left[:, None]
        keys = load(keys_at, cc, kk, inside, KT, K, BK)
        if MODE != 0 or gain is not None:
            left_fast = tl.sum(dks * keys.to(tl.float32), 1)
            left_slowly = left_fast
        if gain is not None:
            of_gain += left_fast
            factor = factors(gain, token, cc, inside, h, H)
            left_fast *= factor
            dks *= factor[:, None]
        if MODE == 2:
            through = dot(wide, tl.trans(slow.to(wide.dtype)), tl.zeros([C, BK], tl.float32), PRECISION)
            through *= left_slow[:, None]
            left_slowly = tl.sum(through * keys.to(tl.float32), 1)
            if gain is not None:
                of_gain += left_slowly
                factor = factors(gain, token, cc, inside, h, H)
                left_slowly *= factor
                through *= factor[:, None]
            dks += through
        if gain is not None:
            tl.store(dgain + part * H * TOKENS + (token + cc) * H + h, of_gain, mask=inside)
        if MODE != 0 and LATE:
            passed, met, stayed = passing(
                keys_at, values_at, at, H * TOKENS, factors_at, states, fast, slow, cc, kk, vv, token, segment, h,
                index % 2, size, kept, joined, stays, H, KT, VT, K, V, C, BK, BV, MODE, PRECISION,
            )  # fmt: skip
        if MODE != 0:
            if found is None:
                put_log_grads(
                    within, across, gone, left_fast, left_slowly, passed, met, stayed, at,
                    reads + h * TOKENS + token + cc, part, H * TOKENS, g_slow, g_fast, dg_slow, dg_fast,
                    (token + cc) * H + h, inside, C, MODE, PARTS, READS,
                )  # fmt: skip
            else:
                numbers = found + h * TOKENS + token + cc
                tl.store(numbers, within, mask=inside)
                tl.store(numbers + H * TOKENS, left_fast, mask=inside)
                if MODE == 2:
                    tl.store(numbers + 2 * H * TOKENS, left_slowly, mask=inside)
                    tl.store(numbers + 3 * H * TOKENS, across, mask=inside)
                    tl.store(numbers + 4 * H * TOKENS, gone, mask=inside)
        qs = load(q + token * QT + (h // SQ) * QH, cc, kk, inside, QT, K, BK)
        dks = dot(dscores.to(qs.dtype), qs, dks, PRECISION)
        store(head_of(dk, token, h, H, K, DKT), dks, cc, kk, inside, DKT, K, BK)
        weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
        weight *= scale
        weight_slow *= scale
        queries = tl.trans(qs)
        if MODE == 2:
            fast = dot(queries, weighted(dos, weight), kept * fast + joined * slow, PRECISION)
            slow = dot(queries, weighted(dos, weight_slow), stays * slow, PRECISION)
        else:
            fast = dot(queries, weighted(dos, weight), kept * fast, PRECISION)
    if leaving is not None:
        store_state(leaving + place, fast, kk, vv, K, V)
        if MODE == 2:
            store_state(leaving + place + K * V, slow, kk, vv, K, V)
    if skip is not None:
        tl.store(dskip + segment * H + h, of_skip, mask=part == 0)


@triton.jit
@no_type_check
def log_grads_kernel(
    sums, found, passes, reads, g_slow, g_fast, dg_slow, dg_fast, table, T, LENGTH, PER, TOKENS, H: tl.constexpr,
    C: tl.constexpr, MODE: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    """The gradients of the log-decays of one chunk and head, from what both walks found."""
    h = tl.program_id(1)
    token, size, chunk = chunk_tokens(table, tl.program_id(0), T, LENGTH, PER, C)
    cc = tl.arange(0, C)
    inside = cc < size
    at = h * TOKENS + token + cc
    within = tl.load(found + at, mask=inside, other=0.0)
    left_fast = tl.load(found + H * TOKENS + at, mask=inside, other=0.0)
    left_slow, across, gone = left_fast, left_fast, left_fast
    passes += tl.where(size > 0, chunk * H + h, 0) * 3
    if MODE == 2:
        left_slow = tl.load(found + 2 * H * TOKENS + at, mask=inside, other=0.0)
        across = tl.load(found + 3 * H * TOKENS + at, mask=inside, other=0.0)
        gone = tl.load(found + 4 * H * TOKENS + at, mask=inside, other=0.0)
    put_log_grads(
        within, across, gone, left_fast, left_slow, tl.load(passes), tl.load(passes + 1), tl.load(passes + 2),
        sums + h * TOKENS + token, reads + at, 0, H * TOKENS, g_slow, g_fast, dg_slow, dg_fast, (token + cc) * H + h,
        inside, C, MODE, 1, READS,
    )  # fmt: skip
