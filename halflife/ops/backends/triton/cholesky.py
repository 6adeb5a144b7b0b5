"""Cholesky factors of regularised Gram matrices, and their inverses, as a Triton kernel."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch

TINY = tl.constexpr(float(torch.finfo(torch.float32).tiny))


@triton.jit
@no_type_check
def _inverse_block(a, ridge):
    """L⁻¹ of `a = L Lᵀ [16, 16]`, and whether a pivot was not positive.

    Gaussian elimination turns the rows `[a | I]` into `[Lᵀ | L⁻¹]`. In exact arithmetic no pivot is below the ridge,
    so smaller ones are rounding errors and become the ridge.
    """
    rows = tl.arange(0, 16)[:, None]
    cols = tl.arange(0, 16)[None, :]
    inverse = tl.where(rows == cols, 1.0, 0.0)
    failed = 0
    for c in range(16):
        row = tl.sum(tl.where(rows == c, a, 0.0), 0)
        below = tl.sum(tl.where((cols == c) & (rows > c), a, 0.0), 1)
        pivot = tl.sum(tl.where(tl.arange(0, 16) == c, row, 0.0))
        failed = failed | (pivot <= 0).to(tl.int32)
        scale = 1 / tl.sqrt(tl.where(pivot < ridge, ridge, pivot))  # NaN stays
        own = scale * tl.sum(tl.where(rows == c, inverse, 0.0), 0)
        factor = scale * below
        a -= factor[:, None] * (scale * row)[None, :]
        inverse = tl.where(rows == c, own[None, :], inverse - factor[:, None] * own[None, :])
    return inverse, failed


@triton.jit
@no_type_check
def _block_of(x, i, j, stride, R: tl.constexpr):
    """Block i, j of the matrix at `x`, and where it lies within R rows and columns."""
    rows = i * 16 + tl.arange(0, 16)[:, None]
    cols = j * 16 + tl.arange(0, 16)[None, :]
    return x + rows * stride + cols, (rows < R) & (cols < R)


@triton.jit
@no_type_check
def _inverse_kernel(gram, norms, out, failures, ridge, stride, stride_row, R: tl.constexpr, N: tl.constexpr):
    store_inverse(gram, norms, out, failures, ridge, tl.program_id(0).to(tl.int64), stride, stride_row, R, N)


@triton.jit
@no_type_check
def store_inverse(gram, norms, out, failures, ridge, at, stride, stride_row, R: tl.constexpr, N: tl.constexpr):
    """L⁻¹ of `G / m² + ε I = L Lᵀ`, for matrix `at`, of N blocks of rows.

    L has the blocks `L_ij = (G_ij − Σ_{k<j} L_ik L_jkᵀ) L_jj⁻ᵀ`, and its inverse W the blocks
    `W_ij = −L_ii⁻¹ Σ_{j≤k<i} L_ik W_kj`.
    """
    norm = tl.load(norms + at)
    scale = 1 / tl.where(norm >= TINY, norm, 1.0)
    eye = tl.where(tl.arange(0, 16)[:, None] == tl.arange(0, 16)[None, :], 1.0, 0.0)
    zeros = tl.zeros([16, 16], tl.float32)
    failed = 0
    lower = ()  # the blocks of L, column by column, with the inverse ones L_jj⁻¹ and zeros above
    for j in tl.static_range(N):
        for i in tl.static_range(N):
            if i < j:
                lower = lower + (zeros,)  # noqa: RUF005 (Triton has no starred tuples)
            else:
                place, inside = _block_of(gram + at * stride, i, j, stride_row, R)
                a = tl.load(place, mask=inside, other=0.0) * scale
                for k in tl.static_range(j):
                    a -= tl.dot(lower[k * N + i], tl.trans(lower[k * N + j]), input_precision="ieee")
                if i == j:
                    # Rows behind the last one are those of the identity.
                    own = tl.where(tl.arange(0, 16) + j * 16 < R, ridge, 1.0)
                    inverse, wrong = _inverse_block(a + eye * own[:, None], ridge)
                    failed = failed | wrong
                    lower = lower + (inverse,)  # noqa: RUF005 (Triton has no starred tuples)
                else:
                    lower = lower + (tl.dot(a, tl.trans(lower[j * N + j]), input_precision="ieee"),)  # noqa: RUF005 (Triton has no starred tuples)
    tl.store(failures + at, failed)
    for j in tl.static_range(N):
        column = ()  # the blocks of W
        for i in tl.static_range(N):
            place, inside = _block_of(out + at * R * R, i, j, R, R)
            block = zeros
            if i == j:
                block = lower[j * N + j]
            if i > j:
                for k in tl.static_range(j, i):
                    block = tl.dot(lower[k * N + i], column[k], block, input_precision="ieee")
                block = -tl.dot(lower[i * N + i], block, input_precision="ieee")
            column = column + (block,)  # noqa: RUF005 (Triton has no starred tuples)
            tl.store(place, block, mask=inside)


def inverse_factors(gram: Tensor, norms: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """L⁻¹ `[…, R, R]` of `G / m² + ε I = L Lᵀ`, and how many factorisations met a pivot that is not positive.

    `gram [n, R, R]` may lie within a wider matrix, and `norms [n]` are m².
    """
    count, rank = gram.shape[0], gram.shape[-1]
    out = torch.empty(count, rank, rank, dtype=torch.float32, device=gram.device)
    failures = torch.empty(count, dtype=torch.int32, device=gram.device)
    if count:
        launch(_inverse_kernel, (count,))(
            gram, norms, out, failures, ridge, gram.stride(0), gram.stride(1), rank, triton.cdiv(rank, 16),
            num_warps=1 if rank <= 32 else 2,
        )  # fmt: skip
    return out, failures.sum()
