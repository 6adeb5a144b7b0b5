"""The weights of Mamba-3's trapezoidal rule and the outputs of its layers, as `halflife.ops.trapezoid` defines them."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.split import new_gradient
from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.laws import sigmoid
from halflife.ops.backends.triton.op import declare, declare_gradients, save_inputs
from halflife.ops.backends.triton.passes.rows import entries, evenly, rows_of_tokens, sequence_of

TILE, WEIGHTS = 2048, 512  # entries of a program of outputs, and of weights


@triton.jit
@no_type_check
def neighbours(rows, cu_seqlens, N, T, rows_all, steps):
    """The sequences of tokens, and whether they are the first and the last ones of these."""
    t, b = rows % T, rows // T
    n, start, stop = sequence_of(t, b, cu_seqlens, N, T, steps)
    return n, t == start, (t == stop - 1) & (rows < rows_all)


@triton.jit
@no_type_check
def _ended(step, share, rows, cols, inside, H, l_t):
    """Return `(λ, Δ)` of tokens and heads, `[R, H]`."""
    size = tl.load(step + rows.to(tl.int64)[:, None] * H + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    logit = tl.load(share + rows.to(tl.int64)[:, None] * l_t + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    return sigmoid(logit), size


@triton.jit
@no_type_check
def _written(
    g, step, share, first, cu_seqlens, rows_all, T, N, steps, H, l_t, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Return e^g, λ, Δ and λ Δ of the token before, `[R, H]`, with what places them: see the kernels."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BC)
    inside = (rows < rows_all)[:, None] & (cols < H)[None, :]
    n, begins, ends = neighbours(rows, cu_seqlens, N, T, rows_all, steps)
    place = rows.to(tl.int64)[:, None] * H + cols[None, :]
    of_state = n.to(tl.int64)[:, None] * H + cols[None, :]
    end, size = _ended(step, share, rows, cols, inside, H, l_t)
    end_before, size_before = _ended(step, share, rows - 1, cols, inside & (begins == 0)[:, None], H, l_t)
    before = end_before * size_before
    starts = inside & begins[:, None]
    if first is not None:
        before += tl.load(first + of_state, mask=starts, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(g + place, mask=inside, other=0.0).to(tl.float32))
    return decay, end, size, before, place, of_state, inside, starts, ends


@triton.jit
@no_type_check
def _weights_kernel(
    g, step, share, first, cu_seqlens, weight, gain, last, rows_all, T, N, steps, H, l_t,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    decay, end, size, before, place, of_state, inside, _, ends = _written(
        g, step, share, first, cu_seqlens, rows_all, T, N, steps, H, l_t, BR, BC
    )
    tl.store(weight + place, decay * (before + (1 - end) * size), mask=inside)
    tl.store(gain + place, end * size, mask=inside)
    tl.store(last + of_state, end * size, mask=inside & ends[:, None])


@triton.jit
@no_type_check
def _weights_back_kernel(
    g, step, share, first, cu_seqlens, dweight, dgain, dlast, dg, dstep, dshare, dfirst, rows_all, T, N, steps, H, l_t,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    decay, end, size, before, place, of_state, inside, starts, ends = _written(
        g, step, share, first, cu_seqlens, rows_all, T, N, steps, H, l_t, BR, BC
    )
    own = decay * tl.load(dweight + place, mask=inside, other=0.0)
    follows = inside & (ends == 0)[:, None]
    later = tl.exp(tl.load(g + place + H, mask=follows, other=0.0).to(tl.float32))
    of_gain = later * tl.load(dweight + place + H, mask=follows, other=0.0)
    of_gain += tl.load(dgain + place, mask=inside, other=0.0)
    if dlast is not None:
        of_gain += tl.load(dlast + of_state, mask=inside & ends[:, None], other=0.0).to(tl.float32)
    tl.store(dg + place, own * (before + (1 - end) * size), mask=inside)
    tl.store(dstep + place, own * (1 - end) + of_gain * end, mask=inside)
    of_share = (of_gain - own) * size * end * (1 - end)
    tl.store(dshare + place, of_share.to(dshare.dtype.element_ty), mask=inside)
    if dfirst is not None:
        tl.store(dfirst + of_state, own.to(dfirst.dtype.element_ty), mask=starts)


def rows_and_sequences(x: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    """The tokens of `x [B, T, …]`, T, the number of sequences, and the steps of a search among them."""
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.shape[0] * x.shape[1], x.shape[1], sequences, sequences.bit_length()


def states_like(x: Tensor, first: Tensor | None, cu_seqlens: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The tensor `[N, …]` for what the last tokens of sequences leave; what an empty one leaves is in it."""
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if cu_seqlens is None and x.shape[1]:
        return x.new_empty(sequences, *x.shape[2:], dtype=dtype)
    if first is None:
        return x.new_zeros(sequences, *x.shape[2:], dtype=dtype)
    return first.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _blocks(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    columns = triton.next_power_of_2(x.shape[2])
    rows = max(1, min(32, WEIGHTS // columns))
    return (triton.cdiv(x.shape[0] * x.shape[1], rows),), {"BR": rows, "BC": columns}


def _weights(
    g: Tensor, step: Tensor, share: Tensor, first: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    share = evenly(share)
    weight, gain = (g.new_empty(g.shape, dtype=torch.float32) for _ in range(2))
    last = states_like(g, first, cu_seqlens, torch.float32)
    if g.numel():
        grid, tile = _blocks(g)
        sizes = *rows_and_sequences(g, cu_seqlens), g.shape[2], share.stride(1)
        first = None if first is None else first.contiguous()
        launch(_weights_kernel, grid)(
            g.contiguous(), step.contiguous(), share, first, cu_seqlens, weight, gain, last, *sizes, **tile
        )
    return weight, gain, last


def _weights_backward(
    dweight: Tensor, dgain: Tensor, dlast: Tensor | None, g: Tensor, step: Tensor, share: Tensor, first: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    share = evenly(share)
    dg, dstep = (g.new_empty(g.shape, dtype=torch.float32) for _ in range(2))
    dshare = share.new_empty(share.shape)
    dfirst = g.new_empty(0) if first is None else of_first(dlast, first)
    if g.numel():
        grid, tile = _blocks(g)
        sizes = *rows_and_sequences(g, cu_seqlens), g.shape[2], share.stride(1)
        launch(_weights_back_kernel, grid)(
            g.contiguous(), step.contiguous(), share, None if first is None else first.contiguous(), cu_seqlens,
            dweight, dgain, dlast, dg, dstep, dshare, None if first is None else dfirst, *sizes, **tile,
        )  # fmt: skip
    return dg, dstep, dshare, dfirst


def of_first(dlast: Tensor | None, first: Tensor) -> Tensor:
    """The gradient of what precedes sequences; an empty one hands over that of what it leaves."""
    if dlast is None:
        return first.new_zeros(first.shape)
    return dlast.to(first.dtype, copy=True, memory_format=torch.contiguous_format)


def _weights_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _weights_grad(ctx: Any, dweight: Tensor | None, dgain: Tensor | None, dlast: Tensor | None) -> tuple[Any, ...]:
    only_first_derivatives()
    g, step, share, first, bounds = ctx.saved_tensors
    dweight, dgain = (g.new_zeros(g.shape) if d is None else d.contiguous() for d in (dweight, dgain))
    dlast = None if dlast is None else dlast.contiguous()
    dg, dstep, dshare, dfirst = _of_weights(dweight, dgain, dlast, g, step, share, first, bounds)
    return dg.to(g.dtype), dstep.to(step.dtype), dshare, None if first is None else dfirst, None


_of_weights = declare_gradients("triton_trapezoid_weights_backward", _weights_backward)
declare("triton_trapezoid_weights", _weights).register_autograd(_weights_grad, setup_context=_weights_save)


# ----------------------------------------------------------------------------------------------------- outputs


@triton.jit
@no_type_check
def _head(o, v, dot, gain, skip, rows, inside, there, cols, h, H, V, v_t):
    """Return `(o + f v, v, f, dot, gain)` of one head, with the factor f of what a token reads of its own value."""
    at = rows * H + h
    product = tl.load(dot + at, mask=there, other=0.0).to(tl.float32)
    size = tl.load(gain + at, mask=there, other=0.0).to(tl.float32)
    factor = size * product
    if skip is not None:
        factor += tl.load(skip + h).to(tl.float32)
    value = entries(v, rows, v_t, h * V + cols, inside)
    return entries(o, at, V, cols, inside) + factor[:, None] * value, value, factor, product, size


@triton.jit
@no_type_check
def _output_kernel(
    o, v, dot, gain, skip, z, out, rows_all, H, V, v_t, z_t, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    h = tl.program_id(0) % H
    rows = (tl.program_id(0) // H).to(tl.int64) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BC)
    there = rows < rows_all
    inside = there[:, None] & (cols < V)[None, :]
    y, _, _, _, _ = _head(o, v, dot, gain, skip, rows, inside, there, cols, h, H, V, v_t)
    if z is not None:
        gate = entries(z, rows, z_t, h * V + cols, inside)
        y *= gate * sigmoid(gate)
    tl.store(out + (rows * H + h)[:, None] * V + cols[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _output_back_kernel(
    o, v, dot, gain, skip, z, dout, do, dv, ddot, dgain, dz, sums, rows_all, H, V, v_t, z_t, dz_t,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    rows = (tl.program_id(0) // H).to(tl.int64) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BC)
    there = rows < rows_all
    inside = there[:, None] & (cols < V)[None, :]
    y, value, factor, product, size = _head(o, v, dot, gain, skip, rows, inside, there, cols, h, H, V, v_t)
    at = rows * H + h
    place = at[:, None] * V + cols[None, :]
    d = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    if z is not None:
        gate = entries(z, rows, z_t, h * V + cols, inside)
        s = sigmoid(gate)
        of_gate = (rows * dz_t + h * V)[:, None] + cols[None, :]
        tl.store(dz + of_gate, (d * y * s * (1 + gate * (1 - s))).to(dz.dtype.element_ty), mask=inside)
        d *= gate * s
    tl.store(do + place, d.to(do.dtype.element_ty), mask=inside)
    tl.store(dv + place, (d * factor[:, None]).to(dv.dtype.element_ty), mask=inside)
    of_factor = tl.sum(d * value, 1)
    tl.store(ddot + at, of_factor * size, mask=there)
    tl.store(dgain + at, of_factor * product, mask=there)
    if skip is not None:
        tl.store(sums + tl.program_id(0), tl.sum(of_factor, 0))


def _tokens(o: Tensor) -> tuple[tuple[int], tuple[int, int, int], dict[str, int]]:
    """The grid of programs, the tokens, H and V, and the size of a tile."""
    tokens, heads, value = o.shape[0] * o.shape[1], o.shape[2], o.shape[3]
    columns = max(16, triton.next_power_of_2(value))
    rows = max(1, TILE // columns)
    return (triton.cdiv(tokens, rows) * heads,), (tokens, heads, value), {"BR": rows, "BC": columns}


def _output(o: Tensor, v: Tensor, dot: Tensor, gain: Tensor, skip: Tensor | None, z: Tensor | None) -> Tensor:
    """`(o + (gain · dot + D) v) ⊙ silu(z) [B, T, H·V]`, in the dtype of o."""
    out = o.new_empty(*o.shape[:2], o.shape[2] * o.shape[3])
    if o.numel():
        grid, sizes, tile = _tokens(o)
        (values, gates), strides = rows_of_tokens(out.shape[2], v, z)
        launch(_output_kernel, grid)(
            o.contiguous(), values, dot.contiguous(), gain.contiguous(), skip, gates, out, *sizes, *strides, **tile
        )
    return out


def _output_backward(
    dout: Tensor, o: Tensor, v: Tensor, dot: Tensor, gain: Tensor, skip: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of o, v, the products, their factors and z, and that of D."""
    do, dv = o.new_empty(o.shape), v.new_empty(v.shape)
    ddot, dgain = (dot.new_empty(dot.shape, dtype=torch.float32) for _ in range(2))
    dz = o.new_empty(0) if z is None else new_gradient(z)
    grid, sizes, tile = _tokens(o)
    sums = dot.new_empty(grid[0] if skip is not None else 0, dtype=torch.float32)
    if o.numel():
        (values, gates, _), strides = rows_of_tokens(dout.shape[2], v, z, None if z is None else dz)
        launch(_output_back_kernel, grid)(
            o.contiguous(), values, dot.contiguous(), gain.contiguous(), skip, gates, dout, do, dv, ddot, dgain, dz,
            sums, *sizes, *strides, **tile,
        )  # fmt: skip
    return do, dv, ddot, dgain, dz, sums if skip is None else sums.view(-1, sizes[1]).sum(0)


def _output_grad(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    only_first_derivatives()
    *others, dot, gain, skip, z = ctx.saved_tensors
    do, dv, ddot, dgain, dz, dskip = _of_output(dout.contiguous(), *others, dot, gain, skip, z)
    dskip = None if skip is None else dskip.to(skip.dtype)
    return do, dv, ddot.to(dot.dtype), dgain.to(gain.dtype), dskip, None if z is None else dz


_of_output = declare_gradients("triton_trapezoid_output_backward", _output_backward)
declare("triton_trapezoid_output", _output).register_autograd(_output_grad, setup_context=save_inputs)
