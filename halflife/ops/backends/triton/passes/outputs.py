"""RWKV-7's outputs, as `ops.rwkv7.rwkv7_output` defines them.

A program has one head of some tokens, and the backward pass computes the norm again, as in `keys.py`.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.op import declare, declare_gradients
from halflife.ops.backends.triton.passes.keys import channels_of, numbers, tiles_of, tokens_of
from halflife.ops.backends.triton.passes.rows import entries, gradient_of, rows_of_tokens


@triton.jit
@no_type_check
def _normed(x, size, inside, eps):
    """Return `(n, 1 / √(variance + eps))` of rows, with n = 0 outside."""
    x = tl.where(inside, x - (tl.sum(x, 1) / size)[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / size + eps)[:, None]
    return x * inverse, inverse


@triton.jit
@no_type_check
def _output_kernel(
    o, s, v, gate, weight, bias, out, tokens, heads, size, o_t, v_t, gate_t, eps, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    h = tl.program_id(0) % heads
    at, here = channels_of(heads, size, BC)
    rows, inside, place = tokens_of(tl.program_id(0) // heads, at, here, tokens, heads, size, BR)
    n, _ = _normed(entries(o, rows, o_t, at, inside), size, inside, eps)
    own = tl.load(s + rows * heads + h, mask=rows < tokens, other=0.0).to(tl.float32)[:, None]
    y = n * numbers(weight, at, here) + numbers(bias, at, here) + own * entries(v, rows, v_t, at, inside)
    y *= entries(gate, rows, gate_t, at, inside)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _output_back_kernel(
    o, s, v, gate, weight, bias, dout, do, ds, dv, dgate, sums, tokens, heads, size, o_t, v_t, gate_t, eps, tiles,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % heads
    block = (tl.program_id(0) // heads).to(tl.int64)
    at, here = channels_of(heads, size, BC)
    dweight = tl.zeros([BC], tl.float32)
    dbias = tl.zeros([BC], tl.float32)
    for i in range(tiles):
        rows, inside, place = tokens_of(block * tiles + i, at, here, tokens, heads, size, BR)
        n, inverse = _normed(entries(o, rows, o_t, at, inside), size, inside, eps)
        own = tl.load(s + rows * heads + h, mask=rows < tokens, other=0.0).to(tl.float32)[:, None]
        value = entries(v, rows, v_t, at, inside)
        scale = numbers(weight, at, here)
        d = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        of_gate = d * (n * scale + numbers(bias, at, here) + own * value)
        tl.store(dgate + place, of_gate.to(dgate.dtype.element_ty), mask=inside)
        d *= entries(gate, rows, gate_t, at, inside)
        tl.store(dv + place, (d * own).to(dv.dtype.element_ty), mask=inside)
        tl.store(ds + rows * heads + h, tl.sum(d * value, 1).to(ds.dtype.element_ty), mask=rows < tokens)
        dbias += tl.sum(d, 0)
        dweight += tl.sum(d * n, 0)
        d *= scale
        d = inverse * (d - (tl.sum(d, 1) / size)[:, None] - n * (tl.sum(d * n, 1) / size)[:, None])
        tl.store(do + place, d.to(do.dtype.element_ty), mask=inside)
    place = block * 2 * heads * size + at
    tl.store(sums + place, dweight, mask=here)
    tl.store(sums + place + heads * size, dbias, mask=here)


def _output(
    o: Tensor, s: Tensor, v: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """`(LayerNorm(o) ⊙ weight + bias + s v) ⊙ gate [B, T, H·V]` in `dtype`."""
    out = gate.new_empty(gate.shape, dtype=dtype)
    if o.numel():
        size, blocks, _, tile = tiles_of(o, False)
        rows, strides = rows_of_tokens(gate.shape[2], o, v, gate)
        launch(_output_kernel, (blocks * size[1],))(
            rows[0], s.contiguous(), *rows[1:], weight.contiguous(), bias.contiguous(), out, *size, *strides, eps,
            **tile,
        )  # fmt: skip
    return out


def _output_backward(
    dout: Tensor, o: Tensor, s: Tensor, v: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of o, s, v and the gate, and those of the parameters in rows."""
    do, ds, dv, dgate = (x.new_empty(x.shape) for x in (o, s, v, gate))
    size, blocks, tiles, tile = tiles_of(o, True)
    sums = o.new_empty(blocks, 2, gate.shape[2], dtype=torch.float32)
    if o.numel():
        rows, strides = rows_of_tokens(gate.shape[2], o, v, gate)
        launch(_output_back_kernel, (blocks * size[1],))(
            rows[0], s.contiguous(), *rows[1:], weight.contiguous(), bias.contiguous(), dout, do, ds, dv, dgate, sums,
            *size, *strides, eps, tiles, **tile,
        )  # fmt: skip
    return do, ds, dv, dgate, gradient_of(sums, weight, bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.eps = inputs[6]


def _grad(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    only_first_derivatives()
    *others, weight, bias = ctx.saved_tensors
    *found, sums = _gradients(dout.contiguous(), *others, weight, bias, ctx.eps)
    return *found, sums[0].to(weight.dtype), sums[1].to(bias.dtype), None, None


_gradients = declare_gradients("triton_rwkv7_output_backward", _output_backward)
declare("triton_rwkv7_output", _output).register_autograd(_grad, setup_context=_save)
