"""RWKV-7's keys, and its values beside those of the first layer (`rwkv7_keys` and `rwkv7_values` of `ops.rwkv7`).

A program has one head of some tokens. The backward pass computes the forward pass again. Gradients of
parameters are summed over the tokens of a program, and then over programs by torch.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.laws import sigmoid
from halflife.ops.backends.triton.op import declare, declare_gradients, save_inputs
from halflife.ops.backends.triton.passes.rows import contiguous, entries, gradient_of, rows_of_tokens

TILE = 1024  # entries of a program at once
PROGRAMS = 1024  # programs of a backward pass, at most, of all heads
EPS = tl.constexpr(1e-24)  # of unit norms, as in the definition


@triton.jit
@no_type_check
def numbers(x, at, here):
    """Load numbers of channels, as a row in float32; 0 outside."""
    return tl.load(x + at, mask=here, other=0.0).to(tl.float32)[None, :]


@triton.jit
@no_type_check
def channels_of(heads, size, BC: tl.constexpr):
    """The channels of a program's head, and which of them exist."""
    cols = tl.arange(0, BC)
    return (tl.program_id(0) % heads) * size + cols, cols < size


@triton.jit
@no_type_check
def tokens_of(block, at, here, tokens, heads, size, BR: tl.constexpr):
    """The tokens of a block, which of its entries exist, and their places in `[tokens, heads · size]`."""
    rows = block.to(tl.int64) * BR + tl.arange(0, BR)
    return rows, (rows < tokens)[:, None] & here[None, :], rows[:, None] * heads * size + at[None, :]


