"""The states that enter the segments of the delta rule's sequences.

A segment changes its entering state S to `M S + N`. The walk from a state of zeros gives N, and the walk from the
identity matrix, with values of zero, gives M `[K', K']`, where K' is 2K for two states. The gradient G of the state
after a segment becomes `Mᵀ G + N'`.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.delta.pairs import product
from halflife.ops.backends.triton.segments import segments_of


@triton.jit
@no_type_check
def _block(at, rows, cols, stride, R: tl.constexpr, V):
    """Load a block of a matrix, whose rows are `stride` apart: rows below R and columns below V."""
    mask = (rows < R)[:, None] & (cols < V)[None, :]
    return tl.load(at + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
@no_type_check
def join_kernel(
    update, transition, first, entering, last, sequences, PER, H, R: tl.constexpr, V: tl.constexpr, BACK: tl.constexpr,
    PRECISION: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The states that enter the segments of one sequence and head, and the last one, for a block of their columns.

    BACK goes from the last segment to the first, with gradients.
    """
    head = tl.program_id(0) % H
    start, count = segments_of(sequences, tl.program_id(0) // H, PER)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    end = last + tl.program_id(0).to(tl.int64) * R * V
    begin = first + tl.program_id(0).to(tl.int64) * R * V
    for step in tl.range(0, count + 1):
        place = (start + (count - step if BACK else step - 1)) * H + head  # the segment that was passed
        goal = end
        if step < count:
            goal = entering + ((start + (count - 1 - step if BACK else step)) * H + head) * R * V
        tl.debug_barrier()  # other threads of the program stored what is read now
        here = entering + place * R * V
        for row in range(0, R, BR):
            rr = row + tl.arange(0, BR)
            mask = (rr < R)[:, None] & (vv < V)[None, :]
            at = rr[:, None] * V + vv[None, :]
            if step == 0:
                state = tl.load(begin + at, mask=mask, other=0.0)
            else:
                state = tl.load(update + place * R * V + at, mask=mask, other=0.0)
                for column in range(0, R, BR):
                    cc = column + tl.arange(0, BR)
                    if BACK:
                        passed = tl.trans(_block(transition + place * R * R, cc, rr, R, R, R))
                    else:
                        passed = _block(transition + place * R * R, rr, cc, R, R, R)
                    state = product(passed, _block(here, cc, vv, V, R, V), state, PRECISION)
            tl.store(goal + at, state, mask=mask)
