"""Log-decays in one pass over memory, forward and backward (see `halflife.ops.laws`).

A program has some tokens and channels. The gradients of the vectors (bias, rate, taper) are summed over the tokens of a
program, and then over programs by torch, in a fixed order.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.split import new_gradient
from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.op import declare, declare_gradients

SHAPES = {"softplus": 0, "logsigmoid": 1, "sigmoid": 2, "relu": 3}
TILE = 2048  # entries of a program at once
PROGRAMS = 512  # programs a block of channels, at most, each with several tiles


@triton.jit
@no_type_check
def log1p(z):
    """log(1 + z) = 2 artanh(z / (2 + z)) for −1/2 ≤ z ≤ 1, with an error relative to the result."""
    s = z / (2 + z)
    y = s * s
    series = 1 / 17 * y + 1 / 15
    series = series * y + 1 / 13
    series = series * y + 1 / 11
    series = series * y + 1 / 9
    series = series * y + 1 / 7
    series = series * y + 1 / 5
    series = series * y + 1 / 3
    return 2 * s * (series * y + 1)


@triton.jit
@no_type_check
def softplus(x):
    """log(1 + e^x), with an error relative to the result."""
    return tl.where(x > 0, x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
@no_type_check
def sigmoid(x):
    """1 / (1 + e^{−x}), without an overflow."""
    z = tl.exp(-tl.abs(x))
    return tl.where(x > 0, 1.0, z) / (1 + z)


@triton.jit
@no_type_check
def law(x, SHAPE: tl.constexpr, least, most):
    """Return `(φ(x), φ'(x))` within its limits."""
    if SHAPE == 0:
        step = softplus(x)
        slope = sigmoid(x)
    elif SHAPE == 1:
        step = softplus(-x)
        slope = -sigmoid(-x)
    elif SHAPE == 2:
        step = sigmoid(x)
        slope = step * sigmoid(-x)
    else:
        step = tl.where(x < 0, 0.0, x)  # a NaN passes through
        slope = tl.where(x > 0, 1.0, 0.0)
    if SHAPE == 0:
        slope = tl.where((step < least) | (step > most), 0.0, slope)
        step = tl.where(step < least, least, tl.where(step > most, most, step))
    return step, slope


@triton.jit
@no_type_check
def _tile(
    f, position, bias, rate, taper, rows, cols, in_rows, in_cols, T, f_b, f_t, p_b, p_t, factor, least, most,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Return `(φ, φ', the factor of φ in g, log t)` of tokens `rows` and channels `cols`, `[R, C]` or `[R]`."""
    b = rows // T
    t = rows % T
    place = (b * f_b + t * f_t)[:, None] + cols[None, :]
    x = tl.load(f + place, mask=in_rows[:, None] & in_cols[None, :], other=0.0).to(tl.float32)
    scale = tl.full([1, cols.shape[0]], factor, tl.float32)
    log_t = tl.zeros([rows.shape[0]], tl.float32)
    if bias is not None:
        x += tl.load(bias + cols, mask=in_cols, other=0.0)[None, :]
    if rate is not None:
        scale *= tl.exp(tl.load(rate + cols, mask=in_cols, other=0.0))[None, :]
    if taper is not None:
        log_t = tl.log(tl.load(position + b * p_b + t * p_t, mask=in_rows, other=1).to(tl.float32))
        stretch = -log_t[:, None] * tl.load(taper + cols, mask=in_cols, other=0.0)[None, :]
        if SHAPE == 2:
            x += stretch
        else:
            scale = scale * tl.exp(stretch)
    step, slope = law(x, SHAPE, least, most)
    return step, slope, scale, log_t


