"""The weights that vector log-decays give to the scores of a chunk, none of which can overflow.

The weight `e^{g_{j+1} + … + g_i}` of a score `Σ_K x_i y_j` is a factor of x times one of y. In the first pass these are
`e^{c_i}` and `e^{−c_j}`, with the sums c of log-decays from the start of the chunk; it serves all *mild* tokens i, up
to which c is at least −LIMIT in each channel. Further passes serve the others, if there are any. They split the chunk
by halves: at level n it has pairs of blocks of 2ⁿ tokens, and a score whose i is in the second block of a pair and
whose j is in the first has the factors `e^{sum from the middle of the pair to i}` and `e^{sum from j + 1 to it}`. All
sums are of log-decays ≤ 0, and products with matrices of zeros and ones compute them as such, so nothing cancels. For
16-bit inputs log-decays are rounded to float16, so that no weight is off by more than 2e-4.

Each pair of tokens j < i is in one pass, and what is computed for i depends on no later token, not even by a bit.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.delta.pairs import product
from halflife.ops.backends.triton.gates import FLOOR, dot
from halflife.ops.backends.triton.walks import load

NONE, SCALAR, VECTOR = 0, 1, 2  # MODE of a kernel, the kind of decay


@triton.jit
@no_type_check
def load_log_decays(
    g, first, h, cc, kk, inside, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    MODE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Load the log-decays of a chunk `[C, BK]`, none below FLOOR; float16 unless EXACT."""
    if MODE == 0:
        given = tl.zeros([C, BK], tl.float32)
    elif MODE == 1:
        given = tl.load(g + (first + cc) * H + h, mask=inside, other=0.0).to(tl.float32)
        given = tl.broadcast_to(given[:, None], [C, BK])
    else:
        given = load(g + (first * H + h) * K, cc, kk, inside, H * K, K, K if K % BK == 0 else BK).to(tl.float32)
    given = tl.where(given < FLOOR, FLOOR, given)
    if EXACT:
        return given
    else:
        return given.to(tl.float16)


@triton.jit
@no_type_check
def factor(x, DTYPE: tl.constexpr):
    """Convert an operand to the DTYPE of the inputs if that is bfloat16, else to float32 (see `pairs.product`)."""
    if tl.bfloat16 == DTYPE:
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float32)


@triton.jit
@no_type_check
def add_up(chosen, x, PRECISION: tl.constexpr):
    """Compute `chosen x` in float32, sums of rows of a float32 or float16 `x`, for a matrix of booleans."""
    zeros = tl.zeros([chosen.shape[0], x.shape[1]], tl.float32)
    ones = chosen.to(tl.float32)
    if x.dtype == tl.float16:
        return dot(ones.to(tl.float16), x, zeros, PRECISION)
    elif PRECISION == "ieee":
        return dot(ones, x, zeros, PRECISION)
    else:
        return product(ones.to(tl.bfloat16), x, zeros, PRECISION)


@triton.jit
@no_type_check
def add_up_columns(x, chosen, PRECISION: tl.constexpr):
    """Compute `x chosen` in float32, sums of columns of log-decays, for a matrix of booleans."""
    zeros = tl.zeros([x.shape[0], chosen.shape[1]], tl.float32)
    return dot(x, chosen.to(tl.float32).to(x.dtype), zeros, PRECISION)


@triton.jit
@no_type_check
def passes_of(sums, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return which tokens are mild, how many passes the scores need, and LIMIT, for the sums c `[C, BK]`."""
    LIMIT: tl.constexpr = 10.0 if PRECISION == "ieee" else 20.0
    least = tl.min(sums, 1)
    return least >= -LIMIT, tl.where(tl.min(least, 0) >= -LIMIT, 1, 1 + LEVELS), LIMIT


@triton.jit
@no_type_check
def between(token, other, level, C: tl.constexpr, OWN: tl.constexpr):
    """Whether the log-decay of `other` is between the middle of a token's pair and the token, or with OWN after it.

    The chunk as a whole is the second block of the highest level.
    """
    token += C
    other += C
    return ((token >> level) == (other >> level)) & ((other < token + OWN) == (((token >> level) & 1) == 1))


@triton.jit
@no_type_check
def direction(token, level, C: tl.constexpr):
    """Return 1 for tokens after the middle of their pair, and −1 for others."""
    return tl.where((((token + C) >> level) & 1) == 1, 1.0, -1.0)


@triton.jit
@no_type_check
def of_pass(i, j, mild, level, LEVELS: tl.constexpr):
    """Whether the score of tokens i and j < i belongs to the pass of this level; `mild` is that of i."""
    here = ((i >> level) & 1 == 1) & ((j >> level) + 1 == (i >> level))
    return tl.where(level == LEVELS, (j < i) & mild, here & (mild == 0))
