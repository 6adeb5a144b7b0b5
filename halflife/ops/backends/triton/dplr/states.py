"""The walk of DPLR over the chunks of a segment, which the forward and the backward pass share (see `reduced.py`)."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.delta.pairs import product
from halflife.ops.backends.triton.segments import segment_tokens
from halflife.ops.backends.triton.walks import load, load_state, store, store_state


@triton.jit
@no_type_check
def states_kernel(
    reads, writes, adds, asks, pairs, inner, kept, v, entering, out, leaving, solved, states, table, T, LENGTH,
    PER, H: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BACK: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The walk over a segment, for one head and BV columns of its state. What is None is not read or written.

    It starts from `entering`, or zeros, and without v from the identity matrix, which has V rows. It writes `out`, the
    state after the segment (`leaving`), U (`solved`, which needs M in `inner`), and the state entering each chunk,
    transposed (`states`). BACK walks from the end, with dO in v, and the pairs and N as they are.
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    h = tl.program_id(0) // PARTS
    segment = tl.program_id(1)
    first, tokens = segment_tokens(table, segment, T, LENGTH, PER)
    cc = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = (tl.program_id(0) % PARTS) * BV + tl.arange(0, BV)
    place = (segment.to(tl.int64) * H + h) * (K * V)
    state = tl.zeros([BV, BK], tl.float32)
    if v is None:
        state = ((vv[:, None] == kk[None, :]) & (kk < K)[None, :]).to(tl.float32)
    elif entering is not None:
        state = tl.trans(load_state(entering + place, kk, vv, K, V))
    count = tl.cdiv(tokens, C)
    for step in tl.range(0, count, num_stages=STAGES):
        index = count - 1 - step if BACK else step
        inside = cc < tokens - index * C
        token = first + index * C
        row = (token * H + h) * K
        near = (token * H + h) * C
        here = (token // C + segment) * H + h
        read = load(reads + row, cc, kk, inside, H * K, K, BK)
        if v is not None:
            vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
        us = product(state, tl.trans(read), tl.zeros([BV, C], tl.float32), PRECISION)
        if states is not None:
            store(states + here * (K * V), state, vv, kk, vv < V, K, K, BK)
        if solved is not None:
            weights = load(inner + near, cc, cc, inside, H * C, C, C)
            u = product(tl.trans(vs), weights if BACK else tl.trans(weights), us, PRECISION)
            store(solved + (token * H + h) * V, tl.trans(u), cc, vv, inside, H * V, V, BV)
        if out is not None:
            weights = load(pairs + near, cc, cc, inside, H * C, C, C)
            asked = load(asks + row, cc, kk, inside, H * K, K, BK)
            o = product(state, tl.trans(asked), tl.zeros([BV, C], tl.float32), PRECISION)
            o = product(tl.trans(vs), weights if BACK else tl.trans(weights), o, PRECISION)
            store(out + (token * H + h) * V, tl.trans(o), cc, vv, inside, H * V, V, BV)
        state *= tl.load(kept + here * K + kk, mask=kk < K, other=0.0)[None, :]
        state = product(us, load(writes + row, cc, kk, inside, H * K, K, BK), state, PRECISION)
        if v is not None:
            added = load(adds + row, cc, kk, inside, H * K, K, BK)  # here, where it holds registers for one product
            state = product(tl.trans(vs), added, state, PRECISION)
    if leaving is not None:
        store_state(leaving + place, tl.trans(state), kk, vv, K, V)
