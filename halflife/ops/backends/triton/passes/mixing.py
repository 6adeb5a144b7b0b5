"""RWKV's mixtures of a token with the one before it: up to six outputs from one pass over both (`ops.rwkv7.token_mix`).

Each output has a tensor of its own, because products read them, and their gradients come one by one. The square of ReLU
is that of RWKV's channel mix (`ops.rwkv7.relu_square`).
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.arguments import dense
from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.op import declare, save_inputs

MOST = 6  # outputs, for which the kernels have arguments
ROWS, COLUMNS = 16, 64  # tokens and channels of a tile
ROWS_BACK = 8  # tokens of a tile in the backward pass
BLOCK = 1024  # entries of a program of ReLU²
PROGRAMS = 128  # programs a block of channels, at most, in the backward pass


@triton.jit
@no_type_check
def _entries(x, rows, cols, inside, T, x_b, x_t):
    """Load tokens and channels of `x [B, T, D]` in float32; 0 outside."""
    place = (rows // T).to(tl.int64) * x_b + (rows % T).to(tl.int64) * x_t
    return tl.load(x + place[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _earlier(x, before, rows, cols, inside, T, x_b, x_t, before_b, before_t, OWN: tl.constexpr):
    """Load the token before each one: that of `before`, or of x itself, where `before` precedes the first ones."""
    if OWN:
        begins = (rows % T == 0)[:, None]
        place = (rows // T).to(tl.int64) * x_b + (rows % T - 1).to(tl.int64) * x_t
        old = tl.load(x + place[:, None] + cols[None, :], mask=inside & (begins == 0), other=0.0).to(tl.float32)
        if before is not None:
            place = (rows // T).to(tl.int64) * before_b
            old += tl.load(before + place[:, None] + cols[None, :], mask=inside & begins, other=0.0).to(tl.float32)
    else:
        old = _entries(before, rows, cols, inside, T, before_b, before_t)
    return old


@triton.jit
@no_type_check
def _mix(out, mu, now, change, place, cols, inside, D, i: tl.constexpr):
    """Store output i, if there is one."""
    if out is not None:
        factor = tl.load(mu + i * D + cols, mask=cols < D, other=0.0).to(tl.float32)
        tl.store(out + place, (now + change * factor[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _mix_kernel(
    x, before, mu, o0, o1, o2, o3, o4, o5, end, tokens, T, D, x_b, x_t, before_b, before_t, OWN: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    groups = tl.cdiv(D, BC)
    rows = (tl.program_id(0) // groups) * BR + tl.arange(0, BR)
    cols = (tl.program_id(0) % groups) * BC + tl.arange(0, BC)
    inside = (rows < tokens)[:, None] & (cols < D)[None, :]
    now = _entries(x, rows, cols, inside, T, x_b, x_t)
    change = _earlier(x, before, rows, cols, inside, T, x_b, x_t, before_b, before_t, OWN) - now
    if end is not None:
        ends = inside & (rows % T == T - 1)[:, None]
        tl.store(end + (rows // T)[:, None] * D + cols[None, :], now.to(end.dtype.element_ty), mask=ends)
    place = rows.to(tl.int64)[:, None] * D + cols[None, :]
    _mix(o0, mu, now, change, place, cols, inside, D, 0)
    _mix(o1, mu, now, change, place, cols, inside, D, 1)
    _mix(o2, mu, now, change, place, cols, inside, D, 2)
    _mix(o3, mu, now, change, place, cols, inside, D, 3)
    _mix(o4, mu, now, change, place, cols, inside, D, 4)
    _mix(o5, mu, now, change, place, cols, inside, D, 5)


@triton.jit
@no_type_check
def _add(
    dout, mu, all, old, later, sums, change, place, cols, inside, follows, slots, D, OWN: tl.constexpr, i: tl.constexpr
):
    """Add the gradient of output i to those of both tokens together, of the token before, and of μ.

    `later` is that of the token before, at the token after this one.
    """
    if dout is not None:
        d = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(mu + i * D + cols, mask=cols < D, other=0.0).to(tl.float32)
        all += d
        old += d * factor[None, :]
        if OWN:
            later += tl.load(dout + place + D, mask=follows, other=0.0).to(tl.float32) * factor[None, :]
        sums += tl.where((slots == i)[:, None], tl.sum(d * change, 0)[None, :], 0.0)
    return all, old, later, sums


@triton.jit
@no_type_check
def _mix_back_kernel(
    x, before, mu, d0, d1, d2, d3, d4, d5, dend, dx, dbefore, dmu, tokens, T, D, x_b, x_t, before_b, before_t, count,
    tiles, OWN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    groups = tl.cdiv(D, BC)
    block = (tl.program_id(0) // groups).to(tl.int64)
    cols = (tl.program_id(0) % groups) * BC + tl.arange(0, BC)
    slots = tl.arange(0, 8)
    sums = tl.zeros([8, BC], tl.float32)
    for i in range(tiles):
        rows = (block * tiles + i) * BR + tl.arange(0, BR)
        inside = (rows < tokens)[:, None] & (cols < D)[None, :]
        follows = inside & (rows % T != T - 1)[:, None]
        change = _earlier(x, before, rows, cols, inside, T, x_b, x_t, before_b, before_t, OWN)
        change -= _entries(x, rows, cols, inside, T, x_b, x_t)
        place = rows[:, None] * D + cols[None, :]
        all = tl.zeros([BR, BC], tl.float32)
        old = tl.zeros([BR, BC], tl.float32)
        later = tl.zeros([BR, BC], tl.float32)
        if dend is not None:
            ends = inside & (rows % T == T - 1)[:, None]
            all += tl.load(dend + (rows // T)[:, None] * D + cols[None, :], mask=ends, other=0.0).to(tl.float32)
        all, old, later, sums = _add(
            d0, mu, all, old, later, sums, change, place, cols, inside, follows, slots, D, OWN, 0
        )
        all, old, later, sums = _add(
            d1, mu, all, old, later, sums, change, place, cols, inside, follows, slots, D, OWN, 1
        )
        all, old, later, sums = _add(
            d2, mu, all, old, later, sums, change, place, cols, inside, follows, slots, D, OWN, 2
        )
        all, old, later, sums = _add(
            d3, mu, all, old, later, sums, change, place, cols, inside, follows, slots, D, OWN, 3
        )
        all, old, later, sums = _add(
            d4, mu, all, old, later, sums, change, place, cols, inside, follows, slots, D, OWN, 4
        )
        all, old, later, sums = _add(
            d5, mu, all, old, later, sums, change, place, cols, inside, follows, slots, D, OWN, 5
        )
        tl.store(dx + place, (all - old + later).to(dx.dtype.element_ty), mask=inside)
        if dbefore is not None:
            at = place
            kept = inside
            if OWN:
                at = (rows // T)[:, None] * D + cols[None, :]
                kept = inside & (rows % T == 0)[:, None]
            tl.store(dbefore + at, old.to(dbefore.dtype.element_ty), mask=kept)
    place = block * count * D + slots[:, None] * D + cols[None, :]
    tl.store(dmu + place, sums, mask=(slots < count)[:, None] & (cols < D)[None, :])


def _mixed(x: Tensor, before: Tensor | None, mu: Tensor, dtype: torch.dtype, last: bool) -> list[Tensor]:
    """`x + μ_i ⊙ (x' − x)` of `x [B, T, D]` for each row of `mu [R, D]`, in `dtype`, and the last token if asked for.

    x' is `before [B, T, D]`, or the token before, and for the first ones `before [B, D]` or zeros.
    """
    outs = [x.new_empty(x.shape, dtype=dtype) for _ in range(len(mu))]
    end = x.new_empty(x.shape[0], x.shape[2]) if last else None
    if x.numel():
        tensors, sizes, own = _given(x, before)
        blocks = triton.cdiv(sizes[0], ROWS) * triton.cdiv(sizes[2], COLUMNS)
        launch(_mix_kernel, (blocks,))(
            *tensors, mu.contiguous(), *outs, *[None] * (MOST - len(outs)), end, *sizes, OWN=own, BR=ROWS, BC=COLUMNS
        )
    return outs if end is None else [*outs, end]


def _mixed_backward(douts: list[Tensor], x: Tensor, before: Tensor | None, mu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, before (without entries for None) and mu. `douts` without entries stand for None."""
    tensors, sizes, own = _given(x, before)
    dx, dbefore = x.new_empty(x.shape), x.new_empty(0) if before is None else before.new_empty(before.shape)
    tiles = max(1, triton.cdiv(triton.cdiv(sizes[0], ROWS_BACK), PROGRAMS))
    blocks = triton.cdiv(sizes[0], ROWS_BACK * tiles)
    dmu = x.new_empty(blocks, *mu.shape, dtype=torch.float32)
    given = [d if d.numel() else None for d in douts]
    given[len(mu) : len(mu)] = [None] * (MOST - len(mu))
    if x.numel():
        launch(_mix_back_kernel, (blocks * triton.cdiv(sizes[2], COLUMNS),))(
            *tensors, mu.contiguous(), *given, *[None] * (MOST + 1 - len(given)), dx,
            None if before is None else dbefore, dmu, *sizes, len(mu), tiles, OWN=own, BR=ROWS_BACK, BC=COLUMNS,
        )  # fmt: skip
    elif own and before is not None:
        dbefore = torch.zeros_like(before)
    return dx, dbefore, dmu.sum(0)


