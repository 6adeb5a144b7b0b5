"""Linear attention with a vector decay: what a walk over chunks reads, computed for all chunks at once."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.gates import dot
from halflife.ops.backends.triton.segments import chunk_tokens
from halflife.ops.backends.triton.vector.levels import (
    clamped,
    is_second,
    level_pairs,
    level_sums,
    summed_decays,
    sums,
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
    same = cc[None, :] == cc[:, None]
    found = tl.zeros([C, C], tl.float32)
    for block in range(0, K, BK):
        kk = block + tl.arange(0, BK)
        qs = load(q + token * QT + (h // SQ) * QH, cc, kk, inside, QT, K, BK)
        ks = load(k + token * KT + (h // SK) * KH, cc, kk, inside, KT, K, BK)
        given = load(g + row, cc, kk, inside, H * K, K, BK)
        gs = clamped(given)
        tl.store(total + kk, tl.sum(tl.where(given == given, gs, given), 0), mask=kk < K)
        parts = summed_decays(gs, DTYPE)
        store(
            reads + row, qs.to(tl.float32) * tl.exp(sums(upto, parts, PRECISION)) * scale, cc, kk, inside, H * K, K, BK
        )
        store(writes + row, ks.to(tl.float32) * tl.exp(sums(after, parts, PRECISION)), cc, kk, inside, H * K, K, BK)
        # A NaN among the log-decays is seen from its token on, and in the states after its chunk.
        alike = tl.sum(qs.to(tl.float32) * ks.to(tl.float32), 1)
        alike += tl.cumsum(tl.sum(tl.where(given == given, 0.0, given.to(tl.float32)), 1), 0)
        found += tl.where(same, alike[:, None], 0.0)
        for level in range(LEVELS):
            weight = tl.exp(sums(level_sums(cc, cc, level), parts, PRECISION))
            rows = (tl.where(is_second(cc, level)[:, None], qs, ks).to(tl.float32) * weight).to(qs.dtype)
            part = dot(rows, tl.trans(rows), tl.zeros([C, C], tl.float32), PRECISION)
            found += tl.where(level_pairs(cc, cc, level) & upto, part, 0.0)
    store(pairs + (token * H + h) * C, found * scale, cc, cc, inside, H * C, C, C)
