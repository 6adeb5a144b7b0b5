"""How the tokens of a call are divided over the programs of a kernel: sequences, segments, chunks.

A program walks over the chunks of one *segment* of a sequence with the state in registers. Where sequences × heads fill
a GPU, a segment is a whole sequence. Else a sequence has several: one walk computes what each adds to a state, a short
scan the states that enter them, and a second walk starts from these. The table of packed sequences is made on the
device, so the host never waits for it; batches need none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

ENOUGH = 250  # programs that fill a GPU: about two on each of 132 multiprocessors
LEAST_CHUNKS = 8  # of a segment, so that its state is a small part of what is read


@dataclass(frozen=True)
class Segments:
    """The segments of a call.

    Attributes:
        length: the most tokens of a segment, a multiple of all sizes of chunks.
        count: segments; for packed sequences as many as there might be, and the last ones may be empty.
        per_sequence: segments of each sequence of a batch; 0 for packed sequences.
        num_sequences: sequences.
        table: `[count, 2]` int64, first token (a row of `[B·T, …]`) and number of tokens; None for batches.
        sequences: `[N, 2]` int64, first segment and number of segments; None for batches.
    """

    length: int
    count: int
    per_sequence: int
    num_sequences: int
    table: Tensor | None = None
    sequences: Tensor | None = None

    @property
    def whole(self) -> bool:
        """Whether each sequence is one segment."""
        return self.per_sequence == 1


def make_segments(batch: int, length: int, cu_seqlens: Tensor | None, chunk: int, programs: int) -> Segments:
    """Divide `[batch, length]` tokens, or sequences packed with boundaries `cu_seqlens [N + 1]`, into segments.

    `chunk` is the most tokens of a chunk, a power of two. `programs` are those that a segment is given to, one a head
    and block of columns.
    """
    chunks = max(1, triton.cdiv(length, chunk))
    if cu_seqlens is None:
        wanted = triton.cdiv(ENOUGH, max(1, batch * programs))
        size = max(min(chunks, LEAST_CHUNKS), triton.cdiv(chunks, wanted))
        each = triton.cdiv(chunks, size)
        return Segments(size * chunk, batch * each, each, batch)
    size = chunk * max(LEAST_CHUNKS, triton.cdiv(chunks, triton.cdiv(ENOUGH, max(1, programs))))
    bounds = cu_seqlens.to(torch.int64)
    count = length // size + len(bounds) - 1
    lengths = bounds[1:] - bounds[:-1]
    counts = (lengths + size - 1) // size
    ends = counts.cumsum(0)
    index = torch.arange(count, device=bounds.device)
    sequence = torch.searchsorted(ends, index, right=True).clamp(max=len(bounds) - 2)
    done = (index - (ends - counts)[sequence]) * size
    tokens = (lengths[sequence] - done).clamp(min=0, max=size)
    table, sequences = torch.stack((bounds[sequence] + done, tokens), 1), torch.stack((ends - counts, counts), 1)
    return Segments(size, count, 0, len(bounds) - 1, table, sequences)


@triton.jit
@no_type_check
def segment_tokens(table, segment, T, LENGTH, PER):
    """Return the first row of a segment's tokens in `[B·T, …]` (int64) and their number (int32)."""
    if table is None:
        start = (segment % PER) * LENGTH
        return (segment // PER).to(tl.int64) * T + start, tl.minimum(LENGTH, T - start)
    else:
        return tl.load(table + 2 * segment), tl.load(table + 2 * segment + 1).to(tl.int32)


@triton.jit
@no_type_check
def segments_of(sequences, sequence, PER):
    """Return the first segment of a sequence (int64) and the number of its segments (int32)."""
    if sequences is None:
        return sequence.to(tl.int64) * PER, PER
    else:
        return tl.load(sequences + 2 * sequence), tl.load(sequences + 2 * sequence + 1).to(tl.int32)
