"""What the chunk-parallel forms share: chunk layouts, decays inside a chunk, the walk over chunks.

A chunked op cuts the sequence into chunks of C tokens. Inside a chunk everything is a batched matrix
product; from chunk to chunk only the state `[B, H, K, V]` is carried. The walk goes in blocks of a few
chunks, so that a block's C×C matrices stay in cache and memory is linear in T.

Tensors inside a block are `[B, H, n, C, D]`. Packed sequences each start at a chunk of their own, so that
no product ever sees two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# exp(-110) is 0 in float32 and exp(-750) in float64: clamping the log-decay here changes nothing,
# and makes -inf a number whose differences are numbers.
FLOOR = {torch.float32: -110.0, torch.float64: -750.0}

# Rows (batch x heads x tokens) of a block: on a CPU what fits in cache (measured, docs/log.md), on an
# accelerator large enough to fill it.
_BLOCK_ROWS = {"cpu": 6144}
_BLOCK_ROWS_ACCELERATOR = 1 << 19


def wide(x: Tensor) -> Tensor:
    """`x` in float64, in which cumulative sums lose nothing (float32 on Apple's MPS, which has no float64)."""
    return x.float() if x.device.type == "mps" else x.double()


def by_hand(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a `backward` written by hand: float32 also when called under autocast, and differentiable once.

    A second derivative would take the states saved at block borders for constants, so it is an error.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():  # only under create_graph=True
            raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
        with torch.autocast(grads[0].device.type, enabled=False):
            return backward(ctx, *grads)

    return run


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

    def blocks(self, batch: int, heads: int, device: torch.device) -> Iterator[tuple[slice, range]]:
        """The walk: (batch rows, chunks) of each block, each row group from its first chunk to its last."""
        target = _BLOCK_ROWS.get(device.type, _BLOCK_ROWS_ACCELERATOR)
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


# ------------------------------------------------------------------------------------ decay in a chunk


class ScalarDecay:
    """Decays inside the chunks of a block, one rate a head; `g=None` is no decay.

    With the inclusive cumulative log-decay `b_t` of a chunk: `rows = e^{b_t}` (what a query still sees of
    the entering state), `cols = e^{b_C − b_t}` (what of a key is left when the chunk ends), `total = e^{b_C}`
    and the causal matrix `e^{b_i − b_j}`. Differences are formed before `exp`, and are all ≤ 0.
    """

    def __init__(self, g: Tensor | None, chunk: int, dtype: torch.dtype, device: torch.device) -> None:
        lower = torch.ones(chunk, chunk, dtype=dtype, device=device).tril_()
        self.floored = None
        if g is None:
            self.rows = self.cols = torch.ones(chunk, 1, dtype=dtype, device=device)
            self.total = torch.ones(1, 1, 1, 1, 1, dtype=dtype, device=device)
            self.matrix = lower
            return
        b = wide(g.clamp(min=FLOOR[dtype])).cumsum(-1)
        self.rows = b.to(dtype).exp().unsqueeze(-1)
        self.cols = (b[..., -1:] - b).to(dtype).exp().unsqueeze(-1)
        self.total = self.rows[..., -1:, :]
        bound = torch.where(lower > 0, 0.0, -torch.inf)
        self.matrix = torch.minimum((b.unsqueeze(-1) - b.unsqueeze(-2)).to(dtype), bound).exp_()

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        """`Σ_K x_i y_j e^{b_i − b_j}` for j ≤ i, else 0: `[…, C, C]`."""
        return (x @ y.transpose(-1, -2)).mul_(self.matrix)

    def scores_grad(self, grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `scores` for x and y, from a `grad` whose diagonal is zero (overwrites `grad`)."""
        grad = grad.mul_(self.matrix)
        return grad @ y, grad.transpose(-1, -2) @ x

    def log_grad(self, reads: Tensor, writes: Tensor, carried: Tensor) -> Tensor:
        """See `_log_grad`; products are summed over K first."""
        return _log_grad(reads.sum(-1), writes.sum(-1), carried.sum((-1, -2)).unsqueeze(-1), -1)


class VectorDecay:
    """Decays inside the chunks of a block, one rate a key channel; the same members as `ScalarDecay`.

    The causal matrix depends on the channel, so `scores` splits the chunk in halves, again and again: a
    tile below the diagonal (rows in a second half, columns in the first) factors at the last token of the
    first half into `e^{b_i − b_a} · e^{b_a − b_j}`, two exponents ≤ 0, whatever g is. The anchor lies at or
    before every row of the tile, so no output depends on later tokens.
    """

    def __init__(self, g: Tensor, chunk: int, dtype: torch.dtype, device: torch.device) -> None:
        b = wide(g.clamp(min=FLOOR[dtype])).cumsum(-2)
        self.rows = b.to(dtype).exp()
        self.cols = (b[..., -1:, :] - b).to(dtype).exp()
        self.total = self.rows[..., -1, :].unsqueeze(-1)
        self.tiles: list[tuple[int, Tensor, Tensor]] = []
        size = chunk // 2
        while size:
            halves = b.unflatten(-2, (-1, 2, size))
            anchor = halves[..., 0, -1:, :]
            row = (halves[..., 1, :, :] - anchor).to(dtype).clamp(max=0).exp()
            col = (anchor - halves[..., 0, :, :]).to(dtype).clamp(max=0).exp()
            self.tiles.append((size, row, col))
            size //= 2

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        out = x.new_zeros(*x.shape[:-1], x.shape[-2])
        for size, row, col in self.tiles:
            second, first = _half(x, size, 1) * row, _half(y, size, 0) * col
            _tile(out, size).copy_(second @ first.transpose(-1, -2))
        out.diagonal(dim1=-2, dim2=-1).copy_((x * y).sum(-1))
        return out

    def scores_grad(self, grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        dx, dy = torch.zeros_like(x), torch.zeros_like(y)
        for size, row, col in self.tiles:
            tile = _tile(grad, size)
            second, first = _half(x, size, 1) * row, _half(y, size, 0) * col
            _half(dx, size, 1).addcmul_(tile @ first, row)
            _half(dy, size, 0).addcmul_(tile.transpose(-1, -2) @ second, col)
        return dx, dy

    def log_grad(self, reads: Tensor, writes: Tensor, carried: Tensor) -> Tensor:
        return _log_grad(reads, writes, carried.sum(-1).unsqueeze(-2), -2)


def _half(x: Tensor, size: int, which: int) -> Tensor:
    """Every first (0) or second (1) half of the pairs of `size` tokens: `[…, C, D]` → `[…, m, size, D]`."""
    return x.unflatten(-2, (-1, 2, size))[..., which, :, :]


def _tile(x: Tensor, size: int) -> Tensor:
    """The tiles (second half, first half) of a `[…, C, C]` matrix: a view `[…, m, size, size]`."""
    pairs = x.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))
    return pairs[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _log_grad(reads: Tensor, writes: Tensor, carried: Tensor, dim: int) -> Tensor:
    """The gradient of the log-decays of a chunk from those of everything they weigh.

    A log-decay g_t weighs what tokens i ≥ t read from tokens j < t and from the entering state (`reads`:
    x ⊙ dx of the reads minus that of the keys read, summed from t on), what tokens j < t leave in the
    outgoing state (`writes`: k ⊙ dk of that, summed before t) and the entering state itself (`carried`).
    Splitting it so keeps strong decays exact: no large terms cancel.
    """
    after = reads.flip(dim).cumsum(dim).flip(dim)
    after.narrow(dim, 1, writes.shape[dim] - 1).add_(writes.narrow(dim, 0, writes.shape[dim] - 1).cumsum(dim))
    return after.add_(carried)


def make_decay(g: Tensor | None, chunk: int, dtype: torch.dtype, device: torch.device) -> ScalarDecay | VectorDecay:
    """The decay of a block: `g [b, H, c, C]` scalar, `[b, H, c, C, K]` vector, None for none."""
    if g is not None and g.ndim == 5:
        return VectorDecay(g, chunk, dtype, device)
    return ScalarDecay(g, chunk, dtype, device)


# ------------------------------------------------------------------------------------- chunk to chunk


def scan(
    step: Callable[[int, Tensor], Tensor],
    state: Tensor,
    layout: Layout,
    rows: slice,
    chunks: range,
    initial: Tensor,
    final: Tensor,
) -> tuple[Tensor, Tensor]:
    """Walks a block's chunks: `state ← step(c, state)`, starting and ending sequences where they do.

    Returns the states entering each chunk `[b, H, c, K, V]` and the one leaving the block; states of
    sequences that end are written into `final [N, H, K, V]`.
    """
    entering = []
    for c, chunk in enumerate(chunks):
        start = layout.entering(chunk, rows)
        state = state if start is None else initial[start]
        entering.append(state)
        state = step(c, state)
        end = layout.leaving(chunk, rows)
        if end is not None:
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
