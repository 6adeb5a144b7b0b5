"""SwiGLU, scaled heads and rotations of pairs of channels (`halflife.ops.fused`)."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.arguments import dense
from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.laws import sigmoid
from halflife.ops.backends.triton.op import declare, declare_gradients, save_inputs
from halflife.ops.backends.triton.passes.norms import TILE
from halflife.ops.backends.triton.passes.rows import as_rows, entries

COLUMNS = 512  # of a tile of SwiGLU, at most
ENTRIES = 1024  # of a program of ReLU²


@triton.jit
@no_type_check
def _swiglu_kernel(a, b, out, tokens, D, a_t, b_t, BR: tl.constexpr, BC: tl.constexpr):
    groups = tl.cdiv(D, BC)
    rows = (tl.program_id(0) // groups) * BR + tl.arange(0, BR)
    cols = (tl.program_id(0) % groups) * BC + tl.arange(0, BC)
    inside = (rows < tokens)[:, None] & (cols < D)[None, :]
    x = entries(a, rows, a_t, cols, inside)
    product = x * sigmoid(x) * entries(b, rows, b_t, cols, inside)
    tl.store(out + rows.to(tl.int64)[:, None] * D + cols[None, :], product.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _swiglu_back_kernel(a, b, dout, both, out, tokens, D, a_t, b_t, BR: tl.constexpr, BC: tl.constexpr):
    groups = tl.cdiv(D, BC)
    rows = (tl.program_id(0) // groups) * BR + tl.arange(0, BR)
    cols = (tl.program_id(0) % groups) * BC + tl.arange(0, BC)
    inside = (rows < tokens)[:, None] & (cols < D)[None, :]
    x = entries(a, rows, a_t, cols, inside)
    s = sigmoid(x)
    d = entries(dout, rows, D, cols, inside)
    y = entries(b, rows, b_t, cols, inside)
    of_a = d * y * s * (1 + x * (1 - s))
    place = both + rows.to(tl.int64)[:, None] * 2 * D + cols[None, :]
    tl.store(place, of_a.to(both.dtype.element_ty), mask=inside)
    tl.store(place + D, (d * x * s).to(both.dtype.element_ty), mask=inside)
    if out is not None:
        product = (x * s * y).to(out.dtype.element_ty)
        tl.store(out + rows.to(tl.int64)[:, None] * D + cols[None, :], product, mask=inside)


def _swiglu(a: Tensor, b: Tensor) -> Tensor:
    """`silu(a) ⊙ b` of `[..., D]`."""
    out = a.new_empty(a.shape, dtype=torch.promote_types(a.dtype, b.dtype))
    if a.numel():
        (a, b), strides, size, grid, blocks = _tiles(a, b)
        launch(_swiglu_kernel, grid)(a, b, out, *size, *strides, **blocks)
    return out


def _swiglu_backward(dout: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The gradients of a and b beside each other, `[..., 2 D]`, as the gradient of a product that gave both."""
    return _gradients(dout, a, b, None)


