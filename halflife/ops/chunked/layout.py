"""How tokens are cut into chunks, how blocks of chunks are copied out of `[B, T, H, D]` and back; running angles.

Tensors inside a block are `[B, H, n, C, D]`. Each packed sequence starts at a new chunk, so that no product mixes two
sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.chunked.groups import each_head
from halflife.packing import Packing
from halflife.precision import wide

# Rows (batch x heads x tokens) of a block. On a CPU this many fit in cache (measured, docs/log.md); an accelerator
# needs many more to be busy.
_BLOCK_ROWS = {"cpu": 6144}
_BLOCK_ROWS_ACCELERATOR = 1 << 19


@dataclass(frozen=True)
class ChunkLayout:
    """How T tokens are laid out in chunks, of which the last of each sequence is padded."""

    length: int  # number of tokens T before padding
    chunk: int  # tokens per chunk, C
    num_chunks: int
    # Chunk index → rows of the initial state of the sequence that starts there, or of the final state of its end.
    first: dict[int, slice] = field(default_factory=dict)
    last: dict[int, slice] = field(default_factory=dict)
    index: Tensor | None = None  # for packed input, the padded position of each token `[T]`

    def align(self, x: Tensor) -> Tensor:
        """Pad `[B, T, …]` to `[B, n·C, …]` with zeros where there is no token."""
        aligned = self.num_chunks * self.chunk
        if self.index is not None:
            return x.new_zeros(x.shape[0], aligned, *x.shape[2:]).index_copy(1, self.index, x)
        if aligned == self.length:
            return x
        return F.pad(x, (0, 0) * (x.ndim - 2) + (0, aligned - self.length))

    def restore(self, x: Tensor) -> Tensor:
        """Undo `align`: `[B, n·C, …]` → `[B, T, …]`."""
        return x.index_select(1, self.index) if self.index is not None else x[:, : self.length]

    def blocks(self, batch: int, heads: int, device: torch.device, num_states: int) -> Iterator[Place]:
        """Yield the place of each block; a group of batch rows goes from its first chunk to its last."""
        target = _BLOCK_ROWS.get(device.type, _BLOCK_ROWS_ACCELERATOR) // num_states
        per_chunk = max(1, heads * self.chunk)
        rows = max(1, min(batch, target // per_chunk))
        chunks = max(1, target // (per_chunk * rows))
        for row in range(0, batch, rows):
            for start in range(0, self.num_chunks, chunks):
                chosen = range(start, min(start + chunks, self.num_chunks))
                yield Place(self, slice(row, min(row + rows, batch)), chosen)


class Place(NamedTuple):
    """Where a block of chunks stands: in the layout, its batch rows and its chunks."""

    layout: ChunkLayout
    rows: slice
    chunks: range

    def starting(self, c: int) -> slice | None:
        """The rows of the initial state that sequences starting at chunk c of the block read, or None."""
        return self._rows(self.layout.first, c)

    def ending(self, c: int) -> slice | None:
        """The rows of the final state that sequences ending with chunk c of the block write, or None."""
        return self._rows(self.layout.last, c)

    def _rows(self, table: dict[int, slice], c: int) -> slice | None:
        state_rows = table.get(self.chunks[c])
        return state_rows if self.layout.index is not None or state_rows is None else self.rows

    def take(self, x: Tensor, dtype: torch.dtype, heads: int) -> Tensor:
        """Copy a block of an aligned tensor: `[B, n·C, H, D]` → contiguous `[b, H, c, C, D]`; D may be absent.

        Groups `[B, n·C, G, D]` are repeated for the heads of the block.
        """
        order = (0, 3, 1, 2, 4) if x.ndim == 4 else (0, 3, 1, 2)
        return each_head(self._part(x).permute(order), heads).to(dtype, memory_format=torch.contiguous_format)

    def put(self, out: Tensor, part: Tensor) -> None:
        """Undo `take`: write a block into the aligned tensor `out`, and add the heads of each group."""
        if (groups := out.shape[2]) != part.shape[1]:
            part = part.unflatten(1, (groups, -1)).sum(2)
        order = (0, 2, 3, 1, 4) if out.ndim == 4 else (0, 2, 3, 1)
        self._part(out).copy_(part.permute(order))

    def _part(self, x: Tensor) -> Tensor:
        chunk, chunks = self.layout.chunk, self.chunks
        return x[self.rows, chunks.start * chunk : chunks.stop * chunk].unflatten(1, (len(chunks), chunk))


def make_layout(packing: Packing, chunk_size: int, device: torch.device) -> ChunkLayout:
    """Lay out rows of equal length, or packed sequences."""
    length = packing.length
    if packing.cu_seqlens is None:
        chunk = _power_of_two(min(chunk_size, max(length, 1)))
        n = -(-length // chunk)
        every = slice(None)
        return ChunkLayout(length, chunk, n, {0: every} if n else {}, {n - 1: every} if n else {})
    lengths = packing.counts
    chunk = _power_of_two(min(chunk_size, max([*lengths, 1])))
    first, last, n = {}, {}, 0
    for row, tokens in enumerate(lengths):
        if tokens:
            first[n] = slice(row, row + 1)
            n += -(-tokens // chunk)
            last[n - 1] = slice(row, row + 1)
    return ChunkLayout(length, chunk, n, first, last, _places(packing, chunk).to(device))


def _places(packing: Packing, chunk: int) -> Tensor:
    """The padded position of each token `[T]`, computed where the boundaries are: a copy would wait for the device."""
    assert packing.cu_seqlens is not None
    bounds = packing.cu_seqlens.long()
    padded = -(-bounds.diff() // chunk) * chunk
    shift = padded.cumsum(0) - padded - bounds[:-1]
    return torch.arange(packing.length, device=bounds.device) + shift[packing.sequence]


def _power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


def running_angle(turns: Tensor, start: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
    """Running sums of `turns [B, T, H, P]` along each sequence from `start [N, H, P]` on, and each sequence's last sum.

    Angles are in turns of 2π. Whole turns are subtracted exactly, so angles stay small at any length. The sums go chunk
    by chunk and separately for each sequence. Differences of one sum over all packed sequences would mix the rounding
    errors of other sequences in. The sums and the last ones are float64, because equal steps round to the same side.
    """
    sums, last = _running_sums(wide(turns), start, packing)
    return sums.to(turns.dtype), last


def _running_sums(turns: Tensor, start: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
    layout = make_layout(packing, 64, turns.device)
    inside = layout.align(turns).unflatten(1, (layout.num_chunks, layout.chunk)).cumsum(2)
    bounds = packing.cu_seqlens
    if bounds is not None:
        bounds = F.pad(-(-bounds.diff() // layout.chunk).cumsum(0), (1, 0))
    chunks = Packing(packing.batch, layout.num_chunks, bounds)
    totals = inside[:, :, -1]
    if layout.num_chunks > len(layout.first):  # a sequence has several chunks
        totals, _ = _running_sums(_drop_turns(totals), start, chunks)
    entering, _ = chunks.delay(totals, start)
    angle = layout.restore(_drop_turns(inside + entering.unsqueeze(2)).flatten(1, 2))
    return angle, packing.delay(angle, start)[1]


def _drop_turns(angle: Tensor) -> Tensor:
    return angle - angle.round()
