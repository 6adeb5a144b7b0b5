"""The walk from the end of a segment, which computes the gradients of the delta rule's states.

Let G be the gradient of the state leaving a chunk. Then those of the values U that the chunk writes, of the right sides
of its system, and of the state that enters it are

    dU = (Q Kᵀ ⊙ D)ᵀ dO + l ⊙ (K G),   R = (I + L)⁻ᵀ dU,   G ← carryᵀ(G) + (w ⊙ Q)ᵀ dO − (β ⊙ w ⊙ K)ᵀ R,

with the weights w of queries and l of keys of `gates.py`.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.delta.pairs import by_pair, load_triangle, product, store_scaled
from halflife.ops.backends.triton.segments import segment_tokens
from halflife.ops.backends.triton.sums import stored_carries, stored_decays, stored_leaves, stored_reads
from halflife.ops.backends.triton.walks import load, load_state, store_state


@triton.jit
@no_type_check
def adjoint_kernel(
    q, k, do, beta, inverse, sums, entering, leaving, states, powers, table, scale, T, LENGTH, PER, TOKENS,
    H: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr, KT: tl.constexpr,
    KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    MODE: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The walk over a segment, for one head and BV columns of its state. What is None is not read or written.

    It starts from `entering`, or zeros, and writes the gradient of the state before the segment (`leaving`), and that
    of the state leaving each chunk, transposed (`states`, times `powers`).
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
    if entering is not None:
        fast = tl.trans(load_state(entering + place, kk, vv, K, V))
        if MODE == 2:
            slow = tl.trans(load_state(entering + place + K * V, kk, vv, K, V))
    count = tl.cdiv(tokens, C)
    for step in tl.range(0, count, num_stages=STAGES):
        index = count - 1 - step
        inside = cc < tokens - index * C
        token = first + index * C
        size = tl.minimum(C, tokens - index * C)
        at = token if MODE == 0 else sums + h * TOKENS + token
        ks = load(k + token * KT + (h // SK) * KH, cc, kk, inside, KT, K, BK)
        qs = load(q + token * QT + (h // SQ) * QH, cc, kk, inside, QT, K, BK)
        dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
        if states is None:  # else later, which spills less
            solved, solved_low = load_triangle(inverse, token, h, H, size, cc, inside, C)
        if states is not None:
            here = (token // C + segment) * H + h
            store_scaled(states + here * STATE, powers + here * POWERS + part, fast, vv, kk, there, K, BK)
            if MODE == 2:
                slow_at = states + here * STATE + K * V
                store_scaled(slow_at, powers + here * POWERS + PARTS + part, slow, vv, kk, there, K, BK)
        left, left_slow = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
        rs = product(fast, tl.trans(ks), tl.zeros([BV, C], tl.float32), PRECISION) * left[None, :]
        if MODE == 2:
            rs += product(slow, tl.trans(ks), tl.zeros([BV, C], tl.float32), PRECISION) * left_slow[None, :]
        scores = product(qs, tl.trans(ks), tl.zeros([C, C], tl.float32), PRECISION)
        scores *= stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE) * scale
        rs = product(tl.trans(dos), scores, rs, PRECISION)
        if states is not None:
            solved, solved_low = load_triangle(inverse, token, h, H, size, cc, inside, C)
        strength = tl.load(beta + (token + cc) * H + h, mask=inside, other=0.0).to(tl.float32)
        rs = by_pair(rs, solved, solved_low, tl.zeros([BV, C], tl.float32), PRECISION) * -strength[None, :]
        kept, joined, stays = stored_carries(at, H * TOKENS, size, MODE)
        weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
        wide = tl.trans(dos).to(tl.float32) * scale
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