def _given(x: Tensor, before: Tensor | None) -> tuple[list[Tensor | None], list[int], bool]:
    """Both tensors, then the tokens, T, D and strides, and whether x holds the tokens before."""
    own = before is None or before.ndim == 2
    x, before = dense(x), None if before is None else dense(before)
    strides = (0, 0) if before is None else (before.stride(0), 0 if own else before.stride(1))
    return [x, before], [x.shape[0] * x.shape[1], *x.shape[1:], x.stride(0), x.stride(1), *strides], own


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.set_materialize_grads(False)  # a training step does not use the last tokens


def _grad(ctx: Any, douts: list[Tensor | None]) -> tuple[Any, ...]:
    only_first_derivatives()
    x, before, mu = ctx.saved_tensors
    given = [x.new_empty(0) if d is None else d.contiguous() for d in douts]
    dx, dbefore, dmu = _gradients(given, x, before, mu)
    return dx, None if before is None else dbefore, dmu.to(mu.dtype), None, None


_gradients = declare("triton_token_mix_backward", _mixed_backward)
declare("triton_token_mix", _mixed).register_autograd(_grad, setup_context=_save)


@triton.jit
@no_type_check
def _positive(x, count, BLOCK: tl.constexpr):
    """The places of a program's entries, and their ReLU."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    return at, tl.where(given <= 0, 0.0, given)  # NaN stays NaN


@triton.jit
@no_type_check
def _square_kernel(x, out, count, BLOCK: tl.constexpr):
    at, positive = _positive(x, count, BLOCK)
    tl.store(out + at, (positive * positive).to(out.dtype.element_ty), mask=at < count)


@triton.jit
@no_type_check
def _square_back_kernel(x, dout, dx, count, BLOCK: tl.constexpr):
    at, positive = _positive(x, count, BLOCK)
    d = 2 * positive * tl.load(dout + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(dx + at, d.to(dx.dtype.element_ty), mask=at < count)


def _square(x: Tensor) -> Tensor:
    """`relu(x)²`."""
    out = x.new_empty(x.shape)
    if x.numel():
        launch(_square_kernel, (triton.cdiv(x.numel(), BLOCK),))(x.contiguous(), out, x.numel(), BLOCK=BLOCK)
    return out


def _square_backward(dout: Tensor, x: Tensor) -> Tensor:
    dx = x.new_empty(x.shape)
    if x.numel():
        launch(_square_back_kernel, (triton.cdiv(x.numel(), BLOCK),))(x.contiguous(), dout, dx, x.numel(), BLOCK=BLOCK)
    return dx


def _square_grad(ctx: Any, dout: Tensor) -> Tensor:
    only_first_derivatives()
    return _of_square(dout.contiguous(), *ctx.saved_tensors)


_of_square = declare("triton_relu_square_backward", _square_backward)
declare("triton_relu_square", _square).register_autograd(_square_grad, setup_context=save_inputs)
