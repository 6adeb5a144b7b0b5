"""Running angles of Mamba-3, as `halflife.ops.trapezoid` defines them, in one pass over a sequence."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.op import declare, declare_gradients
from halflife.ops.backends.triton.passes.parts import sums_of_parts
from halflife.ops.backends.triton.passes.rows import evenly

TILE = 2048  # entries of a program at once
SLOPE = tl.constexpr(0.15915494309189535)  # 1 / 2π


@triton.jit
@no_type_check
def tanh(x):
    """tanh(x), with an error relative to the result, by the polynomial of Cephes below 0.625."""
    y = x * x
    series = -5.70498872745e-3 * y + 2.06390887954e-2
    series = series * y - 5.37397155531e-2
    series = series * y + 1.33314422036e-1
    series = series * y - 3.33332819422e-1
    z = tl.exp(-2 * tl.abs(x))
    large = tl.where(x < 0, -1.0, 1.0) * (1 - z) / (1 + z)
    return tl.where(tl.abs(x) < 0.625, series * y * x + x, large)


@triton.jit
@no_type_check
def _speed(rate, rows, h, cols, inside, r_t, r_h, BOUNDED: tl.constexpr):
    """Return `(ω, dω/dr)` of tokens, with which a step Δ turns by Δ ω, `[R, P]`."""
    place = rows.to(tl.int64)[:, None] * r_t + h * r_h + cols[None, :]
    r = tl.load(rate + place, mask=inside, other=0.0).to(tl.float32)
    if BOUNDED:
        bounded = tanh(r)
        speed = bounded / 2
        slope = (1 - bounded * bounded) / 2
    else:
        speed = r * SLOPE
        slope = tl.full(r.shape, SLOPE, tl.float32)
    return speed, slope


@triton.jit
@no_type_check
def span(cu_seqlens, n, T):
    """The first token of sequence n, and the token after its last one."""
    if cu_seqlens is None:
        start, stop = n * T, (n + 1) * T
    else:
        start, stop = tl.load(cu_seqlens + n).to(tl.int32), tl.load(cu_seqlens + n + 1).to(tl.int32)
    return start, stop


@triton.jit
@no_type_check
def _angles_kernel(
    step, rate, first, cu_seqlens, angle, last, T, H, P, r_t, r_h,
    BOUNDED: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The angles of one sequence and head, tile after tile, in float64."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, stop = span(cu_seqlens, n, T)
    cols = tl.arange(0, BP)
    whole = tl.program_id(0).to(tl.int64) * P + cols
    sums = tl.zeros([BP], tl.float64)
    if first is not None:
        sums += tl.load(first + whole, mask=cols < P, other=0.0).to(tl.float64)
    for begin in range(start, stop, BR):
        rows = begin + tl.arange(0, BR)
        inside = (rows < stop)[:, None] & (cols < P)[None, :]
        at = rows.to(tl.int64) * H + h
        speed, _ = _speed(rate, rows, h, cols, inside, r_t, r_h, BOUNDED)
        turns = tl.load(step + at, mask=rows < stop, other=0.0).to(tl.float32)[:, None] * speed
        total = tl.cumsum(turns.to(tl.float64), 0) + sums[None, :]
        total -= tl.floor(total + 0.5)
        tl.store(angle + at[:, None] * P + cols[None, :], total.to(tl.float32), mask=inside)
        sums = tl.sum(tl.where((rows == begin + BR - 1)[:, None], total, 0.0), 0)  # what is outside adds 0
    tl.store(last + whole, sums, mask=cols < P)


@triton.jit
@no_type_check
def _angles_back_kernel(
    step, rate, cu_seqlens, dangle, dlast, dstep, drate, dfirst, T, H, P, r_t, r_h,
    BOUNDED: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The gradients of steps and rates of one sequence and head, from the last tile to the first."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, stop = span(cu_seqlens, n, T)
    cols = tl.arange(0, BP)
    whole = tl.program_id(0).to(tl.int64) * P + cols
    later = tl.zeros([BP], tl.float64)
    if dlast is not None:
        later += tl.load(dlast + whole, mask=cols < P, other=0.0).to(tl.float64)
    for tile in range(tl.cdiv(stop - start, BR)):
        rows = stop - (tile + 1) * BR + tl.arange(0, BR)
        inside = (rows >= start)[:, None] & (cols < P)[None, :]
        at = rows.to(tl.int64) * H + h
        place = at[:, None] * P + cols[None, :]
        d = tl.load(dangle + place, mask=inside, other=0.0).to(tl.float32)
        of_turns = tl.cumsum(d, 0, reverse=True) + later.to(tl.float32)[None, :]
        later += tl.sum(d, 0).to(tl.float64)
        speed, slope = _speed(rate, rows, h, cols, inside, r_t, r_h, BOUNDED)
        size = tl.load(step + at, mask=rows >= start, other=0.0).to(tl.float32)[:, None]
        tl.store(dstep + at, tl.sum(of_turns * speed, 1).to(dstep.dtype.element_ty), mask=rows >= start)
        tl.store(drate + place, (of_turns * size * slope).to(drate.dtype.element_ty), mask=inside)
    if dfirst is not None:
        tl.store(dfirst + whole, later.to(dfirst.dtype.element_ty), mask=cols < P)


def _grid(
    step: Tensor, rate: Tensor, cu_seqlens: Tensor | None, entries: int
) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    """The grid, T, H, P and the strides of the rates, and the size of a tile."""
    batch, length, heads = step.shape
    pairs = rate.shape[-1]
    block = max(16, triton.next_power_of_2(pairs))
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    strides = rate.stride(1), 0 if rate.ndim == 3 else rate.stride(2)
    tile = {"BR": max(16, entries // block), "BP": block}
    return (sequences * heads,), (length, heads, pairs, *strides), tile


def _angles(
    step: Tensor, rate: Tensor, first: Tensor | None, cu_seqlens: Tensor | None, bounded: bool
) -> tuple[Tensor, Tensor]:
    """φ `[B, T, H, P]` in float32, and that of the last token of each sequence in float64."""
    rate = evenly(rate)
    grid, sizes, tile = _grid(step, rate, cu_seqlens, TILE)
    angle = step.new_empty(*step.shape, sizes[2], dtype=torch.float32)
    last = step.new_empty(grid[0] // sizes[1], *sizes[1:3], dtype=torch.float64)
    if last.numel():
        first = None if first is None else first.contiguous()
        launch(_angles_kernel, grid)(
            step.contiguous(), rate, first, cu_seqlens, angle, last, *sizes, BOUNDED=bounded, **tile
        )
    return angle, last


def _angles_backward(
    dangle: Tensor, dlast: Tensor | None, step: Tensor, rate: Tensor, first: Tensor | None, cu_seqlens: Tensor | None,
    bounded: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rate = evenly(rate)
    grid, sizes, tile = _grid(step, rate, cu_seqlens, TILE // 2)
    dstep = step.new_empty(step.shape, dtype=step.dtype)
    drate = dangle.new_empty(dangle.shape, dtype=torch.float32 if rate.ndim == 3 else rate.dtype)
    dfirst = step.new_empty(0) if first is None else torch.empty_like(first, memory_format=torch.contiguous_format)
    if grid[0] and sizes[2]:
        launch(_angles_back_kernel, grid)(
            step.contiguous(), rate, cu_seqlens, dangle, dlast, dstep, drate, None if first is None else dfirst,
            *sizes, BOUNDED=bounded, **tile,
        )  # fmt: skip
    if rate.ndim == 3:
        like = rate.new_empty(rate.shape)
        found = sums_of_parts((drate, like, sizes[2]))[0] if drate.numel() else like
        assert found is not None
        drate = found
    return dstep, drate, dfirst


def _angles_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.bounded = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)  # a training step does not use the last angles


def _angles_grad(ctx: Any, dangle: Tensor | None, dlast: Tensor | None) -> tuple[Any, ...]:
    only_first_derivatives()
    step, rate, first, bounds = ctx.saved_tensors
    shape = *step.shape, rate.shape[-1]
    dangle = step.new_zeros(shape, dtype=torch.float32) if dangle is None else dangle.contiguous()
    dlast = None if dlast is None else dlast.contiguous()
    dstep, drate, dfirst = _of_angles(dangle, dlast, step, rate, first, bounds, ctx.bounded)
    return dstep, drate, None if first is None else dfirst, None, None


_of_angles = declare_gradients("triton_running_angles_backward", _angles_backward)
declare("triton_running_angles", _angles).register_autograd(_angles_grad, setup_context=_angles_save)
