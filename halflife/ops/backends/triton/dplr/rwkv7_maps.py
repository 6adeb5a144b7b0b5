"""Linear maps of few tokens, each of its own mixture with the tokens before, in one kernel, for decoding.

    out_i = (x + μ_i ⊙ (x' − x)) W_iᵀ

A program has some rows of one map and all tokens, as in `passes/maps.py`.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.op import declare
from halflife.ops.backends.triton.passes.maps import COLUMNS, ROWS
from halflife.ops.backends.triton.passes.rows import entries, rows_of_tokens

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
    x, before, m0, m1, m2, m3, m4, m5, m6, w0, w1, w2, w3, w4, w5, w6, out, tokens, F, s0, s1, s2, s3, s4, s5, s6, x_t,
    before_t, SIZE: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(1)
    size = _chosen(i, s0, s1, s2, s3, s4, s5, s6)
    if tl.program_id(0) * BF < size:
        mu = _chosen(i, m0, m1, m2, m3, m4, m5, m6)
        weight = _chosen(i, w0, w1, w2, w3, w4, w5, w6)
        tt = tl.arange(0, BT)
        rows = tl.program_id(0) * BF + tl.arange(0, BF)
        place = rows.to(tl.int64)[:, None] * SIZE
        sums = tl.zeros([BT, BF, BS], tl.float32)
        for start in range(0, SIZE, BS):
            cols = start + tl.arange(0, BS)
            there = cols < SIZE
            inside = (tt < tokens)[:, None] & there[None, :]
            a = entries(x, tt, x_t, cols, inside)
            change = entries(before, tt, before_t, cols, inside) - a
            a += tl.load(mu + cols, mask=there, other=0.0).to(tl.float32)[None, :] * change
            w = tl.load(weight + place + cols[None, :], mask=(rows < size)[:, None] & there[None, :], other=0.0)
            sums += a[:, None, :] * w.to(tl.float32)[None, :, :]
        goal = (i * tokens + tt).to(tl.int64)[:, None] * F + rows[None, :]
        inside = (tt < tokens)[:, None] & (rows < size)[None, :]
        tl.store(out + goal, tl.sum(sums, 2).to(out.dtype.element_ty), mask=inside)


def _mixed_maps(x: Tensor, before: Tensor, mu: list[Tensor], weights: list[Tensor]) -> Tensor:
    """The maps `[maps, B, 1, F]` of `x [B, 1, D]` mixed with `before [B, D]` by μ_i `[D]`, by weights `[Fᵢ, D]`.

    F is the largest of the Fᵢ; behind the others stands anything.
    """
    sizes, channels, tokens = [len(weight) for weight in weights], x.shape[-1], len(x)
    out = x.new_empty(len(weights), tokens, 1, max(sizes), dtype=weights[0].dtype)
    rows, strides = rows_of_tokens(channels, x, before)
    lists = [[part.contiguous() for part in parts] for parts in (mu, weights)]
    filled = [x for parts in lists for x in [*parts, *parts[-1:] * (MOST - len(parts))]]
    block = triton.next_power_of_2(max(1, tokens))
    if tokens:
        launch(_mixed_kernel, (triton.cdiv(max(sizes), ROWS), len(weights)))(
            *rows, *filled, out, tokens, max(sizes), *sizes, *sizes[-1:] * (MOST - len(sizes)), *strides, channels,
            block, ROWS, min(max(16, COLUMNS // block), max(16, triton.next_power_of_2(channels))), num_warps=8,
        )  # fmt: skip
    return out


declare("triton_mixed_maps", _mixed_maps)
