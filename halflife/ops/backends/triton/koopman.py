"""Operators of spectral Koopman attention as Triton kernels: inverse factors, and the reads of a chunk's queries.

A matrix `[G M Cᵀ]`, `[R, 2 R + P]`, holds the three sums of a head. With `L Lᵀ = G + ε m² I` and `N = L⁻¹`, queries
read the whitened operators `Â = N M Nᵀ` and `Ĉ = C Nᵀ`, whose norms are at most 1 and that of the values:

    x̂_0 = N q,   x̂_i = γ Â x̂_{i−1},   y = Ĉ Σ μ_i x̂_i

Numbers inside kernels are float32. Products are exact for float32 queries, and TF32 for narrower ones.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.cholesky import TINY, inverse_factors
from halflife.ops.backends.triton.gates import dot, precision_of
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.op import declare, declare_gradients
from halflife.ops.backends.triton.segments import block


@triton.jit
@no_type_check
def _inverse(lower, norms, at, R: tl.constexpr, BR: tl.constexpr):
    """N of one operator. It is loaded again where holding it would take too many registers."""
    row = tl.arange(0, BR)[:, None]
    col = tl.arange(0, BR)[None, :]
    norm = tl.load(norms + at)
    n = tl.load(lower + at * R * R + row * R + col, mask=(row < R) & (col < R), other=0.0)
    return n / tl.sqrt(tl.where(norm >= TINY, norm, 1.0))


@triton.jit
@no_type_check
def _transition(n, sums, gamma, at, h, R: tl.constexpr, P: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr):
    """`γ Âᵀ = γ N Mᵀ Nᵀ`."""
    row = tl.arange(0, BR)[:, None]
    col = tl.arange(0, BR)[None, :]
    place = sums + at * R * (2 * R + P) + row * (2 * R + P) + R + col
    m = tl.load(place, mask=(row < R) & (col < R), other=0.0)
    zeros = tl.zeros([BR, BR], tl.float32)
    return dot(dot(n, tl.trans(m), zeros, PRECISION), tl.trans(n), zeros, PRECISION) * tl.load(gamma + h)


@triton.jit
@no_type_check
def _values(n, sums, at, R: tl.constexpr, P: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr):
    """`Ĉᵀ = N Cᵀ`."""
    row = tl.arange(0, BR)[:, None]
    col = tl.arange(0, BP)[None, :]
    place = sums + at * R * (2 * R + P) + row * (2 * R + P) + 2 * R + col
    c = tl.load(place, mask=(row < R) & (col < P), other=0.0)
    return dot(n, c, tl.zeros([BR, BP], tl.float32), PRECISION)


@triton.jit
@no_type_check
def _rows_of(x, at, H, rows, chunks, S: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr):
    """The places of a chunk's tokens in `x [rows, n, S, H, D]`, for operator `at` of `[n, rows, H]`, and the mask."""
    token = tl.arange(0, BS)[:, None]
    col = tl.arange(0, BD)[None, :]
    chunk = ((at // H) % rows) * chunks + at // (H * rows)
    return x + ((chunk * S + token) * H + at % H) * D + col, (token < S) & (col < D)


@triton.jit
@no_type_check
def _read_kernel(
    q, sums, lower, norms, gamma, weights, y, H, rows, chunks, S: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    K: tl.constexpr, PRECISION: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The outputs of the queries of one chunk and head."""
    at = tl.program_id(0).to(tl.int64)
    h = at % H
    n = _inverse(lower, norms, at, R, BR)
    transposed = _transition(n, sums, gamma, at, h, R, P, BR, PRECISION)
    zeros = tl.zeros([BS, BR], tl.float32)
    place, inside = _rows_of(q, at, H, rows, chunks, S, R, BS, BR)
    x = dot(tl.load(place, mask=inside, other=0.0).to(tl.float32), tl.trans(n), zeros, PRECISION)
    total = tl.load(weights + h) * x
    for i in tl.static_range(1, K + 1):
        x = dot(x, transposed, zeros, PRECISION)
        total += tl.load(weights + i * H + h) * x
    c = _values(n, sums, at, R, P, BR, BP, PRECISION)
    out = dot(total, c, tl.zeros([BS, BP], tl.float32), PRECISION)
    place, inside = _rows_of(y, at, H, rows, chunks, S, P, BS, BP)
    tl.store(place, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _trace(x, BR: tl.constexpr):
    """The trace of `x [BR, BR]`."""
    return tl.sum(tl.where(tl.arange(0, BR)[:, None] == tl.arange(0, BR)[None, :], x, 0.0))


@triton.jit
@no_type_check
def _read_back_kernel(
    dy, q, sums, lower, norms, gamma, weights, dq, dsums, dsettings, H, rows, chunks, S: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    """The gradients of one chunk's queries, of γ and μ, and the sums over queries for `_sums_back_kernel`.

    Let `b̂_K = μ_K Ĉᵀ dy` and `b̂_{i−1} = γ Âᵀ b̂_i + μ_{i−1} Ĉᵀ dy`. With sums over queries,
    `dG = −Nᵀ (Σ b̂_i x̂_iᵀ) N`, `dM = γ Nᵀ (Σ b̂_i x̂_{i−1}ᵀ) N`, `dC = (Σ dy (Σ μ_i x̂_i)ᵀ) N` and `dq = Nᵀ b̂_0`.
    The b̂ are columns and the x̂ rows, so that no result of a product is transposed.
    """
    at = tl.program_id(0).to(tl.int64)
    h = at % H
    row = tl.arange(0, BR)[:, None]
    col = tl.arange(0, BR)[None, :]
    square = tl.zeros([BR, BR], tl.float32)
    n = _inverse(lower, norms, at, R, BR)
    transposed = _transition(n, sums, gamma, at, h, R, P, BR, PRECISION)
    place, inside = _rows_of(q, at, H, rows, chunks, S, R, BS, BR)
    x = dot(tl.load(place, mask=inside, other=0.0).to(tl.float32), tl.trans(n), tl.zeros([BS, BR], tl.float32),
            PRECISION)  # fmt: skip
    xs = (x,)
    weight = tl.load(weights + h)
    total = weight * x
    for i in tl.static_range(1, K + 1):
        x = dot(x, transposed, tl.zeros([BS, BR], tl.float32), PRECISION)
        weight = tl.load(weights + i * H + h)
        total += weight * x
        xs = xs + (x,)  # noqa: RUF005 (Triton has no starred tuples)

    place, inside = _rows_of(dy, at, H, rows, chunks, S, P, BS, BP)
    grad = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    read = dot(tl.trans(grad), total, tl.zeros([BP, BR], tl.float32), PRECISION)
    width = tl.arange(0, BP)[:, None]
    sums_at = dsums + at * R * (2 * R + P)
    tl.store(sums_at + col * (2 * R + P) + 2 * R + width, read, mask=(width < P) & (col < R))
    c = _values(_inverse(lower, norms, at, R, BR), sums, at, R, P, BR, BP, PRECISION)
    mixed = dot(c, tl.trans(grad), tl.zeros([BR, BS], tl.float32), PRECISION)

    settings = dsettings + at * (K + 2)
    pairs = square
    steps = square
    for i in tl.static_range(K + 1):
        steps = pairs
        pairs = dot(mixed, xs[i], square, PRECISION)
        tl.store(settings + 1 + i, _trace(pairs, BR))
    pairs *= weight  # as b̂_K = μ_K Ĉᵀ dy
    steps *= weight
    b = weight * mixed
    slope = 0.0
    for i in tl.static_range(K):
        slope += _trace(pairs, BR) if i == 0 else 0.0
        b = dot(transposed, b, tl.load(weights + (K - 1 - i) * H + h) * mixed, PRECISION)
        if i < K - 1:
            more = dot(b, xs[K - 1 - i], square, PRECISION)
            slope += _trace(more, BR)
            pairs += more
            steps = dot(b, xs[K - 2 - i], steps, PRECISION)
        else:
            pairs = dot(b, xs[0], pairs, PRECISION)
    tl.store(settings, slope / tl.load(gamma + h))
    inside = (row < R) & (col < R)
    tl.store(sums_at + row * (2 * R + P) + col, pairs, mask=inside)
    tl.store(sums_at + row * (2 * R + P) + R + col, steps, mask=inside)

    n = _inverse(lower, norms, at, R, BR)
    back = dot(tl.trans(n), b, tl.zeros([BR, BS], tl.float32), PRECISION)
    token = tl.arange(0, BS)[None, :]
    chunk = ((at // H) % rows) * chunks + at // (H * rows)
    place = dq + ((chunk * S + token) * H + h) * R + row
    tl.store(place, back.to(dq.dtype.element_ty), mask=(token < S) & (row < R))


@triton.jit
@no_type_check
def _sums_back_kernel(
    lower, norms, gamma, dsums, dnorms, ridge, H, R: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr,
    BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The gradients of G, M and Cᵀ of one operator and of its m², from the sums over queries in their places."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BR)[:, None]
    col = tl.arange(0, BR)[None, :]
    wide = tl.arange(0, BP)[None, :]
    square = (row < R) & (col < R)
    norm = tl.load(norms + at)
    n = _inverse(lower, norms, at, R, BR)
    place = dsums + at * R * (2 * R + P) + row * (2 * R + P)
    zeros = tl.zeros([BR, BR], tl.float32)
    pairs = tl.load(place + col, mask=square, other=0.0)
    dgram = -dot(dot(tl.trans(n), pairs, zeros, PRECISION), n, zeros, PRECISION)
    tl.store(place + col, dgram, mask=square)
    tl.store(dnorms + at, tl.where(norm >= TINY, ridge * _trace(dgram, BR), 0.0))
    steps = tl.load(place + R + col, mask=square, other=0.0)
    moved = dot(dot(tl.trans(n), steps, zeros, PRECISION), n, zeros, PRECISION)
    tl.store(place + R + col, moved * tl.load(gamma + at % H), mask=square)
    inside = (row < R) & (wide < P)
    read = tl.load(place + 2 * R + wide, mask=inside, other=0.0)
    tl.store(place + 2 * R + wide, dot(tl.trans(n), read, tl.zeros([BR, BP], tl.float32), PRECISION), mask=inside)


def _koopman(
    q: Tensor, sums: Tensor, norms: Tensor, gamma: Tensor, weights: Tensor, ridge: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs `[rows, n, S, H, P]` of queries `[rows, n, S, H, R]`, failures of factorisations, and the L⁻¹.

    The other inputs are the sums `[n, rows, H, R, 2 R + P]` and m² `[n, rows, H]`, γ `[H]` and μ `[K + 1, H]`, all
    contiguous; ε; and the dtype of the outputs.
    """
    rows, chunks, size, heads, rank = q.shape
    lower, failures = inverse_factors(sums.flatten(0, 2)[..., :rank], norms, ridge)
    y = torch.empty(rows, chunks, size, heads, sums.shape[-1] - 2 * rank, dtype=dtype, device=q.device)
    if len(lower):
        launch(_read_kernel, (len(lower),))(
            q, sums, lower, norms, gamma, weights, y, heads, rows, chunks, *_sizes(q, sums, weights)
        )
    return y, failures, lower


def _sizes(q: Tensor, sums: Tensor, weights: Tensor) -> tuple[Any, ...]:
    """S, R, P, K, the precision of products, and the sizes of blocks."""
    size, rank, width = q.shape[2], q.shape[-1], sums.shape[-1] - 2 * q.shape[-1]
    return size, rank, width, len(weights) - 1, precision_of(q), *map(block, (size, rank, width))


def _koopman_backward(
    dy: Tensor, q: Tensor, sums: Tensor, norms: Tensor, gamma: Tensor, weights: Tensor, lower: Tensor, ridge: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the queries, the sums, m², and of γ and μ_0, …, μ_K for each operator `[n, rows, H, K + 2]`."""
    rows, chunks, _, heads, rank = q.shape
    dq, dsums, dnorms = torch.empty_like(q), torch.empty_like(sums), torch.empty_like(norms)
    dsettings = norms.new_empty(*norms.shape, len(weights) + 1)
    if len(lower):
        sizes = _sizes(q, sums, weights)
        launch(_read_back_kernel, (len(lower),))(
            dy, q, sums, lower, norms, gamma, weights, dq, dsums, dsettings, heads, rows, chunks, *sizes
        )
        launch(_sums_back_kernel, (len(lower),))(
            lower, norms, gamma, dsums, dnorms, ridge, heads, rank, sizes[2], sizes[4], *sizes[6:]
        )
    return dq, dsums, dnorms, dsettings


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.ridge, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 7
    if torch.is_grad_enabled():  # only under create_graph=True; autograd cannot see into the kernels
        raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
    *grads, dsettings = _of_operators(dy.contiguous(), *ctx.saved_tensors, ctx.ridge)
    dgamma, dweights = dsettings.sum((0, 1)).mT.split([1, dsettings.shape[-1] - 1])
    return *grads, dgamma.squeeze(0), dweights, None, None


declare("triton_koopman", _koopman).register_autograd(_grad, setup_context=_save)
_of_operators = declare_gradients("triton_koopman_backward", _koopman_backward)
