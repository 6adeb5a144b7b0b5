"""Sums of log-decays in chunks that are computed once and stored, and the weights that follow from them.

The sums of `gates.py` are costly with two states, and walks have no registers for them. So B is stored for a scalar
decay, and for GateRank five numbers a token, `[5, H, B·T]`: B, A, `B_n(j)` (B of the last token where no reset
follows), `A_i + B_min(f, i)`, and the number of resets up to the token. Where no reset is between j and i, `A_i = A_j`
and `B_i ≥ B_n(j)`; elsewhere `B_i ≤ B_n(j)`. Hence both cases of D are

    D_ij = e^{(A_i + max(B_i, B_n(j))) − (A_j + B_j)}.

The sums are float64 for float32 inputs, and float32 for others (see `gates.py`).
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.gates import FLOOR

COUNTS = (0, 1, 5)  # numbers a token, by MODE


@triton.jit
@no_type_check
def store_sums(
    sums, g_slow, g_fast, token, size, h, TOKENS, H: tl.constexpr, C: tl.constexpr, N: tl.constexpr, MODE: tl.constexpr
):
    """Store the numbers of N chunks of one head, whose `size` tokens begin at `token`."""
    stride = H * TOKENS
    at = tl.arange(0, N)[:, None] * C + tl.arange(0, C)[None, :]
    inside = at < size
    rows = (token + at) * H + h
    sums += h * TOKENS + token + at
    fast = tl.load(g_fast + rows, mask=inside, other=0.0).to(tl.float32)
    fast = tl.where(fast < FLOOR, FLOOR, fast)
    b = tl.cumsum(fast.to(sums.dtype.element_ty), 1)
    tl.store(sums, b, mask=inside)
    if MODE == 2:
        given = tl.load(g_slow + rows, mask=inside, other=0.0)
        reset = (given != 0).to(tl.int32)
        slow = given.to(tl.float32)
        a = tl.cumsum(tl.where(slow < FLOOR, FLOOR, slow).to(b.dtype), 1)
        seg = tl.cumsum(reset, 1)
        index = tl.arange(0, C)
        counted = (index[None, :] > index[:, None])[None] & ((seg - reset)[:, None, :] == seg[:, :, None])
        met = b + tl.sum(tl.where(counted, fast[:, None, :], 0.0), 2)
        tl.store(sums + stride, a, mask=inside)
        tl.store(sums + 2 * stride, met, mask=inside)
        tl.store(sums + 3 * stride, a + tl.cumsum(tl.where(seg == reset, fast, 0.0).to(b.dtype), 1), mask=inside)
        tl.store(sums + 4 * stride, seg.to(b.dtype), mask=inside)


@triton.jit
@no_type_check
def store_sums_of_segment(
    sums, g_slow, g_fast, first, tokens, h, TOKENS, H: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr
):
    """Store the numbers of all tokens of a segment, for this program to load."""
    N: tl.constexpr = 512 // C if MODE == 1 else 4096 // (C * C) if C <= 64 else 1
    for start in tl.range(0, tokens, N * C, num_stages=2):
        store_sums(sums, g_slow, g_fast, first + start, tokens - start, h, TOKENS, H, C, N, MODE)
    tl.debug_barrier()


@triton.jit
@no_type_check
def stored_decays(sums, stride, ii, jj, inside_i, inside_j, MODE: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """Compute D of `gates.py` for tokens i and j of the chunk, float32 `[i, j]`; Dᵀ `[j, i]` if TRANSPOSED."""
    causal = ii[None, :] >= jj[:, None] if TRANSPOSED else ii[:, None] >= jj[None, :]
    if MODE == 0:
        return causal.to(tl.float32)
    else:
        b = tl.load(sums + ii, mask=inside_i, other=0.0)
        below = tl.load(sums + jj, mask=inside_j, other=0.0)
        if MODE == 1:
            exponent = b[None, :] - below[:, None] if TRANSPOSED else b[:, None] - below[None, :]
        else:
            a = tl.load(sums + stride + ii, mask=inside_i, other=0.0)
            below += tl.load(sums + stride + jj, mask=inside_j, other=0.0)
            met = tl.load(sums + 2 * stride + jj, mask=inside_j, other=0.0)
            if TRANSPOSED:
                exponent = (a[None, :] + tl.maximum(b[None, :], met[:, None])) - below[:, None]
            else:
                exponent = (a[:, None] + tl.maximum(b[:, None], met[None, :])) - below[None, :]
        # A difference can be above 0 where it is not causal, or by rounding. A NaN passes through.
        exponent = exponent.to(tl.float32)
        return tl.where(causal, tl.exp(tl.where(exponent > 0, 0.0, exponent)), 0.0)


@triton.jit
@no_type_check
def stored_reads(sums, stride, cc, inside, C: tl.constexpr, MODE: tl.constexpr):
    """Return the weights `(fast, slow)`, float32 `[C]`, with which tokens read the entering states."""
    ones = tl.full([C], 1.0, tl.float32)
    if MODE == 0:
        return ones, ones
    elif MODE == 1:
        return tl.exp(tl.load(sums + cc, mask=inside, other=0.0).to(tl.float32)), ones
    else:
        fast = tl.load(sums + 3 * stride + cc, mask=inside, other=0.0).to(tl.float32)
        return tl.exp(fast), tl.exp(tl.load(sums + stride + cc, mask=inside, other=0.0).to(tl.float32))


@triton.jit
@no_type_check
def stored_leaves(sums, stride, cc, inside, count, C: tl.constexpr, MODE: tl.constexpr):
    """Return the weights `(fast, slow)`, float32 `[C]`, with which keys are written into the outgoing states.

    `count` is the number of the chunk's tokens.
    """
    ones = tl.full([C], 1.0, tl.float32)
    if MODE == 0:
        return ones, ones
    else:
        b = tl.load(sums + cc, mask=inside, other=0.0)
        if MODE == 1:
            return tl.exp((tl.load(sums + count - 1) - b).to(tl.float32)), ones
        else:
            a = tl.load(sums + stride + cc, mask=inside, other=0.0)
            met = tl.load(sums + 2 * stride + cc, mask=inside, other=0.0)
            left = tl.exp(((tl.load(sums + stride + count - 1) + met) - (a + b)).to(tl.float32))
            seg = tl.load(sums + 4 * stride + cc, mask=inside, other=0.0)
            stays = seg == tl.load(sums + 4 * stride + count - 1)
            return tl.where(stays, left, 0.0), tl.where(stays, 0.0, left)


@triton.jit
@no_type_check
def stored_carries(sums, stride, count, MODE: tl.constexpr):
    """Return the factors `(fast to fast, fast to slow, slow to slow)` of states that pass the chunk, float32."""
    if MODE == 0:
        return 1.0, 0.0, 1.0
    elif MODE == 1:
        return tl.exp(tl.load(sums + count - 1).to(tl.float32)), 0.0, 1.0
    else:
        passed = tl.exp(tl.load(sums + 3 * stride + count - 1).to(tl.float32))
        none = tl.load(sums + 4 * stride + count - 1) == 0
        stays = tl.exp(tl.load(sums + stride + count - 1).to(tl.float32))
        return tl.where(none, passed, 0.0), tl.where(none, 0.0, passed), stays
