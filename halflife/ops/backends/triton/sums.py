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

from halflife.ops.backends.triton.gates import load_gates, until_joined
from halflife.ops.backends.triton.segments import chunk_tokens

COUNTS = (0, 1, 5)  # numbers a token, by MODE


@triton.jit
@no_type_check
def store_sums(sums, stride, cc, inside, a, b, fast, reset, seg, C: tl.constexpr, MODE: tl.constexpr):
    """Store the results of `gates.load_gates` for the tokens from `sums` on. The numbers are `stride` apart."""
    if MODE != 0:
        tl.store(sums + cc, b, mask=inside)
    if MODE == 2:
        before = tl.cumsum(tl.where(seg == reset, fast, 0.0).to(a.dtype), 0)
        tl.store(sums + stride + cc, a, mask=inside)
        tl.store(sums + 2 * stride + cc, b + until_joined(fast, reset, seg, C), mask=inside)
        tl.store(sums + 3 * stride + cc, a + before, mask=inside)
        tl.store(sums + 4 * stride + cc, seg.to(a.dtype), mask=inside)


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


@triton.jit
@no_type_check
def sums_kernel(
    sums, g_slow, g_fast, table, T, LENGTH, PER, TOKENS, H: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The sums of the log-decays of one chunk and head, `[planes, H, TOKENS]`."""
    h = tl.program_id(1)
    token, size, _ = chunk_tokens(table, tl.program_id(0), T, LENGTH, PER, C)
    cc = tl.arange(0, C)
    inside = cc < size
    EXACT: tl.constexpr = sums.dtype.element_ty == tl.float64
    a, b, fast, reset, seg = load_gates(g_slow, g_fast, (token + cc) * H + h, inside, C, MODE, EXACT)
    store_sums(sums + h * TOKENS + token, H * TOKENS, cc, inside, a, b, fast, reset, seg, C, MODE)