@triton.jit
@no_type_check
def _keys_kernel(
    key, rate, r, bias, unit, change, bonus, k, a, b, s, tokens, heads, size, key_t, rate_t, r_t,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % heads
    at, here = channels_of(heads, size, BC)
    rows, inside, place = tokens_of(tl.program_id(0) // heads, at, here, tokens, heads, size, BR)
    given = entries(key, rows, key_t, at, inside)
    learned = sigmoid(entries(rate, rows, rate_t, at, inside) + numbers(bias, at, here))
    removed = given * numbers(unit, at, here)
    removed *= tl.rsqrt(tl.sum(removed * removed, 1) + EPS)[:, None]
    written = (given * (1 + (learned - 1) * numbers(change, at, here))).to(k.dtype.element_ty)
    tl.store(k + place, written, mask=inside)
    tl.store(a + place, (-removed).to(a.dtype.element_ty), mask=inside)
    tl.store(b + place, (removed * learned).to(b.dtype.element_ty), mask=inside)
    if r is not None:
        read = entries(r, rows, r_t, at, inside) * written.to(tl.float32) * numbers(bonus, at, here)
        tl.store(s + rows * heads + h, tl.sum(read, 1), mask=rows < tokens)


@triton.jit
@no_type_check
def _keys_back_kernel(
    key, rate, r, bias, unit, change, bonus, dk, da, db, ds, dkey, drate, dr, sums, tokens, heads, size,
    key_t, rate_t, r_t, count, tiles, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % heads
    block = (tl.program_id(0) // heads).to(tl.int64)
    at, here = channels_of(heads, size, BC)
    dbias = tl.zeros([BC], tl.float32)
    dunit = tl.zeros([BC], tl.float32)
    dchange = tl.zeros([BC], tl.float32)
    dbonus = tl.zeros([BC], tl.float32)
    for i in range(tiles):
        rows, inside, place = tokens_of(block * tiles + i, at, here, tokens, heads, size, BR)
        given = entries(key, rows, key_t, at, inside)
        learned = sigmoid(entries(rate, rows, rate_t, at, inside) + numbers(bias, at, here))
        factor = 1 + (learned - 1) * numbers(change, at, here)
        of_k = tl.load(dk + place, mask=inside, other=0.0).to(tl.float32)
        if r is not None:
            of_s = tl.load(ds + rows * heads + h, mask=rows < tokens, other=0.0)[:, None]
            read = entries(r, rows, r_t, at, inside)
            weight = numbers(bonus, at, here)
            tl.store(dr + place, (of_s * given * factor * weight).to(dr.dtype.element_ty), mask=inside)
            dbonus += tl.sum(of_s * given * factor * read, 0)
            of_k += of_s * read * weight
        scale = numbers(unit, at, here)
        removed = given * scale
        inverse = tl.rsqrt(tl.sum(removed * removed, 1) + EPS)[:, None]
        removed *= inverse
        of_b = tl.load(db + place, mask=inside, other=0.0).to(tl.float32)
        of_rate = of_k * given  # of the factor, first
        dchange += tl.sum(of_rate * (learned - 1), 0)
        of_rate = (of_rate * numbers(change, at, here) + of_b * removed) * learned * (1 - learned)
        tl.store(drate + place, of_rate.to(drate.dtype.element_ty), mask=inside)
        dbias += tl.sum(of_rate, 0)
        d = of_b * learned - tl.load(da + place, mask=inside, other=0.0).to(tl.float32)
        d = inverse * (d - removed * tl.sum(d * removed, 1)[:, None])
        dunit += tl.sum(d * given, 0)
        tl.store(dkey + place, (d * scale + of_k * factor).to(dkey.dtype.element_ty), mask=inside)
    place = block * count * heads * size + at
    tl.store(sums + place, dbias, mask=here)
    tl.store(sums + place + heads * size, dunit, mask=here)
    tl.store(sums + place + 2 * heads * size, dchange, mask=here)
    if r is not None:
        tl.store(sums + place + 3 * heads * size, dbonus, mask=here)


def tiles_of(x: Tensor, backward: bool) -> tuple[tuple[int, int, int], int, int, dict[str, int]]:
    """Tokens, H and K of `x [B, T, H, K]`, the programs a head, the tiles of each, and the options of a launch."""
    tokens, heads, size = x.shape[0] * x.shape[1], x.shape[2], x.shape[3]
    columns = max(16, triton.next_power_of_2(size))
    rows = max(1, TILE // columns)
    tiles = max(1, triton.cdiv(triton.cdiv(tokens, rows), max(1, PROGRAMS // heads))) if backward else 1
    tile = {"BR": rows, "BC": columns, "num_warps": max(4, min(16, columns // 256))}
    return (tokens, heads, size), triton.cdiv(tokens, rows * tiles), tiles, tile


def _keys(
    key: Tensor, rate: Tensor, r: Tensor | None, bias: Tensor, unit: Tensor, change: Tensor, bonus: Tensor | None,
    dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """k, −κ̂ and κ̂ ⊙ a `[B, T, H, K]` in `dtype`, and s `[B, T, H]` in float32 if there is r."""
    outs = [key.new_empty(key.shape, dtype=dtype) for _ in range(3)]
    outs += [] if r is None else [key.new_empty(key.shape[:3], dtype=torch.float32)]
    if key.numel():
        given, strides = rows_of_tokens(bias.numel(), key, rate, r)
        size, blocks, _, tile = tiles_of(key, False)
        launch(_keys_kernel, (blocks * size[1],))(
            *given, *contiguous(bias, unit, change, bonus), *outs, *[None] * (4 - len(outs)), *size, *strides, **tile
        )
    return outs


def _keys_backward(
    douts: list[Tensor], key: Tensor, rate: Tensor, r: Tensor | None, bias: Tensor, unit: Tensor, change: Tensor,
    bonus: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of key, rate and r, and those of the parameters in rows."""
    dkey, drate, dr = (key.new_empty(0) if x is None else x.new_empty(x.shape) for x in (key, rate, r))
    size, blocks, tiles, tile = tiles_of(key, True)
    sums = key.new_empty(blocks, 3 + (r is not None), *key.shape[2:], dtype=torch.float32)
    if key.numel():
        given, strides = rows_of_tokens(bias.numel(), key, rate, r)
        launch(_keys_back_kernel, (blocks * size[1],))(
            *given, *contiguous(bias, unit, change, bonus), *douts, *[None] * (4 - len(douts)), dkey, drate, dr, sums,
            *size, *strides, sums.shape[1], tiles, **tile,
        )  # fmt: skip
    return dkey, drate, dr, gradient_of(sums, bias, unit, change, bonus)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7])


def _grad(ctx: Any, douts: list[Tensor]) -> tuple[Any, ...]:
    only_first_derivatives()
    tensors = ctx.saved_tensors
    dkey, drate, dr, sums = _gradients([d.contiguous() for d in douts], *tensors)
    parameters = [x for x in tensors[3:] if x is not None]
    found = [d.to(x.dtype) for d, x in zip(sums.unbind(), parameters, strict=True)]
    return dkey, drate, None if tensors[2] is None else dr, *found, *[None] * (5 - len(found))


_gradients = declare_gradients("triton_rwkv7_keys_backward", _keys_backward)
declare("triton_rwkv7_keys", _keys).register_autograd(_grad, setup_context=_save)


@triton.jit
@no_type_check
def _values_kernel(
    v, first, rate, bias, out, tokens, heads, size, v_t, first_t, rate_t, BR: tl.constexpr, BC: tl.constexpr
):
    at, here = channels_of(heads, size, BC)
    rows, inside, place = tokens_of(tl.program_id(0) // heads, at, here, tokens, heads, size, BR)
    part = sigmoid(entries(rate, rows, rate_t, at, inside) + numbers(bias, at, here))
    own = entries(v, rows, v_t, at, inside)
    own += (entries(first, rows, first_t, at, inside) - own) * part
    tl.store(out + place, own.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _values_back_kernel(
    v, first, rate, bias, dout, dv, dfirst, drate, sums, tokens, heads, size, v_t, first_t, rate_t, tiles,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    block = (tl.program_id(0) // heads).to(tl.int64)
    at, here = channels_of(heads, size, BC)
    dbias = tl.zeros([BC], tl.float32)
    for i in range(tiles):
        rows, inside, place = tokens_of(block * tiles + i, at, here, tokens, heads, size, BR)
        part = sigmoid(entries(rate, rows, rate_t, at, inside) + numbers(bias, at, here))
        d = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dv + place, (d * (1 - part)).to(dv.dtype.element_ty), mask=inside)
        tl.store(dfirst + place, (d * part).to(dfirst.dtype.element_ty), mask=inside)
        d *= entries(first, rows, first_t, at, inside) - entries(v, rows, v_t, at, inside)
        d *= part * (1 - part)
        tl.store(drate + place, d.to(drate.dtype.element_ty), mask=inside)
        dbias += tl.sum(d, 0)
    tl.store(sums + block * heads * size + at, dbias, mask=here)


def _values(v: Tensor, first: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """`v + (first − v) ⊙ σ(bias + rate)` of `[B, T, H, V]`, in the dtype of v."""
    out = v.new_empty(v.shape)
    if v.numel():
        given, strides = rows_of_tokens(bias.numel(), v, first, rate)
        size, blocks, _, tile = tiles_of(v, False)
        launch(_values_kernel, (blocks * size[1],))(*given, bias.contiguous(), out, *size, *strides, **tile)
    return out


def _values_backward(
    dout: Tensor, v: Tensor, first: Tensor, rate: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dv, dfirst, drate = (x.new_empty(x.shape) for x in (v, first, rate))
    size, blocks, tiles, tile = tiles_of(v, True)
    sums = v.new_empty(blocks, *bias.shape, dtype=torch.float32)
    if v.numel():
        given, strides = rows_of_tokens(bias.numel(), v, first, rate)
        launch(_values_back_kernel, (blocks * size[1],))(
            *given, bias.contiguous(), dout, dv, dfirst, drate, sums, *size, *strides, tiles, **tile
        )
    return dv, dfirst, drate, gradient_of(sums, bias)


def _values_grad(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
    only_first_derivatives()
    given = ctx.saved_tensors
    *found, dbias = _of_values(dout.contiguous(), *given)
    return *found, dbias.to(given[3].dtype)


_of_values = declare_gradients("triton_rwkv7_values_backward", _values_backward)
declare("triton_rwkv7_values", _values).register_autograd(_values_grad, setup_context=save_inputs)
