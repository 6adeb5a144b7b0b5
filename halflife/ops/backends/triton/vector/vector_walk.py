"""Linear attention with a vector decay: a walk over the chunks of a segment with the state in registers.

It reads what `prepare.py` computes: decayed queries Q and keys W, scores A, and the sums b of log-decays. So the state
alone passes from chunk to chunk:

    O = Q S + A V,   S ← e^b ⊙ S + Wᵀ V,        and from the end   dV = W G + Aᵀ dO,   G ← e^b ⊙ G + Qᵀ dO.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.gates import dot
from halflife.ops.backends.triton.segments import segment_tokens
from halflife.ops.backends.triton.walks import beside_state, head_of, load, load_state, store, store_state


@triton.jit
@no_type_check
def walk_kernel(
    reads, writes, v, pairs, totals, entering, out, leaving, carried, states, table, T, LENGTH, PER, H: tl.constexpr,
    VT: tl.constexpr, VH: tl.constexpr, OT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BACK: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The walk over a segment, for one head and BV columns of its state. What is None is not read or written.

    It starts from `entering`, or zeros, and writes `out`, the state after the segment and the log-decays of a state
    that passes it (`leaving`, `carried`), and the state entering each chunk (`states`). BACK walks from the end with
    the gradient of the state: `reads` are decayed keys, `writes` queries, and v the gradients of outputs.
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    h = tl.program_id(0) // PARTS
    segment = tl.program_id(1)
    first, tokens = segment_tokens(table, segment, T, LENGTH, PER)
    cc = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = (tl.program_id(0) % PARTS) * BV + tl.arange(0, BV)
    place = (segment.to(tl.int64) * H + h) * K * V
    state = tl.zeros([BK, BV], tl.float32)
    if entering is not None:
        state = load_state(entering + place, kk, vv, K, V)
    passed = tl.zeros([BK], tl.float32)
    count = tl.cdiv(tokens, C)
    for step in tl.range(0, count, num_stages=STAGES):
        index = count - 1 - step if BACK else step
        inside = cc < tokens - index * C
        token = first + index * C
        slot = (token // C + segment) * H + h
        ws = load(writes + (token * H + h) * K, cc, kk, inside, H * K, K, BK)
        vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
        total = tl.load(totals + slot * K + kk, mask=kk < K, other=0.0)
        if states is not None:
            store_state(states + slot * K * V, state, kk, vv, K, V)
        if out is not None:
            wide = beside_state(load(reads + (token * H + h) * K, cc, kk, inside, H * K, K, BK))
            scores = load(pairs + (token * H + h) * C, cc, cc, inside, H * C, C, C)
            o = dot(wide, state.to(wide.dtype), tl.zeros([C, BV], tl.float32), PRECISION)
            o = dot(tl.trans(scores) if BACK else scores, vs, o, PRECISION)
            store(head_of(out, token, h, H, V, OT), o, cc, vv, inside, OT, V, BV)
        state = dot(tl.trans(ws), vs, tl.exp(total)[:, None] * state, PRECISION)
        passed += total
    if leaving is not None:
        store_state(leaving + place, state, kk, vv, K, V)
    if carried is not None:  # noqa: SIM102, as None is known when compiled
        if tl.program_id(0) % PARTS == 0:
            tl.store(carried + (segment.to(tl.int64) * H + h) * K + kk, passed, mask=kk < K)
