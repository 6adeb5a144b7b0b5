"""Mamba-3's queries, and the keys and values of the tokens before, as `halflife.ops.trapezoid` defines them.

A program of the forward pass has one head of some tokens, and one of the backward pass all heads of a group. The
channels of a head are three parts: the first and the second ones of the rotated pairs, and the rest.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.op import declare, declare_gradients
from halflife.ops.backends.triton.passes.parts import sums_of_parts
from halflife.ops.backends.triton.passes.rows import as_rows, contiguous
from halflife.ops.backends.triton.passes.weights import neighbours, of_first, rows_and_sequences, states_like

TILE = 2048  # entries of a program at once
TURN = tl.constexpr(6.283185307179586)  # 2π


@triton.jit
@no_type_check
def _load(x, place, there, P, K, BP: tl.constexpr, BC: tl.constexpr):
    """The three parts of vectors that begin at `place`, in float32, `[R, …]`; 0 where they are not `there`."""
    pairs, rest = tl.arange(0, BP), tl.arange(0, BC)
    first = there[:, None] & (pairs < P)[None, :]
    at = x + place.to(tl.int64)[:, None]
    a = tl.load(at + pairs[None, :], mask=first, other=0.0).to(tl.float32)
    b = tl.load(at + P + pairs[None, :], mask=first, other=0.0).to(tl.float32)
    c = tl.load(at + 2 * P + rest[None, :], mask=there[:, None] & (2 * P + rest < K)[None, :], other=0.0)
    return a, b, c.to(tl.float32)


@triton.jit
@no_type_check
def _store(x, place, there, a, b, c, P, K, BP: tl.constexpr, BC: tl.constexpr):
    pairs, rest = tl.arange(0, BP), tl.arange(0, BC)
    first = there[:, None] & (pairs < P)[None, :]
    at = x + place.to(tl.int64)[:, None]
    kind = x.dtype.element_ty
    tl.store(at + pairs[None, :], a.to(kind), mask=first)
    tl.store(at + P + pairs[None, :], b.to(kind), mask=first)
    tl.store(at + 2 * P + rest[None, :], c.to(kind), mask=there[:, None] & (2 * P + rest < K)[None, :])


@triton.jit
@no_type_check
def _one(x, at, P, K, BP: tl.constexpr, BC: tl.constexpr):
    """The parts of one vector of parameters, `[1, …]`."""
    place = tl.zeros([1], tl.int64) + at
    return _load(x, place, place >= 0, P, K, BP, BC)


@triton.jit
@no_type_check
def _normed(a, b, c, K, eps):
    """The parts of vectors over their root mean squares, and 1 over these."""
    squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
    inverse = tl.rsqrt(squares / K + eps)[:, None]
    return a * inverse, b * inverse, c * inverse, inverse


@triton.jit
@no_type_check
def _biased(a, b, c, weight, bias, h, P, K, BP: tl.constexpr, BC: tl.constexpr):
    """Normed vectors with the weights, and the bias of head h."""
    if weight is not None:
        wa, wb, wc = _one(weight, 0, P, K, BP, BC)
        ba, bb, bc = _one(bias, h * K, P, K, BP, BC)
        a, b, c = a * wa + ba, b * wb + bb, c * wc + bc
    return a, b, c


@triton.jit
@no_type_check
def _cos_sin(angle, place, there, P, BP: tl.constexpr):
    """cos and sin of angles in turns, by the polynomials of Cephes for an eighth of a turn."""
    pairs = tl.arange(0, BP)
    mask = there[:, None] & (pairs < P)[None, :]
    turns = tl.load(angle + place.to(tl.int64)[:, None] + pairs[None, :], mask=mask, other=0.0).to(tl.float32)
    quarters = tl.floor(4 * turns + 0.5)
    x = (turns - quarters / 4) * TURN
    y = x * x
    sin = ((-1.9515295891e-4 * y + 8.3321608736e-3) * y - 1.6666654611e-1) * y * x + x
    cos = ((2.443315711809948e-5 * y - 1.388731625493765e-3) * y + 4.166664568298827e-2) * y * y - y / 2 + 1
    quadrant = quarters.to(tl.int32) & 3
    sin, cos = tl.where(quadrant % 2 == 0, sin, cos), tl.where(quadrant % 2 == 0, cos, -sin)
    return tl.where(quadrant < 2, cos, -cos), tl.where(quadrant < 2, sin, -sin)


@triton.jit
@no_type_check
def _copy(source, goal, place, there, size, BLOCK: tl.constexpr):
    """Copy vectors, or zeros if there is no source."""
    cols = tl.arange(0, BLOCK)
    mask = there[:, None] & (cols < size)[None, :]
    from_there, to_there = place
    if source is None:
        x = tl.zeros([there.shape[0], BLOCK], tl.float32)
    else:
        x = tl.load(source + from_there.to(tl.int64)[:, None] + cols[None, :], mask=mask, other=0.0)
    tl.store(goal + to_there.to(tl.int64)[:, None] + cols[None, :], x.to(goal.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _keys_kernel(
    c, b, v, angle, query, query_bias, key, key_bias, first_key, first_value, cu_seqlens, q, before, v_before, dot,
    last_key, last_value, k, rows_all, T, N, steps, c_t, b_t, v_t, H, A, VH, PER, P, K, V, eps,
    BR: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    rows = tl.program_id(0) // H * BR + tl.arange(0, BR)
    there = rows < rows_all
    n, begins, ends = neighbours(rows, cu_seqlens, N, T, rows_all, steps)
    begins, goes_on = begins & there, there & (ends == 0)
    wide, state = rows.to(tl.int64) * H + h, n * H + h
    qa, qb, qc = _load(c, rows.to(tl.int64) * c_t + h // PER * K, there, P, K, BP, BC)
    ka, kb, kc = _load(b, rows.to(tl.int64) * b_t + h // PER * K, there, P, K, BP, BC)
    if query is not None:
        qa, qb, qc, _ = _normed(qa, qb, qc, K, eps)
        ka, kb, kc, _ = _normed(ka, kb, kc, K, eps)
        qa, qb, qc = _biased(qa, qb, qc, query, query_bias, h, P, K, BP, BC)
        ka, kb, kc = _biased(ka, kb, kc, key, key_bias, h, P, K, BP, BC)
    tl.store(dot + wide, tl.sum(qa * ka, 1) + tl.sum(qb * kb, 1) + tl.sum(qc * kc, 1), mask=there)
    cos, sin = _cos_sin(angle, (rows.to(tl.int64) * A + h % A) * P, there, P, BP)
    _store(q, wide * K, there, qa * cos - qb * sin, qb * cos + qa * sin, qc, P, K, BP, BC)
    ra, rb = ka * cos - kb * sin, kb * cos + ka * sin
    _store(before, (wide + H) * K, goes_on, ra, rb, kc, P, K, BP, BC)
    _store(last_key, state * K, ends, ra, rb, kc, P, K, BP, BC)
    if k is not None:
        _store(k, wide * K, there, ra, rb, kc, P, K, BP, BC)
    _copy(first_key, before, (state * K, wide * K), begins, K, BK)
    if h < VH:
        own, place, state = rows.to(tl.int64) * v_t + h * V, (rows.to(tl.int64) * VH + h) * V, (n * VH + h) * V
        _copy(v, v_before, (own, place + VH * V), goes_on, V, BV)
        _copy(v, last_value, (own, state), ends, V, BV)
        _copy(first_value, v_before, (state, place), begins, V, BV)


@triton.jit
@no_type_check
def _unturned(a, b, cos, sin):
    return a * cos + b * sin, b * cos - a * sin


@triton.jit
@no_type_check
def _of_normed(a, b, c, na, nb, nc, inverse, weight, out, place, there, P, K, BP: tl.constexpr, BC: tl.constexpr):
    """Store the gradient of vectors from that of their normed ones times the weights, if there is a norm."""
    if weight is not None:
        wa, wb, wc = _one(weight, 0, P, K, BP, BC)
        a, b, c = a * wa, b * wb, c * wc
        along = ((tl.sum(a * na, 1) + tl.sum(b * nb, 1) + tl.sum(c * nc, 1)) / K)[:, None]
        a, b, c = inverse * (a - along * na), inverse * (b - along * nb), inverse * (c - along * nc)
    _store(out, place, there, a, b, c, P, K, BP, BC)


@triton.jit
@no_type_check
def _sum_rows(sums, at, a, b, c, P, K, BP: tl.constexpr, BC: tl.constexpr):
    place = tl.zeros([1], tl.int64) + at
    a, b, c = tl.sum(a, 0)[None, :], tl.sum(b, 0)[None, :], tl.sum(c, 0)[None, :]
    _store(sums, place, place >= 0, a, b, c, P, K, BP, BC)


@triton.jit
@no_type_check
def _keys_back_kernel(
    c, b, angle, query, query_bias, key, key_bias, cu_seqlens, dq, dbefore, dv_before, ddot, dlast_key, dlast_value,
    dk, dc, db, dv, dangle, dfirst_key, dfirst_value, sums, rows_all, T, N, steps, c_t, b_t, H, A, VH, PER, P, K, V,
    eps, BR: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    groups = H // PER
    g = tl.program_id(0) % groups
    block = (tl.program_id(0) // groups).to(tl.int64)
    rows = tl.program_id(0) // groups * BR + tl.arange(0, BR)
    there = rows < rows_all
    n, begins, ends = neighbours(rows, cu_seqlens, N, T, rows_all, steps)
    begins, goes_on = begins & there, there & (ends == 0)
    na, nb, nc = _load(c, rows.to(tl.int64) * c_t + g * K, there, P, K, BP, BC)
    ma, mb, mc = _load(b, rows.to(tl.int64) * b_t + g * K, there, P, K, BP, BC)
    inverse, inverse_b = 1.0, 1.0
    if query is not None:
        na, nb, nc, inverse = _normed(na, nb, nc, K, eps)
        ma, mb, mc, inverse_b = _normed(ma, mb, mc, K, eps)
    sa, sb, sc = tl.zeros_like(na), tl.zeros_like(nb), tl.zeros_like(nc)  # gradients of queries over all heads
    ta, tb, tc = tl.zeros_like(na), tl.zeros_like(nb), tl.zeros_like(nc)  # of keys
    for h in range(g * PER, (g + 1) * PER):
        wide, state = rows.to(tl.int64) * H + h, n * H + h
        cos, sin = _cos_sin(angle, (rows.to(tl.int64) * A + h % A) * P, there, P, BP)
        qa, qb, qc = _biased(na, nb, nc, query, query_bias, h, P, K, BP, BC)
        ka, kb, kc = _biased(ma, mb, mc, key, key_bias, h, P, K, BP, BC)
        xa, xb, xc = _load(dq, wide * K, there, P, K, BP, BC)
        ya, yb, yc = _load(dbefore, (wide + H) * K, goes_on, P, K, BP, BC)
        if dlast_key is not None:
            la, lb, lc = _load(dlast_key, state * K, ends, P, K, BP, BC)
            ya, yb, yc = ya + la, yb + lb, yc + lc
        if dk is not None:
            la, lb, lc = _load(dk, wide * K, there, P, K, BP, BC)
            ya, yb, yc = ya + la, yb + lb, yc + lc
        xa, xb = _unturned(xa, xb, cos, sin)
        ya, yb = _unturned(ya, yb, cos, sin)
        pairs = tl.arange(0, BP)
        turned = (xb * qa - xa * qb + yb * ka - ya * kb) * TURN
        tl.store(dangle + (wide * P)[:, None] + pairs[None, :], turned, mask=there[:, None] & (pairs < P)[None, :])
        if ddot is not None:
            d = tl.load(ddot + wide, mask=there, other=0.0).to(tl.float32)[:, None]
            xa, xb, xc = xa + d * ka, xb + d * kb, xc + d * kc
            ya, yb, yc = ya + d * qa, yb + d * qb, yc + d * qc
        if query is not None:
            at = block * 2 * (H + groups) * K
            _sum_rows(sums, at + h * K, xa, xb, xc, P, K, BP, BC)
            _sum_rows(sums, at + (H + h) * K, ya, yb, yc, P, K, BP, BC)
        sa, sb, sc = sa + xa, sb + xb, sc + xc
        ta, tb, tc = ta + ya, tb + yb, tc + yc
        if dfirst_key is not None:
            _copy(dbefore, dfirst_key, (wide * K, state * K), begins, K, BK)
        if h < VH:
            place, state = (rows.to(tl.int64) * VH + h) * V, (n * VH + h) * V
            _copy(dv_before, dv, (place + VH * V, place), goes_on, V, BV)
            _copy(dlast_value, dv, (state, place), ends, V, BV)
            if dfirst_value is not None:
                _copy(dv_before, dfirst_value, (place, state), begins, V, BV)
    if query is not None:
        at = (block * 2 * (H + groups) + 2 * H + g) * K
        _sum_rows(sums, at, sa * na, sb * nb, sc * nc, P, K, BP, BC)
        _sum_rows(sums, at + groups * K, ta * ma, tb * mb, tc * mc, P, K, BP, BC)
    place = rows.to(tl.int64) * groups * K + g * K
    _of_normed(sa, sb, sc, na, nb, nc, inverse, query, dc, place, there, P, K, BP, BC)
    _of_normed(ta, tb, tc, ma, mb, mc, inverse_b, key, db, place, there, P, K, BP, BC)


def _sizes(c: Tensor, v: Any, angle: Tensor, bias: Tensor | None) -> tuple[tuple[int, ...], dict[str, int]]:
    """The heads of queries, of angles and of values, the heads of a group, P, K and V; and the size of a tile."""
    heads = angle.shape[2] if bias is None else len(bias)
    size = c.shape[2] // heads if bias is None else bias.shape[1]
    (_, _, value_heads, value), pairs = v, angle.shape[3]
    channels, per = triton.next_power_of_2(size), heads * size // max(1, c.shape[2])
    tile = {"BP": triton.next_power_of_2(pairs), "BC": triton.next_power_of_2(max(1, size - 2 * pairs))}
    tile |= {"BR": max(1, min(32, TILE // channels)), "BK": channels, "BV": triton.next_power_of_2(value)}
    return (heads, angle.shape[2], value_heads, per, pairs, size, value), tile


def _keys(
    c: Tensor, b: Tensor, v: Tensor, angle: Tensor, query: Tensor | None, query_bias: Tensor | None,
    key: Tensor | None, key_bias: Tensor | None, first_key: Tensor | None, first_value: Tensor | None,
    cu_seqlens: Tensor | None, eps: float, whole: bool,
) -> list[Tensor]:  # fmt: skip
    """q, the keys and the values before, q·k, the last keys and values of sequences, and k if asked for."""
    (sizes, tile), angle = _sizes(c, v.shape, angle, query_bias), angle.contiguous()
    shape = *c.shape[:2], sizes[0], sizes[5]
    q, before = v.new_empty(shape), v.new_empty(shape)
    v_before, dot = v.new_empty(v.shape), v.new_empty(shape[:3], dtype=torch.float32)
    last_key = states_like(q, first_key, cu_seqlens, torch.float32)
    last_value = states_like(v, first_value, cu_seqlens, v.dtype)
    tokens, k = rows_and_sequences(v, cu_seqlens), [v.new_empty(shape)] if whole else []
    if q.numel():
        (c, c_t), (b, b_t), (values, v_t) = as_rows(c, c.shape[2]), as_rows(b, b.shape[2]), as_rows(v, v[0, 0].numel())
        launch(_keys_kernel, (triton.cdiv(tokens[0], tile["BR"]) * sizes[0],))(
            c, b, values, angle, *contiguous(query, query_bias, key, key_bias, first_key, first_value), cu_seqlens,
            q, before, v_before, dot, last_key, last_value, k[0] if whole else None, *tokens, c_t, b_t, v_t, *sizes,
            eps, **tile,
        )  # fmt: skip
    return [q, before, v_before, dot, last_key, last_value, *k]


def _keys_backward(
    dq: Tensor, dbefore: Tensor, dv_before: Tensor, ddot: Tensor | None, dlast_key: Tensor | None,
    dlast_value: Tensor | None, dk: Tensor | None, c: Tensor, b: Tensor, angle: Tensor, query: Tensor | None,
    query_bias: Tensor | None, key: Tensor | None, key_bias: Tensor | None, first_key: Tensor | None,
    first_value: Tensor | None, cu_seqlens: Tensor | None, eps: float,
) -> list[Tensor]:  # fmt: skip
    """The gradients of c, b, v, φ and both first ones, and those of biases and weights in rows."""
    (sizes, tile), angle = _sizes(c, dv_before.shape, angle, query_bias), angle.contiguous()
    heads, size, groups = sizes[0], sizes[5], c.shape[2] // sizes[5]
    dc, db, dv = (x.new_empty(x.shape) for x in (c, b, dv_before))
    dangle = angle.new_empty(*angle.shape[:2], heads, angle.shape[3])
    firsts = [None if x is None else of_first(d, x) for d, x in ((dlast_key, first_key), (dlast_value, first_value))]
    tokens = rows_and_sequences(c, cu_seqlens)
    blocks = triton.cdiv(tokens[0], tile["BR"])
    sums = angle.new_empty(blocks if query is not None else 0, 2 * (heads + groups), size)
    if dq.numel():
        (c, c_t), (b, b_t) = as_rows(c, c.shape[2]), as_rows(b, b.shape[2])
        launch(_keys_back_kernel, (blocks * groups,))(
            c, b, angle, *contiguous(query, query_bias, key, key_bias), cu_seqlens, dq, dbefore, dv_before, ddot,
            dlast_key, dlast_value, dk, dc, db, dv, dangle, *firsts, sums, *tokens, c_t, b_t, *sizes, eps, **tile,
        )  # fmt: skip
    if heads != angle.shape[2] and dangle.numel():
        found = sums_of_parts((dangle, angle, angle.shape[2] * angle.shape[3]))[0]
        assert found is not None
        dangle = found
    return [dc, db, dv, dangle, *(c.new_empty(0) if x is None else x for x in firsts), sums.sum(0)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    c, b, v, *rest, ctx.eps, _ = inputs
    ctx.save_for_backward(c, b, *rest)
    ctx.values = v.shape, v.dtype
    ctx.set_materialize_grads(False)  # a training step does not use what the last tokens leave


def _grad(ctx: Any, douts: list[Tensor | None]) -> tuple[Any, ...]:
    only_first_derivatives()
    c, _, angle, query, query_bias, key, key_bias, first_key, first_value, _ = saved = ctx.saved_tensors
    (shape, dtype), (heads, *_, size, _) = ctx.values, _sizes(c, ctx.values[0], angle, query_bias)[0]
    dq, dbefore, dv_before, *rest = contiguous(*douts)
    dq, dbefore = (c.new_zeros(*shape[:2], heads, size, dtype=dtype) if d is None else d for d in (dq, dbefore))
    dv_before = c.new_zeros(shape, dtype=dtype) if dv_before is None else dv_before
    rest += [None] * (4 - len(rest))
    dc, db, dv, dangle, of_key, of_value, sums = _gradients(dq, dbefore, dv_before, *rest, *saved, ctx.eps)
    parameters, given = [None] * 4, [x for x in (query, query_bias, key, key_bias) if x is not None]
    if given:
        groups = len(sums) // 2 - heads
        of_query_bias, of_key_bias, of_query, of_key_weight = sums.split([heads, heads, groups, groups])
        of_query, of_key_weight = (x[0] if groups == 1 else x.sum(0) for x in (of_query, of_key_weight))
        found = of_query, of_query_bias, of_key_weight, of_key_bias
        parameters = [d.to(x.dtype) for d, x in zip(found, given, strict=True)]
    firsts = None if first_key is None else of_key, None if first_value is None else of_value
    return dc, db, dv, dangle, *parameters, *firsts, None, None, None


_gradients = declare_gradients("triton_trapezoid_keys_backward", _keys_backward)
declare("triton_trapezoid_keys", _keys).register_autograd(_grad, setup_context=_save)
