"""Linear maps of few tokens, as while decoding, with the norm and the gate before them in one kernel.

    a = x, x + branch, x ⊙ f(gate) or relu(x)²;   n = a / √(mean a² + eps) ⊙ norm (⊙ f(gate)), or a;   out = n Wᵀ, n Uᵀ

The means are over groups of channels. A program has some rows of one map and all tokens. It reads all of their
channels, which are few beside its rows, and sums their squares beside the products: the norm's scale follows them.
"""

from __future__ import annotations

from itertools import accumulate
from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.laws import sigmoid
from halflife.ops.backends.triton.op import declare
from halflife.ops.backends.triton.passes.rows import entries, rows_of_tokens, sum_dtype

ROWS, COLUMNS = 8, 512  # of a tile of weights, at most; of several tokens fewer columns
MOST = 5  # maps of a launch
GATES = {"none": 0, "silu_before": 1, "sigmoid_before": 2, "silu_after": 3, "sigmoid_after": 4, "relu_square": 5}


@triton.jit
@no_type_check
def _sum(x, branch, tt, x_t, branch_t, cols, inside, DTYPE: tl.constexpr):
    """x in float32, or `x + branch` as it is in the dtype of the sum."""
    a = entries(x, tt, x_t, cols, inside)
    if branch is not None:
        a = (a + entries(branch, tt, branch_t, cols, inside)).to(DTYPE).to(tl.float32)
    return a


@triton.jit
@no_type_check
def _map_kernel(
    x, branch, gate, norm, w0, w1, w2, w3, w4, out, total, normed, tokens, F, p1, p2, p3, p4, f1, f2, f3, f4, eps,
    x_t, branch_t, gate_t, norm_g, GROUPS: tl.constexpr, SIZE: tl.constexpr, GATE: tl.constexpr, BT: tl.constexpr,
    BF: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    weight = w1 if program >= p1 else w0
    weight = w2 if program >= p2 else weight
    weight = w3 if program >= p3 else weight
    weight = w4 if program >= p4 else weight
    begin = tl.where(program < p1, 0, tl.where(program < p2, f1, tl.where(program < p3, f2, f3)))
    begin = tl.where(program < p4, begin, f4)  # the first row of this map in the outputs, and its first program
    first = tl.where(program < p1, 0, tl.where(program < p2, p1, tl.where(program < p3, p2, p3)))
    first = tl.where(program < p4, first, p4)
    end = tl.where(program < p1, f1, tl.where(program < p2, f2, tl.where(program < p3, f3, f4)))
    end = tl.where(program < p4, end, F)
    tt = tl.arange(0, BT)
    rows = (program - first) * BF + tl.arange(0, BF)
    in_rows = rows < end - begin
    place = rows.to(tl.int64)[:, None] * GROUPS * SIZE
    goal = tt.to(tl.int64)[:, None]
    DTYPE: tl.constexpr = x.dtype.element_ty if total is None else total.dtype.element_ty
    j = tl.arange(0, BG * BS)
    result = tl.zeros([BT, BF], tl.float32)
    scale = tl.zeros([BT, BG], tl.float32)
    for group in range(0, GROUPS, BG):
        sums = tl.zeros([BT, BF, BG * BS], tl.float32)
        squares = tl.zeros([BT, BG * BS], tl.float32)
        for start in range(0, SIZE, BS):
            within = start + j % BS
            there = (within < SIZE) & (group + j // BS < GROUPS)
            cols = (group + j // BS) * SIZE + within
            inside = (tt < tokens)[:, None] & there[None, :]
            a = _sum(x, branch, tt, x_t, branch_t, cols, inside, DTYPE)
            if total is not None:
                once = inside & (cols * 0 + program == 0)[None, :]
                tl.store(total + goal * SIZE + cols[None, :], a.to(DTYPE), mask=once)
            if GATE == 5:
                a = tl.where(a < 0, 0.0, a * a)  # a NaN passes through
            elif GATE != 0:
                z = entries(gate, tt, gate_t, cols, inside)
                f = sigmoid(z)
                if GATE % 2 == 1:
                    f *= z
            if GATE == 1 or GATE == 2:
                a *= f
            squares += a * a
            if GATE == 3 or GATE == 4:
                a *= f
            if norm is not None:
                w = tl.load(norm + (group + j // BS) * norm_g + within, mask=there, other=0.0)
                a *= w.to(tl.float32)[None, :]
            w = tl.load(weight + place + cols[None, :], mask=in_rows[:, None] & there[None, :], other=0.0)
            sums += a[:, None, :] * w.to(tl.float32)[None, :, :]
        parts = tl.sum(tl.reshape(sums, [BT, BF, BG, BS]), 3)
        if norm is not None:
            scale = tl.rsqrt(tl.sum(tl.reshape(squares, [BT, BG, BS]), 2) / SIZE + eps)
            parts *= scale[:, None, :]
        result += tl.sum(parts, 2)
    inside = (tt < tokens)[:, None] & in_rows[None, :]
    tl.store(out + goal * F + (begin + rows)[None, :], result.to(out.dtype.element_ty), mask=inside)
    if normed is not None:  # of one group, whose scale every program has: each stores other channels
        for start in range(program * BS, SIZE, tl.num_programs(0) * BS):
            cols = start + tl.arange(0, BS)
            here = (tt < tokens)[:, None] & (cols < SIZE)[None, :]
            w = tl.load(norm + cols, mask=cols < SIZE, other=0.0).to(tl.float32)[None, :]
            n = _sum(x, branch, tt, x_t, branch_t, cols, here, DTYPE) * scale * w
            tl.store(normed + goal * SIZE + cols[None, :], n.to(normed.dtype.element_ty), mask=here)


def _map(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, norm: Tensor | None, weights: list[Tensor], kind: str,
    groups: int, eps: float, keeps: bool,
) -> list[Tensor]:  # fmt: skip
    """The maps `[..., ΣFᵢ]` of `x, branch, gate [..., D]` by weights `[Fᵢ, D]`, beside each other.

    With a branch the sum follows, and if it `keeps` it, the norm, whose weight is `[D]` or that of each group.
    """
    channels, sizes = x.shape[-1], [len(weight) for weight in weights]
    dtype = sum_dtype(x, branch)
    out = x.new_empty(*x.shape[:-1], sum(sizes), dtype=weights[0].dtype)
    total, normed = (x.new_empty(x.shape, dtype=dtype) if given else None for given in (branch is not None, keeps))
    rows, strides = rows_of_tokens(channels, x, branch, gate)
    count, size = x.shape[:-1].numel(), channels // groups
    programs = [0, *accumulate(triton.cdiv(part, ROWS) for part in sizes)]
    rows_of_maps = [weight.contiguous() for weight in weights]
    rest, tokens = MOST - len(weights), triton.next_power_of_2(max(1, count))
    columns = max(16, COLUMNS // tokens)
    block = min(columns, max(16, triton.next_power_of_2(size)))
    if count:
        launch(_map_kernel, (programs[-1],))(
            *rows, norm, *rows_of_maps, *rows_of_maps[-1:] * rest, out, total, normed, count,
            sum(sizes), *programs[1:-1], *programs[-1:] * rest, *[*accumulate(sizes)][:-1], *[sum(sizes)] * rest, eps,
            *strides, 0 if norm is None or len(norm) == size else size, GROUPS=groups, SIZE=size, GATE=GATES[kind],
            BT=tokens, BF=ROWS, BG=min(columns // block, triton.next_power_of_2(groups)), BS=block, num_warps=8,
        )  # fmt: skip
    return [part for part in (out, total, normed) if part is not None]


declare("triton_map", _map)
