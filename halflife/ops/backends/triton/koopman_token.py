"""A token of each sequence of spectral Koopman attention in one kernel, for decoding.

Of each head one program factorises the operator of the state and reads it, as in `koopman.py`, and another one writes
the next state: the token waits for its chunk, or is the last of the chunk, which then enters the sums.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.arguments import dense
from halflife.ops.backends.triton.cholesky import store_inverse
from halflife.ops.backends.triton.gates import dot, precision_of
from halflife.ops.backends.triton.koopman import _inverse
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.laws import sigmoid
from halflife.ops.backends.triton.op import declare
from halflife.ops.backends.triton.segments import block


@triton.jit
@no_type_check
def _matrix(x, at, rows, cols, R: tl.constexpr, C: tl.constexpr):
    """Load matrix `at` of `x [n, R, C]`."""
    inside = (rows < R)[:, None] & (cols < C)[None, :]
    return tl.load(x + at * R * C + rows[:, None] * C + cols[None, :], mask=inside, other=0.0)


@triton.jit
@no_type_check
def _read(
    q, transition, values, norms, lower, gamma, mix, eta, y, fixed_gamma, fixed_mix, at, h, H, R: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr, POWERS: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """What the query of a head reads by the inverse factor in `lower`."""
    rows = tl.arange(0, BR)
    wide = tl.arange(0, BP)
    gain = fixed_gamma
    if gamma is not None:
        gain = 1 + sigmoid(tl.load(gamma + h)) / 2
    share = fixed_mix
    if mix is not None and not POWERS:
        share = sigmoid(tl.load(mix + h))
    n = _inverse(lower, norms, at, R, BR)
    m = _matrix(transition, at, rows, rows, R, R)
    x = tl.sum(n * tl.load(q + rows, mask=rows < R, other=0.0).to(tl.float32)[None, :], 1)
    total = x
    if POWERS:
        total *= tl.load(mix + h)
    elif K > 0:
        total *= 1 - share
    for i in tl.static_range(1, K + 1):
        x = tl.sum(n * x[:, None], 0)
        x = gain * tl.sum(m * x[None, :], 1)
        x = tl.sum(n * x[None, :], 1)
        if POWERS:
            total += tl.load(mix + i * H + h) * x
        elif i == K:
            total += share * x
    total = tl.sum(n * total[:, None], 0)
    out = tl.sum(_matrix(values, at, wide, rows, P, R) * total[None, :], 1) * tl.load(eta + h)
    tl.store(y + at * P + wide, out.to(y.dtype.element_ty), mask=wide < P)


@triton.jit
@no_type_check
def _waiting(x, new, now, at, H, count, full, S: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr):
    """The tokens of a chunk so far `[S, D]`, with the new one behind them. They are stored, or zeros after a chunk."""
    token = tl.arange(0, BS)
    cols = tl.arange(0, BD)
    place = ((at // H * (S - 1) + token[:, None]) * H + at % H) * D + cols[None, :]
    inside = (token < S - 1)[:, None] & (cols < D)[None, :]
    tokens = tl.load(x + place, mask=inside & (token < count)[:, None], other=0.0)
    tokens = tl.where((token == count)[:, None], now[None, :], tokens)
    tl.store(new + place, tl.where(full, 0.0, tokens), mask=inside)
    return tokens


@triton.jit
@no_type_check
def _add(
    x, new, left, right, at, full, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Store the sum `at` of `x [n, R, C]`, with a chunk that is full; returned as well."""
    rows = tl.arange(0, BR)
    cols = tl.arange(0, BC)
    total = _matrix(x, at, rows, cols, R, C)
    if full:
        total = dot(tl.trans(left), right, total, PRECISION)
    place = new + at * R * C + rows[:, None] * C + cols[None, :]
    tl.store(place, total, mask=(rows < R)[:, None] & (cols < C)[None, :])
    return total


