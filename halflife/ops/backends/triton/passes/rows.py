"""Tensors as rows of tokens, as the kernels of passes read them."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.arguments import dense
from halflife.ops.backends.triton.launch import launch


@triton.jit
@no_type_check
def entries(x, rows, stride, cols, inside):
    """Load rows and columns of a matrix in float32; 0 outside."""
    return tl.load(x + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)


def as_rows(x: Tensor, channels: int) -> tuple[Tensor, int]:
    """The tokens of a tensor as rows, of which each has stride 1, and the stride between them."""
    rows = dense(x.reshape(-1, channels))
    return rows, rows.stride(0)


def rows_of_tokens(channels: int, *tensors: Tensor | None) -> tuple[list[Tensor | None], list[int]]:
    """Tensors as rows, and the strides of these; 0 for None."""
    pairs = [(None, 0) if x is None else as_rows(x, channels) for x in tensors]
    return [x for x, _ in pairs], [stride for _, stride in pairs]


def sum_dtype(x: Tensor, branch: Tensor | None) -> torch.dtype:
    """The dtype of `x + branch`, or of x if there is no branch."""
    return x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)


def evenly(x: Tensor) -> Tensor:
    """A tensor `[B, T, …]` whose tokens are evenly apart, and its last axis too."""
    x = dense(x)
    return x if x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


@triton.jit
@no_type_check
def sequence_of(t, b, cu_seqlens, N, T, steps):
    """Return the sequences of tokens `t` of rows `b`, their first tokens, and the tokens after their last ones."""
    if cu_seqlens is None:
        n, start, stop = b, t * 0, t * 0 + T
    else:
        n = t * 0
        high = n + N
        for _ in range(steps):  # the last sequence that begins at t or before
            middle = (n + high) // 2
            begun = tl.load(cu_seqlens + middle) <= t
            n = tl.where(begun, middle, n)
            high = tl.where(begun, high, middle)
        start, stop = tl.load(cu_seqlens + n).to(tl.int32), tl.load(cu_seqlens + n + 1).to(tl.int32)
    return n, start, stop


@triton.jit
@no_type_check
def sequence_of_state(number, slots, cu_seqlens, T):
    """As `sequence_of`, for the slots of the state of one sequence; its row of x comes second."""
    n = slots * 0 + number
    if cu_seqlens is None:
        b, start, stop = n, slots * 0, slots * 0 + T
    else:
        b = slots * 0
        start, stop = tl.load(cu_seqlens + n).to(tl.int32), tl.load(cu_seqlens + n + 1).to(tl.int32)
    return n, b, start, stop


@triton.jit
@no_type_check
def _sums_kernel(x, out, rows, columns, BR: tl.constexpr, BC: tl.constexpr):
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros([BR, BC], tl.float32)
    for start in range(0, rows, BR):
        at = start + tl.arange(0, BR)
        inside = (at < rows)[:, None] & (cols < columns)[None, :]
        total += tl.load(x + at[:, None] * columns + cols[None, :], mask=inside, other=0.0)
    tl.store(out + cols, tl.sum(total, 0).to(out.dtype.element_ty), mask=cols < columns)


def gradient_of(sums: Tensor, *parameters: Tensor | None) -> Tensor:
    """The sum of what programs found, `[programs, …]` in float32, in the dtype of the parameters if they have one.

    Torch's sum would need a cast after it for parameters of 16 bits.
    """
    dtypes = {x.dtype for x in parameters if x is not None}
    if len(dtypes) != 1 or dtypes == {sums.dtype}:
        return sums.sum(0)
    out = sums.new_empty(sums.shape[1:], dtype=dtypes.pop())
    launch(_sums_kernel, (triton.cdiv(out.numel(), 32),))(sums, out, len(sums), out.numel(), BR=64, BC=32)
    return out
