"""Linear attention with a vector decay: what a walk over chunks reads, computed for all chunks at once."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.segments import chunk_tokens
from halflife.ops.backends.triton.vector.levels import (
    clamped,
    level_scores,
    not_numbers,
    own_scores,
    summed_decays,
    total_of,
    weights,
)
from halflife.ops.backends.triton.walks import load, store


@triton.jit
@no_type_check
def prepare_kernel(
    q, k, g, reads, writes, pairs, totals, table, scale, T, LENGTH, PER, H: tl.constexpr, SQ: tl.constexpr,
    SK: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The decayed queries and keys of one chunk and head, their scores, and the sum of the chunk's log-decays.

    `reads` are q with what is left of the entering state, times `scale`, and `writes` are k with what is left of them
    after the chunk. `pairs [B·T, H, C]` are the scores of queries and the keys up to them, times `scale`.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    h = tl.program_id(0) % H
    token, size, slot = chunk_tokens(table, tl.program_id(0) // H, T, LENGTH, PER, C)
    if size <= 0:
        return
    cc = tl.arange(0, C)
    inside = cc < size
    row = (token * H + h) * K
    total = totals + (slot * H + h) * K
    upto = cc[None, :] <= cc[:, None]
    after = cc[None, :] > cc[:, None]
    found = tl.zeros([C, C], tl.float32)
    for block in range(0, K, BK):
        kk = block + tl.arange(0, BK)
        qs = load(q + token * QT + (h // SQ) * QH, cc, kk, inside, QT, K, BK)
        ks = load(k + token * KT + (h // SK) * KH, cc, kk, inside, KT, K, BK)
        given = load(g + row, cc, kk, inside, H * K, K, BK)
        gs = clamped(given)
        tl.store(total + kk, total_of(given, gs), mask=kk < K)
        parts = summed_decays(gs, DTYPE)
        store(reads + row, qs.to(tl.float32) * weights(upto, parts, PRECISION) * scale, cc, kk, inside, H * K, K, BK)
        store(writes + row, ks.to(tl.float32) * weights(after, parts, PRECISION), cc, kk, inside, H * K, K, BK)
        # A NaN among the log-decays is seen from its token on, and in the states after its chunk.
        found += own_scores(qs, ks, cc) + tl.where(upto, not_numbers(given)[None, :], 0.0)
        for level in range(LEVELS):
            found += level_scores(qs, ks, parts, cc, level, upto, PRECISION)
    store(pairs + (token * H + h) * C, found * scale, cc, cc, inside, H * C, C, C)
