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

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check
def sums(chosen, x, PRECISION: tl.constexpr):
    """Compute `N x` in float32 for the truth values `chosen`, which are the matrix N."""
    zeros = tl.zeros([chosen.shape[0], x.shape[1]], tl.float32)
    return dot(chosen.to(tl.float32).to(x.dtype), x, zeros, PRECISION)


@triton.jit
@no_type_check
def summed_decays(g, DTYPE: tl.constexpr):
    """Convert float32 log-decays to logarithms to base 2, an operand of `weights`, for inputs in DTYPE."""
    return (g * LOG2E).to(tl.float32 if DTYPE == tl.float32 else tl.float16)  # noqa: SIM300


@triton.jit
@no_type_check
def weights(chosen, parts, PRECISION: tl.constexpr):
    """Compute `e^E` with `E = N g`, from `parts`, the result of `summed_decays`."""
    return tl.exp2(sums(chosen, parts, PRECISION))


@triton.jit
@no_type_check
def summed_grads(x, DTYPE: tl.constexpr):
    """Convert float32 gradients to an operand of `sums`, for inputs in DTYPE."""
    return x.to(tl.bfloat16) if DTYPE == tl.bfloat16 else x  # noqa: SIM300


@triton.jit
@no_type_check
def clamped(g):
    """Convert log-decays to float32 from `FLOOR` on, so that none is infinite.

    A NaN becomes `FLOOR` too, because in `sums` it would reach tokens before its own.
    """
    return tl.maximum(g.to(tl.float32), FLOOR)


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


@triton.jit
@no_type_check
def total_of(given, gs):
    """The sums of a chunk's log-decays, with a NaN where one is among the `given` ones."""
    return tl.sum(tl.where(given == given, gs, given.to(tl.float32)), 0)


@triton.jit
@no_type_check
def not_numbers(given):
    """For each token NaN if one of its log-decays is, else 0."""
    return tl.sum(tl.where(given == given, 0.0, given.to(tl.float32)), 1)


@triton.jit
@no_type_check
def own_scores(qs, ks, cc):
    """The scores of tokens with themselves, float32 `[i, j]`."""
    alike = tl.sum(qs.to(tl.float32) * ks.to(tl.float32), 1)
    return tl.where(cc[None, :] == cc[:, None], alike[:, None], 0.0)


@triton.jit
@no_type_check
def level_scores(qs, ks, parts, cc, level, within, PRECISION: tl.constexpr):
    """The scores of a level's pairs, float32 `[i, j]`, where `within`, which is i ≥ j, or j > i for the transpose."""
    weight = weights(level_sums(cc, cc, level), parts, PRECISION)
    rows = (tl.where(is_second(cc, level)[:, None], qs.to(tl.float32), ks.to(tl.float32)) * weight).to(qs.dtype)
    scores = dot(rows, tl.trans(rows), tl.zeros([qs.shape[0], qs.shape[0]], tl.float32), PRECISION)
    return tl.where(level_pairs(cc, cc, level) & within, scores, 0.0)
