"""How tokens are laid out as chunks for `koopman_attention`, and summed from chunk to chunk.

Every sequence has chunks of its own, one after the other, and its pending tokens come first. All tokens stand on a
timeline `[rows, n S, H, …]` of n chunks: one row a sequence where all chunk boundaries coincide, else one row in all,
in which each sequence is a segment of chunks. Chunks are `[n, rows, H, S, …]`, so that running sums go along axis 0.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from halflife.ops.koopman.state import KoopmanState, Sums


class Segment(NamedTuple):
    """The chunks `start` to `stop` of a sequence (of all, if they are rows), the first `full` of them complete."""

    start: int
    stop: int
    full: int


class Layout:
    """The timeline of keys `[B, T, H, R]` that come after `state`, in chunks of `chunk_size` tokens."""

    def __init__(self, k: Tensor, state: KoopmanState, chunk_size: int, cu_seqlens: Tensor | None) -> None:
        self.size, self.shape = chunk_size, k.shape[:2]
        pending = state["pending"].tolist()
        new = [k.shape[1]] * k.shape[0] if cu_seqlens is None else cu_seqlens.diff().tolist()
        total = [a + b for a, b in zip(pending, new, strict=True)]
        # One chunk at least, so that every sequence has an entering state to start from.
        counts = [max(1, -(-tokens // chunk_size)) for tokens in total]
        aligned = cu_seqlens is None and len(set(pending)) == 1
        self.rows = len(total) if aligned else 1
        bounds = [0, *accumulate(counts[:1] if aligned else counts)]
        self.chunks = bounds[-1]
        self.segments = [Segment(*span, n // chunk_size) for span, n in zip(pairwise(bounds), total, strict=False)]
        firsts = range(0, self.rows * self.chunks, self.chunks) if aligned else bounds[:-1]
        # Of each sequence: the place of its first token, its tokens, how many of them were pending, and are new.
        self.first, self.total, self.pending, tokens = (
            torch.tensor(x, dtype=torch.long, device=k.device)
            for x in ([chunk * chunk_size for chunk in firsts], total, pending, new)
        )
        row, token = _each(tokens)
        self.slots = (self.first + self.pending)[row] + token

    def place(self, x: Tensor, pending: Tensor | None = None) -> Tensor:
        """`[B, T, …]` → the timeline, zeros where there is no token."""
        flat = x.new_zeros(self.rows * self.chunks * self.size, *x.shape[2:]).index_copy(0, self.slots, x.flatten(0, 1))
        if pending is not None and pending.shape[1]:
            row, token = _each(self.pending)
            flat = flat.index_copy(0, self.first[row] + token, pending[row, token])
        return flat.unflatten(0, (self.rows, self.chunks * self.size))

    def split(self, x: Tensor) -> Tensor:
        """The timeline → chunks `[n, rows, H, S, …]`."""
        chunks = x.view(self.rows, self.chunks, self.size, *x.shape[2:])
        return chunks.permute(1, 0, 3, 2, 4).contiguous()

    def take(self, y: Tensor) -> Tensor:
        """The inverse of `place` and `split`: `[n, rows, H, S, …]` → `[B, T, H, …]`."""
        return y.permute(1, 0, 3, 2, 4).flatten(0, 2).index_select(0, self.slots).unflatten(0, self.shape)

    def before(self, keys: Tensor, last: Tensor) -> Tensor:
        """The key before each of those on the timeline; `last [N, H, R]` before the first ones."""
        shifted = torch.cat([keys[:, :1], keys[:, :-1]], 1)
        return shifted.flatten(0, 1).index_copy(0, self.first, last).view(keys.shape)

    def run(self, keys: Tensor, before: Tensor, values: Tensor, state: KoopmanState) -> tuple[Sums, Sums]:
        """Running sums of chunks: those entering each, `[n rows, …]`, and after each sequence's last full one."""
        grid = len(self.segments), self.rows
        first = [state[name].unflatten(0, grid) for name in Sums._fields]
        entering = _Scan.apply(keys, before, values, *first[:3], self.segments)
        norm = self._norms(keys.square().sum(-1).amax(-1), first[3])
        sums = *entering[:3], norm[0], *entering[3:], norm[1]
        return Sums(*(x.flatten(0, 1) for x in sums[:4])), Sums(*(x.flatten(0, 1) for x in sums[4:]))

    def _norms(self, norms: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Running maxima of `norms [n, rows, H]`: entering, leaving."""
        upto = [
            torch.cat([first[i, None], norms[start:stop]]).cummax(0).values
            for i, (start, stop, _) in enumerate(self.segments)
        ]
        leaving = [x[segment.full] for x, segment in zip(upto, self.segments, strict=True)]
        return (torch.cat([x[:-1] for x in upto]), torch.stack(leaving)) if upto else (norms, first)

    def longest(self, keys: Tensor, state: KoopmanState) -> Tensor:
        """The largest squared norm of each chunk's whole sequence, the future included: `[n rows, H]`."""
        norms, first = keys.square().sum(-1).amax(-1), state["norm"].unflatten(0, (len(self.segments), self.rows))
        whole = [
            torch.maximum(norms[start:stop].amax(0), first[i]).expand(stop - start, -1, -1)
            for i, (start, stop, _) in enumerate(self.segments)
        ]
        return torch.cat(whole).flatten(0, 1) if whole else norms.flatten(0, 1)

    def final(self, leaving: Sums, keys: Tensor, values: Tensor, state: KoopmanState) -> KoopmanState:
        """The state after the last token of the timelines `keys`, `values`."""
        whole = self.total // self.size * self.size
        last = keys.flatten(0, 1).index_select(0, (self.first + whole - 1).clamp(min=0))
        new = leaving.state(torch.where((whole > 0)[:, None, None], last, state["last"]), state)
        waiting = torch.arange(self.size - 1, device=keys.device)
        left = self.total - whole
        at = torch.where(waiting < left[:, None], (self.first + whole)[:, None] + waiting, 0)
        for name, x in (("pending_keys", keys), ("pending_values", values)):
            rows = x.flatten(0, 1)[at]
            new[name] = torch.where((waiting < left[:, None])[..., None, None], rows, 0.0)
        return {**new, "pending": left}


def _each(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Of tokens, `counts [N]` a sequence: the sequence of each, and its number there."""
    row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return row, torch.arange(len(row), device=counts.device) - (counts.cumsum(0) - counts)[row]


class _Scan(torch.autograd.Function):
    """`G, M, C` entering each chunk and after each segment's full ones, from chunks and the sums before each segment.

    The products of all chunks are one batch; they are added up where they stand, one chunk after the other.
    """

    @staticmethod
    def forward(ctx, keys, before, values, gram, transition, read, segments):  # type: ignore[override]
        ctx.save_for_backward(keys, before, values)
        ctx.segments = segments
        pairs = (keys, keys, gram), (keys, before, transition), (values, keys, read)
        entering, leaving = zip(*(_forward(a, b, first, segments) for a, b, first in pairs), strict=True)
        return *entering, *leaving

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[override]
        keys, before, values = ctx.saved_tensors
        (gram, dgram), (transition, dtransition), (read, dread) = (
            _backward(grads[i], grads[i + 3], ctx.segments) for i in range(3)
        )
        dkeys = keys @ gram + keys @ gram.mT + before @ transition.mT + values @ read
        return dkeys, keys @ transition, keys @ read.mT, dgram, dtransition, dread, None


def _forward(left: Tensor, right: Tensor, first: Tensor, segments: list[Segment]) -> tuple[Tensor, Tensor]:
    """Running sums of `leftᵀ right` over chunks `[n, rows, H, S, …]`, and `[segments, rows, H, …]` after the full."""
    # Slot j + 1 gets chunk j's product, and becomes the sum entering chunk j + 1.
    sums = left.new_empty(len(left) + 1, *left.shape[1:3], left.shape[-1], right.shape[-1])
    torch.bmm(left.flatten(0, 2).mT, right.flatten(0, 2), out=sums[1:].flatten(0, 2))
    leaving = []
    for i, (start, stop, full) in enumerate(segments):
        own = sums[start : stop + 1]
        own[0] = first[i]
        _accumulate(own)
        leaving.append(own[full].clone())  # the next segment starts in the last slot
    return sums[:-1], torch.stack(leaving) if leaving else first


def _backward(entering: Tensor, leaving: Tensor, segments: list[Segment]) -> tuple[Tensor, Tensor]:
    """Gradients of each chunk's product and of the sums before each segment: what the sums after them get."""
    products, first = torch.empty_like(entering), []
    for i, (start, stop, full) in enumerate(segments):
        own, given = products[start:stop], entering[start:stop]
        own[:-1], own[-1] = given[1:], 0
        if full:
            own[full - 1] += leaving[i]
        _accumulate(own, backwards=True)
        first.append(own[0] + given[0] if full else own[0] + given[0] + leaving[i])
    return products, torch.stack(first) if first else entering


def _accumulate(x: Tensor, backwards: bool = False) -> None:
    """Running sums along axis 0 of `x`, in place, from the last one if `backwards`."""
    if x.is_cuda:
        x.copy_(x.flip(0).cumsum(0).flip(0) if backwards else x.cumsum(0))
        return
    parts = x.unbind(0)  # a tenth of cumsum's time on a CPU, which goes along the far axis number by number
    for a, b in pairwise(parts[::-1] if backwards else parts):
        b.add_(a)
