"""The products and outputs of Mamba-3 MIMO, as `halflife.ops.trapezoid` defines them.

A program has one head of some tokens, and goes through its R queries, keys and outputs. Tiles that it reads again are
in the cache. Gradients of parameters are summed over the tokens of a program, and then over programs by torch.
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
from halflife.ops.backends.triton.passes.keys import channels_of, numbers, tokens_of
from halflife.ops.backends.triton.passes.rows import contiguous, entries, rows_of_tokens

TILE = 1024  # entries of a program at once
OF_OUTPUTS = 128  # those of the backward pass of outputs, of 2 warps; 1,024 of 4 spill 876 times on sm_90
PROGRAMS = 2048  # programs of the backward pass of outputs, at most, of all heads


@triton.jit
@no_type_check
def _of_heads(x, rows, heads, there):
    """Load the numbers of one head, `[R]` in float32."""
    place = rows * heads + tl.program_id(0) % heads
    return tl.load(x + place, mask=there, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _matrix(x, rows, heads, there, r, s, RANK: tl.constexpr):
    """Load the entries (r, s) of the matrices of one head, `[R, 1]` in float32."""
    place = ((rows * heads + tl.program_id(0) % heads) * RANK + r) * RANK + s
    return tl.load(x + place, mask=there, other=0.0).to(tl.float32)[:, None]


@triton.jit
@no_type_check
def _store_matrix(x, value, rows, heads, there, r, s, RANK: tl.constexpr):
    place = ((rows * heads + tl.program_id(0) % heads) * RANK + r) * RANK + s
    tl.store(x + place, value, mask=there)


@triton.jit
@no_type_check
def _products_kernel(
    q, k, before, weight, gain, skip, later, now, tokens, heads, size, q_t, k_t, before_t,
    RANK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % heads
    at, here = channels_of(heads, size, BC)
    rows, inside, _ = tokens_of(tl.program_id(0) // heads, at, here, tokens, heads, size, BR)
    there = rows < tokens
    of_before = _of_heads(weight, rows, heads, there)
    of_now = _of_heads(gain, rows, heads, there)
    own = tl.load(skip + h).to(tl.float32)
    for r in tl.static_range(RANK):
        query = entries(q, rows, q_t, r * heads * size + at, inside)
        for s in tl.static_range(RANK):
            product = of_now * tl.sum(query * entries(k, rows, k_t, s * heads * size + at, inside), 1)
            if r == s:
                product += own
            _store_matrix(now, product, rows, heads, there, r, s, RANK)
            product = tl.zeros([BR], tl.float32)
            if s > r:
                key = entries(before, rows, before_t, s * heads * size + at, inside)
                product = of_before * tl.sum(query * key, 1)
            _store_matrix(later, product, rows, heads, there, r, s, RANK)


@triton.jit
@no_type_check
def _products_back_kernel(
    q, k, before, weight, gain, dlater, dnow, dq, dk, dbefore, dweight, dgain, sums, tokens, heads, size,
    q_t, k_t, before_t, RANK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % heads
    at, here = channels_of(heads, size, BC)
    rows, inside, _ = tokens_of(tl.program_id(0) // heads, at, here, tokens, heads, size, BR)
    there = rows < tokens
    of_before = _of_heads(weight, rows, heads, there)[:, None]
    of_now = _of_heads(gain, rows, heads, there)[:, None]
    of_weight = tl.zeros([BR], tl.float32)
    of_gain = tl.zeros([BR], tl.float32)
    of_skip = tl.zeros([BR], tl.float32)
    place = (rows * RANK * heads * size)[:, None] + at[None, :]
    for r in tl.static_range(RANK):
        query = entries(q, rows, q_t, r * heads * size + at, inside)
        read = tl.zeros([BR, BC], tl.float32)
        read_before = tl.zeros([BR, BC], tl.float32)
        for s in tl.static_range(RANK):
            d = _matrix(dnow, rows, heads, there, r, s, RANK)
            read += d * entries(k, rows, k_t, s * heads * size + at, inside)
            if r == s:
                of_skip += tl.sum(d, 1)
            if s > r:
                key = entries(before, rows, before_t, s * heads * size + at, inside)
                read_before += _matrix(dlater, rows, heads, there, r, s, RANK) * key
        of_weight += tl.sum(query * read_before, 1)
        of_gain += tl.sum(query * read, 1)
        d = of_now * read + of_before * read_before
        tl.store(dq + place + r * heads * size, d.to(dq.dtype.element_ty), mask=inside)
    for s in tl.static_range(RANK):
        written = tl.zeros([BR, BC], tl.float32)
        written_before = tl.zeros([BR, BC], tl.float32)
        for r in tl.static_range(RANK):
            query = entries(q, rows, q_t, r * heads * size + at, inside)
            written += _matrix(dnow, rows, heads, there, r, s, RANK) * query
            if s > r:
                written_before += _matrix(dlater, rows, heads, there, r, s, RANK) * query
        tl.store(dk + place + s * heads * size, (of_now * written).to(dk.dtype.element_ty), mask=inside)
        d = (of_before * written_before).to(dbefore.dtype.element_ty)
        tl.store(dbefore + place + s * heads * size, d, mask=inside)
    tl.store(dweight + rows * heads + h, of_weight, mask=there)
    tl.store(dgain + rows * heads + h, of_gain, mask=there)
    tl.store(sums + tl.program_id(0), tl.sum(of_skip, 0))


@triton.jit
@no_type_check
def _output_of_rank(
    y, later, now, before, x, values, rows, at, here, inside, y_t, tokens, heads, size, r, RANK: tl.constexpr
):
    """Return u_r, and the factors of x' and x in it."""
    there = rows < tokens
    of_before = tl.zeros(x.shape, tl.float32)
    of_x = tl.zeros(x.shape, tl.float32)
    for s in tl.static_range(RANK):
        value = numbers(values, s * heads * size + at, here)
        of_before += _matrix(later, rows, heads, there, r, s, RANK) * value
        of_x += _matrix(now, rows, heads, there, r, s, RANK) * value
    u = entries(y, rows, y_t, r * heads * size + at, inside) + of_before * before + of_x * x
    return u, of_before, of_x


