"""Softmax attention of one token of each sequence to a cache, which gets its rotated key and its value: two kernels.

A program has some slots of one sequence and head of keys. It copies them to the next cache, with the new token in its
slot, and sums the values with the weights of its slots. The second kernel adds what the programs of a head have found.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.arguments import dense
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.op import declare

SLOTS, TILE = 64, 8192  # at once, at most; numbers of their products with all queries
PROGRAMS, PARTS = 512, 64  # about as many programs; the most of one head

_LEAST = tl.constexpr(-1e30)


@triton.jit
@no_type_check
def _halves(x, place, j, inside, cos, sin, HALF, K):
    """Both halves of the channels of rows at `place`, rotated, as they are in their dtype."""
    first = tl.load(x + place + j, mask=inside & (j < HALF), other=0.0).to(tl.float32)
    second = tl.load(x + place + HALF + j, mask=inside & (HALF + j < K), other=0.0).to(tl.float32)
    a = (first * cos - second * sin).to(x.dtype.element_ty).to(tl.float32)
    b = (second * cos + first * sin).to(x.dtype.element_ty).to(tl.float32)
    return a, b


@triton.jit
@no_type_check
def _attend_kernel(
    q, k, v, cos, sin, keys, values, seen, new_keys, new_values, most, total, read, scale, slots, span, H, G, K, HALF,
    q_n, q_h, k_n, k_h, v_n, v_h, c_n, R: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) // G
    g = tl.program_id(0) % G
    part = tl.program_id(1)
    j = tl.arange(0, BP)
    cols = tl.arange(0, BK)
    r = tl.arange(0, BR)
    c = tl.full([BP], 1.0, tl.float32)
    s = tl.zeros([BP], tl.float32)
    if cos is not None:
        c = tl.load(cos + n * c_n + j, mask=j < HALF, other=0.0).to(tl.float32)
        s = tl.load(sin + n * c_n + j, mask=j < HALF, other=0.0).to(tl.float32)
    place = (n * q_n + (g * R + r) * q_h)[:, None]
    q_a, q_b = _halves(q, place, j[None, :], (r < R)[:, None], c[None, :], s[None, :], HALF, K)
    k_a, k_b = _halves(k, n * k_n + g * k_h, j, j < HALF, c, s, HALF, K)
    value = tl.load(v + n * v_n + g * v_h + cols, mask=cols < K, other=0.0).to(tl.float32)
    at = tl.load(seen + n).to(tl.int32)  # the slot of this token
    highest = tl.full([BR], _LEAST, tl.float32)
    weight = tl.zeros([BR], tl.float32)
    found = tl.zeros([BR, BK], tl.float32)
    for start in range(part * span, tl.minimum((part + 1) * span, slots), BS):
        slot = start + tl.arange(0, BS)
        here = slot < slots
        old = (slot < slots - 1) & (slot != at)
        now = (slot == at)[:, None]
        from_old = ((n * (slots - 1) + slot) * G + g)[:, None] * K
        to_new = ((n * slots + slot) * G + g)[:, None] * K
        lower = (j < HALF)[None, :]
        upper = (HALF + j < K)[None, :]
        a = tl.load(keys + from_old + j[None, :], mask=old[:, None] & lower, other=0.0).to(tl.float32)
        b = tl.load(keys + from_old + HALF + j[None, :], mask=old[:, None] & upper, other=0.0).to(tl.float32)
        a = tl.where(now, k_a[None, :], a)
        b = tl.where(now, k_b[None, :], b)
        tl.store(new_keys + to_new + j[None, :], a.to(new_keys.dtype.element_ty), mask=here[:, None] & lower)
        tl.store(new_keys + to_new + HALF + j[None, :], b.to(new_keys.dtype.element_ty), mask=here[:, None] & upper)
        w = tl.load(values + from_old + cols[None, :], mask=old[:, None] & (cols < K)[None, :], other=0.0)
        w = tl.where(now, value[None, :], w.to(tl.float32))
        inside = here[:, None] & (cols < K)[None, :]
        tl.store(new_values + to_new + cols[None, :], w.to(new_values.dtype.element_ty), mask=inside)
        scores = tl.sum(q_a[:, None, :] * a[None, :, :], 2) + tl.sum(q_b[:, None, :] * b[None, :, :], 2)
        scores = tl.where(((slot <= at) & here)[None, :], scale * scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        before = tl.exp(highest - higher)
        p = tl.exp(scores - higher[:, None])
        weight = weight * before + tl.sum(p, 1)
        found = found * before[:, None] + tl.sum(p[:, :, None] * w[None, :, :], 1)
        highest = higher
    row = (n * H + g * R + r) * tl.num_programs(1) + part
    tl.store(most + row, highest, mask=r < R)
    tl.store(total + row, weight, mask=r < R)
    tl.store(read + row[:, None] * K + cols[None, :], found, mask=(r < R)[:, None] & (cols < K)[None, :])


@triton.jit
@no_type_check
def _join_kernel(most, total, read, o, parts, K, BP: tl.constexpr, BK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BP)
    cols = tl.arange(0, BK)
    there = part < parts
    highest = tl.load(most + row * parts + part, mask=there, other=_LEAST)
    factor = tl.exp(highest - tl.max(highest, 0))
    weight = tl.sum(factor * tl.load(total + row * parts + part, mask=there, other=0.0), 0)
    inside = there[:, None] & (cols < K)[None, :]
    found = tl.load(read + (row * parts + part)[:, None] * K + cols[None, :], mask=inside, other=0.0)
    y = tl.sum(factor[:, None] * found, 0) / weight
    tl.store(o + row * K + cols, y.to(o.dtype.element_ty), mask=cols < K)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, keys: Tensor, values: Tensor,
    seen: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    """The outputs `[N, 1, H, K]` and the next keys and values `[N, S + 1, G, K]`.

    `q [N, 1, H, K]` and `k, v [N, 1, G, K]` are of one token each, whose slot is `seen [N]` in the cache of `keys` and
    `values [N, S, G, K]`. `cos` and `sin [N or 1, 1, K / 2]` are of the angles, or None without positions.
    """
    (rows, _, heads, size), (_, held, groups, _) = q.shape, keys.shape
    q, k, v = dense(q), dense(k), dense(v)
    slots, shared = held + 1, heads // groups
    new = [x.new_empty(rows, slots, groups, size) for x in (keys, values)]
    half, columns = triton.cdiv(size, 2), max(16, triton.next_power_of_2(size))
    block = max(4, min(SLOTS, TILE // (columns * triton.next_power_of_2(shared))))
    parts = max(1, min(PARTS, PROGRAMS // max(1, rows * groups), triton.cdiv(slots, block)))
    span = triton.cdiv(triton.cdiv(slots, block), parts) * block
    parts = triton.cdiv(slots, span)
    most, total = (q.new_empty(rows, heads, parts, dtype=torch.float32) for _ in range(2))
    read, o = q.new_empty(rows, heads, parts, size, dtype=torch.float32), q.new_empty(q.shape)
    cos, sin = (None if x is None else x.contiguous() for x in (cos, sin))
    by_row = half if cos is not None and len(cos) > 1 else 0
    if rows:
        launch(_attend_kernel, (rows * groups, parts))(
            q, k, v, cos, sin, keys.contiguous(), values.contiguous(), seen.contiguous(), *new, most, total, read,
            scale, slots, span, heads, groups, size, half, q.stride(0), q.stride(2), k.stride(0), k.stride(2),
            v.stride(0), v.stride(2), by_row, R=shared, BR=triton.next_power_of_2(shared), BS=block,
            BP=max(16, triton.next_power_of_2(half)), BK=columns,
        )  # fmt: skip
        launch(_join_kernel, (rows * heads,))(
            most, total, read, o, parts, size, BP=triton.next_power_of_2(parts), BK=columns
        )
    return [o, *new]


declare("triton_attend", _attend)
