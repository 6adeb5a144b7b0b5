"""What the chunk-parallel forms share: chunk layouts and the walk over chunks.

A chunked op cuts the sequence into chunks of C tokens. Inside a chunk everything is a batched matrix
product; from chunk to chunk only the state `[B, H, K, V]` is carried. The walk goes in blocks of a few
chunks, so that a block's C×C matrices stay in cache and memory is linear in T.

Tensors inside a block are `[B, H, n, C, D]`. Packed sequences each start at a chunk of their own, so that
no product ever sees two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.chunked.decays import FLOOR, Grads, make_decay
from halflife.ops.recurrent import first_state

# Rows (batch x heads x tokens) of a block: on a CPU what fits in cache (measured, docs/log.md), on an
# accelerator large enough to fill it.
_BLOCK_ROWS = {"cpu": 6144}
_BLOCK_ROWS_ACCELERATOR = 1 << 19


# ---------------------------------------------------------------------------------------------- layout


@dataclass(frozen=True)
class Layout:
    """How T tokens are laid out in chunks.

    Attributes:
        length: tokens T as given.
        chunk: tokens a chunk, C.
        first: chunk index → row of the initial state of the sequence that starts there.
        last: chunk index → row of the final state of the sequence that ends there.
        num_chunks: chunks in all, the last one of each sequence padded.
        index: for packed input, the aligned position of each token `[T]`; None otherwise.
    """

    length: int
    chunk: int
    num_chunks: int
    first: dict[int, slice] = field(default_factory=dict)
    last: dict[int, slice] = field(default_factory=dict)
    index: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.index is not None

    def align(self, x: Tensor) -> Tensor:
        """`[B, T, …]` → `[B, n·C, …]`, zeros where there is no token."""
        aligned = self.num_chunks * self.chunk
        if self.index is not None:
            return x.new_zeros(x.shape[0], aligned, *x.shape[2:]).index_copy(1, self.index, x)
        if aligned == self.length:
            return x
        return F.pad(x, (0, 0) * (x.ndim - 2) + (0, aligned - self.length))

    def restore(self, x: Tensor) -> Tensor:
        """`[B, n·C, …]` → `[B, T, …]`."""
        return x.index_select(1, self.index) if self.index is not None else x[:, : self.length]

    def blocks(self, batch: int, heads: int, device: torch.device, parts: int) -> Iterator[tuple[slice, range]]:
        """The walk: (batch rows, chunks) of each block, each row group from its first chunk to its last."""
        target = _BLOCK_ROWS.get(device.type, _BLOCK_ROWS_ACCELERATOR) // parts
        per_chunk = max(1, heads * self.chunk)
        rows = min(batch, max(1, target // per_chunk))
        chunks = max(1, target // (per_chunk * rows))
        for row in range(0, batch, rows):
            for start in range(0, self.num_chunks, chunks):
                yield slice(row, min(row + rows, batch)), range(start, min(start + chunks, self.num_chunks))

    def entering(self, chunk: int, rows: slice) -> slice | None:
        """The rows of the initial state with which a sequence starts at `chunk`, None if none does."""
        return self._rows(self.first, chunk, rows)

    def leaving(self, chunk: int, rows: slice) -> slice | None:
        """The rows of the final state that a sequence ending with `chunk` leaves, None if none does."""
        return self._rows(self.last, chunk, rows)

    def _rows(self, table: dict[int, slice], chunk: int, rows: slice) -> slice | None:
        found = table.get(chunk)
        return found if self.packed or found is None else rows


def make_layout(length: int, chunk_size: int, cu_seqlens: Tensor | None, device: torch.device) -> Layout:
    """Layout of one batch of equal lengths, or of packed sequences with boundaries `cu_seqlens [N+1]`."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1; got {chunk_size}")
    if cu_seqlens is None:
        chunk = _power_of_two(min(chunk_size, max(length, 1)))
        n = -(-length // chunk)
        every = slice(None)
        return Layout(length, chunk, n, {0: every} if n else {}, {n - 1: every} if n else {})
    bounds: list[int] = cu_seqlens.tolist()
    lengths = [b - a for a, b in pairwise(bounds)]
    chunk = _power_of_two(min(chunk_size, max([*lengths, 1])))
    first, last, starts, n = {}, {}, [], 0
    for row, tokens in enumerate(lengths):
        starts.append(n * chunk)
        if tokens:
            first[n] = slice(row, row + 1)
            n += -(-tokens // chunk)
            last[n - 1] = slice(row, row + 1)
    shift = torch.tensor([s - b for s, b in zip(starts, bounds, strict=False)], dtype=torch.long)
    index = torch.arange(length) + shift.repeat_interleave(torch.tensor(lengths, dtype=torch.long))
    return Layout(length, chunk, n, first, last, index.to(device))


def _power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


def take(x: Tensor, rows: slice, chunks: range, chunk: int, dtype: torch.dtype) -> Tensor:
    """A block of an aligned tensor: `[B, n·C, H, D]` → contiguous `[b, H, c, C, D]` (`[b, H, c, C]` without D)."""
    part = x[rows, chunks.start * chunk : chunks.stop * chunk].unflatten(1, (len(chunks), chunk))
    order = (0, 3, 1, 2, 4) if x.ndim == 4 else (0, 3, 1, 2)
    return part.permute(order).to(dtype, memory_format=torch.contiguous_format)


def put(out: Tensor, part: Tensor, rows: slice, chunks: range, chunk: int) -> None:
    """The inverse of `take`: writes a block back into the aligned tensor `out`."""
    order = (0, 2, 3, 1, 4) if out.ndim == 4 else (0, 2, 3, 1)
    target = out[rows, chunks.start * chunk : chunks.stop * chunk].unflatten(1, (len(chunks), chunk))
    target.copy_(part.permute(order))


# ------------------------------------------------------------------------------------- chunk to chunk


def scan(
    step: Callable[[int, Tensor], Tensor],
    state: Tensor,
    layout: Layout,
    rows: slice,
    chunks: range,
    initial: Tensor,
    final: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Walks a block's chunks: `state ← step(c, state)`, starting and ending sequences where they do.

    Returns the states entering each chunk `[b, H, c, K, V]` and the one leaving the block; states of
    sequences that end are written into `final [N, H, K, V]`, if it is given.
    """
    entering = []
    for c, chunk in enumerate(chunks):
        start = layout.entering(chunk, rows)
        state = state if start is None else initial[start]
        entering.append(state)
        state = step(c, state)
        end = layout.leaving(chunk, rows)
        if end is not None and final is not None:
            final[end] = state
    return torch.stack(entering, 2), state


def scan_back(
    step: Callable[[int, Tensor], Tensor],
    grad: Tensor,
    layout: Layout,
    rows: slice,
    chunks: range,
    grad_initial: Tensor,
    grad_final: Tensor,
) -> tuple[Tensor, Tensor]:
    """The reverse of `scan`: `step(c, gradient of the leaving state) → gradient of the entering state`.

    Returns the gradients of the states leaving each chunk `[b, H, c, K, V]` and of the one entering the block.
    """
    leaving: list[Tensor] = []
    for c in reversed(range(len(chunks))):
        end = layout.leaving(chunks[c], rows)
        grad = grad if end is None else grad_final[end]
        leaving.append(grad)
        grad = step(c, grad)
        start = layout.entering(chunks[c], rows)
        if start is not None:
            grad_initial[start] = grad
    return torch.stack(leaving[::-1], 2), grad


def add_product_(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """`out += x @ y` in place and in one pass, `[b, H, c, …, …]` all."""
    out.flatten(0, 2).baddbmm_(x.flatten(0, 2), y.flatten(0, 2))
    return out


def split_diagonal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix with its diagonal set to 0 (in place), and the diagonal as a column: `[…, C, C]`, `[…, C, 1]`."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).clone().unsqueeze(-1)
    matrix.diagonal(dim1=-2, dim2=-1).zero_()
    return matrix, diagonal


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """`(I + L)⁻¹` for strictly lower triangular `L [b, H, c, C, C]`: one triangular solve."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    return torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)


# ------------------------------------------------------------------------------------------- autograd


class Block:
    """A block of chunks of one op: what `run` asks of it. Tensors are `[b, H, c, C, D]`.

    Args:
        inputs: the op's aligned inputs, q first and the log-decay (or None) last.
        scale: factor of the queries.
        dtype: of the computation.
        layout, rows, chunks: where the block stands.
    """

    decay_of: Callable[..., Any] = staticmethod(make_decay)  # the log-decays of a block → their weights
    parts = 1  # states a key has

    def __init__(
        self,
        inputs: Sequence[Any],
        scale: float,
        dtype: torch.dtype,
        layout: Layout,
        rows: slice,
        chunks: range,
    ) -> None:
        self.where, self.scale = (layout, rows, chunks), scale
        q, *given, g = inputs
        self.inputs = [take(x, rows, chunks, layout.chunk, dtype) for x in given]
        q = take(q, rows, chunks, layout.chunk, dtype)
        self.g = None if g is None else take(g, rows, chunks, layout.chunk, dtype)
        self.q = q * scale  # out of place: a block may be a view of the input
        self.decay = self.decay_of(self.g, layout.chunk, len(chunks), dtype, q.device)

    def forward(self, state: Tensor, initial: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs `[b, H, c, C, V]` and the state leaving the block; ended sequences' states go into `final`."""
        raise NotImplementedError

    def backward(
        self, do: Tensor, state: Tensor, initial: Tensor, dstate: Tensor, dinitial: Tensor, dfinal: Tensor
    ) -> tuple[list[Tensor | None], Tensor]:
        """Gradients of the inputs, in their order, and of the state entering the block; those of sequences that
        start here go into `dinitial`."""
        raise NotImplementedError

    def log_grad(self, grads: Grads, entering: Tensor, leaving: Tensor) -> Tensor | None:
        """The gradient of the log-decays (see `chunk_decay`), exactly 0 where nothing passes; None without."""
        if self.g is None:
            return None
        return self.decay.log_grad(grads, entering, leaving).masked_fill_(self.g < FLOOR[entering.dtype], 0)


def run(
    block_type: type[Block],
    inputs: Sequence[Any],
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """A chunked op: `(o [B, T, H, V], final state [N, H, K', V])`, differentiable once in every input.

    Args:
        block_type: the op's blocks.
        inputs: `q, k, v, …, g`, each `[B, T, H, …]`; g may be None.
        scale, initial_state, cu_seqlens, chunk_size: as in the op's signature.
    """
    q, _, v = inputs[:3]
    layout = make_layout(q.shape[1], chunk_size, cu_seqlens, q.device)
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    initial = first_state(q, v, initial_state, sequences, block_type.parts)
    aligned = (None if x is None else layout.align(x) for x in inputs)
    o, state = _Walk.apply(block_type, scale, layout, initial, *aligned)
    return layout.restore(o), state


class _Walk(torch.autograd.Function):
    """Saves the inputs and the state at each block's start; the backward pass recomputes the rest."""

    @staticmethod
    def forward(ctx, block_type, scale, layout, initial, *inputs):
        q, _, v = inputs[:3]
        o, final, borders, state = torch.empty_like(v), initial.clone(), [], initial[:0]
        for rows, chunks in layout.blocks(q.shape[0], q.shape[2], q.device, block_type.parts):
            borders.append(state)
            block = block_type(inputs, scale, initial.dtype, layout, rows, chunks)
            part, state = block.forward(state, initial, final)
            put(o, part, rows, chunks, layout.chunk)
        ctx.save_for_backward(initial, *inputs, *borders)
        ctx.settings, ctx.count = (block_type, scale, layout), len(inputs)
        return o, final

    @staticmethod
    def backward(ctx, do, dfinal):
        if torch.is_grad_enabled():  # only under create_graph=True, for which the saved states are constants
            raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
        block_type, scale, layout = ctx.settings
        initial, *saved = ctx.saved_tensors
        inputs, borders = saved[: ctx.count], saved[ctx.count :]
        grads = [None if x is None else torch.empty_like(x) for x in inputs]
        dinitial, dstate = dfinal.clone(), dfinal[:0]
        walk = list(layout.blocks(do.shape[0], do.shape[2], do.device, block_type.parts))
        with torch.autocast(do.device.type, enabled=False):
            for (rows, chunks), state in zip(reversed(walk), reversed(borders), strict=True):
                block = block_type(inputs, scale, initial.dtype, layout, rows, chunks)
                dob = take(do, rows, chunks, layout.chunk, initial.dtype)
                parts, dstate = block.backward(dob, state, initial, dstate, dinitial, dfinal)
                for out, part in zip(grads, parts, strict=True):
                    if out is not None and part is not None:
                        put(out, part, rows, chunks, layout.chunk)
        return None, None, None, dinitial, *grads