@triton.jit
@no_type_check
def put_law(
    program, f, position, bias, rate, taper, g, step, rows_all, T, D, f_b, f_t, p_b, p_t, factor, least, most,
    SHAPE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store g, and φ if asked for, of the tokens and channels of a program."""
    groups = tl.cdiv(D, BC)
    rows = (program // groups).to(tl.int64) * BR + tl.arange(0, BR)
    cols = (program % groups) * BC + tl.arange(0, BC)
    in_rows = rows < rows_all
    in_cols = cols < D
    size, _, scale, _ = _tile(
        f, position, bias, rate, taper, rows, cols, in_rows, in_cols, T, f_b, f_t, p_b, p_t, factor, least, most, SHAPE
    )
    place = rows[:, None] * D + cols[None, :]
    mask = in_rows[:, None] & in_cols[None, :]
    tl.store(g + place, (-scale * size).to(g.dtype.element_ty), mask=mask)
    if step is not None:
        tl.store(step + place, size, mask=mask)


@triton.jit
@no_type_check
def law_kernel(
    f, position, bias, rate, taper, g, step, rows_all, T, D, f_b, f_t, p_b, p_t, factor, least, most,
    SHAPE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    put_law(
        tl.program_id(0), f, position, bias, rate, taper, g, step, rows_all, T, D, f_b, f_t, p_b, p_t, factor, least,
        most, SHAPE, BR, BC,
    )  # fmt: skip


@triton.jit
@no_type_check
def _backward_kernel(
    f, position, bias, rate, taper, dg, dstep, df, sums, rows_all, T, D, f_b, f_t, df_t, p_b, p_t, factor, least, most,
    tiles, SHAPE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    in_cols = cols < D
    dbias = tl.zeros([BC], tl.float32)
    drate = tl.zeros([BC], tl.float32)
    dtaper = tl.zeros([BC], tl.float32)
    for i in range(tiles):
        rows = (tl.program_id(1).to(tl.int64) * tiles + i) * BR + tl.arange(0, BR)
        in_rows = rows < rows_all
        size, slope, scale, log_t = _tile(
            f, position, bias, rate, taper, rows, cols, in_rows, in_cols, T, f_b, f_t, p_b, p_t, factor, least, most,
            SHAPE,
        )  # fmt: skip
        place = rows[:, None] * D + cols[None, :]
        mask = in_rows[:, None] & in_cols[None, :]
        d = tl.load(dg + place, mask=mask, other=0.0).to(tl.float32)
        dlog = -d * scale * size  # of the logarithm of g's factors
        dx = -d * scale
        if dstep is not None:
            dx += tl.load(dstep + place, mask=mask, other=0.0).to(tl.float32)
        dx = dx * slope
        tl.store(df + rows[:, None] * df_t + cols[None, :], dx.to(df.dtype.element_ty), mask=mask)
        dbias += tl.sum(dx, 0)
        drate += tl.sum(dlog, 0)
        if taper is not None:
            dtaper -= tl.sum(log_t[:, None] * (dx if SHAPE == 2 else dlog), 0)
    place = tl.program_id(1).to(tl.int64) * 3 * D + cols
    tl.store(sums + place, dbias, mask=in_cols)
    tl.store(sums + place + D, drate, mask=in_cols)
    tl.store(sums + place + 2 * D, dtaper, mask=in_cols)


def _log_decay(
    f: Tensor, bias: Tensor | None, rate: Tensor | None, taper: Tensor | None, position: Tensor | None, shape: str,
    factor: float, least: float, most: float | None, with_step: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """g and φ in the shape of f, in float32; φ is without entries if it is not asked for. f has stride 1 in D."""
    tokens, rows, columns = blocks(f)
    g, step = (f.new_empty(f.shape if made else 0, dtype=torch.float32) for made in (True, with_step))
    if f.numel():
        launch(law_kernel, (triton.cdiv(f.shape[2], columns) * triton.cdiv(tokens, rows),))(
            f, position, bias, rate, taper, g, step if with_step else None, tokens, f.shape[1], f.shape[2],
            f.stride(0), f.stride(1), *positions(position), factor, least, limit(most),
            SHAPE=SHAPES[shape], BR=rows, BC=columns,
        )  # fmt: skip
    return g, step


def log_decay_backward(
    dg: Tensor, dstep: Tensor | None, f: Tensor, bias: Tensor | None, rate: Tensor | None, taper: Tensor | None,
    position: Tensor | None, shape: str, factor: float, least: float, most: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of f, and of bias, rate and taper together, `[3, D]`; without these vectors it has no meaning."""
    tokens, rows, columns = blocks(f)
    df, channels = new_gradient(f), f.shape[2]
    if not f.numel():
        return df, f.new_zeros(3, channels, dtype=torch.float32)
    tiles = triton.cdiv(triton.cdiv(tokens, rows), PROGRAMS)
    programs = triton.cdiv(tokens, rows * tiles)
    sums = f.new_empty(programs, 3, channels, dtype=torch.float32)
    launch(_backward_kernel, (triton.cdiv(channels, columns), programs))(
        f, position, bias, rate, taper, dg, dstep, df, sums, tokens, f.shape[1], channels,
        f.stride(0), f.stride(1), df.stride(1), *positions(position), factor, least, limit(most), tiles,
        SHAPE=SHAPES[shape], BR=rows, BC=columns,
    )  # fmt: skip
    return df, sums[0] if bias is rate is taper is None else sums.sum(0)


def blocks(f: Tensor) -> tuple[int, int, int]:
    """Tokens, and the tokens and channels of a tile."""
    columns = max(16, min(64, triton.next_power_of_2(f.shape[2])))
    return f.shape[0] * f.shape[1], TILE // columns, columns


def positions(position: Tensor | None) -> tuple[int, int]:
    """The strides of positions `[T]` or `[B, T]`."""
    if position is None:
        return 0, 0
    return (0, position.stride(0)) if position.ndim == 1 else (position.stride(0), position.stride(1))


def limit(most: float | None) -> float:
    """The limit as a kernel gets it: the code of a compiler cannot name infinity."""
    return torch.finfo(torch.float32).max if most is None else most


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings, ctx.with_step = inputs[5:9], inputs[9]


def _grad(ctx: Any, dg: Tensor, dstep: Tensor) -> tuple[Any, ...]:
    only_first_derivatives()
    tensors = ctx.saved_tensors
    of_step = dstep.contiguous() if ctx.with_step else None
    df, sums = _gradients(dg.contiguous(), of_step, *tensors, *ctx.settings)
    vectors = [None if x is None else dx for x, dx in zip(tensors[1:4], sums.unbind(), strict=True)]
    return df, *vectors, *[None] * 6


_gradients = declare_gradients("triton_log_decay_backward", log_decay_backward)
declare("triton_log_decay", _log_decay).register_autograd(_grad, setup_context=_save)
