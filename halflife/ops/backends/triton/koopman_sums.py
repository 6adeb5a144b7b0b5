"""The sums of spectral Koopman attention that enter each chunk, and those after all full chunks, in one launch.

    G = Σ k kᵀ,   M = Σ k_t k_{t−1}ᵀ,   Cᵀ = Σ k vᵀ,   m² = max ‖k‖²

A program has a head of a sequence, and G, M or Cᵀ; it walks over the chunks with the sum in registers. The backward
pass walks from the last chunk to the first with the gradients of all three, which are those of all later sums.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.arguments import dense
from halflife.ops.backends.triton.gates import dot, precision_of
from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.op import declare, declare_gradients
from halflife.ops.backends.triton.segments import block

PARTS = 4  # of the columns of gradients, at most, each with a program


@triton.jit
@no_type_check
def _tokens(x, first, row, cols, inside, x_t):
    """Rows `first + row` of one head in float32; 0 outside."""
    place = (first + row).to(tl.int64)[:, None] * x_t + cols[None, :]
    return tl.load(x + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _add_kernel(
    k, v, sums, norms, gram, transition, values, norm, last, T, H, chunks, full, k_b, k_t, k_h, v_b, v_t, v_h,
    S: tl.constexpr, R: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
    BW: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # 0: G and m², 1: M, 2: Cᵀ
    heads = tl.num_programs(0)
    k += (at // H) * k_b + (at % H) * k_h
    v += (at // H) * v_b + (at % H) * v_h
    row = tl.arange(0, BS)
    col = tl.arange(0, BR)
    wide = tl.arange(0, BW)
    width = R
    final = gram
    if part == 1:
        final = transition
    if part == 2:
        width = P
        final = values
    inside_sum = (col < R)[:, None] & (wide < width)[None, :]
    total = tl.zeros([BR, BW], tl.float32)
    largest = 0.0
    for c in range(chunks + 1):
        if c == full:
            # C is the transpose. A store for each part is more than Triton 3.6 compiles.
            place = tl.where(part == 2, wide[None, :] * R + col[:, None], col[:, None] * R + wide[None, :])
            tl.store(final + at * R * width + place, total, mask=inside_sum)
            if part == 0:
                tl.store(norm + at, largest)
                newest = tl.load(k + (at * 0 + c * S - 1) * k_t + col, mask=(col < R) & (c > 0), other=0.0)
                tl.store(last + at * R + col, newest.to(tl.float32), mask=col < R)
        if c < chunks:
            place = ((c * heads + at) * R + col[:, None]) * (2 * R + P) + part * R + wide[None, :]
            tl.store(sums + place, total, mask=inside_sum)
            token = c * S + row
            there = (row < S) & (token < T)
            keys = _tokens(k, c * S, row, col, there[:, None] & (col < R)[None, :], k_t)
            if part == 0:
                tl.store(norms + c * heads + at, largest)
                largest = tl.maximum(largest, tl.max(tl.sum(keys * keys, 1)))
            inside = there[:, None] & (wide < width)[None, :]
            if part == 2:
                right = _tokens(v, c * S, row, wide, inside, v_t)
            elif part == 1:
                right = _tokens(k, c * S - 1, row, wide, inside & (token > 0)[:, None], k_t)
            else:
                right = _tokens(k, c * S, row, wide, inside, k_t)
            total = dot(tl.trans(keys), right, total, PRECISION)


@triton.jit
@no_type_check
def _block(x, first, rows, row_stride, cols, col_stride, inside):
    """A block of gradients, or zeros where there are none."""
    found = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
    if x is not None:
        place = x + first + rows[:, None] * row_stride + cols[None, :] * col_stride
        found += tl.load(place, mask=inside, other=0.0)
    return found


@triton.jit
@no_type_check
def _add_back_kernel(
    k, v, norms, dsums, dnorms, dgram, dtransition, dvalues, dnorm, dlast, dk, dv, T, H, chunks, full, k_b, k_t, k_h,
    v_b, v_t, v_h, S: tl.constexpr, R: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr, BS: tl.constexpr,
    BR: tl.constexpr, BP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Some columns of the gradients of one head's keys and values.

    With U the gradient of all sums after a chunk, `dk = k (U_G + U_Gᵀ) + k' U_Mᵀ + v U_Cᵀ + k'' U_M` and `dv = k U_C`,
    for the keys k' before and k'' after each key, whose U_M is that of its own chunk.
    """
    at = tl.program_id(0).to(tl.int64)
    heads = tl.num_programs(0)
    k += (at // H) * k_b + (at % H) * k_h
    v += (at // H) * v_b + (at % H) * v_h
    first = (at // H) * T * H + at % H  # of the rows of dk and dv
    W: tl.constexpr = 2 * R + P
    row = tl.arange(0, BS)
    rank = tl.arange(0, BR)
    width = tl.arange(0, BP)
    col = tl.program_id(1) * (BR // PARTS) + tl.arange(0, BR // PARTS)
    wide = tl.program_id(1) * (BP // PARTS) + tl.arange(0, BP // PARTS)
    square = (rank < R)[:, None] & (col < R)[None, :]
    of_values = (width < P)[:, None] & (col < R)[None, :]
    of_keys = (rank < R)[:, None] & (wide < P)[None, :]
    both = tl.zeros([BR, BR // PARTS], tl.float32)  # U_G + U_Gᵀ
    step = tl.zeros([BR, BR // PARTS], tl.float32)  # U_M
    back = tl.zeros([BR, BR // PARTS], tl.float32)  # U_Mᵀ
    read = tl.zeros([BP, BR // PARTS], tl.float32)  # U_Cᵀ
    written = tl.zeros([BR, BP // PARTS], tl.float32)  # U_C
    of_norm = 0.0
    carry = tl.zeros([BR // PARTS], tl.float32)  # of the key before a chunk, which is in the chunk before
    for i in range(chunks + 1):
        c = chunks - i
        if c < chunks:
            token = c * S + row
            there = (row < S) & (token < T)
            inside = there[:, None] & (rank < R)[None, :]
            keys = _tokens(k, c * S, row, rank, inside, k_t)
            squares = tl.where(there, tl.sum(keys * keys, 1), -1.0)
            most = tl.max(squares)
            chosen = squares == most
            share = tl.where(most >= tl.load(norms + c * heads + at), of_norm, 0.0)
            of_norm -= share
            some = there[:, None] & (col < R)[None, :]
            factor = tl.where(chosen, 2 * share / tl.sum(chosen.to(tl.float32)), 0.0)
            grad = factor[:, None] * _tokens(k, c * S, row, col, some, k_t)
            if dlast is not None:  # noqa: SIM102 (Triton compiles what stands behind `and`)
                if c == full - 1:
                    carry += tl.load(dlast + at * R + col, mask=col < R, other=0.0)
            grad += tl.where((row == S - 1)[:, None], carry[None, :], 0.0)
            newest = tl.sum(tl.where((row == 0)[:, None], keys, 0.0), 0)
            carry = tl.sum(newest[:, None] * step, 0)
            grad = dot(keys, both, grad, PRECISION)
            other = _tokens(k, c * S - 1, row, rank, inside & (token > 0)[:, None], k_t)
            grad = dot(other, back, grad, PRECISION)
            other = _tokens(k, c * S + 1, row, rank, inside & ((row < S - 1) & (token < T - 1))[:, None], k_t)
            grad = dot(other, step, grad, PRECISION)
            other = _tokens(v, c * S, row, width, there[:, None] & (width < P)[None, :], v_t)
            grad = dot(other, read, grad, PRECISION)
            place = (first + token.to(tl.int64) * H)[:, None]
            tl.store(dk + place * R + col[None, :], grad.to(dk.dtype.element_ty), mask=some)
            some = there[:, None] & (wide < P)[None, :]
            grad = dot(keys, written, tl.zeros([BS, BP // PARTS], tl.float32), PRECISION)
            tl.store(dv + place * P + wide[None, :], grad.to(dv.dtype.element_ty), mask=some)
            entry = (c * heads + at) * R * W
            both += _block(dsums, entry, rank, W, col, 1, square) + _block(dsums, entry, rank, 1, col, W, square)
            step += _block(dsums, entry + R, rank, W, col, 1, square)
            back += _block(dsums, entry + R, rank, 1, col, W, square)
            read += _block(dsums, entry + 2 * R, width, 1, col, W, of_values)
            written += _block(dsums, entry + 2 * R, rank, W, wide, 1, of_keys)
            if dnorms is not None:
                of_norm += tl.load(dnorms + c * heads + at)
        if c == full:
            entry = at * R * R
            both += _block(dgram, entry, rank, R, col, 1, square) + _block(dgram, entry, rank, 1, col, R, square)
            step += _block(dtransition, entry, rank, R, col, 1, square)
            back += _block(dtransition, entry, rank, 1, col, R, square)
            read += _block(dvalues, at * P * R, width, R, col, 1, of_values)
            written += _block(dvalues, at * P * R, rank, 1, wide, R, of_keys)
            if dnorm is not None:
                of_norm += tl.load(dnorm + at)


def _add(k: Tensor, v: Tensor, size: int, chunks: int) -> list[Tensor]:
    """Sums of keys `[B, T, H, R]` and values `[B, T, H, P]` in chunks of `size` tokens, in float32.

    These are `[G M Cᵀ] [n, B, H, R, 2 R + P]` and m² `[n, B, H]` before each of the n chunks; G, M `[B, H, R, R]`,
    C `[B, H, P, R]` and m² `[B, H]` after the last full one; and the last key of this `[B, H, R]`, or 0.
    """
    k, v = dense(k), dense(v)
    (batch, length, heads, rank), width = k.shape, v.shape[-1]
    shapes = (
        (chunks, batch, heads, rank, 2 * rank + width), (chunks, batch, heads), (batch, heads, rank, rank),
        (batch, heads, rank, rank), (batch, heads, width, rank), (batch, heads), (batch, heads, rank),
    )  # fmt: skip
    found = [k.new_empty(shape, dtype=torch.float32) for shape in shapes]
    if batch * heads:
        blocks = block(size), block(rank), max(block(rank), block(width))
        launch(_add_kernel, (batch * heads, 3))(
            k, v, *found, length, heads, chunks, length // size, *k.stride()[:3], *v.stride()[:3], size, rank, width,
            precision_of(k), *blocks,
        )  # fmt: skip
    return found


def _add_backward(
    k: Tensor, v: Tensor, norms: Tensor, dsums: Tensor | None, dnorms: Tensor | None, dgram: Tensor | None,
    dtransition: Tensor | None, dvalues: Tensor | None, dnorm: Tensor | None, dlast: Tensor | None, size: int,
    chunks: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of keys and values."""
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    k, v = dense(k), dense(v)
    (batch, length, heads, rank), width = k.shape, v.shape[-1]
    if batch * heads:
        blocks = block(size), block(rank), block(width)
        parts = min(PARTS, min(blocks[1:]) // 16)
        launch(_add_back_kernel, (batch * heads, parts))(
            k, v, norms, dsums, dnorms, dgram, dtransition, dvalues, dnorm, dlast, dk, dv, length, heads, chunks,
            length // size, *k.stride()[:3], *v.stride()[:3], size, rank, width, precision_of(k), *blocks, parts,
        )  # fmt: skip
    return dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    k, v, *ctx.sizes = inputs
    ctx.save_for_backward(k, v, output[1])
    ctx.set_materialize_grads(False)  # a training step does not use the state


def _grad(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    only_first_derivatives()
    given = [None if d is None else d.contiguous() for d in grads]
    return *_gradients(*ctx.saved_tensors, *given, *ctx.sizes), None, None


_gradients = declare_gradients("triton_koopman_sums_backward", _add_backward)
declare("triton_koopman_sums", _add).register_autograd(_grad, setup_context=_save)
