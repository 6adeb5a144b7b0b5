"""A linear map of few tokens, as while decoding, with the norm before it and SwiGLU after it in one kernel.

    a = x + branch, or x ⊙ silu(gate);    n = a / √(mean a² + eps) ⊙ norm;    out = n Wᵀ, or silu(n Wᵀ) ⊙ (n Uᵀ)

The means are over groups of channels. A program has some rows of W and all tokens. It reads all of their channels,
which are few beside its rows of W, and sums their squares beside the products: the norm's scale follows them.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.laws import sigmoid
from halflife.ops.backends.triton.op import declare
from halflife.ops.backends.triton.passes.rows import entries, rows_of_tokens

ROWS, COLUMNS = 8, 512  # of a tile of weights, at most; of several tokens fewer columns


@triton.jit
@no_type_check
def _map_kernel(
    x, branch, gate, norm, weight, other, out, total, tokens, F, eps, x_t, branch_t, gate_t,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    tt = tl.arange(0, BT)
    rows = tl.program_id(0) * BF + tl.arange(0, BF)
    place = rows.to(tl.int64)[:, None] * GROUPS * SIZE
    goal = tt.to(tl.int64)[:, None]
    first = tl.zeros([BT, BF], tl.float32)
    second = tl.zeros([BT, BF], tl.float32)
    for group in range(GROUPS):
        sums = tl.zeros([BT, BF, BC], tl.float32)
        others = tl.zeros([BT, BF, BC], tl.float32)
        squares = tl.zeros([BT, BC], tl.float32)
        for start in range(0, SIZE, BC):
            there = start + tl.arange(0, BC) < SIZE
            cols = group * SIZE + start + tl.arange(0, BC)
            inside = (tt < tokens)[:, None] & there[None, :]
            a = entries(x, tt, x_t, cols, inside)
            if branch is not None:
                rounded = (a + entries(branch, tt, branch_t, cols, inside)).to(total.dtype.element_ty)
                a = rounded.to(tl.float32)
                once = inside & (cols * 0 + tl.program_id(0) == 0)[None, :]
                tl.store(total + goal * GROUPS * SIZE + cols[None, :], rounded, mask=once)
            if gate is not None:
                z = entries(gate, tt, gate_t, cols, inside)
                a *= z * sigmoid(z)
            squares += a * a
            a *= tl.load(norm + cols, mask=there, other=0.0).to(tl.float32)[None, :]
            tile = (rows < F)[:, None] & there[None, :]
            w = tl.load(weight + place + cols[None, :], mask=tile, other=0.0).to(tl.float32)
            sums += a[:, None, :] * w[None, :, :]
            if other is not None:
                w = tl.load(other + place + cols[None, :], mask=tile, other=0.0).to(tl.float32)
                others += a[:, None, :] * w[None, :, :]
        scale = tl.rsqrt(tl.sum(squares, 1) / SIZE + eps)[:, None]
        first += scale * tl.sum(sums, 2)
        second += scale * tl.sum(others, 2)
    if other is not None:
        first *= sigmoid(first) * second
    inside = (tt < tokens)[:, None] & (rows < F)[None, :]
    tl.store(out + goal * F + rows[None, :], first.to(out.dtype.element_ty), mask=inside)


def _map(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, norm: Tensor, weight: Tensor, other: Tensor | None,
    groups: int, eps: float,
) -> list[Tensor]:  # fmt: skip
    """The map `[..., F]` of the norm of `x, branch, gate [..., D]` by weights `[F, D]`, and with a branch the sum."""
    out = x.new_empty(*x.shape[:-1], len(weight), dtype=weight.dtype)
    sums = [] if branch is None else [x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, branch.dtype))]
    (rows, *others), strides = rows_of_tokens(x.shape[-1], x, branch, gate)
    assert rows is not None
    tokens, size = triton.next_power_of_2(max(1, len(rows))), x.shape[-1] // groups
    if rows.numel():
        launch(_map_kernel, (triton.cdiv(len(weight), ROWS),))(
            rows, *others, norm, weight.contiguous(), None if other is None else other.contiguous(), out,
            sums[0] if sums else None, len(rows), len(weight), eps, *strides, GROUPS=groups, SIZE=size, BT=tokens,
            BF=ROWS, BC=max(16, min(COLUMNS // tokens, triton.next_power_of_2(size))), num_warps=8,
        )  # fmt: skip
    return [out, *sums]


declare("triton_map", _map)
