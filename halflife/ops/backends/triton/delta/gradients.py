"""The walk from the end of a segment, which computes the gradients of the delta rule, and of GateRank on it.

It holds the gradient G of the state that leaves a chunk. With the state S that enters the chunk, from which the written
values U are computed again (see `written.py`), and the adjoint R of the system,

    dU = (Q Kᵀ ⊙ D)ᵀ dO + l ⊙ (K G),    R = (I + L)⁻ᵀ dU,
    dS = (dO Uᵀ) ⊙ D,           W = −β ⊙ (R Uᵀ) ⊙ D below the diagonal,           dV = β ⊙ R,
    dQ = dS K + w ⊙ (dO Sᵀ),    dK = dSᵀ Q + (W + Wᵀ) K + l ⊙ (U Gᵀ) − β ⊙ w ⊙ (R Sᵀ),
    G ← carryᵀ(G) + (w ⊙ Q)ᵀ dO − (β ⊙ w ⊙ K)ᵀ R,

with the weights w of queries and l of keys of `gates.py`. dSᵀ and Wᵀ are computed in place of dS and W, some parts of
dK as dKᵀ, and R as Rᵀ, so that no result of a product is an operand's transpose (see `gates.py`). G, U and R have the
precision of `product`, as dS has; what else is only a part of a result has that of `walks.py`.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.delta.pairs import by_pair, load_scaled, load_triangle, pair_by, product
from halflife.ops.backends.triton.gates import dot, pair_sums
from halflife.ops.backends.triton.linear_grads import put_log_grads, put_sums, share_of
from halflife.ops.backends.triton.segments import chunk_tokens, segment_tokens
from halflife.ops.backends.triton.sums import stored_carries, stored_decays, stored_leaves, stored_reads
from halflife.ops.backends.triton.walks import load, load_state, store, store_state


@triton.jit
@no_type_check
def rounded(x, y, out, like, PRECISION: tl.constexpr):
    """Compute `x y + out` with operands in bfloat16 where that is the dtype of `like`, and else as float32."""
    if like.dtype.element_ty == tl.bfloat16:
        return dot(x.to(tl.bfloat16), y.to(tl.bfloat16), out, PRECISION)
    else:
        return dot(x.to(tl.float32), y.to(tl.float32), out, PRECISION)


@triton.jit
@no_type_check
def gradients_kernel(
    q, k, v, do, beta, inverse, sums, g_fast, entering, leaving, states, powers, dq, dk, dv, dbeta, dg_fast, found,
    passes, reads, table, scale, T, LENGTH, PER, TOKENS, H: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr,
    QT: tl.constexpr, QH: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, STAGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The walk over a segment, for one head and BV columns of its state. What is None is not read or written.

    It starts from `entering`, or zeros, and writes the gradient of the state before the segment (`leaving`). With
    `states`, and the `powers` of their blocks of COLUMNS, it writes the gradients of inputs. Programs of other columns
    write their own parts of all but dV. What the gradients of GateRank's log-decays are made of would hold registers
    for long, so it is stored (`found`, `passes`, `reads`) for `parts_kernel`.
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    STATE: tl.constexpr = 2 * K * V if MODE == 2 else K * V
    SCALED: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    POWERS: tl.constexpr = 2 * SCALED if MODE == 2 else SCALED
    STRIDE: tl.constexpr = H * PARTS * K
    h = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    segment = tl.program_id(1)
    first, tokens = segment_tokens(table, segment, T, LENGTH, PER)
    cc = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = part * BV + tl.arange(0, BV)
    there = vv < V
    place = (segment.to(tl.int64) * H + h) * STATE
    fast = tl.zeros([BV, BK], tl.float32)
    slow = tl.zeros([BV, BK], tl.float32)
    if entering is not None:
        fast = tl.trans(load_state(entering + place, kk, vv, K, V))
        if MODE == 2:
            slow = tl.trans(load_state(entering + place + K * V, kk, vv, K, V))
    count = tl.cdiv(tokens, C)
    # Tiles and weights are loaded where they are used, most of them again, so that they hold no registers in between.
    for step in tl.range(0, count, num_stages=STAGES, disable_licm=True):
        index = count - 1 - step
        inside = cc < tokens - index * C
        token = first + index * C
        size = tl.minimum(C, tokens - index * C)
        at = token if MODE == 0 else sums + h * TOKENS + token
        rows = (token + cc) * H + h
        keys_at = k + token * KT + (h // SK) * KH
        queries_at = q + token * QT + (h // SQ) * QH

        # Rᵀ
        ks = load(keys_at, cc, kk, inside, KT, K, BK)
        left, left_slow = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
        rs = product(fast, tl.trans(ks), tl.zeros([BV, C], tl.float32), PRECISION) * left[None, :]
        if MODE == 2:
            rs += product(slow, tl.trans(ks), tl.zeros([BV, C], tl.float32), PRECISION) * left_slow[None, :]
        qs = load(queries_at, cc, kk, inside, QT, K, BK)
        scores = product(qs, tl.trans(ks), tl.zeros([C, C], tl.float32), PRECISION)
        scores *= stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE) * scale
        dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
        rs = product(tl.trans(dos), scores, rs, PRECISION)
        solved, solved_low = load_triangle(inverse, token, h, H, size, cc, inside, C)
        rs = by_pair(rs, solved, solved_low, tl.zeros([BV, C], tl.float32), PRECISION)

        if states is not None:
            # U
            strength = tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)
            weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
            by_row = tl.trans(rs)
            store(dv + (token * H + h) * V, by_row * strength[:, None], cc, vv, inside, H * V, V, BV)
            here = (token // C + segment) * H + h
            state_at = states + here * STATE
            power = powers + here * POWERS + vv // COLUMNS
            state = load_scaled(state_at, power, vv, kk, there, K, BK)
            read = product(ks, tl.trans(state), tl.zeros([C, BV], tl.float32), PRECISION) * weight[:, None]
            read_fast = -tl.sum(by_row * read, 1) * strength
            read_slow = tl.zeros([C], tl.float32)
            if MODE == 2:
                state = load_scaled(state_at + K * V, power + SCALED, vv, kk, there, K, BK)
                more = product(ks, tl.trans(state), tl.zeros([C, BV], tl.float32), PRECISION) * weight_slow[:, None]
                read_slow = -tl.sum(by_row * more, 1) * strength
                read += more
            vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
            us = vs.to(tl.float32) - read
            dstrength = tl.sum(by_row * us, 1)
            solved, solved_low = load_triangle(inverse, token, h, H, size, cc, inside, C)
            us = pair_by(solved, solved_low, us * strength[:, None], tl.zeros([C, BV], tl.float32), PRECISION)

            # dSᵀ and Wᵀ
            decays = stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE, True)
            dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
            dscores = product(us, tl.trans(dos), tl.zeros([C, C], tl.float32), PRECISION) * decays * scale
            system = rounded(us, rs, tl.zeros([C, C], tl.float32), q, PRECISION)
            system = tl.where(cc[:, None] < cc[None, :], -system * decays, 0.0)
            ks = load(keys_at, cc, kk, inside, KT, K, BK)
            overlap = dot(ks, tl.trans(ks), tl.zeros([C, C], tl.float32), PRECISION)
            dstrength += tl.sum(system * overlap, 0)
            tl.store(dbeta + part * H * TOKENS + rows, dstrength.to(dbeta.dtype.element_ty), mask=inside)
            system *= strength[None, :]
            if MODE != 0:
                seg = tl.zeros([C], tl.float32)
                if MODE == 2:
                    seg = tl.load(at + 4 * H * TOKENS + cc, mask=inside, other=0.0).to(tl.float32)
                qs = load(queries_at, cc, kk, inside, QT, K, BK)
                scores = dot(qs, tl.trans(ks), tl.zeros([C, C], tl.float32), PRECISION)
                within, across, gone = pair_sums(tl.trans(dscores) * scores + tl.trans(system * overlap), seg, C, MODE)
                if MODE == 2:
                    numbers = found + (part * 5 * H + h) * TOKENS + token + cc
                    tl.store(numbers, within, mask=inside)
                    tl.store(numbers + 3 * H * TOKENS, across, mask=inside)
                    tl.store(numbers + 4 * H * TOKENS, gone, mask=inside)

            # dQ
            weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
            state = load_scaled(state_at, power, vv, kk, there, K, BK)
            dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
            dqs = rounded(dos, state, tl.zeros([C, BK], tl.float32), q, PRECISION) * (weight * scale)[:, None]
            qs = load(queries_at, cc, kk, inside, QT, K, BK)
            if MODE != 0:
                read_fast += tl.sum(dqs * qs.to(tl.float32), 1)
            if MODE == 2:
                state = load_scaled(state_at + K * V, power + SCALED, vv, kk, there, K, BK)
                more = rounded(dos, state, tl.zeros([C, BK], tl.float32), q, PRECISION)
                more *= (weight_slow * scale)[:, None]
                read_slow += tl.sum(more * qs.to(tl.float32), 1)
                dqs += more
                numbers = reads + (part * 2 * H + h) * TOKENS + token + cc
                tl.store(numbers, read_fast, mask=inside)
                tl.store(numbers + H * TOKENS, read_slow, mask=inside)
            ks = load(keys_at, cc, kk, inside, KT, K, BK)
            dqs += tl.trans(product(tl.trans(ks), dscores, tl.zeros([BK, C], tl.float32), PRECISION))
            store(dq + ((token * H + h) * PARTS + part) * K, dqs, cc, kk, inside, STRIDE, K, BK)

            # dK
            weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
            left, left_slow = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
            strength = tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)
            state = load_scaled(state_at, power, vv, kk, there, K, BK)
            passed = tl.sum(state * fast)
            dks_t = rounded(tl.trans(state), rs, tl.zeros([BK, C], tl.float32), q, PRECISION)
            dks_t *= -(weight * strength)[None, :]
            dks = rounded(us, fast, tl.zeros([C, BK], tl.float32), q, PRECISION) * left[:, None]
            if MODE != 0:
                left_fast = tl.sum(dks * ks.to(tl.float32), 1)
            if MODE == 2:
                met = tl.sum(state * slow)
                state = load_scaled(state_at + K * V, power + SCALED, vv, kk, there, K, BK)
                stayed = tl.sum(state * slow)
                more_t = rounded(tl.trans(state), rs, tl.zeros([BK, C], tl.float32), q, PRECISION)
                dks_t -= more_t * (weight_slow * strength)[None, :]
                more = rounded(us, slow, tl.zeros([C, BK], tl.float32), q, PRECISION) * left_slow[:, None]
                dks += more
                numbers = found + ((part * 5 + 1) * H + h) * TOKENS + token + cc
                tl.store(numbers, left_fast, mask=inside)
                tl.store(numbers + H * TOKENS, tl.sum(more * ks.to(tl.float32), 1), mask=inside)
            dks = product(dscores, qs, dks, PRECISION)
            ks = load(keys_at, cc, kk, inside, KT, K, BK)
            dks = rounded(system, ks, dks, q, PRECISION)
            dks_t = rounded(tl.trans(ks), system, dks_t, q, PRECISION)
            store(dk + ((token * H + h) * PARTS + part) * K, dks + tl.trans(dks_t), cc, kk, inside, STRIDE, K, BK)

        # G
        kept, joined, stays = stored_carries(at, H * TOKENS, size, MODE)
        if states is not None:
            if MODE == 1:
                here_fast = dg_fast + part * H * TOKENS
                put_sums(within, read_fast, left_fast, kept * passed, g_fast, here_fast, rows, inside, C)
            if MODE == 2:
                chunk = passes + (here * PARTS + part) * 3
                tl.store(chunk, kept * passed)
                tl.store(chunk + 1, joined * met)
                tl.store(chunk + 2, stays * stayed)
        strength = tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)
        weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
        dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
        wide = tl.trans(dos).to(tl.float32) * scale
        rs *= -strength[None, :]
        if MODE == 2:
            fast = kept * fast + joined * slow
            slow = product(wide * weight_slow[None, :], qs, stays * slow, PRECISION)
            slow = product(rs * weight_slow[None, :], ks, slow, PRECISION)
        else:
            fast = kept * fast
        fast = product(wide * weight[None, :], qs, fast, PRECISION)
        fast = product(rs * weight[None, :], ks, fast, PRECISION)
    if leaving is not None:
        store_state(leaving + place, tl.trans(fast), kk, vv, K, V)
        if MODE == 2:
            store_state(leaving + place + K * V, tl.trans(slow), kk, vv, K, V)


@triton.jit
@no_type_check
def parts_kernel(
    sums, found, passes, reads, g_slow, g_fast, dg_slow, dg_fast, dq_parts, dk_parts, dbeta_parts, dq, dk, dbeta, table,
    T, LENGTH, PER, TOKENS, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The gradients of GateRank for one chunk and head, from what programs of PARTS blocks of columns found."""
    h = tl.program_id(1)
    token, size, chunk = chunk_tokens(table, tl.program_id(0), T, LENGTH, PER, C)
    if size <= 0:
        return
    cc = tl.arange(0, C)
    kk = tl.arange(0, BK)
    inside = cc < size
    rows = (token + cc) * H + h
    at = h * TOKENS + token + cc
    first = (token * H + h) * PARTS * K
    of_queries = tl.zeros([C, BK], tl.float32)
    of_keys = tl.zeros([C, BK], tl.float32)
    strength = tl.zeros([C], tl.float32)
    for part in tl.static_range(PARTS):
        of_queries += load(dq_parts + first + part * K, cc, kk, inside, H * PARTS * K, K, BK).to(tl.float32)
        of_keys += load(dk_parts + first + part * K, cc, kk, inside, H * PARTS * K, K, BK).to(tl.float32)
        strength += tl.load(dbeta_parts + part * H * TOKENS + rows, mask=inside, other=0.0).to(tl.float32)
    store(dq + (token * H + h) * K, of_queries, cc, kk, inside, H * K, K, BK)
    store(dk + (token * H + h) * K, of_keys, cc, kk, inside, H * K, K, BK)
    tl.store(dbeta + rows, strength.to(dbeta.dtype.element_ty), mask=inside)
    passes += (chunk * H + h) * PARTS * 3
    put_log_grads(
        share_of(found + at, 5 * H * TOKENS, inside, 0, 1, PARTS, C),
        share_of(found + 3 * H * TOKENS + at, 5 * H * TOKENS, inside, 0, 1, PARTS, C),
        share_of(found + 4 * H * TOKENS + at, 5 * H * TOKENS, inside, 0, 1, PARTS, C),
        share_of(found + H * TOKENS + at, 5 * H * TOKENS, inside, 0, 1, PARTS, C),
        share_of(found + 2 * H * TOKENS + at, 5 * H * TOKENS, inside, 0, 1, PARTS, C),
        _sum(passes, PARTS), _sum(passes + 1, PARTS), _sum(passes + 2, PARTS), sums + h * TOKENS + token, reads + at, 0,
        H * TOKENS, g_slow, g_fast, dg_slow, dg_fast, rows, inside, C, MODE, 1, PARTS,
    )  # fmt: skip


@triton.jit
@no_type_check
def _sum(at, PARTS: tl.constexpr):
    """The sum of PARTS numbers, which are 3 apart."""
    total = 0.0
    for part in tl.static_range(PARTS):
        total += tl.load(at + 3 * part)
    return total
