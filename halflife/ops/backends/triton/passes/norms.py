"""Norms over groups of channels with their gates, weights and skips, as the ops of `halflife.ops.fused` define them.

    v = y + D ⊙ x,   a = v ⊙ f(z) or v,   n = a / √(mean a² + eps), a / √(Σ a² + eps) or a,   out = n ⊙ w (⊙ f(z))

`triton_add_norm` also returns v, the sum of a residual stream y and a branch x; D is then 1.

A program has one group of channels of some tokens. The backward pass computes the forward pass again, so that nothing
but the inputs is kept. Gradients of w and D are summed over the tokens of a program, and then over programs by torch.
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
from halflife.ops.backends.triton.passes.rows import as_rows, entries, gradient_of, rows_of_tokens

GATES = {"none": 0, "silu_before": 1, "sigmoid_before": 2, "silu_after": 3, "sigmoid_after": 4}
TILE = 2048  # entries of a program at once
WIDE = 4096  # channels of a row whose inputs, with x, do not fit registers: the backward pass reads them twice
PROGRAMS = 1024  # programs of the backward pass, at most, of all groups of channels


@triton.jit
@no_type_check
def _gate(z, GATE: tl.constexpr):
    """Return `(f(z), f'(z))`."""
    s = sigmoid(z)
    if GATE == 2 or GATE == 4:
        value, slope = s, s * (1 - s)
    else:
        value, slope = z * s, s * (1 + z * (1 - s))
    return value, slope


@triton.jit
@no_type_check
def _normalized(a, size, eps, MEAN: tl.constexpr):
    """Return `(n, 1 / √(… + eps))` of rows a; `(a, 1)` if MEAN is None."""
    scale = tl.full([a.shape[0], 1], 1.0, tl.float32)
    if MEAN is not None:
        squares = tl.sum(a * a, 1)
        scale = tl.rsqrt((squares / size if MEAN else squares) + eps)[:, None]
    return a * scale, scale


@triton.jit
@no_type_check
def _forward_kernel(
    y, z, x, weight, scale, out, total, tokens, groups, size, y_t, z_t, x_t, w_g, eps,
    HEAD: tl.constexpr, GATE: tl.constexpr, MEAN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(0) % groups
    rows = (tl.program_id(0) // groups) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BC)
    inside = (rows < tokens)[:, None] & (cols < size)[None, :]
    at = g * size + cols
    place = rows.to(tl.int64)[:, None] * groups * size + at[None, :]
    a = entries(y, rows, y_t, at, inside)
    if x is not None:
        added = entries(x, rows, x_t, at, inside)
        if scale is not None:
            added *= tl.load(scale + at // HEAD, mask=cols < size, other=0.0).to(tl.float32)[None, :]
        a += added
    if total is not None:
        rounded = a.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        a = rounded.to(tl.float32)
    if GATE != 0:
        f, _ = _gate(entries(z, rows, z_t, at, inside), GATE)
        if GATE < 3:
            a *= f
    n, _ = _normalized(a, size, eps, MEAN)
    if weight is not None:
        n *= tl.load(weight + g * w_g + cols, mask=cols < size, other=0.0).to(tl.float32)[None, :]
    if GATE >= 3:
        n *= f
    tl.store(out + place, n.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _inputs(y, z, x, factor, rows, y_t, z_t, x_t, at, inside, GATE: tl.constexpr):
    """Return `(v, a, f(z), f'(z), x)` of a tile; what is not given is v."""
    v = entries(y, rows, y_t, at, inside)
    a, f, slope, skipped = v, v, v, v
    if x is not None:
        skipped = entries(x, rows, x_t, at, inside)
        v += factor * skipped
        a = v
    if GATE != 0:
        f, slope = _gate(entries(z, rows, z_t, at, inside), GATE)
        if GATE < 3:
            a = v * f
    return v, a, f, slope, skipped


@triton.jit
@no_type_check
def _along(d, n, size, MEAN: tl.constexpr):
    """Return the factor of n in gradients d of n, for each row."""
    along = tl.sum(d * n, 1)[:, None]
    return along / size if MEAN else along


@triton.jit
@no_type_check
def _backward_kernel(
    y, z, x, weight, scale, dout, dtotal, dy, dz, dx, dadded, again, sums, tokens, groups, size, y_t, z_t, x_t, dz_t,
    w_g, s_p, s_g, eps, tiles,
    HEAD: tl.constexpr, GATE: tl.constexpr, MEAN: tl.constexpr, TWICE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(0) % groups
    block = (tl.program_id(0) // groups).to(tl.int64)
    cols = tl.arange(0, BC)
    at = g * size + cols
    dweight, dscale = tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32)
    for i in range(tiles):
        rows = (block * tiles + i) * BR + tl.arange(0, BR)
        inside = (rows < tokens)[:, None] & (cols < size)[None, :]
        place = rows[:, None] * groups * size + at[None, :]
        factor = 0.0
        if x is not None:
            factor = tl.load(scale + at // HEAD, mask=cols < size, other=0.0).to(tl.float32)[None, :]
        v, a, f, slope, skipped = _inputs(y, z, x, factor, rows, y_t, z_t, x_t, at, inside, GATE)
        n, inverse = _normalized(a, size, eps, MEAN)
        d = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        if TWICE:
            if weight is not None:
                d *= tl.load(weight + g * w_g + cols, mask=cols < size, other=0.0).to(tl.float32)[None, :]
            along = _along(d * f if GATE >= 3 else d, n, size, MEAN)
            tl.debug_barrier()  # without it the second load is the first
            v, a, f, slope, _ = _inputs(y, z, x, factor, rows, y_t, z_t, x_t, at, inside, GATE)
            n = a * inverse
            d = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        of_weight = d * n
        made = n
        if weight is not None:
            factors = tl.load(weight + g * w_g + cols, mask=cols < size, other=0.0).to(tl.float32)[None, :]
            d *= factors
            made *= factors
        if again is not None:  # the output of a gate before the norm
            tl.store(again + place, made.to(again.dtype.element_ty), mask=inside)
        if GATE >= 3:
            of_weight *= f
            tl.store(dz + rows[:, None] * dz_t + at[None, :], (d * n * slope).to(dz.dtype.element_ty), mask=inside)
            d *= f
        dweight += tl.sum(of_weight, 0)
        if MEAN is not None:
            if not TWICE:
                along = _along(d, n, size, MEAN)
            d = inverse * (d - n * along)
        if GATE == 1 or GATE == 2:
            tl.store(dz + rows[:, None] * dz_t + at[None, :], (d * v * slope).to(dz.dtype.element_ty), mask=inside)
            d *= f
        if dtotal is not None:
            d += tl.load(dtotal + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dy + place, d.to(dy.dtype.element_ty), mask=inside)
        if dadded is not None:
            tl.store(dadded + place, d.to(dadded.dtype.element_ty), mask=inside)
        if x is not None:
            if TWICE:
                skipped = entries(x, rows, x_t, at, inside)
                factor = tl.load(scale + at // HEAD, mask=cols < size, other=0.0).to(tl.float32)[None, :]
            tl.store(dx + place, (d * factor).to(dx.dtype.element_ty), mask=inside)
            dscale += tl.sum(d * skipped, 0)
    place = block * s_p + g * s_g + cols
    if weight is not None:
        tl.store(sums + place, dweight, mask=cols < size)
        place += groups * size
    if x is not None:
        tl.store(sums + place, dscale, mask=cols < size)


def _norm(
    y: Tensor, z: Tensor | None, weight: Tensor | None, x: Tensor | None, scale: Tensor | None, gate: str, size: int,
    mean: bool | None, eps: float, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The norm over groups of `size` channels of `y, z, x [..., D]`, with weights `[D]` or `[size]` and D `[H]`.

    It is in `dtype`, or in that of y. If `mean` is None, there is no norm.
    """
    out = y.new_empty(y.shape, dtype=dtype)
    _write(y, z, weight, x, scale, gate, size, mean, eps, out, None)
    return out


