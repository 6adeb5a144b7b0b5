"""The decays and keys of Longhorn, as `halflife.ops.linear_attention` defines them, from keys of all heads.

A program of the backward pass goes over all heads of some tokens, so that the gradient of a key is in one program.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.laws import log1p, sigmoid
from halflife.ops.backends.triton.op import declare, declare_gradients
from halflife.ops.backends.triton.passes.rows import as_rows, entries

TILE = 2048  # entries of a program at once
ROW = 512  # of which a token has at most so many


@triton.jit
@no_type_check
def _given(logits, k, rows, h, cols, tokens, H, K, l_t, k_t):
    """Return `(logits [R, H], k [R, K], kᵀk [R], the places of entries [R, H, K], which of them exist)`."""
    there = rows < tokens
    x = entries(logits, rows, l_t, h, there[:, None] & (h < H)[None, :])
    key = entries(k, rows, k_t, cols, there[:, None] & (cols < K)[None, :])
    place = ((rows.to(tl.int64) * H)[:, None] + h[None, :])[:, :, None] * K + cols[None, None, :]
    inside = (there[:, None] & (h < H)[None, :])[:, :, None] & (cols < K)[None, None, :]
    return x, key, tl.sum(key * key, 1), place, inside


@triton.jit
@no_type_check
def _longhorn_kernel(
    logits, k, g, written, tokens, H, K, l_t, k_t, BR: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    groups = tl.cdiv(H, BH)
    rows = (tl.program_id(0) // groups) * BR + tl.arange(0, BR)
    h = (tl.program_id(0) % groups) * BH + tl.arange(0, BH)
    x, key, total, place, inside = _given(logits, k, rows, h, tl.arange(0, BK), tokens, H, K, l_t, k_t)
    beta = sigmoid(x)
    step = beta / (1 + beta * total[:, None])
    rest = tl.maximum(total[:, None] - key * key, 0.0)
    f = beta[:, :, None] * (key * key)[:, None, :] / (1 + beta[:, :, None] * rest[:, None, :])
    decay = tl.where(f < 1, log1p(tl.where(f < 1, f, 0.0)), tl.log(1 + f))
    tl.store(g + place, -decay, mask=inside)
    tl.store(written + place, (step[:, :, None] * key[:, None, :]).to(written.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _longhorn_back_kernel(
    logits, k, dg, dwritten, dlogits, dk, tokens, H, K, l_t, k_t, BR: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr
):
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BK)
    of_key = tl.zeros([BR, BK], tl.float32)
    of_square = tl.zeros([BR, BK], tl.float32)
    for start in range(0, H, BH):
        h = start + tl.arange(0, BH)
        x, key, total, place, inside = _given(logits, k, rows, h, cols, tokens, H, K, l_t, k_t)
        beta = sigmoid(x)
        whole = 1 + beta * total[:, None]
        rest = 1 + beta[:, :, None] * tl.maximum(total[:, None] - key * key, 0.0)[:, None, :]
        d = tl.load(dwritten + place, mask=inside, other=0.0).to(tl.float32)
        of_step = tl.sum(d * key[:, None, :], 2)
        share = beta / whole
        of_key += tl.sum(d * share[:, :, None], 1)
        d = -tl.load(dg + place, mask=inside, other=0.0) / rest  # of log(1 + f), over the denominator of f
        of_beta = (of_step / whole + tl.sum(d * (key * key)[:, None, :], 2)) / whole
        place = (rows.to(tl.int64) * H)[:, None] + h[None, :]
        of_beta = (of_beta * beta * sigmoid(-x)).to(dlogits.dtype.element_ty)
        tl.store(dlogits + place, of_beta, mask=(rows < tokens)[:, None] & (h < H)[None, :])
        d *= beta[:, :, None]
        of_total = -share * (share * of_step + tl.sum(d * (key * key)[:, None, :], 2))
        of_square += tl.sum(d, 1) + tl.sum(of_total, 1)[:, None]
    mask = (rows < tokens)[:, None] & (cols < K)[None, :]
    of_key += 2 * entries(k, rows, k_t, cols, mask) * of_square
    tl.store(dk + rows.to(tl.int64)[:, None] * K + cols[None, :], of_key.to(dk.dtype.element_ty), mask=mask)


def _tiles(logits: Tensor, k: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The tokens, H and K, and the size of a tile."""
    heads, size = logits.shape[-1], k.shape[-1]
    columns = triton.next_power_of_2(size)
    block = min(triton.next_power_of_2(heads), max(1, ROW // columns))
    return (logits.numel() // heads, heads, size), {"BR": max(1, TILE // (block * columns)), "BH": block, "BK": columns}


def _longhorn(logits: Tensor, k: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """g in float32, and the keys in `dtype` or that of k, `[B, T, H, K]`."""
    sizes, tile = _tiles(logits, k)
    shape = *logits.shape, sizes[2]
    g, written = k.new_empty(shape, dtype=torch.float32), k.new_empty(shape, dtype=dtype)
    if g.numel():
        (x, l_t), (key, k_t) = as_rows(logits, sizes[1]), as_rows(k, sizes[2])
        grid = (triton.cdiv(sizes[0], tile["BR"]) * triton.cdiv(sizes[1], tile["BH"]),)
        launch(_longhorn_kernel, grid)(x, key, g, written, *sizes, l_t, k_t, **tile)
    return g, written


def _longhorn_backward(dg: Tensor, dwritten: Tensor, logits: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    sizes, tile = _tiles(logits, k)
    dlogits, dk = logits.new_empty(logits.shape), k.new_empty(k.shape)
    if dg.numel():
        (x, l_t), (key, k_t) = as_rows(logits, sizes[1]), as_rows(k, sizes[2])
        launch(_longhorn_back_kernel, (triton.cdiv(sizes[0], tile["BR"]),))(
            x, key, dg, dwritten, dlogits, dk, *sizes, l_t, k_t, **tile
        )
    return dlogits, dk


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2])


def _grad(ctx: Any, dg: Tensor, dwritten: Tensor) -> tuple[Any, ...]:
    only_first_derivatives()
    return *_gradients(dg.contiguous(), dwritten.contiguous(), *ctx.saved_tensors), None


_gradients = declare_gradients("triton_longhorn_keys_backward", _longhorn_backward)
declare("triton_longhorn_keys", _longhorn).register_autograd(_grad, setup_context=_save)
