"""How the tokens of a call are divided over the programs of a kernel: sequences, segments, chunks.

A program walks over the chunks of one *segment* of a sequence with the state in registers. Where sequences × heads fill
a GPU, a segment is a whole sequence. Else a sequence has several: one walk computes what each adds to a state, a short
scan the states that enter them, and a second walk starts from these. The table of packed sequences is made on the
device, so the host never waits for it; batches need none.

Tiles and stages of the kernels that walk, by architecture, head sizes and dtype, were found by compiling for each
target, so that two programs fit a multiprocessor and none spills where possible; see `benchmarks/offline.py`. Nothing
is tuned at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton import interpreted
from halflife.ops.backends.triton.launch import target_of

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


class Settings(NamedTuple):
    """How a kernel is launched."""

    chunk: int  # tokens per chunk
    rows: int  # BK, which covers K
    columns: int  # BV
    warps: int
    stages: int  # chunks whose loads are under way


def architecture(x: Tensor) -> str:
    """The kind of GPU of a tensor: "hopper" (sm_90 to sm_110), "amd", or "ampere" for others of NVIDIA.

    The cards of sm_120 have the tensor cores and the shared memory of sm_89.
    """
    if interpreted():
        return "hopper"
    target = target_of(x)
    if target.backend != "cuda":
        return "amd"
    return "hopper" if 90 <= target.arch < 120 else "ampere"


# (kernel, states a head) → architecture → (tokens of a chunk, columns or rows of a block). "walk" has all K rows of a
# state and some columns, "grads" all V columns and some rows: first where K or V is up to 64, then where it is larger.
_TILES = {
    ("walk", 1): {"hopper": ((64, 64), (64, 64)), "ampere": ((32, 64), (32, 32)), "amd": ((64, 64), (64, 64))},
    ("walk", 2): {"hopper": ((32, 64), (16, 32)), "ampere": ((32, 64), (16, 32)), "amd": ((64, 64), (32, 32))},
    ("grads", 1): {"hopper": ((32, 64), (16, 64)), "ampere": ((32, 64), (32, 32)), "amd": ((32, 64), (32, 32))},
    ("grads", 2): {"hopper": ((32, 64), (16, 32)), "ampere": ((32, 32), (16, 32)), "amd": ((16, 32), (16, 32))},
}
_EXACT = {"walk": (16, 32), "grads": (16, 16)}  # products of float32 use no tensor cores


def settings_of(kind: str, key: int, value: int, q: Tensor, states: int, most: int) -> Settings:
    """The settings of a kernel ("walk" or "grads") of queries q; chunks have at most `most` tokens, a power of two."""
    exact = q.dtype == torch.float32
    whole = key if kind == "walk" else value
    chunk, size = _EXACT[kind] if exact else _TILES[kind, states][architecture(q)][bool(whole > 64)]
    if kind == "walk":
        rows, columns = block(key, 256), block(value, size)
    else:
        rows, columns = block(key, size if states * value <= 256 else 16), block(value, 256)
    return Settings(min(chunk, most), rows, columns, 4, 1 if exact else 2)


def block(size: int, most: int = 64) -> int:
    """The power of two, from 16 to `most`, that covers `size`."""
    return max(16, min(most, triton.next_power_of_2(size)))


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
def chunk_tokens(table, chunk, T, LENGTH, PER, C: tl.constexpr):
    """Return the first row of a chunk's tokens (int64), their number (int32), and the place of its state (int64).

    The number is 0 or less for chunks behind the end of their segment. Chunks are counted as if segments were full.
    """
    segment = chunk // (LENGTH // C)
    index = chunk % (LENGTH // C)
    first, tokens = segment_tokens(table, segment, T, LENGTH, PER)
    token = first + index * C
    return token, tl.minimum(C, tokens - index * C), token // C + segment


@triton.jit
@no_type_check
def segments_of(sequences, sequence, PER):
    """Return the first segment of a sequence (int64) and the number of its segments (int32)."""
    if sequences is None:
        return sequence.to(tl.int64) * PER, PER
    else:
        return tl.load(sequences + 2 * sequence), tl.load(sequences + 2 * sequence + 1).to(tl.int32)


@triton.jit
@no_type_check
def scan_kernel(
    update, carried, first, entering, last, sequences, PER, H, SIZE: tl.constexpr, V: tl.constexpr, MODE: tl.constexpr,
    BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The states that enter the segments of one sequence and head, and the last one, for a block of their entries.

    `carried` are the factors of states that pass a segment, or the log-decays of their rows (MODE 3). No `first` state
    is zeros. BACK goes from the last segment to the first, with gradients.
    """
    STATE: tl.constexpr = 2 * SIZE if MODE == 2 else SIZE
    head = tl.program_id(0) % H
    start, count = segments_of(sequences, tl.program_id(0) // H, PER)
    whole = tl.program_id(0).to(tl.int64) * STATE
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < SIZE
    fast = tl.zeros([BLOCK], tl.float32)
    slow = tl.zeros([BLOCK], tl.float32)
    if first is not None:
        fast = tl.load(first + whole + entry, mask=mask, other=0.0)
        if MODE == 2:
            slow = tl.load(first + whole + SIZE + entry, mask=mask, other=0.0)
    for step in tl.range(0, count, num_stages=4):
        place = (start + (count - 1 - step if BACK else step)) * H + head
        at = place * STATE + entry
        added = tl.load(update + at, mask=mask, other=0.0)
        if MODE == 3:
            kept = tl.exp(tl.load(carried + place * (SIZE // V) + entry // V, mask=mask, other=0.0))
        else:
            kept = tl.load(carried + 3 * place)
        tl.store(entering + at, fast, mask=mask)
        if MODE == 2:
            added_slow = tl.load(update + at + SIZE, mask=mask, other=0.0)
            joined = tl.load(carried + 3 * place + 1)
            stays = tl.load(carried + 3 * place + 2)
            tl.store(entering + at + SIZE, slow, mask=mask)
            if BACK:
                fast = kept * fast + joined * slow + added
                slow = stays * slow + added_slow
            else:
                slow = stays * slow + joined * fast + added_slow
                fast = kept * fast + added
        else:
            fast = kept * fast + added
    tl.store(last + whole + entry, fast, mask=mask)
    if MODE == 2:
        tl.store(last + whole + SIZE + entry, slow, mask=mask)