@triton.jit
@no_type_check
def _write(
    key, value, gram, transition, values, norms, last, keys, held, pending, new_gram, new_transition, new_values,
    new_norm, new_last, new_keys, new_held, new_pending, at, H, NORM: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, PRECISION: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The next state of a head."""
    token = tl.arange(0, BS)
    rows = tl.arange(0, BR)
    count = tl.load(pending + at // H)
    full = count == S - 1
    tl.store(new_pending + at // H, tl.where(full, 0, count + 1), mask=at % H == 0)
    z = _waiting(keys, new_keys, key, at, H, count, full, S, R, BS, BR)
    newest = tl.load(last + at * R + rows, mask=rows < R, other=0.0)
    place = ((at // H * (S - 1) + token[:, None] - 1) * H + at % H) * R + rows[None, :]
    inside = ((token > 0) & (token <= count))[:, None] & (rows < R)[None, :]
    before = tl.where((token == 0)[:, None], newest[None, :], tl.load(keys + place, mask=inside, other=0.0))
    total = _add(gram, new_gram, z, z, at, full, R, R, PRECISION, BR, BR)
    _add(transition, new_transition, z, before, at, full, R, R, PRECISION, BR, BR)
    u = _waiting(held, new_held, value, at, H, count, full, S, P, BS, BP)
    _add(values, new_values, u, z, at, full, P, R, PRECISION, BP, BR)
    norm = tl.load(norms + at)
    if NORM == "causal":
        norm = tl.where(full, tl.maximum(norm, tl.max(tl.sum(z * z, 1))), norm)
    elif NORM == "trace":
        norm = tl.sum(tl.where(rows[:, None] == rows[None, :], total, 0.0))
    tl.store(new_norm + at, norm)
    tl.store(new_last + at * R + rows, tl.where(full, key, newest), mask=rows < R)


@triton.jit
@no_type_check
def _token_kernel(
    q, k, v, gram, transition, values, norms, last, keys, held, pending, gamma, mix, eta, y, lower, failures, new_gram,
    new_transition, new_values, new_norm, new_last, new_keys, new_held, new_pending, fixed_gamma, fixed_mix, ridge, H,
    q_n, q_h, k_n, k_h, v_n, v_h, S: tl.constexpr, R: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    POWERS: tl.constexpr, NORM: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr, BS: tl.constexpr,
    BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    n = at // H
    h = at % H
    rows = tl.arange(0, BR)
    wide = tl.arange(0, BP)
    if tl.program_id(1) == 0:
        store_inverse(gram, norms, lower, failures, ridge, at, R * R, R, R, BLOCKS)
        tl.debug_barrier()  # all threads read what others have stored
        _read(
            q + n * q_n + h * q_h, transition, values, norms, lower, gamma, mix, eta, y, fixed_gamma, fixed_mix, at, h,
            H, R, P, K, POWERS, BR, BP,
        )  # fmt: skip
    else:
        key = tl.load(k + n * k_n + h * k_h + rows, mask=rows < R, other=0.0).to(tl.float32)
        value = tl.load(v + n * v_n + h * v_h + wide, mask=wide < P, other=0.0).to(tl.float32)
        _write(
            key, value, gram, transition, values, norms, last, keys, held, pending, new_gram, new_transition,
            new_values, new_norm, new_last, new_keys, new_held, new_pending, at, H, NORM, S, R, P,
            PRECISION, BS, BR, BP,
        )  # fmt: skip


def _koopman_token(
    q: Tensor, k: Tensor, v: Tensor, state: list[Tensor], gamma: Tensor | None, mix: Tensor | None, eta: Tensor,
    fixed_gamma: float, fixed_mix: float, power: int, ridge: float, normalization: str, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """The outputs `[N, 1, H, P]` times η `[H]`, in `dtype`, and the next state.

    The state is G, M, C, m², the last key, the keys and values that wait and their number. γ is `1 + σ(gamma [H]) / 2`,
    or `fixed_gamma`. μ is σ(mix `[H]`), or `fixed_mix`; of each power it is mix `[K + 1, H]`.
    """
    (count, _, heads, rank), width, size = k.shape, v.shape[-1], state[5].shape[1] + 1
    state = [x.contiguous() for x in state]
    new = [torch.empty_like(x) for x in state]
    y, lower = k.new_empty(count, 1, heads, width, dtype=dtype), torch.empty_like(state[0])
    q, k, v = dense(q), dense(k), dense(v)
    if count:
        launch(_token_kernel, (count * heads, 2))(
            q, k, v, *state, gamma, mix, eta, y, lower, torch.empty_like(state[3], dtype=torch.int32), *new,
            fixed_gamma, fixed_mix, ridge, heads, *[x.stride(axis) for x in (q, k, v) for axis in (0, 2)], size, rank,
            width, power, mix is not None and mix.ndim == 2, normalization, triton.cdiv(rank, 16),
            precision_of(k), *map(block, (size, rank, width)),
        )  # fmt: skip
    return [y, *new]


declare("triton_koopman_token", _koopman_token)
