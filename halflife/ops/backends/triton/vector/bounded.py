"""Log-decays above a lower bound, and their keys, as `halflife.ops.laws.bounded_decay` defines them."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.split import new_gradient
from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.laws import PROGRAMS, blocks, log1p, sigmoid, softplus
from halflife.ops.backends.triton.op import declare, declare_gradients
from halflife.ops.backends.triton.passes.rows import as_rows


@triton.jit
@no_type_check
def _given(f, bound, rows, cols, inside, T, D, f_b, f_t):
    """Return `(x, γ, σ(x), σ(−x))`."""
    place = ((rows // T) * f_b + (rows % T) * f_t)[:, None] + cols[None, :]
    x = tl.load(f + place, mask=inside, other=0.0).to(tl.float32)
    least = tl.zeros([1, cols.shape[0]], tl.float32)
    if bound is not None:
        least += tl.load(bound + cols, mask=cols < D, other=0.0)[None, :]
    return x, least, sigmoid(x), sigmoid(-x)


@triton.jit
@no_type_check
def _bounded_kernel(
    f, bound, g, key, rows_all, T, D, f_b, f_t, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    groups = tl.cdiv(D, BC)
    rows = (tl.program_id(0) // groups).to(tl.int64) * BR + tl.arange(0, BR)
    cols = (tl.program_id(0) % groups) * BC + tl.arange(0, BC)
    inside = (rows < rows_all)[:, None] & (cols < D)[None, :]
    x, least, share, rest = _given(f, bound, rows, cols, inside, T, D, f_b, f_t)
    k = (1 - least) * rest
    place = rows[:, None] * D + cols[None, :]
    if bound is None:
        decay = -softplus(-x)
    else:
        small = k < 0.5  # no digits are lost there
        decay = tl.where(small, log1p(-tl.where(small, k, 0.0)), tl.log(least + (1 - least) * share))
    tl.store(g + place, decay, mask=inside)
    if key is not None:
        tl.store(key + place, k.to(key.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _bounded_back_kernel(
    f, bound, dg, dkey, df, sums, rows_all, T, D, f_b, f_t, df_t, tiles, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    dbound = tl.zeros([BC], tl.float32)
    for i in range(tiles):
        rows = (tl.program_id(1).to(tl.int64) * tiles + i) * BR + tl.arange(0, BR)
        inside = (rows < rows_all)[:, None] & (cols < D)[None, :]
        _, least, share, rest = _given(f, bound, rows, cols, inside, T, D, f_b, f_t)
        place = rows[:, None] * D + cols[None, :]
        d = tl.load(dg + place, mask=inside, other=0.0)
        of_key = tl.zeros([BR, BC], tl.float32)
        if dkey is not None:
            of_key += tl.load(dkey + place, mask=inside, other=0.0).to(tl.float32)
        if bound is None:
            dx = d * rest - of_key * share * rest
        else:
            d = d / (least + (1 - least) * share)
            dx = (d - of_key) * (1 - least) * share * rest
        tl.store(df + rows[:, None] * df_t + cols[None, :], dx.to(df.dtype.element_ty), mask=inside)
        dbound += tl.sum((d - of_key) * rest, 0)
    if bound is not None:
        tl.store(sums + tl.program_id(1).to(tl.int64) * D + cols, dbound, mask=cols < D)


def _bounded(f: Tensor, bound: Tensor | None, with_key: bool) -> tuple[Tensor, Tensor]:
    """g in float32 and the keys in the dtype of f, without entries if they are not asked for; f has stride 1 in D."""
    tokens, rows, columns = blocks(f)
    g, key = f.new_empty(f.shape, dtype=torch.float32), f.new_empty(f.shape if with_key else 0)
    if f.numel():
        launch(_bounded_kernel, (triton.cdiv(f.shape[2], columns) * triton.cdiv(tokens, rows),))(
            f, bound, g, key if with_key else None, tokens, f.shape[1], f.shape[2], f.stride(0), f.stride(1),
            BR=rows, BC=columns,
        )  # fmt: skip
    return g, key


def _bounded_backward(dg: Tensor, dkey: Tensor | None, f: Tensor, bound: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of f and of the bound, which has no entries for None."""
    tokens, rows, columns = blocks(f)
    tiles = max(1, triton.cdiv(triton.cdiv(tokens, rows), PROGRAMS))
    programs = triton.cdiv(tokens, rows * tiles)
    df, sums = new_gradient(f), f.new_empty(programs, 0 if bound is None else f.shape[2], dtype=torch.float32)
    if f.numel():
        launch(_bounded_back_kernel, (triton.cdiv(f.shape[2], columns), programs))(
            f, bound, dg, dkey, df, sums, tokens, f.shape[1], f.shape[2], f.stride(0), f.stride(1),
            as_rows(df, f.shape[2])[1], tiles, BR=rows, BC=columns,
        )  # fmt: skip
    return df, sums.sum(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.with_key = inputs
    ctx.save_for_backward(*tensors)


def _grad(ctx: Any, dg: Tensor, dkey: Tensor) -> tuple[Any, ...]:
    only_first_derivatives()
    f, bound = ctx.saved_tensors
    df, dbound = _gradients(dg.contiguous(), dkey.contiguous() if ctx.with_key else None, f, bound)
    return df, None if bound is None else dbound, None


_gradients = declare_gradients("triton_bounded_decay_backward", _bounded_backward)
declare("triton_bounded_decay", _bounded).register_autograd(_grad, setup_context=_save)
