"""The delta rule under a vector decay (KDA) as DPLR, in one pass over its inputs before and one over gradients after.

From `S ← diag(e^g) S + β k (v − (e^g ⊙ k)ᵀ S)ᵀ` follow `b = k`, `a = −β e^g ⊙ k` and values `β v`. So keys are not
rounded again, and keep their groups. DPLR's kernels get no b, and compute scores with keys once in place of twice. With
the gradients of DPLR's k and b together, a, values and g, which have a bar below,

    dk = k̄ − β e^g ⊙ ā,   dg = ḡ + a ⊙ ā,   dv = β v̄,   dβ = v · v̄ − (e^g ⊙ k) · ā.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.dplr import dplr_host as dplr
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.linear import rows_of
from halflife.ops.backends.triton.segments import block
from halflife.ops.backends.triton.walks import load, store
from halflife.ops.chunked.groups import sum_of_heads

TILE = 2048  # entries of a program


@triton.jit
@no_type_check
def _strengths(beta, tokens, H: tl.constexpr, BR: tl.constexpr):
    """A program's head, its tokens, which of them exist, and their β."""
    h = tl.program_id(0) % H
    rows = (tl.program_id(0) // H).to(tl.int64) * BR + tl.arange(0, BR)
    inside = rows < tokens
    return h, rows, inside, tl.load(beta + rows * H + h, mask=inside, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _inputs_kernel(
    k, v, beta, g, a, values, tokens, H: tl.constexpr, SK: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr,
    VT: tl.constexpr, VH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """The rows a and the values of one head and BR tokens."""
    h, rows, inside, strength = _strengths(beta, tokens, H, BR)
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    weights = -strength[:, None] * tl.exp(load(g + h * K, rows, kk, inside, H * K, K, BK).to(tl.float32))
    keys = load(k + (h // SK) * KH, rows, kk, inside, KT, K, BK).to(tl.float32)
    store(a + h * K, weights * keys, rows, kk, inside, H * K, K, BK)
    written = strength[:, None] * load(v + h * VH, rows, vv, inside, VT, V, BV).to(tl.float32)
    store(values + h * V, written, rows, vv, inside, H * V, V, BV)


@triton.jit
@no_type_check
def _gradients_kernel(
    k, v, beta, g, da, dk, dv, dg, dbeta, tokens, H: tl.constexpr, SK: tl.constexpr, KT: tl.constexpr,
    KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients of one head and BR tokens. Those of k, v (which was `values`) and g are changed in place."""
    h, rows, inside, strength = _strengths(beta, tokens, H, BR)
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    keys = load(k + (h // SK) * KH, rows, kk, inside, KT, K, BK).to(tl.float32)
    through = tl.exp(load(g + h * K, rows, kk, inside, H * K, K, BK).to(tl.float32))
    through *= load(da + h * K, rows, kk, inside, H * K, K, BK).to(tl.float32)
    met = through * keys
    of_keys = load(dk + h * K, rows, kk, inside, H * K, K, BK).to(tl.float32) - strength[:, None] * through
    store(dk + h * K, of_keys, rows, kk, inside, H * K, K, BK)
    of_decays = load(dg + h * K, rows, kk, inside, H * K, K, BK).to(tl.float32) - strength[:, None] * met
    store(dg + h * K, of_decays, rows, kk, inside, H * K, K, BK)
    of_values = load(dv + h * V, rows, vv, inside, H * V, V, BV).to(tl.float32)
    store(dv + h * V, strength[:, None] * of_values, rows, vv, inside, H * V, V, BV)
    of_strength = tl.sum(of_values * load(v + h * VH, rows, vv, inside, VT, V, BV).to(tl.float32), 1) - tl.sum(met, 1)
    tl.store(dbeta + rows * H + h, of_strength.to(dbeta.dtype.element_ty), mask=inside)


def _sizes(k: Tensor, v: Tensor) -> tuple[int, tuple[int, ...]]:
    """How many programs both kernels have, and their last arguments."""
    (batch, length, heads, value), (groups, key) = v.shape, k.shape[2:]
    columns, tokens = (block(key, 256), block(value, 256)), batch * length
    rows, strides = TILE // max(columns), (*k.stride()[1:3], *v.stride()[1:3])
    programs = triton.cdiv(tokens, rows) * heads
    return programs, (tokens, heads, heads // max(1, groups), *strides, key, value, rows, *columns)


def as_dplr(k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The rows a `[B, T, H, K]` and the values `[B, T, H, V]` of DPLR."""
    a, values = k.new_empty(g.shape), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    k, v = rows_of(k), rows_of(v)
    programs, sizes = _sizes(k, v)
    if programs:
        launch(_inputs_kernel, (programs,))(k, v, beta, g, a, values, *sizes)
    return a, values


def forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what DPLR returns, and its rows a and values."""
    a, values = as_dplr(k, v, beta, g)
    found = dplr.forward(q, k, values, a, None, g, initial, cu_seqlens, scale, chunk_size)
    return *found, a, values


def backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, initial: Tensor | None, entering: Tensor,
    transition: Tensor, a: Tensor, values: Tensor, cu_seqlens: Tensor | None, scale: float, chunk_size: int, do: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of q, k, v, beta, the log-decays and the initial states."""
    rest = initial, entering, transition, cu_seqlens, scale, chunk_size, do, dfinal
    dq, dk, dv, da, _, dg, dinitial = dplr.gradients(q, k, values, a, None, g, *rest)
    assert dg is not None
    dbeta, even_k, even_v = torch.empty_like(beta), rows_of(k), rows_of(v)
    programs, sizes = _sizes(even_k, even_v)
    if programs:
        launch(_gradients_kernel, (programs,))(even_k, even_v, beta, g, da, dk, dv, dg, dbeta, *sizes)
    return sum_of_heads(dq, q), sum_of_heads(dk, k), dv, dbeta, dg, dinitial