def _swiglu_again(dout: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """`_swiglu_backward`, and `silu(a) ⊙ b` again."""
    out = torch.empty_like(dout)
    return _gradients(dout, a, b, out), out


def _gradients(dout: Tensor, a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    both = dout.new_empty(*a.shape[:-1], 2 * a.shape[-1])
    if a.numel():
        (a, b), strides, size, grid, blocks = _tiles(a, b)
        launch(_swiglu_back_kernel, grid)(a, b, dout, both, out, *size, *strides, **blocks)
    return both


def _tiles(*tensors: Tensor) -> tuple[list[Tensor], list[int], tuple[int, int], tuple[int], dict[str, int]]:
    """Tensors `[..., D]` as rows, their strides, the number of rows and D, the grid, and the size of a tile."""
    rows, strides = zip(*(as_rows(x, x.shape[-1]) for x in tensors), strict=True)
    tokens, channels = rows[0].shape
    columns = max(16, min(COLUMNS, triton.next_power_of_2(channels)))
    grid = (triton.cdiv(tokens, TILE // columns) * triton.cdiv(channels, columns),)
    return [*rows], [*strides], (tokens, channels), grid, {"BR": TILE // columns, "BC": columns}


def _swiglu_grad(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    only_first_derivatives()
    a, b = ctx.saved_tensors
    da, db = _of_swiglu(dout.contiguous(), a, b).chunk(2, -1)
    return da.to(a.dtype), db.to(b.dtype)


_of_swiglu = declare_gradients("triton_swiglu_backward", _swiglu_backward)
declare("triton_swiglu_again", _swiglu_again)
declare("triton_swiglu", _swiglu).register_autograd(_swiglu_grad, setup_context=save_inputs)


@triton.jit
@no_type_check
def _scale_kernel(x, s, out, tokens, H, V, x_t, BR: tl.constexpr, BC: tl.constexpr):
    h = tl.program_id(0) % H
    rows = (tl.program_id(0) // H) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BC)
    inside = (rows < tokens)[:, None] & (cols < V)[None, :]
    factor = tl.load(s + rows.to(tl.int64) * H + h, mask=rows < tokens, other=0.0).to(tl.float32)
    product = factor[:, None] * entries(x, rows, x_t, h * V + cols, inside)
    place = rows.to(tl.int64)[:, None] * H * V + (h * V + cols)[None, :]
    tl.store(out + place, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _scale_back_kernel(x, s, dout, dx, ds, tokens, H, V, x_t, BR: tl.constexpr, BC: tl.constexpr):
    h = tl.program_id(0) % H
    rows = (tl.program_id(0) // H) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BC)
    inside = (rows < tokens)[:, None] & (cols < V)[None, :]
    factor = tl.load(s + rows.to(tl.int64) * H + h, mask=rows < tokens, other=0.0).to(tl.float32)
    place = rows.to(tl.int64)[:, None] * H * V + (h * V + cols)[None, :]
    d = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + place, (factor[:, None] * d).to(dx.dtype.element_ty), mask=inside)
    total = tl.sum(d * entries(x, rows, x_t, h * V + cols, inside), 1)
    tl.store(ds + rows.to(tl.int64) * H + h, total.to(ds.dtype.element_ty), mask=rows < tokens)


def _scale_heads(x: Tensor, s: Tensor) -> Tensor:
    """`x ⊙ s` of `x [B, T, H·V]` and `s [B, T, H]`, with one number for each head."""
    out = x.new_empty(x.shape)
    if x.numel():
        rows, sizes, grid, blocks = _heads(x, s)
        launch(_scale_kernel, grid)(rows, s.contiguous(), out, *sizes, **blocks)
    return out


def _scale_heads_backward(dout: Tensor, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    dx, ds = x.new_empty(x.shape), s.new_empty(s.shape)
    if x.numel():
        rows, sizes, grid, blocks = _heads(x, s)
        launch(_scale_back_kernel, grid)(rows, s.contiguous(), dout, dx, ds, *sizes, **blocks)
    return dx, ds


def _heads(x: Tensor, s: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int], dict[str, int]]:
    """The tokens as rows; their number, H, V and their stride; the grid, and the size of a tile."""
    heads = s.shape[-1]
    value = x.shape[-1] // heads
    rows, stride = as_rows(x, x.shape[-1])
    columns = max(16, triton.next_power_of_2(value))
    tokens = max(1, TILE // columns)
    grid = (triton.cdiv(len(rows), tokens) * heads,)
    return rows, (len(rows), heads, value, stride), grid, {"BR": tokens, "BC": columns}


def _scale_grad(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    only_first_derivatives()
    return _of_scale(dout.contiguous(), *ctx.saved_tensors)


_of_scale = declare_gradients("triton_scale_heads_backward", _scale_heads_backward)
declare("triton_scale_heads", _scale_heads).register_autograd(_scale_grad, setup_context=save_inputs)


@triton.jit
@no_type_check
def _rotate_kernel(
    x, cos, sin, out, heads, T, H, K, P, x_b, x_t, x_h, c_b, sign, BR: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    rows = tl.program_id(0) * BR + tl.arange(0, BR)  # heads of all tokens
    inside = rows < heads
    t = (rows // H % T).to(tl.int64)
    b = (rows // H // T).to(tl.int64)
    place = (b * x_b + t * x_t + (rows % H) * x_h)[:, None]
    goal = rows.to(tl.int64)[:, None] * K
    pairs = tl.arange(0, BP)
    mask = inside[:, None] & (pairs < P)[None, :]
    angle = (b * c_b + t * P)[:, None] + pairs[None, :]
    c = tl.load(cos + angle, mask=mask, other=0.0)
    s = sign * tl.load(sin + angle, mask=mask, other=0.0)
    first = tl.load(x + place + pairs[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + place + P + pairs[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + goal + pairs[None, :], (first * c - second * s).to(out.dtype.element_ty), mask=mask)
    tl.store(out + goal + P + pairs[None, :], (second * c + first * s).to(out.dtype.element_ty), mask=mask)
    if BC > 0:  # the channels that do not change
        rest = 2 * P + tl.arange(0, BC)
        mask = inside[:, None] & (rest < K)[None, :]
        tl.store(out + goal + rest[None, :], tl.load(x + place + rest[None, :], mask=mask), mask=mask)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Rotate the pairs of `x [B, T, H, K]` by angles of which cos and sin are `[B or 1, T, P]`."""
    x = dense(x)
    _, length, heads, channels = x.shape
    pairs, out = cos.shape[-1], x.new_empty(x.shape)
    rest = channels - 2 * pairs
    block = max(16, triton.next_power_of_2(pairs))
    rows = max(1, TILE // (2 * block))
    if x.numel():
        launch(_rotate_kernel, (triton.cdiv(x.numel() // channels, rows),))(
            x, cos.contiguous(), sin.contiguous(), out, x.numel() // channels, length, heads, channels, pairs,
            *x.stride()[:3], length * pairs if len(cos) > 1 else 0, sign, BR=rows, BP=block,
            BC=max(16, triton.next_power_of_2(rest)) if rest else 0,
        )  # fmt: skip
    return out


def _rotate_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *angle, ctx.sign = inputs
    ctx.save_for_backward(*angle)


def _rotate_grad(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    only_first_derivatives()
    return _rotation(dout, *ctx.saved_tensors, -ctx.sign), None, None, None


_rotation = declare("triton_rotate", _rotate)
_rotation.register_autograd(_rotate_grad, setup_context=_rotate_save)


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
        launch(_square_kernel, (triton.cdiv(x.numel(), ENTRIES),))(x.contiguous(), out, x.numel(), BLOCK=ENTRIES)
    return out


def _square_backward(dout: Tensor, x: Tensor) -> Tensor:
    dx = x.new_empty(x.shape)
    if x.numel():
        launch(_square_back_kernel, (triton.cdiv(x.numel(), ENTRIES),))(
            x.contiguous(), dout, dx, x.numel(), BLOCK=ENTRIES
        )
    return dx


def _square_grad(ctx: Any, dout: Tensor) -> Tensor:
    only_first_derivatives()
    return _of_square(dout.contiguous(), *ctx.saved_tensors)


_of_square = declare_gradients("triton_relu_square_backward", _square_backward)
declare("triton_relu_square", _square).register_autograd(_square_grad, setup_context=save_inputs)
