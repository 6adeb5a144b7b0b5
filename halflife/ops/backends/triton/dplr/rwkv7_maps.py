"""Linear maps of few tokens, each of its own mixture with the tokens before, in one kernel, for decoding.

    out_i = (n + μ_i ⊙ (n' − n)) W_iᵀ

n is x, or a LayerNorm of x or of a sum, which each program computes. It has some rows of one map and all tokens, as in
`passes/maps.py`.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.op import declare
from halflife.ops.backends.triton.passes.maps import COLUMNS, ROWS, _sum
from halflife.ops.backends.triton.passes.rows import contiguous, entries, rows_of_tokens, sum_dtype

MOST = 7  # maps of a launch


@triton.jit
@no_type_check
def _chosen(i, x0, x1, x2, x3, x4, x5, x6):
    x = x1 if i == 1 else x0
    x = x2 if i == 2 else x
    x = x3 if i == 3 else x
    x = x4 if i == 4 else x
    x = x5 if i == 5 else x
    return x6 if i == 6 else x


@triton.jit
@no_type_check
def _mixed_kernel(
    x, branch, before, norm, bias, m0, m1, m2, m3, m4, m5, m6, w0, w1, w2, w3, w4, w5, w6, out, normed, total, tokens,
    F, eps, s0, s1, s2, s3, s4, s5, s6, x_t, branch_t, before_t, SIZE: tl.constexpr, BT: tl.constexpr,
    BF: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(1)
    size = _chosen(i, s0, s1, s2, s3, s4, s5, s6)
    if tl.program_id(0) * BF < size:
        mu = _chosen(i, m0, m1, m2, m3, m4, m5, m6)
        weight = _chosen(i, w0, w1, w2, w3, w4, w5, w6)
        tt = tl.arange(0, BT)
        rows = tl.program_id(0) * BF + tl.arange(0, BF)
        place = rows.to(tl.int64)[:, None] * SIZE
        DTYPE: tl.constexpr = x.dtype.element_ty if total is None else total.dtype.element_ty
        mean = tl.zeros([BT, 1], tl.float32)
        scale = tl.zeros([BT, 1], tl.float32)
        if norm is not None:
            for start in range(0, SIZE, BS):
                cols = start + tl.arange(0, BS)
                inside = (tt < tokens)[:, None] & (cols < SIZE)[None, :]
                mean += tl.sum(_sum(x, branch, tt, x_t, branch_t, cols, inside, DTYPE), 1)[:, None] / SIZE
            for start in range(0, SIZE, BS):
                cols = start + tl.arange(0, BS)
                inside = (tt < tokens)[:, None] & (cols < SIZE)[None, :]
                apart = tl.where(inside, _sum(x, branch, tt, x_t, branch_t, cols, inside, DTYPE) - mean, 0.0)
                scale += tl.sum(apart * apart, 1)[:, None] / SIZE
            scale = tl.rsqrt(scale + eps)
        sums = tl.zeros([BT, BF, BS], tl.float32)
        for start in range(0, SIZE, BS):
            cols = start + tl.arange(0, BS)
            there = cols < SIZE
            inside = (tt < tokens)[:, None] & there[None, :]
            a = _sum(x, branch, tt, x_t, branch_t, cols, inside, DTYPE)
            if norm is not None:
                goal = tt.to(tl.int64)[:, None] * SIZE + cols[None, :]
                once = inside & (cols * 0 + tl.program_id(0) + i == 0)[None, :]
                if total is not None:
                    tl.store(total + goal, a.to(DTYPE), mask=once)
                a = (a - mean) * scale * tl.load(norm + cols, mask=there, other=0.0).to(tl.float32)[None, :]
                a += tl.load(bias + cols, mask=there, other=0.0).to(tl.float32)[None, :]
                tl.store(normed + goal, a.to(normed.dtype.element_ty), mask=once)
            change = entries(before, tt, before_t, cols, inside) - a
            a += tl.load(mu + cols, mask=there, other=0.0).to(tl.float32)[None, :] * change
            w = tl.load(weight + place + cols[None, :], mask=(rows < size)[:, None] & there[None, :], other=0.0)
            sums += a[:, None, :] * w.to(tl.float32)[None, :, :]
        goal = (i * tokens + tt).to(tl.int64)[:, None] * F + rows[None, :]
        inside = (tt < tokens)[:, None] & (rows < size)[None, :]
        tl.store(out + goal, tl.sum(sums, 2).to(out.dtype.element_ty), mask=inside)


def _mixed_maps(
    x: Tensor, before: Tensor, mu: list[Tensor], weights: list[Tensor], branch: Tensor | None, norm: list[Tensor],
    eps: float,
) -> list[Tensor]:  # fmt: skip
    """The maps `[maps, B, 1, F]` of n mixed with `before [B, D]` by μ_i `[D]`, by weights `[Fᵢ, D]`.

    n is `x [B, 1, D]`, or with weight and bias of a norm that of x or of `x + branch`; then n `[B, D]` follows, and the
    sum if there is one. F is the largest of the Fᵢ; behind the others stands anything.
    """
    sizes, channels, tokens = [len(weight) for weight in weights], x.shape[-1], len(x)
    out = x.new_empty(len(weights), tokens, 1, max(sizes), dtype=weights[0].dtype)
    wide = sum_dtype(x, branch)
    normed = x.new_empty(tokens, channels, dtype=wide) if norm else None
    total = None if branch is None else x.new_empty(x.shape, dtype=wide)
    rows, strides = rows_of_tokens(channels, x, branch, before)
    lists = [[part.contiguous() for part in parts] for parts in (mu, weights)]
    filled = [x for parts in lists for x in [*parts, *parts[-1:] * (MOST - len(parts))]]
    of_norm = contiguous(*norm) if norm else [None, None]
    block = triton.next_power_of_2(max(1, tokens))
    if tokens:
        launch(_mixed_kernel, (triton.cdiv(max(sizes), ROWS), len(weights)))(
            *rows, *of_norm, *filled, out, normed, total, tokens, max(sizes), eps, *sizes,
            *sizes[-1:] * (MOST - len(sizes)), *strides, channels, block, ROWS,
            min(max(16, COLUMNS // block), max(16, triton.next_power_of_2(channels))), num_warps=8,
        )  # fmt: skip
    return [part for part in (out, normed, total) if part is not None]


declare("triton_mixed_maps", _mixed_maps)
