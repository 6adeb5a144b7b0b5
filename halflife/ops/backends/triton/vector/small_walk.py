"""Linear attention with a vector decay and small heads: the walk of `vector_walk.py` without `prepare.py`.

Few programs have a part of one state, so each computes decayed queries and keys and their scores itself. Nothing but
the op's arguments and results is in the GPU's memory.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.gates import dot
from halflife.ops.backends.triton.segments import segment_tokens
from halflife.ops.backends.triton.vector.levels import (
    clamped,
    level_scores,
    not_numbers,
    own_scores,
    summed_decays,
    total_of,
    weights,
)
from halflife.ops.backends.triton.walks import beside_state, head_of, load, store, store_state


@triton.jit
@no_type_check
def load_transposed(at, rows, cols, K: tl.constexpr, V: tl.constexpr):
    """Load a block of a state `[K, V]` as `[V, K]`."""
    mask = (rows < K)[None, :] & (cols < V)[:, None]
    return tl.load(at + rows[None, :] * V + cols[:, None], mask=mask, other=0.0)


@triton.jit
@no_type_check
def store_transposed(at, value, rows, cols, K: tl.constexpr, V: tl.constexpr):
    """Store `value [V, K]` as a block of a state `[K, V]`."""
    mask = (rows < K)[None, :] & (cols < V)[:, None]
    tl.store(at + rows[None, :] * V + cols[:, None], value.to(at.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def walk_kernel(
    q, k, v, g, entering, out, leaving, carried, states, table, scale, T, LENGTH, PER, H: tl.constexpr,
    SQ: tl.constexpr, SK: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr,
    VT: tl.constexpr, VH: tl.constexpr, OT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The walk over a segment, for one head and BV columns of its state. What is None is not read or written.

    It starts from `entering`, or zeros, and writes `out`, the state after the segment and the log-decays of a state
    that passes it (`leaving`, `carried`), and the state entering each chunk (`states`, transposed). BACK walks from
    the end with the gradient of the state: q are keys, k are queries, and v are the gradients of outputs.
    """
    DTYPE: tl.constexpr = k.dtype.element_ty
    PARTS: tl.constexpr = (V + BV - 1) // BV
    h = tl.program_id(0) // PARTS
    segment = tl.program_id(1)
    first, tokens = segment_tokens(table, segment, T, LENGTH, PER)
    cc = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = (tl.program_id(0) % PARTS) * BV + tl.arange(0, BV)
    upto = cc[None, :] <= cc[:, None]
    after = cc[None, :] > cc[:, None]
    place = (segment.to(tl.int64) * H + h) * K * V
    state = tl.zeros([BV, BK], tl.float32)  # transposed, so that no operand of its update is; see `gates.py`
    if entering is not None:
        state = load_transposed(entering + place, kk, vv, K, V)
    passed = tl.zeros([BK], tl.float32)
    count = tl.cdiv(tokens, C)
    for step in tl.range(0, count, num_stages=STAGES):
        index = count - 1 - step if BACK else step
        inside = cc < tokens - index * C
        token = first + index * C
        ks = load(k + token * KT + (h // SK) * KH, cc, kk, inside, KT, K, BK)
        vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
        given = load(g + (token * H + h) * K, cc, kk, inside, H * K, K, BK)
        gs = clamped(given)
        parts = summed_decays(gs, DTYPE)
        if states is not None:
            store_state(states + ((token // C + segment) * H + h) * K * V, state, vv, kk, V, K)
        if out is not None:
            qs = load(q + token * QT + (h // SQ) * QH, cc, kk, inside, QT, K, BK)
            scores = own_scores(qs, ks, cc)
            for level in tl.static_range(LEVELS):
                if BACK:
                    scores += level_scores(ks, qs, parts, cc, level, after, PRECISION)
                else:
                    scores += level_scores(qs, ks, parts, cc, level, upto, PRECISION)
            if not BACK:  # a NaN among the log-decays is seen from its token on, and in the states after its chunk
                scores += tl.where(upto, not_numbers(given)[None, :], 0.0)
            reads = qs.to(tl.float32) * weights(after if BACK else upto, parts, PRECISION)
            if not BACK:
                reads *= scale
            wide = beside_state(reads.to(DTYPE))
            o = dot(wide, tl.trans(state.to(wide.dtype)), tl.zeros([C, BV], tl.float32), PRECISION)
            o = dot((scores * scale).to(DTYPE), vs, o, PRECISION)
            store(head_of(out, token, h, H, V, OT), o, cc, vv, inside, OT, V, BV)
        total = total_of(given, gs)
        writes = ks.to(tl.float32) * weights(upto if BACK else after, parts, PRECISION)
        if BACK:
            writes *= scale
        state = dot(tl.trans(vs), writes.to(DTYPE), tl.exp(total)[None, :] * state, PRECISION)
        passed += total
    if leaving is not None:
        store_transposed(leaving + place, state, kk, vv, K, V)
    if carried is not None:  # noqa: SIM102, as None is known when compiled
        if tl.program_id(0) % PARTS == 0:
            tl.store(carried + (segment.to(tl.int64) * H + h) * K + kk, passed, mask=kk < K)