def _add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """`x + y [..., D]`, and its norm in `dtype`, or in that of the sum."""
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, y.dtype))
    out = torch.empty_like(total, dtype=dtype)
    _write(x, None, weight, y, None, "none", x.shape[-1], True, eps, out, total)
    return total, out


def _write(
    y: Tensor, z: Tensor | None, weight: Tensor | None, x: Tensor | None, scale: Tensor | None, gate: str, size: int,
    mean: bool | None, eps: float, out: Tensor, total: Tensor | None,
) -> None:  # fmt: skip
    channels = y.shape[-1]
    given, strides = rows_of_tokens(channels, y, z, x)
    weight, scale = [part if part is None else part.contiguous() for part in (weight, scale)]
    tokens, groups = out.numel() // channels, channels // size
    rows, columns, warps = _blocks(size)
    if tokens:
        launch(_forward_kernel, (triton.cdiv(tokens, rows) * groups,))(
            *given, weight, scale, out, total, tokens, groups, size, *strides, _of_group(weight, size), eps,
            HEAD=1 if scale is None else channels // len(scale), GATE=GATES[gate], MEAN=mean, BR=rows, BC=columns,
            num_warps=warps,
        )  # fmt: skip


def _norm_backward(
    dout: Tensor, y: Tensor, z: Tensor | None, weight: Tensor | None, x: Tensor | None, scale: Tensor | None, gate: str,
    size: int, mean: bool | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of y, z and x, and those of the weights and of each channel's factor of x, in rows."""
    dy, dx = (y.new_empty(0) if part is None else part.new_empty(part.shape) for part in (y, x))
    dz = y.new_empty(0) if z is None else new_gradient(z)
    return dy, dz, dx, _write_back(dout, None, y, z, weight, x, scale, gate, size, mean, eps, dy, dz, dx, None, None)


def _norm_again(
    dout: Tensor, y: Tensor, z: Tensor, weight: Tensor, x: Tensor | None, scale: Tensor | None, size: int, eps: float
) -> list[Tensor]:
    """The gradients of y, z, weight, x and scale of a norm of gated values, and its output again."""
    dy, dx, again = (y.new_empty(0) if part is None else part.new_empty(part.shape) for part in (y, x, dout))
    dz = new_gradient(z)
    sums = _write_back(dout, None, y, z, weight, x, scale, "silu_before", size, True, eps, dy, dz, dx, None, again)
    dweight, dx, dscale = _of_parameters(sums, weight, dx, scale)
    return [dy, dz, dweight, dx, y.new_empty(0) if dscale is None else dscale, again]


def _add_norm_backward(
    dout: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor, eps: float, of_x: torch.dtype, of_y: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and y, which has no entries if their dtypes are one, and of the weight; `dtotal` is added."""
    dx = total.new_empty(total.shape, dtype=of_x)
    dy = total.new_empty(total.shape if of_y != of_x else 0, dtype=of_y)
    size, also = total.shape[-1], dy if of_y != of_x else None
    given = dout, dtotal, total, None, weight, None, None
    return dx, dy, _write_back(*given, "none", size, True, eps, dx, None, None, also, None)


def _write_back(
    dout: Tensor, dtotal: Tensor | None, y: Tensor, z: Tensor | None, weight: Tensor | None, x: Tensor | None,
    scale: Tensor | None, gate: str, size: int, mean: bool | None, eps: float, dy: Tensor, dz: Any, *written: Any,
) -> Tensor:  # fmt: skip
    """Write the gradients, and return those of parameters."""
    channels = y.shape[-1]
    given, strides = rows_of_tokens(channels, y, z, x)
    weight, scale = [part if part is None else part.contiguous() for part in (weight, scale)]
    tokens, groups = y.numel() // channels, channels // size
    rows, columns, warps = _blocks(size)
    tiles = max(1, triton.cdiv(triton.cdiv(tokens, rows), max(1, PROGRAMS // groups)))
    blocks, kept = triton.cdiv(tokens, rows * tiles), (weight is not None) + (x is not None)
    shared = weight is not None and len(weight) == size < channels
    sums = y.new_empty((blocks * groups, 1, size) if shared else (blocks, kept, channels), dtype=torch.float32)
    if tokens:
        launch(_backward_kernel, (blocks * groups,))(
            *given, weight, scale, dout, dtotal, dy, dz, *written, sums, tokens, groups, size, *strides,
            0 if z is None else as_rows(dz, channels)[1], _of_group(weight, size),
            groups * size if shared else kept * channels, size, eps, tiles, GATE=GATES[gate], MEAN=mean,
            HEAD=1 if scale is None else channels // len(scale), TWICE=x is not None and columns > WIDE, BR=rows,
            BC=columns, num_warps=warps,
        )  # fmt: skip
    return gradient_of(sums, weight, scale) if kept else sums


def _of_group(weight: Tensor | None, size: int) -> int:
    """The stride from the weights of a group to those of the next one."""
    return 0 if weight is None or len(weight) == size else size


def _blocks(size: int) -> tuple[int, int, int]:
    """The tokens, channels and warps of a program."""
    columns = max(16, triton.next_power_of_2(size))
    return max(1, TILE // columns), columns, max(4, min(16, columns // 256))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:9]


def _grad(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    only_first_derivatives()
    y, z, weight, x, scale = ctx.saved_tensors
    dy, dz, dx, sums = _gradients(dout.contiguous(), y, z, weight, x, scale, *ctx.settings)
    return dy, None if z is None else dz, *_of_parameters(sums, weight, None if x is None else dx, scale), *[None] * 5


def _of_parameters(sums: Tensor, weight: Any, dx: Any, scale: Any) -> tuple[Any, Any, Any]:
    """The gradients of the weight, of x and of D."""
    dweight = None if weight is None else sums[0].to(weight.dtype)
    return dweight, dx, None if scale is None else sums[-1].view(len(scale), -1).sum(1).to(scale.dtype)


declare("triton_norm_again", _norm_again)
_gradients = declare_gradients("triton_norm_backward", _norm_backward)
declare("triton_norm", _norm).register_autograd(_grad, setup_context=_save)


def _add_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, y, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(output[0], weight)
    ctx.dtypes = x.dtype, y.dtype
    ctx.set_materialize_grads(False)


def _add_grad(ctx: Any, dtotal: Tensor | None, dout: Tensor | None) -> tuple[Any, ...]:
    only_first_derivatives()
    total, weight = ctx.saved_tensors
    dout = torch.zeros_like(total) if dout is None else dout.contiguous()
    dtotal = None if dtotal is None else dtotal.contiguous()
    dx, dy, sums = _add_gradients(dout, dtotal, total, weight, ctx.eps, *ctx.dtypes)
    return dx, dy if dy.numel() else dx, sums[0].to(weight.dtype), None, None


_add_gradients = declare_gradients("triton_add_norm_backward", _add_norm_backward)
declare("triton_add_norm", _add_norm).register_autograd(_add_grad, setup_context=_add_save)