@triton.jit
@no_type_check
def _outputs_kernel(
    y, before, x, z, later, now, values, gates, outputs, out, tokens, heads, size, y_t, before_t, x_t, z_t,
    RANK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    at, here = channels_of(heads, size, BC)
    rows, inside, place = tokens_of(tl.program_id(0) // heads, at, here, tokens, heads, size, BR)
    old = entries(before, rows, before_t, at, inside)
    new = entries(x, rows, x_t, at, inside)
    opened = entries(z, rows, z_t, at, inside)
    total = tl.zeros([BR, BC], tl.float32)
    for r in tl.static_range(RANK):
        u, _, _ = _output_of_rank(
            y, later, now, old, new, values, rows, at, here, inside, y_t, tokens, heads, size, r, RANK
        )
        gate = numbers(gates, r * heads * size + at, here) * opened
        total += numbers(outputs, r * heads * size + at, here) * u * gate * sigmoid(gate)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _outputs_back_kernel(
    y, before, x, z, later, now, values, gates, outputs, dout, dy, dbefore, dx, dz, dlater, dnow, sums,
    tokens, heads, size, y_t, before_t, x_t, z_t, tiles,
    RANK: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    block = (tl.program_id(0) // heads).to(tl.int64)
    at, here = channels_of(heads, size, BC)
    rank = tl.arange(0, ROWS)[:, None]
    of_values = tl.zeros([ROWS, BC], tl.float32)
    of_gates = tl.zeros([ROWS, BC], tl.float32)
    of_outputs = tl.zeros([ROWS, BC], tl.float32)
    for i in range(tiles):
        rows, inside, place = tokens_of(block * tiles + i, at, here, tokens, heads, size, BR)
        there = rows < tokens
        old = entries(before, rows, before_t, at, inside)
        new = entries(x, rows, x_t, at, inside)
        opened = entries(z, rows, z_t, at, inside)
        d = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        of_old = tl.zeros([BR, BC], tl.float32)
        of_new = tl.zeros([BR, BC], tl.float32)
        of_z = tl.zeros([BR, BC], tl.float32)
        for r in tl.static_range(RANK):
            u, factor_old, factor_new = _output_of_rank(
                y, later, now, old, new, values, rows, at, here, inside, y_t, tokens, heads, size, r, RANK
            )
            weight = numbers(gates, r * heads * size + at, here)
            gate = weight * opened
            share = sigmoid(gate)
            du = d * gate * share
            of_outputs += tl.where(rank == r, tl.sum(du * u, 0)[None, :], 0.0)
            scale = numbers(outputs, r * heads * size + at, here)
            of_gate = d * scale * u * share * (1 + gate * (1 - share))
            of_gates += tl.where(rank == r, tl.sum(of_gate * opened, 0)[None, :], 0.0)
            of_z += of_gate * weight
            du *= scale
            here_y = (rows * RANK * heads * size)[:, None] + (r * heads * size + at)[None, :]
            tl.store(dy + here_y, du.to(dy.dtype.element_ty), mask=inside)
            of_old += du * factor_old
            of_new += du * factor_new
            for s in tl.static_range(RANK):
                value = numbers(values, s * heads * size + at, here)
                _store_matrix(dlater, tl.sum(du * old * value, 1), rows, heads, there, r, s, RANK)
                _store_matrix(dnow, tl.sum(du * new * value, 1), rows, heads, there, r, s, RANK)
                own = _matrix(later, rows, heads, there, r, s, RANK) * old
                own += _matrix(now, rows, heads, there, r, s, RANK) * new
                of_values += tl.where(rank == s, tl.sum(du * own, 0)[None, :], 0.0)
        tl.store(dbefore + place, of_old.to(dbefore.dtype.element_ty), mask=inside)
        tl.store(dx + place, of_new.to(dx.dtype.element_ty), mask=inside)
        tl.store(dz + place, of_z.to(dz.dtype.element_ty), mask=inside)
    place = (block * 3 * RANK + rank) * heads * size + at[None, :]
    mask = (rank < RANK) & here[None, :]
    tl.store(sums + place, of_values, mask=mask)
    tl.store(sums + place + RANK * heads * size, of_gates, mask=mask)
    tl.store(sums + place + 2 * RANK * heads * size, of_outputs, mask=mask)


def _tile(x: Tensor, entries: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Tokens, H and the channels of `x [B, T, R, H, C]`, and the tile of a program."""
    columns = max(16, triton.next_power_of_2(x.shape[4]))
    rows = max(1, entries // columns)
    return (x.shape[0] * x.shape[1], x.shape[3], x.shape[4]), {"RANK": x.shape[2], "BR": rows, "BC": columns}


def _products(
    q: Tensor, k: Tensor, before: Tensor, weight: Tensor, gain: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor]:
    """The matrices of `mimo_products`, `[B, T, H, R, R]` in float32."""
    later, now = (q.new_empty(*q.shape[:2], q.shape[3], q.shape[2], q.shape[2], dtype=torch.float32) for _ in range(2))
    if later.numel():
        size, tile = _tile(q, TILE)
        rows, strides = rows_of_tokens(q.shape[2] * q.shape[3] * q.shape[4], q, k, before)
        launch(_products_kernel, (triton.cdiv(size[0], tile["BR"]) * size[1],))(
            *rows, *contiguous(weight, gain, skip), later, now, *size, *strides, **tile
        )
    return later, now


def _products_backward(
    dlater: Tensor, dnow: Tensor, q: Tensor, k: Tensor, before: Tensor, weight: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the six arguments; those of weight, gain and skip are float32."""
    found = [x.new_empty(x.shape) for x in (q, k, before)]
    found += [x.new_empty(x.shape, dtype=torch.float32) for x in (weight, gain)]
    size, tile = _tile(q, TILE)
    blocks = triton.cdiv(size[0], tile["BR"])
    sums = weight.new_empty(blocks, size[1], dtype=torch.float32)
    if dnow.numel():
        rows, strides = rows_of_tokens(q.shape[2] * q.shape[3] * q.shape[4], q, k, before)
        launch(_products_back_kernel, (blocks * size[1],))(
            *rows, *contiguous(weight, gain), dlater, dnow, *found, sums, *size, *strides, **tile
        )
    return *found, sums.sum(0)  # pyright: ignore[reportReturnType]


def _products_grad(ctx: Any, dlater: Tensor, dnow: Tensor) -> tuple[Any, ...]:
    only_first_derivatives()
    *tensors, skip = ctx.saved_tensors
    *found, dweight, dgain, dskip = _of_products(dlater.contiguous(), dnow.contiguous(), *tensors)
    return *found, dweight.to(tensors[3].dtype), dgain.to(tensors[4].dtype), dskip.to(skip.dtype)


def _outputs(
    y: Tensor, before: Tensor, x: Tensor, z: Tensor, later: Tensor, now: Tensor, values: Tensor, gates: Tensor,
    outputs: Tensor,
) -> Tensor:  # fmt: skip
    """The result of `mimo_output [B, T, H, V]`, in the dtype of x."""
    out = x.new_empty(x.shape)
    if out.numel():
        size, tile = _tile(y, TILE)
        (rows_y,), (stride,) = rows_of_tokens(y.shape[2] * size[1] * size[2], y)
        rows, strides = rows_of_tokens(size[1] * size[2], before, x, z)
        launch(_outputs_kernel, (triton.cdiv(size[0], tile["BR"]) * size[1],))(
            rows_y, *rows, *contiguous(later, now, values, gates, outputs), out, *size, stride, *strides, **tile
        )
    return out


def _outputs_backward(
    dout: Tensor, y: Tensor, before: Tensor, x: Tensor, z: Tensor, later: Tensor, now: Tensor, values: Tensor,
    gates: Tensor, outputs: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the six tensors of tokens, and those of the parameters `[3, R, H, V]` in float32."""
    dy, dbefore, dx, dz = (part.new_empty(part.shape) for part in (y, before, x, z))
    dlater, dnow = (part.new_empty(part.shape, dtype=torch.float32) for part in (later, now))
    size, tile = _tile(y, OF_OUTPUTS)
    blocks = triton.cdiv(size[0], tile["BR"])
    tiles = max(1, triton.cdiv(blocks, max(1, PROGRAMS // size[1])))
    programs = triton.cdiv(blocks, tiles)
    sums = values.new_empty(programs, 3, *values.shape, dtype=torch.float32)
    if dout.numel():
        (rows_y,), (stride,) = rows_of_tokens(y.shape[2] * size[1] * size[2], y)
        rows, strides = rows_of_tokens(size[1] * size[2], before, x, z)
        launch(_outputs_back_kernel, (programs * size[1],))(
            rows_y, *rows, *contiguous(later, now, values, gates, outputs), dout, dy, dbefore, dx, dz, dlater, dnow,
            sums, *size, stride, *strides, tiles, ROWS=triton.next_power_of_2(y.shape[2]), num_warps=2, **tile,
        )  # fmt: skip
    return dy, dbefore, dx, dz, dlater, dnow, sums.sum(0)


def _outputs_grad(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    only_first_derivatives()
    tensors = ctx.saved_tensors
    *found, sums = _of_outputs(dout.contiguous(), *tensors)
    found = [*found, *sums.unbind()]
    return tuple(d if d.dtype == x.dtype else d.to(x.dtype) for d, x in zip(found, tensors, strict=True))


_of_products = declare_gradients("triton_mimo_products_backward", _products_backward)
_of_outputs = declare_gradients("triton_mimo_output_backward", _outputs_backward)
declare("triton_mimo_output", _outputs).register_autograd(_outputs_grad, setup_context=save_inputs)
declare("triton_mimo_products", _products).register_autograd(_products_grad, setup_context=save_inputs)
