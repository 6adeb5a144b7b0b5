"""What reads and writes a state under gates, as `halflife.ops.dplr` defines it for Gated DeltaNet-2 and Comba.

A program has one head of some tokens, and the backward pass computes the forward pass again, as in `passes/keys.py`.
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
from halflife.ops.backends.triton.passes.keys import channels_of, tiles_of, tokens_of
from halflife.ops.backends.triton.passes.rows import as_rows, entries, gradient_of, rows_of_tokens

EPS = tl.constexpr(1e-6)  # of unit norms, as in the definition


@triton.jit
@no_type_check
def _erase_kernel(
    erase, write, k, v, g, read, written, tokens, heads, size, value, erase_t, write_t, k_t, v_t, most,
    BR: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) // heads
    at, here = channels_of(heads, size, BC)
    rows, inside, place = tokens_of(block, at, here, tokens, heads, size, BR)
    gate = -most * sigmoid(entries(erase, rows, erase_t, at, inside))
    gate *= tl.exp(tl.load(g + place, mask=inside, other=0.0))
    tl.store(read + place, (gate * entries(k, rows, k_t, at, inside)).to(read.dtype.element_ty), mask=inside)
    at, here = channels_of(heads, value, BV)
    rows, inside, place = tokens_of(block, at, here, tokens, heads, value, BR)
    gate = sigmoid(entries(write, rows, write_t, at, inside))
    tl.store(written + place, (gate * entries(v, rows, v_t, at, inside)).to(written.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _erase_back_kernel(
    erase, write, k, v, g, dread, dwritten, derase, dwrite, dk, dv, dg, tokens, heads, size, value,
    erase_t, write_t, k_t, v_t, derase_t, dwrite_t, most, BR: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) // heads
    at, here = channels_of(heads, size, BC)
    rows, inside, place = tokens_of(block, at, here, tokens, heads, size, BR)
    x, key = entries(erase, rows, erase_t, at, inside), entries(k, rows, k_t, at, inside)
    d = -most * tl.load(dread + place, mask=inside, other=0.0).to(tl.float32)
    d *= tl.exp(tl.load(g + place, mask=inside, other=0.0)) * sigmoid(x)
    tl.store(dk + place, d.to(dk.dtype.element_ty), mask=inside)
    d *= key
    tl.store(dg + place, d, mask=inside)
    d *= sigmoid(-x)
    tl.store(derase + rows[:, None] * derase_t + at[None, :], d.to(derase.dtype.element_ty), mask=inside)
    at, here = channels_of(heads, value, BV)
    rows, inside, place = tokens_of(block, at, here, tokens, heads, value, BR)
    x = entries(write, rows, write_t, at, inside)
    d = tl.load(dwritten + place, mask=inside, other=0.0).to(tl.float32) * sigmoid(x)
    tl.store(dv + place, d.to(dv.dtype.element_ty), mask=inside)
    d *= entries(v, rows, v_t, at, inside) * sigmoid(-x)
    tl.store(dwrite + rows[:, None] * dwrite_t + at[None, :], d.to(dwrite.dtype.element_ty), mask=inside)


def _erase_sizes(k: Tensor, v: Tensor) -> tuple[tuple[int, ...], tuple[int], dict[str, int]]:
    """Tokens, H, K and V, the grid, and the options of a launch."""
    size, blocks, _, tile = tiles_of(k if k.shape[3] > v.shape[3] else v, False)
    tile |= {"BC": triton.next_power_of_2(k.shape[3]), "BV": triton.next_power_of_2(v.shape[3])}
    return (*size[:2], k.shape[3], v.shape[3]), (blocks * size[1],), tile


def _erase_write(erase: Tensor, write: Tensor, k: Tensor, v: Tensor, g: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """`−most σ(erase) ⊙ k ⊙ e^g` and `σ(write) ⊙ v`, in the dtypes of k and v."""
    read, written = k.new_empty(k.shape), v.new_empty(v.shape)
    if g.numel():
        sizes, grid, tile = _erase_sizes(k, v)
        given, strides = zip(*(as_rows(x, x.shape[2:].numel()) for x in (erase, write, k, v)), strict=True)
        launch(_erase_kernel, grid)(*given, g.contiguous(), read, written, *sizes, *strides, most, **tile)
    return read, written


def _erase_write_backward(
    dread: Tensor, dwritten: Tensor, erase: Tensor, write: Tensor, k: Tensor, v: Tensor, g: Tensor, most: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    derase, dwrite = new_gradient(erase), new_gradient(write)
    dk, dv, dg = (x.new_empty(x.shape) for x in (k, v, g))
    if g.numel():
        sizes, grid, tile = _erase_sizes(k, v)
        given, strides = zip(*(as_rows(x, x.shape[2:].numel()) for x in (erase, write, k, v)), strict=True)
        launch(_erase_back_kernel, grid)(
            *given, g.contiguous(), dread, dwritten, derase, dwrite, dk, dv, dg, *sizes, *strides, derase.stride(1),
            dwrite.stride(1), most, **tile,
        )  # fmt: skip
    return derase, dwrite, dk, dv, dg


def _erase_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.most = inputs
    ctx.save_for_backward(*tensors)


def _erase_grad(ctx: Any, dread: Tensor, dwritten: Tensor) -> tuple[Any, ...]:
    only_first_derivatives()
    return *_of_erase(dread.contiguous(), dwritten.contiguous(), *ctx.saved_tensors, ctx.most), None


_of_erase = declare_gradients("triton_erase_write_backward", _erase_write_backward)
declare("triton_erase_write", _erase_write).register_autograd(_erase_grad, setup_context=_erase_save)


@triton.jit
@no_type_check
def _parts(q, k, logits, share, output, rows, h, at, inside, tokens, q_t, k_t, l_t, most, APART: tl.constexpr):
    """Return `(k, 1 / ‖k‖, q̂ and its factor, β, β's slope, s, d, the factor of s k in what reads)`."""
    s, d = sigmoid(tl.load(share + h).to(tl.float32)), tl.load(output + h).to(tl.float32)
    key = entries(k, rows, k_t, at, inside)
    query = entries(q, rows, q_t, at, inside) - d * s * key
    of_query = tl.rsqrt(tl.sum(query * query, 1) + EPS)[:, None]
    total = tl.sum(key * key, 1)[:, None]
    of_key = tl.rsqrt(total + EPS)
    x = tl.load(logits + rows * l_t + h, mask=rows < tokens, other=0.0).to(tl.float32)[:, None]
    beta = most * sigmoid(x)
    of_read = tl.rsqrt(s * s * total + EPS) if APART else of_key
    return key, of_key, query * of_query, of_query, beta, beta * sigmoid(-x), s, d, of_read


@triton.jit
@no_type_check
def _feedback_kernel(
    q, k, logits, share, output, query, written, read, tokens, heads, size, q_t, k_t, l_t, most,
    APART: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % heads
    at, here = channels_of(heads, size, BC)
    rows, inside, place = tokens_of(tl.program_id(0) // heads, at, here, tokens, heads, size, BR)
    key, of_key, unit, _, beta, _, s, _, of_read = _parts(
        q, k, logits, share, output, rows, h, at, inside, tokens, q_t, k_t, l_t, most, APART
    )
    tl.store(query + place, unit.to(query.dtype.element_ty), mask=inside)
    tl.store(written + place, (beta * of_key * key).to(written.dtype.element_ty), mask=inside)
    tl.store(read + place, (-s * of_read * key).to(read.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _feedback_back_kernel(
    q, k, logits, share, output, dquery, dwritten, dread, dq, dk, dlogits, sums, tokens, heads, size, q_t, k_t, l_t,
    most, tiles, APART: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % heads
    block = (tl.program_id(0) // heads).to(tl.int64)
    at, here = channels_of(heads, size, BC)
    dshare = tl.zeros([BR], tl.float32)
    doutput = tl.zeros([BR], tl.float32)
    for i in range(tiles):
        rows, inside, place = tokens_of(block * tiles + i, at, here, tokens, heads, size, BR)
        key, of_key, unit, of_query, beta, slope, s, d, of_read = _parts(
            q, k, logits, share, output, rows, h, at, inside, tokens, q_t, k_t, l_t, most, APART
        )
        of_q = tl.load(dquery + place, mask=inside, other=0.0).to(tl.float32)
        of_q = of_query * (of_q - unit * tl.sum(of_q * unit, 1)[:, None])
        tl.store(dq + place, of_q.to(dq.dtype.element_ty), mask=inside)
        along = -tl.sum(of_q * key, 1)  # the gradient of d s
        unit = of_key * key
        of_unit = tl.load(dwritten + place, mask=inside, other=0.0).to(tl.float32)
        of_beta = slope * tl.sum(of_unit * unit, 1)[:, None]
        row = (rows * heads + h)[:, None]
        tl.store(dlogits + row, of_beta.to(dlogits.dtype.element_ty), mask=(rows < tokens)[:, None])
        of_unit *= beta
        of_read_by = -tl.load(dread + place, mask=inside, other=0.0).to(tl.float32)
        dkey = -d * s * of_q
        if APART:
            reads = s * of_read * key
            of_read_by = of_read * (of_read_by - reads * tl.sum(of_read_by * reads, 1)[:, None])
            dshare += tl.sum(of_read_by * key, 1) + d * along
            dkey += s * of_read_by
        else:
            dshare += tl.sum(of_read_by * unit, 1) + d * along
            of_unit += s * of_read_by
        doutput += s * along
        dkey += of_key * (of_unit - unit * tl.sum(of_unit * unit, 1)[:, None])
        tl.store(dk + place, dkey.to(dk.dtype.element_ty), mask=inside)
    x = tl.load(share + h).to(tl.float32)
    tl.store(sums + block * 2 * heads + h, tl.sum(dshare, 0) * sigmoid(x) * sigmoid(-x))
    tl.store(sums + block * 2 * heads + heads + h, tl.sum(doutput, 0))


def _feedback(
    q: Tensor, k: Tensor, logits: Tensor, share: Tensor, output: Tensor, most: float, apart: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys times β, and what reads the state, `[B, T, H, K]` in `dtype`."""
    query, written, read = (q.new_empty(q.shape, dtype=dtype) for _ in range(3))
    if q.numel():
        size, blocks, _, tile = tiles_of(q, False)
        given, strides = rows_of_tokens(size[1] * size[2], q, k)
        logits, l_t = as_rows(logits, size[1])
        launch(_feedback_kernel, (blocks * size[1],))(
            *given, logits, share, output, query, written, read, *size, *strides, l_t, most, APART=apart, **tile
        )
    return query, written, read


