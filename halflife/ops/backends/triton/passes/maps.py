"""A linear map of few tokens, as while decoding, with the norm before it and SwiGLU after it in one kernel.

    a = x + branch, or x ⊙ silu(gate);    n = a / √(mean a² + eps) ⊙ norm;    out = n Wᵀ, or silu(n Wᵀ) ⊙ (n Uᵀ)

The means are over groups of channels. A program has some rows of W and one token. It reads all channels of the token,
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
from halflife.ops.backends.triton.passes.rows import rows_of_tokens

ROWS, COLUMNS = 8, 1024  # of a tile of weights, at most


@triton.jit
@no_type_check
def _map_kernel(
    x, branch, gate, norm, weight, other, out, total, tokens, F, eps, x_t, branch_t, gate_t,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) % tokens).to(tl.int64)  # neighbours read the same weights
    block = tl.program_id(0) // tokens
    rows = block * BF + tl.arange(0, BF)
    place = rows.to(tl.int64)[:, None] * GROUPS * SIZE
    first = tl.zeros([BF], tl.float32)
    second = tl.zeros([BF], tl.float32)
    for group in range(GROUPS):
        sums = tl.zeros([BF, BC], tl.float32)
        others = tl.zeros([BF, BC], tl.float32)
        squares = tl.zeros([BC], tl.float32)
        for start in range(0, SIZE, BC):
            inside = start + tl.arange(0, BC) < SIZE
            cols = group * SIZE + start + tl.arange(0, BC)
            a = tl.load(x + token * x_t + cols, mask=inside, other=0.0).to(tl.float32)
            if branch is not None:
                a += tl.load(branch + token * branch_t + cols, mask=inside, other=0.0).to(tl.float32)
                a = a.to(total.dtype.element_ty)
                tl.store(total + token * GROUPS * SIZE + cols, a, mask=inside & (cols * 0 + block == 0))
                a = a.to(tl.float32)
            if gate is not None:
                z = tl.load(gate + token * gate_t + cols, mask=inside, other=0.0).to(tl.float32)
                a *= z * sigmoid(z)
            squares += a * a
            a *= tl.load(norm + cols, mask=inside, other=0.0).to(tl.float32)
            tile = (rows < F)[:, None] & inside[None, :]
            sums += a[None, :] * tl.load(weight + place + cols[None, :], mask=tile, other=0.0).to(tl.float32)
            if other is not None:
                others += a[None, :] * tl.load(other + place + cols[None, :], mask=tile, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares) / SIZE + eps)
        first += scale * tl.sum(sums, 1)
        second += scale * tl.sum(others, 1)
    if other is not None:
        first *= sigmoid(first) * second
    tl.store(out + token * F + rows, first.to(out.dtype.element_ty), mask=rows < F)


def _map(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, norm: Tensor, weight: Tensor, other: Tensor | None,
    groups: int, eps: float,
) -> list[Tensor]:  # fmt: skip
    """The map `[..., F]` of the norm of `x, branch, gate [..., D]` by weights `[F, D]`, and with a branch the sum."""
    out = x.new_empty(*x.shape[:-1], len(weight), dtype=weight.dtype)
    sums = [] if branch is None else [x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, branch.dtype))]
    (rows, *others), strides = rows_of_tokens(x.shape[-1], x, branch, gate)
    assert rows is not None
    size = x.shape[-1] // groups
    if rows.numel():
        launch(_map_kernel, (triton.cdiv(len(weight), ROWS) * len(rows),))(
            rows, *others, norm, weight.contiguous(), None if other is None else other.contiguous(), out,
            sums[0] if sums else None, len(rows), len(weight), eps, *strides, GROUPS=groups, SIZE=size, BF=ROWS,
            BC=max(16, min(COLUMNS, triton.next_power_of_2(size))), num_warps=8,
        )  # fmt: skip
    return [out, *sums]


declare("triton_map", _map)
