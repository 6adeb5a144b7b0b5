"""The forward walk of the delta rule, and of GateRank on it, over the chunks of a segment.

In a chunk with entering state S, token t adds `k_t u_tᵀ` to the state. With the inverses of `inverse.py`, the written
values U (rows u_t) and the outputs are

    U = (I + L)⁻¹ β ⊙ (V − w ⊙ (K S)),      O = w ⊙ (Q S) + (Q Kᵀ ⊙ D) U,

with D and the weights w of `gates.py`. The state, U and inverses are float32, also for 16-bit inputs. Products with
them have the precision of `gates.precision_of`.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.delta.pairs import by_pair, load_triangle, product, store_scaled
from halflife.ops.backends.triton.segments import segment_tokens
from halflife.ops.backends.triton.sums import stored_carries, stored_decays, stored_leaves, stored_reads
from halflife.ops.backends.triton.walks import load, load_state, store, store_state


@triton.jit
@no_type_check
def write_kernel(
    q, k, v, beta, inverse, sums, entering, out, leaving, states, powers, table, scale, T, LENGTH, PER, TOKENS,
    H: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr, KT: tl.constexpr,
    KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    MODE: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The walk over a segment, for one head and BV columns of its state. What is None is not read or written.

    It starts from `entering`, or zeros, and without v from the identity matrix, which has V rows. It writes `out`, the
    state after the segment (`leaving`), and for the backward pass the state entering each chunk, transposed (`states`,
    times `powers`).
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    STATE: tl.constexpr = 2 * K * V if MODE == 2 else K * V
    POWERS: tl.constexpr = 2 * PARTS if MODE == 2 else PARTS
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
    if v is None:
        fast = ((vv[:, None] == kk[None, :]) & (kk < K)[None, :]).to(tl.float32)
        slow = ((vv[:, None] == kk[None, :] + K) & (kk < K)[None, :]).to(tl.float32)
    elif entering is not None:
        fast = tl.trans(load_state(entering + place, kk, vv, K, V))
        if MODE == 2:
            slow = tl.trans(load_state(entering + place + K * V, kk, vv, K, V))
    count = tl.cdiv(tokens, C)
    for step in tl.range(0, count, num_stages=STAGES):
        inside = cc < tokens - step * C
        token = first + step * C
        rows = (token + cc) * H + h
        size = tl.minimum(C, tokens - step * C)
        at = token if MODE == 0 else sums + h * TOKENS + token
        ks = load(k + token * KT + (h // SK) * KH, cc, kk, inside, KT, K, BK)
        if out is None:  # else where they are used, which spills less
            solved, solved_low = load_triangle(inverse, token, h, H, size, cc, inside, C)
            strength = tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)
        weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
        us = product(fast, tl.trans(ks), tl.zeros([BV, C], tl.float32), PRECISION) * weight[None, :]
        if out is not None:
            qs = load(q + token * QT + (h // SQ) * QH, cc, kk, inside, QT, K, BK)
            o = product(fast, tl.trans(qs), tl.zeros([BV, C], tl.float32), PRECISION) * (weight * scale)[None, :]
        if MODE == 2:
            us += product(slow, tl.trans(ks), tl.zeros([BV, C], tl.float32), PRECISION) * weight_slow[None, :]
            if out is not None:
                read = product(slow, tl.trans(qs), tl.zeros([BV, C], tl.float32), PRECISION)
                o += read * (weight_slow * scale)[None, :]
        if out is not None:
            strength = tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)
        if v is None:
            us = -us * strength[None, :]
        else:
            vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
            us = (tl.trans(vs).to(tl.float32) - us) * strength[None, :]
        if out is not None:
            solved, solved_low = load_triangle(inverse, token, h, H, size, cc, inside, C)
        us = by_pair(us, tl.trans(solved), tl.trans(solved_low), tl.zeros([BV, C], tl.float32), PRECISION)
        if states is not None:
            here = (token // C + segment) * H + h
            store_scaled(states + here * STATE, powers + here * POWERS + part, fast, vv, kk, there, K, BK)
            if MODE == 2:
                slow_at = states + here * STATE + K * V
                store_scaled(slow_at, powers + here * POWERS + PARTS + part, slow, vv, kk, there, K, BK)
        if out is not None:
            scores = product(ks, tl.trans(qs), tl.zeros([C, C], tl.float32), PRECISION)
            scores *= stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE, True) * scale
            o = product(us, scores, o, PRECISION)
            store(out + (token * H + h) * V, tl.trans(o), cc, vv, inside, H * V, V, BV)
        kept, joined, stays = stored_carries(at, H * TOKENS, size, MODE)
        left, left_slow = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
        if MODE == 2:
            slow = product(us * left_slow[None, :], ks, stays * slow + joined * fast, PRECISION)
        fast = product(us * left[None, :], ks, kept * fast, PRECISION)
    if leaving is not None:
        store_state(leaving + place, tl.trans(fast), kk, vv, K, V)
        if MODE == 2:
            store_state(leaving + place + K * V, tl.trans(slow), kk, vv, K, V)