def _feedback_backward(
    dquery: Tensor, dwritten: Tensor, dread: Tensor, q: Tensor, k: Tensor, logits: Tensor, share: Tensor,
    output: Tensor, most: float, apart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and the logits, and those of both parameters in rows."""
    dq, dk, dlogits = (x.new_empty(x.shape) for x in (q, k, logits))
    size, blocks, tiles, tile = tiles_of(q, True)
    sums = q.new_empty(blocks, 2, size[1], dtype=torch.float32)
    if q.numel():
        given, strides = rows_of_tokens(size[1] * size[2], q, k)
        logits, l_t = as_rows(logits, size[1])
        launch(_feedback_back_kernel, (blocks * size[1],))(
            *given, logits, share, output, dquery, dwritten, dread, dq, dk, dlogits, sums, *size, *strides, l_t, most,
            tiles, APART=apart, **tile,
        )  # fmt: skip
    return dq, dk, dlogits, gradient_of(sums, share, output)


def _feedback_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:7]


def _feedback_grad(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
    only_first_derivatives()
    *_, share, output = tensors = ctx.saved_tensors
    dq, dk, dlogits, sums = _of_feedback(*(d.contiguous() for d in douts), *tensors, *ctx.settings)
    return dq, dk, dlogits, sums[0].to(share.dtype), sums[1].to(output.dtype), None, None, None


_of_feedback = declare_gradients("triton_feedback_keys_backward", _feedback_backward)
declare("triton_feedback_keys", _feedback).register_autograd(_feedback_grad, setup_context=_feedback_save)
