"""A token of each sequence of RWKV-7's time mix in one kernel, from its projections to the input of its last map.

It is the second factors of the maps of low rank, the log-decays, the keys, the values, which lead to those of the first
layer, the step of the state, and the norm of each head with the token's own value and the gate. A program has a head.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.arguments import dense
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.laws import limit, positions, sigmoid
from halflife.ops.backends.triton.op import declare
from halflife.ops.backends.triton.passes.token import FORMS, _decay
from halflife.ops.backends.triton.step import _split

RANK = 64  # columns at once of the maps of low rank


@triton.jit
@no_type_check
def _load(x, at, inside):
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _low_rank(f, up, at, inside, ACTIVATION: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr):
    """Channels `at` of a map of `[RANK]` numbers f, or of their tanh or sigmoid."""
    y = tl.zeros([at.shape[0]], tl.float32)
    for start in range(0, RANK, BR):
        r = start + tl.arange(0, BR)
        numbers = _load(f, r, r < RANK)
        if ACTIVATION == "tanh":
            numbers = 2 * sigmoid(2 * numbers) - 1
        elif ACTIVATION == "sigmoid":
            numbers = sigmoid(numbers)
        there = inside[:, None] & (r < RANK)[None, :]
        y += tl.sum(_load(up, at.to(tl.int64)[:, None] * RANK + r[None, :], there) * numbers[None, :], 1)
    return y


@triton.jit
@no_type_check
def _token_kernel(
    r, k, v, first, of_decay, of_rate, of_gate, of_value, up_decay, up_rate, up_gate, up_value, rate_bias, unit,
    change, bonus, weight, bias, value_bias, state, shift, log_rate, taper, position, y, new, eps, factor, least, most,
    H, r_n, k_n, v_n, first_n, decay_n, rate_n, gate_n, value_n, p_n, shift_h, shift_k, log_rate_h, log_rate_k,
    taper_h, taper_k, K: tl.constexpr, DECAY: tl.constexpr, RATE: tl.constexpr, GATE: tl.constexpr,
    VALUE: tl.constexpr, SHAPE: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) // H
    h = tl.program_id(0) % H
    rows = tl.arange(0, BK)
    inside = rows < K
    at = h * K + rows
    f = _low_rank(of_decay + n * decay_n, up_decay, at, inside, "tanh", DECAY, BR)
    g, _ = _decay(
        f, shift, log_rate, taper, None, None, position, n, h, rows, inside, H, p_n, shift_h, shift_k, log_rate_h,
        log_rate_k, taper_h, taper_k, factor, least, most, 1.0, SHAPE, 1,
    )  # fmt: skip
    kept, changed = _split(g)
    value = _load(v + n * v_n, at, inside)
    if first is not None:
        f = _load(value_bias, at, inside) + _low_rank(of_value + n * value_n, up_value, at, inside, None, VALUE, BR)
        value += (_load(first + n * first_n, at, inside) - value) * sigmoid(f)
    key = _load(k + n * k_n, at, inside)
    rate = _load(rate_bias, at, inside) + _low_rank(of_rate + n * rate_n, up_rate, at, inside, None, RATE, BR)
    rate = sigmoid(rate)
    removed = key * _load(unit, at, inside)
    removed *= tl.rsqrt(tl.sum(removed * removed) + 1e-24)
    key *= 1 + (rate - 1) * _load(change, at, inside)
    query = _load(r + n * r_n, at, inside)
    own = tl.sum(query * key * _load(bonus, at, inside))

    square = inside[:, None] & inside[None, :]
    place = (tl.program_id(0).to(tl.int64) * K + rows[:, None]) * K + rows[None, :]
    old = tl.load(state + place, mask=square, other=0.0)
    update = key[:, None] * value[None, :] - (removed * rate)[:, None] * tl.sum(removed[:, None] * old, 0)[None, :]
    now = kept[:, None] * old + (changed[:, None] * old + update)
    tl.store(new + place, now, mask=square)
    out = tl.sum(query[:, None] * now, 0)

    out = tl.where(inside, out - tl.sum(out) / K, 0.0)
    out *= tl.rsqrt(tl.sum(out * out) / K + eps)
    out = out * _load(weight, at, inside) + _load(bias, at, inside) + own * value
    out *= _low_rank(of_gate + n * gate_n, up_gate, at, inside, "sigmoid", GATE, BR)
    tl.store(y + n * H * K + at, out.to(y.dtype.element_ty), mask=inside)


def _rwkv7_token(
    rows: list[Tensor], first: Tensor | None, low: list[Tensor], ups: list[Tensor], vectors: list[Tensor],
    state: Tensor, eps: float, dtype: torch.dtype, shift: Tensor | None, rate: Tensor | None, taper: Tensor | None,
    position: Tensor | None, shape: str, factor: float, least: float, limit_of_step: float | None,
) -> list[Tensor]:  # fmt: skip
    """The output `[B, 1, H · V]` in `dtype`, and the next state `[B, H, K, K]`.

    Args:
        rows, first: r, k and v, and the values of the first layer, which then have weights, `[B, 1, H · K]`.
        low, ups: what the first factors of the maps of decay, rate, gate and (with `first`) value gave `[B, 1, R]`, and
            their second factors `[H · K, R]`.
        vectors: bias of the rate, `k_k`, `k_a`, `r_k`, weight and bias of the norm, and v₀ if there is `first`.
        shift, …: the law of log-decays, as in `passes/token.py`.
    """
    batch, heads, size = state.shape[:3]
    y, new = rows[0].new_empty(batch, 1, heads * size, dtype=dtype), torch.empty_like(state)
    given = [dense(x) for x in (*rows, *([] if first is None else [first]), *low)]
    strides = [x.stride(0) for x in given]
    if first is None:
        given, strides = [*given[:3], None, *given[3:], None], [*strides[:3], 0, *strides[3:], 0]
        ups, vectors = [*ups, None], [*vectors, None]  # type: ignore[list-item]
    of_law = [(0, 0) if x is None else (*x.stride(), 0)[:2] for x in (shift, rate, taper)]
    ranks = [0 if x is None else x.shape[1] for x in ups]
    launch(_token_kernel, (batch * heads,))(
        *given, *ups, *vectors, state, shift, rate, taper, position, y, new, eps, factor, least, limit(limit_of_step),
        heads, *strides, positions(position)[0], *of_law[0], *of_law[1], *of_law[2],
        size, *ranks, FORMS[shape], RANK, max(16, triton.next_power_of_2(size)), num_warps=4 if size <= 64 else 8,
    )  # fmt: skip
    return [y, new]


declare("triton_rwkv7_token", _rwkv7_token)
