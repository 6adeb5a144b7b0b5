"""The inverses of the triangular systems of the delta rule's chunks.

The values that a chunk writes solve `(I + L) U = β ⊙ (V − …)`, with `L_ij = β_i (k_i · k_j) D_ij` for j < i and D of
`gates.py`. The inverses of all chunks are computed at once, in exact float32: an error in one row would spread to all
later rows.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.delta.pairs import store_triangle
from halflife.ops.backends.triton.gates import dot, load_gates, store_sums
from halflife.ops.backends.triton.segments import chunk_tokens
from halflife.ops.backends.triton.sums import stored_decays
from halflife.ops.backends.triton.walks import load


@triton.jit
@no_type_check
def unit_lower_inverse(lower, C: tl.constexpr):
    """Compute `(I + L)⁻¹` of a strictly lower triangular `L [C, C]` by forward substitution.

    The blocks of 16 on the diagonal are inverted first, row by row and all at once, then those of 32. The products are
    small, because exact products use no tensor cores.
    """
    BLOCKS: tl.constexpr = C // 16
    at = tl.arange(0, BLOCKS)
    diagonal = at[:, None, None, None] == at[None, None, :, None]
    small = tl.sum(tl.where(diagonal, tl.reshape(lower, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    row = tl.arange(0, 16)
    eye = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    inverse = tl.broadcast_to(eye[None, :, :], [BLOCKS, 16, 16])
    for step in tl.static_range(1, 16):
        here = (row == step)[None, :, None]
        coefficients = tl.sum(tl.where(here, small, 0.0), 1)
        inverse -= tl.where(here, tl.sum(coefficients[:, :, None] * inverse, 1)[:, None, :], 0.0)
    if C >= 32:
        inverse = _merge(inverse, lower, C, 16)
    return tl.reshape(inverse, [C, C])


@triton.jit
@no_type_check
def _merge(inverse, lower, C: tl.constexpr, SIZE: tl.constexpr):
    """Compute the inverses of all diagonal blocks of 2·SIZE from those of SIZE `[C/SIZE, SIZE, SIZE]`.

    The inverse of `[[A, 0], [B, D]]` is `[[A⁻¹, 0], [−D⁻¹ B A⁻¹, D⁻¹]]`.
    """
    BLOCKS: tl.constexpr = C // SIZE
    PAIRS: tl.constexpr = BLOCKS // 2
    at = tl.arange(0, BLOCKS)
    here = (at[:, None, None, None] == at[None, None, :, None] + 1) & (at % 2 == 1)[:, None, None, None]
    under = tl.sum(tl.where(here, tl.reshape(lower, [BLOCKS, SIZE, BLOCKS, SIZE]), 0.0), 2)
    under = tl.sum(tl.reshape(under, [PAIRS, 2, SIZE, SIZE]), 1)  # B: zero in the first of each pair
    half = tl.arange(0, 2)
    pairs = tl.reshape(inverse, [PAIRS, 2, SIZE, SIZE])
    first = tl.sum(tl.where((half == 0)[None, :, None, None], pairs, 0.0), 1)
    second = tl.sum(tl.where((half == 1)[None, :, None, None], pairs, 0.0), 1)
    under = tl.dot(second, tl.dot(under, first, input_precision="ieee"), input_precision="ieee")
    row = half[None, :, None, None, None]
    col = half[None, None, None, :, None]
    whole = tl.where((row == 0) & (col == 0), first[:, None, :, None, :], 0.0)
    whole = tl.where((row == 1) & (col == 1), second[:, None, :, None, :], whole)
    whole = tl.where((row == 1) & (col == 0), -under[:, None, :, None, :], whole)
    return tl.reshape(whole, [PAIRS, 2 * SIZE, 2 * SIZE])


@triton.jit
@no_type_check
def invert_kernel(
    k, beta, g_slow, g_fast, sums, inverse, table, T, LENGTH, PER, TOKENS, H: tl.constexpr, SK: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """The sums of log-decays and `(I + L)⁻¹` of one chunk and head, as `store_sums` and `store_triangle` store them."""
    h = tl.program_id(1)
    token, size, _ = chunk_tokens(table, tl.program_id(0), T, LENGTH, PER, C)
    cc = tl.arange(0, C)
    inside = cc < size
    rows = (token + cc) * H + h
    at = token if MODE == 0 else sums + h * TOKENS + token
    if MODE != 0:
        EXACT: tl.constexpr = sums.dtype.element_ty == tl.float64
        a, b, fast, reset, seg = load_gates(g_slow, g_fast, rows, inside, C, MODE, EXACT)
        store_sums(at, H * TOKENS, cc, inside, a, b, fast, reset, seg, C, MODE)
    keys = k + token * KT + (h // SK) * KH
    lower = tl.zeros([C, C], tl.float32)
    for start in tl.static_range(0, K, BK):
        ks = load(keys + start, cc, tl.arange(0, BK), inside, KT, K - start, BK)
        lower = dot(ks, tl.trans(ks), lower, PRECISION)
    strength = tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()  # other threads of the program stored the sums that are read now
    lower *= stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE) * strength[:, None]
    solved = unit_lower_inverse(tl.where(cc[:, None] > cc[None, :], lower, 0.0), C)
    store_triangle(inverse, solved, token, h, H, size, cc, inside, C)
