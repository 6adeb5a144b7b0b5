"""One token of an op on a state, for decoding, in one kernel: it reads the state once and writes the next one.

It is the token loop of linear attention, the delta rule, DPLR and GateRank, with any decay. A program has some columns
of the state of one sequence and head, with all of its rows. As in `halflife.ops.slow_decay`, a decay is `kept + change`
with kept = 1 where it is slow, so that a state does not drift over many tokens.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.op import declare

COLUMNS = 16  # of the state in a program: small, so that one sequence also fills a GPU

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
@no_type_check
def _row(x, n, h, by_sequence, by_head, cols, inside):
    """Load a vector of one sequence and head in float32; 0 outside."""
    return tl.load(x + n * by_sequence + h * by_head + cols, mask=inside, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _split(g):
    """Return `(kept, change)` with `e^g = kept + change`. The exponential is float64, as `expm1` of a slow decay."""
    slow = g > -_LN2
    wide = tl.exp(g.to(tl.float64))
    return tl.where(slow, 1.0, 0.0), tl.where(slow, wide - 1.0, wide).to(tl.float32)


@triton.jit
@no_type_check
def _step_kernel(
    q, k, v, g, beta, a, b, g_slow, state, slow_state, o, new, new_slow, scale, H, SQ, SK, K, V,
    q_n, q_h, k_n, k_h, v_n, v_h, g_n, g_h, beta_n, beta_h, a_n, a_h, b_n, b_h, slow_n, slow_h, s_n, s_h, s_k,
    BK: tl.constexpr, BV: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) // H
    h = tl.program_id(0) % H
    rows = tl.arange(0, BK)
    cols = tl.program_id(1) * BV + tl.arange(0, BV)
    query = _row(q, n, h // SQ, q_n, q_h, rows, rows < K)
    key = _row(k, n, h // SK, k_n, k_h, rows, rows < K)
    value = _row(v, n, h, v_n, v_h, cols, cols < V)
    strength = 1.0
    if beta is not None:
        strength = tl.load(beta + n * beta_n + h * beta_h).to(tl.float32)
    decay = None
    if g is not None:
        decay = _row(g, n, h, g_n, g_h, rows if VECTOR else rows * 0, rows < K)
    slow_g = None
    if g_slow is not None:
        slow_g = tl.load(g_slow + n * slow_n + h * slow_h).to(tl.float32)
    out = updated(
        query, key, value, strength, decay, a, b, slow_g, state, slow_state, new, new_slow, n, h, rows, cols, K, V,
        a_n, a_h, b_n, b_h, s_n, s_h, s_k, beta is not None,
    )  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * V + cols
    tl.store(o + at, (out * scale).to(o.dtype.element_ty), mask=cols < V)


@triton.jit
@no_type_check
def updated(
    query, key, value, strength, g, a, b, slow_g, state, slow_state, new, new_slow, n, h, rows, cols, K, V,
    a_n, a_h, b_n, b_h, s_n, s_h, s_k, DELTA: tl.constexpr,
):  # fmt: skip
    """Return what the query reads from columns of the next state, which is stored.

    g are the log-decays of rows, slow_g that of the slow state.
    """
    in_rows = rows < K
    inside = in_rows[:, None] & (cols < V)[None, :]
    place = n * s_n + h * s_h + rows[:, None] * s_k + cols[None, :]
    place_new = (tl.program_id(0).to(tl.int64) * K + rows[:, None]) * V + cols[None, :]
    old = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
    if state is not None:
        old = tl.load(state + place, mask=inside, other=0.0)

    kept = tl.full([rows.shape[0]], 1.0, tl.float32)
    change = tl.zeros([rows.shape[0]], tl.float32)
    if g is not None:
        kept, change = _split(g)
    if slow_g is not None:  # a reset: the slow state decays and takes over the decayed fast one, which starts at 0
        slow = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
        if slow_state is not None:
            slow = tl.load(slow_state + place, mask=inside, other=0.0)
        reset = slow_g != 0
        slow_kept, slow_change = _split(slow_g)
        moved = slow_change * slow + tl.exp(slow_g) * ((kept + change)[:, None] * old)
        slow = tl.where(reset, slow_kept * slow + moved, slow)
        kept = tl.where(reset, 0.0, kept)
        change = tl.where(reset, 0.0, change)
        tl.store(new_slow + place_new, slow, mask=inside)
    if DELTA:  # what the decayed state holds for the key; the small part is subtracted first
        value -= tl.sum((change * key)[:, None] * old, 0)
        if slow_g is not None:
            value -= tl.sum(key[:, None] * slow, 0)
        value -= tl.sum((kept * key)[:, None] * old, 0)
        value *= strength
    update = key[:, None] * value[None, :]
    if a is not None:  # DPLR reads the state before it decays
        correction = tl.sum(_row(a, n, h, a_n, a_h, rows, in_rows)[:, None] * old, 0)
        update += _row(b, n, h, b_n, b_h, rows, in_rows)[:, None] * correction[None, :]
    now = kept[:, None] * old + (change[:, None] * old + update)
    tl.store(new + place_new, now, mask=inside)
    if slow_g is not None:
        now += slow
    return tl.sum(query[:, None] * now, 0)


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, a: Tensor | None, b: Tensor | None,
    g_slow: Tensor | None, state: Tensor | None, slow: Tensor | None, scale: float,
) -> list[Tensor]:  # fmt: skip
    """The outputs `[B, 1, H, V]` and the next state `[B, H, K, V]`, or GateRank's two, fast and slow.

    The last axes of all tensors have stride 1.
    """
    (batch, _, heads, value), rows = v.shape, q.shape[-1]
    count = 1 if g_slow is None else 2
    o, states = (
        v.new_empty(v.shape),
        [q.new_empty(batch, heads, rows, value, dtype=torch.float32) for _ in range(count)],
    )
    strides = [(0, 0) if x is None else (x.stride(0), x.stride(2)) for x in (q, k, v, g, beta, a, b, g_slow)]
    of_state = (0, 0, 0) if state is None else state.stride()[:3]
    launch(_step_kernel, (batch * heads, triton.cdiv(value, COLUMNS)))(
        q, k, v, g, beta, a, b, g_slow, state, slow, o, states[0], states[-1] if count == 2 else None, scale,
        heads, heads // q.shape[2], heads // k.shape[2], rows, value, *[x for pair in strides for x in pair], *of_state,
        BK=max(16, triton.next_power_of_2(rows)), BV=COLUMNS, VECTOR=g is not None and g.ndim == 4,
    )  # fmt: skip
    return [o, *states]


declare("triton_step", _step)
