"""The short convolution with its bias and SiLU, its states and their gradients (`halflife.ops.conv`).

A program has some tokens and channels. Behind the programs of tokens stand those of the states, one for each sequence:
a state is W − 1 inputs, so they run the same functions at the positions before a sequence or at its end.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.split import new_gradient
from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.laws import sigmoid
from halflife.ops.backends.triton.op import declare, declare_gradients
from halflife.ops.backends.triton.passes.rows import as_rows, gradient_of, sequence_of, sequence_of_state

COLUMNS, ENTRIES = 64, 1024  # channels of a tile, and its tokens times channels
MOST_PARTS = 3  # tensors that the outputs may be
PROGRAMS = 128  # programs a block of channels with tokens, at most, in the backward pass


@triton.jit
@no_type_check
def _input(x, state, t, start, n, b, cols, inside, D, x_b, x_t, W: tl.constexpr):
    """Inputs at positions `t` of sequences that begin at `start`, before which stands the state: `[R, C]`."""
    given = (t >= start)[:, None]
    place = (b.to(tl.int64) * x_b + t.to(tl.int64) * x_t)[:, None] + cols[None, :]
    value = tl.load(x + place, mask=inside & given, other=0.0).to(tl.float32)
    if state is not None:
        place = (n.to(tl.int64)[:, None] * D + cols[None, :]) * (W - 1) + (t - start + W - 1)[:, None]
        value += tl.load(state + place, mask=inside & (given == 0), other=0.0).to(tl.float32)
    return value


@triton.jit
@no_type_check
def _sum_of_taps(x, weight, bias, state, t, start, n, b, cols, in_cols, inside, D, x_b, x_t, W: tl.constexpr):
    """Outputs before the activation, `[R, C]`."""
    y = tl.zeros([t.shape[0], cols.shape[0]], tl.float32)
    if bias is not None:
        y += tl.load(bias + cols, mask=in_cols, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(W):
        tap = tl.load(weight + cols * W + i, mask=in_cols, other=0.0).to(tl.float32)
        y += tap[None, :] * _input(x, state, t - (W - 1) + i, start, n, b, cols, inside, D, x_b, x_t, W)
    return y


@triton.jit
@no_type_check
def _length(y, cols, UNITS: tl.constexpr):
    """1 / √(‖y‖² + ε) of each row, if its channels are those of a unit vector; else 1."""
    return tl.where(cols < UNITS, tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None], 1.0)


@triton.jit
@no_type_check
def _part_of(first, x0, x1, x2, n0, n1, n2):
    """Return which of up to three tensors of n0, n1 and n2 channels has the channel `first`, and its channels.

    Its pointer is moved, so that channels may be counted from the first one of all tensors.
    """
    if x1 is None:
        return x0, n0
    elif x2 is None:
        return tl.where(first < n0, x0, x1 - n0), tl.where(first < n0, n0, n1)
    else:
        later = tl.where(first < n0 + n1, x1 - n0, x2 - (n0 + n1))
        return tl.where(first < n0, x0, later), tl.where(first < n0, n0, tl.where(first < n0 + n1, n1, n2))


@triton.jit
@no_type_check
def convolve(
    program, x, weight, bias, rate, state, cu_seqlens, y0, y1, y2, final, rows_all, T, D, N, steps, blocks, x_b, x_t,
    n0, n1, n2, W: tl.constexpr, SILU: tl.constexpr, UNITS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store the outputs, or final states, of a program. With a `rate` they are `−e^rate relu(y)`."""
    groups = tl.cdiv(D, BC)
    block = program // groups
    cols = (program % groups) * BC + tl.arange(0, BC)
    in_cols = cols < D
    if block < blocks:
        rows = block * BR + tl.arange(0, BR)
        b, t = rows // T, rows % T
        inside = (rows < rows_all)[:, None] & in_cols[None, :]
        n, start, stop = sequence_of(t, b, cu_seqlens, N, T, steps)
        out = _sum_of_taps(x, weight, bias, state, t, start, n, b, cols, in_cols, inside, D, x_b, x_t, W)
        if SILU:
            out *= sigmoid(out)
        if UNITS > 0:
            out *= _length(out, cols, UNITS)
        if rate is not None:
            out = tl.where(out < 0, 0.0, out) * _of_rate(rate, cols, in_cols)
        y, channels = _part_of((program % groups) * BC, y0, y1, y2, n0, n1, n2)
        place = rows.to(tl.int64)[:, None] * channels + cols[None, :]
        tl.store(y + place, out.to(y.dtype.element_ty), mask=inside)
    else:
        slots = tl.arange(0, BR)
        n, b, start, stop = sequence_of_state(block - blocks, slots, cu_seqlens, T)
        inside = (slots < W - 1)[:, None] & in_cols[None, :]
        last = _input(x, state, stop - (W - 1) + slots, start, n, b, cols, inside, D, x_b, x_t, W)
        place = (n.to(tl.int64)[:, None] * D + cols[None, :]) * (W - 1) + slots[:, None]
        tl.store(final + place, last.to(final.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _of_rate(rate, cols, in_cols):
    """−e^rate, `[1, C]`."""
    return -tl.exp(tl.load(rate + cols, mask=in_cols, other=0.0))[None, :]


@triton.jit
@no_type_check
def _forward_kernel(
    x, weight, bias, state, cu_seqlens, y0, y1, y2, final, rows_all, T, D, N, steps, blocks, x_b, x_t, n0, n1, n2,
    W: tl.constexpr, SILU: tl.constexpr, UNITS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    convolve(
        tl.program_id(0), x, weight, bias, None, state, cu_seqlens, y0, y1, y2, final, rows_all, T, D, N, steps,
        blocks, x_b, x_t, n0, n1, n2, W, SILU, UNITS, BR, BC,
    )  # fmt: skip


@triton.jit
@no_type_check
def _of_sum(
    x, weight, bias, rate, state, dy, dy_t, t, start, stop, n, b, cols, in_cols, inside, T, D, x_b, x_t,
    W: tl.constexpr, SILU: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The gradient of the sum of taps at positions `t`, 0 outside of the sequence, `[R, C]`."""
    inside = inside & ((t >= start) & (t < stop))[:, None]
    place = (b.to(tl.int64) * T + t)[:, None] * dy_t + cols[None, :]
    d = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    if SILU or UNITS > 0:
        y = _sum_of_taps(x, weight, bias, state, t, start, n, b, cols, in_cols, inside, D, x_b, x_t, W)
        s = sigmoid(y) if SILU else 1.0
        if UNITS > 0:
            vector = y * s
            length = _length(vector, cols, UNITS)
            along = length * length * tl.sum(vector * d, 1)[:, None]
            d = length * (d - tl.where(cols < UNITS, along * vector, 0.0))
        if SILU:
            d *= s * (1 + y * (1 - s))
    if rate is not None:
        y = _sum_of_taps(x, weight, bias, state, t, start, n, b, cols, in_cols, inside, D, x_b, x_t, W)
        d = tl.where(y > 0, d * _of_rate(rate, cols, in_cols), 0.0)
    return tl.where(inside, d, 0.0)


@triton.jit
@no_type_check
def _of_input(
    x, weight, bias, rate, state, dy, dy_t, dfinal, t, start, stop, n, b, cols, in_cols, inside, T, D, x_b, x_t,
    W: tl.constexpr, SILU: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The gradient of the inputs at positions `t`, which may be those of the state before `start`, `[R, C]`."""
    grad = tl.zeros([t.shape[0], cols.shape[0]], tl.float32)
    for j in range(W):
        tap = tl.load(weight + cols * W + (W - 1 - j), mask=in_cols, other=0.0).to(tl.float32)
        grad += tap[None, :] * _of_sum(
            x, weight, bias, rate, state, dy, dy_t, t + j, start, stop, n, b, cols, in_cols, inside, T, D, x_b, x_t, W,
            SILU, UNITS,
        )  # fmt: skip
    if dfinal is not None:
        slot = t - stop + W - 1
        place = (n.to(tl.int64)[:, None] * D + cols[None, :]) * (W - 1) + slot[:, None]
        grad += tl.load(dfinal + place, mask=inside & (slot >= 0)[:, None], other=0.0).to(tl.float32)
    return grad


@triton.jit
@no_type_check
def _backward_kernel(
    x, weight, bias, rate, state, cu_seqlens, dy0, dy1, dy2, dfinal, dx, dstate, sums, rows_all, T, D, N, steps, blocks,
    tiles, x_b, x_t, dx_t, n0, n1, n2,
    W: tl.constexpr, BW: tl.constexpr, SILU: tl.constexpr, UNITS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    groups = tl.cdiv(D, BC)
    block = tl.program_id(0) // groups
    cols = (tl.program_id(0) % groups) * BC + tl.arange(0, BC)
    in_cols = cols < D
    dy, dy_t = _part_of((tl.program_id(0) % groups) * BC, dy0, dy1, dy2, n0, n1, n2)
    if block < blocks:
        taps = tl.arange(0, BW)
        total = tl.zeros([BW, BC], tl.float32)  # of the taps, and of the bias and the rate after them
        for i in range(tiles):
            rows = (block * tiles + i) * BR + tl.arange(0, BR)
            b, t = rows // T, rows % T
            inside = (rows < rows_all)[:, None] & in_cols[None, :]
            n, start, stop = sequence_of(t, b, cu_seqlens, N, T, steps)
            grad = _of_input(
                x, weight, bias, rate, state, dy, dy_t, dfinal, t, start, stop, n, b, cols, in_cols, inside, T, D, x_b,
                x_t, W, SILU, UNITS,
            )  # fmt: skip
            tl.store(dx + rows.to(tl.int64)[:, None] * dx_t + cols[None, :], grad.to(dx.dtype.element_ty), mask=inside)
            d = _of_sum(
                x, weight, bias, rate, state, dy, dy_t, t, start, stop, n, b, cols, in_cols, inside, T, D, x_b, x_t, W,
                SILU, UNITS,
            )  # fmt: skip
            for j in tl.static_range(W):
                before = _input(x, state, t - (W - 1) + j, start, n, b, cols, inside, D, x_b, x_t, W)
                total += tl.where((taps == j)[:, None], tl.sum(d * before, 0)[None, :], 0.0)
            total += tl.where((taps == W)[:, None], tl.sum(d, 0)[None, :], 0.0)
            if rate is not None:
                y = _sum_of_taps(x, weight, bias, state, t, start, n, b, cols, in_cols, inside, D, x_b, x_t, W)
                total += tl.where((taps == W + 1)[:, None], tl.sum(d * y, 0)[None, :], 0.0)
        COUNT: tl.constexpr = W + 1 if rate is None else W + 2
        entry = tl.where((taps < W)[:, None], cols[None, :] * W + taps[:, None], taps[:, None] * D + cols[None, :])
        there = (taps < COUNT)[:, None] & in_cols[None, :]
        tl.store(sums + block.to(tl.int64) * D * COUNT + entry, total, mask=there)
    else:
        slots = tl.arange(0, BR)
        n, b, start, stop = sequence_of_state(block - blocks, slots, cu_seqlens, T)
        inside = (slots < W - 1)[:, None] & in_cols[None, :]
        grad = _of_input(
            x, weight, bias, rate, state, dy, dy_t, dfinal, start - (W - 1) + slots, start, stop, n, b, cols, in_cols,
            inside, T, D, x_b, x_t, W, SILU, UNITS,
        )  # fmt: skip
        goal = (n.to(tl.int64)[:, None] * D + cols[None, :]) * (W - 1) + slots[:, None]
        tl.store(dstate + goal, grad.to(dstate.dtype.element_ty), mask=inside)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None, activated: bool,
    dtype: torch.dtype, units: int, size: int, parts: list[int],
) -> list[Tensor]:  # fmt: skip
    """The final states `[N, D, W − 1]` and then the outputs `[B, T, D]`, in `dtype`.

    x has stride 1 in D, and the others are contiguous. The first `units` outputs are unit vectors of `size` channels.
    The outputs are tensors of `parts` channels, if these are up to three and each has whole tiles, and else one tensor.
    """
    batch, length, channels = x.shape
    width, sequences = weight.shape[1], batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows, columns = tile(units, size)
    parts = parts if len(parts) <= MOST_PARTS and not any(part % columns for part in parts) else [channels]
    ys = [x.new_empty(batch, length, part, dtype=dtype) for part in parts]
    final = x.new_empty(sequences, channels, width - 1, dtype=dtype)
    blocks = triton.cdiv(batch * length, rows)
    programs = (blocks + (sequences if width > 1 else 0)) * triton.cdiv(channels, columns)
    if programs:
        launch(_forward_kernel, (programs,))(
            x, weight, bias, state, cu_seqlens, *_padded(ys, None), final, batch * length, length, channels, sequences,
            sequences.bit_length(), blocks, x.stride(0), x.stride(1), *_padded(parts, 0), W=width, SILU=activated,
            UNITS=units, BR=rows, BC=columns,
        )  # fmt: skip
    return [final, *ys]


def convolve_backward(
    dys: list[Tensor], dfinal: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, rate: Tensor | None,
    state: Tensor | None, cu_seqlens: Tensor | None, activated: bool, of_state: bool, units: int, size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, of the taps `[D, W]`, the bias and a rate together, and of the state if asked for."""
    batch, length, channels = x.shape
    width, sequences = weight.shape[1], batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows, columns = tile(units, size)
    tiles = max(1, triton.cdiv(triton.cdiv(batch * length, rows), PROGRAMS))
    blocks = triton.cdiv(batch * length, rows * tiles)
    count = width + (1 if rate is None else 2)
    dx, sums = new_gradient(x), x.new_empty(blocks, channels * count, dtype=torch.float32)
    dstate = x.new_empty(0) if state is None or not of_state else state.new_empty(state.shape)
    programs = (blocks + (sequences if of_state and width > 1 else 0)) * triton.cdiv(channels, columns)
    if programs:
        launch(_backward_kernel, (programs,))(
            x, weight, bias, rate, state, cu_seqlens, *_padded(dys, None), dfinal, dx, dstate, sums, batch * length,
            length, channels, sequences, sequences.bit_length(), blocks, tiles, x.stride(0), x.stride(1),
            as_rows(dx, channels)[1], *_padded([dy.shape[2] for dy in dys], 0),
            W=width, BW=triton.next_power_of_2(count), SILU=activated, UNITS=units, BR=rows, BC=columns,
        )  # fmt: skip
    return dx, gradient_of(sums, weight, bias), dstate


def _padded(given: list[Any], absent: Any) -> list[Any]:
    """Something about each of the parts, and about those that are not there."""
    return given + [absent] * (MOST_PARTS - len(given))


def tile(units: int = 0, size: int = 0) -> tuple[int, int]:
    """Tokens and channels of a tile, which has a whole unit vector."""
    columns = size if units else COLUMNS
    return ENTRIES // columns, columns


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.activated, ctx.dtype = inputs[:-3]
    ctx.unit, ctx.shapes = inputs[-3:-1], [y.shape for y in output[1:]]
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)  # a training step does not use the final state


def _grad(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    only_first_derivatives()
    x, weight, bias, state, bounds = ctx.saved_tensors
    dfinal, *given = grads
    dys = [
        x.new_zeros(shape, dtype=ctx.dtype) if dy is None else dy.contiguous()
        for dy, shape in zip(given, ctx.shapes, strict=True)
    ]
    dfinal = None if dfinal is None else dfinal.contiguous()
    of_state = state is not None and ctx.needs_input_grad[3]
    dx, sums, dstate = _gradients(dys, dfinal, x, weight, bias, None, state, bounds, ctx.activated, of_state, *ctx.unit)
    taps, shift = sums.split([weight.numel(), len(weight)])
    dweight, dbias = taps.view(weight.shape).to(weight.dtype), None if bias is None else shift.to(bias.dtype)
    return dx, dweight, dbias, dstate if of_state else None, *[None] * 6


_gradients = declare_gradients("triton_conv_backward", convolve_backward)
declare("triton_conv", _convolve).register_autograd(_grad, setup_context=_save)
