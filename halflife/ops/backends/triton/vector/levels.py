"""The weights that the log-decays of a chunk of C tokens give to pairs of tokens, where each channel has its own.

The weight e^{g_{j+1} + … + g_i} of tokens j < i depends on the channel, so no matrix `[C, C]` holds it. The chunk is
halved again and again. On the *level* s, blocks of 2s tokens have a first and a second half. A pair belongs to the
level where i is in the second and j in the first half of one block. Between the halves the weight is a product,

    e^{E_i} · e^{E_j},   E_i = the sum from the start of the second half to i, with i,
                         E_j = the sum after j to the end of the first half,

whose exponents are sums of log-decays, hence ≤ 0. Each row has one E on each level, so `E = N_s g` with a matrix N_s of
0 and 1, and the scores of a level are one product `X Xᵀ` of the rows X = e^E q in second and e^E k in first halves.
No sums are subtracted: strong decays lose no bits of weak ones, and the gradient `dg = Σ N_sᵀ dE` cancels nothing.

Sums are products on tensor cores. There log-decays are float16, so that the weight e^E is off by 1e-4 at most, and
gradients are bfloat16, or TF32 for float16 inputs, whose range is too small for them. For float32 inputs all is exact.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.gates import FLOOR, dot


@triton.jit
@no_type_check
def sums(chosen, x, PRECISION: tl.constexpr):
    """Compute `N x` in float32 for the truth values `chosen`, which are the matrix N."""
    zeros = tl.zeros([chosen.shape[0], x.shape[1]], tl.float32)
    return dot(chosen.to(tl.float32).to(x.dtype), x, zeros, PRECISION)


@triton.jit
@no_type_check
def summed_decays(g, DTYPE: tl.constexpr):
    """Convert float32 log-decays to an operand of `sums`, for inputs in DTYPE."""
    return g if DTYPE == tl.float32 else g.to(tl.float16)  # noqa: SIM300


@triton.jit
@no_type_check
def summed_grads(x, DTYPE: tl.constexpr):
    """Convert float32 gradients to an operand of `sums`, for inputs in DTYPE."""
    return x.to(tl.bfloat16) if DTYPE == tl.bfloat16 else x  # noqa: SIM300


@triton.jit
@no_type_check
def clamped(g):
    """Convert log-decays to float32 from `FLOOR` on, so that none is infinite.

    A NaN becomes 0, because in `sums` it would reach tokens before its own.
    """
    g = g.to(tl.float32)
    return tl.where(g == g, tl.where(g < FLOOR, FLOOR, g), 0.0)


@triton.jit
@no_type_check
def is_second(tt, level):
    """Which tokens are in second halves on the level 2^level."""
    return (tt >> level) % 2 == 1


@triton.jit
@no_type_check
def level_sums(ii, tt, level):
    """N of a level: which log-decays t the sum of token i has."""
    same_half = (ii >> level)[:, None] == (tt >> level)[None, :]
    return same_half & (is_second(ii, level)[:, None] == (tt[None, :] <= ii[:, None]))


@triton.jit
@no_type_check
def level_grads(ii, tt, level):
    """The transpose `[t, i]` of `level_sums`."""
    same_half = (ii >> level)[None, :] == (tt >> level)[:, None]
    return same_half & (is_second(ii, level)[None, :] == (tt[:, None] <= ii[None, :]))


@triton.jit
@no_type_check
def level_pairs(ii, jj, level):
    """Which tokens are in different halves of one block."""
    return (ii >> level)[:, None] == ((jj >> level) ^ 1)[None, :]
