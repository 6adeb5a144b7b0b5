"""How `koopman_attention` cuts tokens into chunks on a CPU, and sums them from chunk to chunk.

No chunk holds tokens of two sequences, and the pending tokens of a sequence come first. All tokens stand on a timeline
`[rows, n S, H, …]` of n chunks. It has one row a sequence if all chunk boundaries coincide. Otherwise it has a single
row, in which each sequence is a segment of chunks. Chunks are `[n, rows, H, S, …]`, so running sums go along axis 0.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from halflife.ops.koopman.call import KoopmanCall
from halflife.ops.koopman.decays import Weighted, running_norms, weigh_tokens
from halflife.ops.koopman.state import KoopmanMemory, Sums
from halflife.ops.slow_decay import split_decay
from halflife.packing import Packing


class Placed(NamedTuple):
    """The tokens of a call on the timeline `[rows, n S, H, …]`, after those that were pending."""

    keys: Tensor
    values: Tensor
    g: Tensor | None


def arrange(line: Any, call: KoopmanCall, memory: KoopmanMemory) -> tuple[Placed, Tensor, Weighted]:
    """Put tokens on a timeline, a `KoopmanLayout` or one like it; also their keys in chunks, and weighted."""
    keys, values = line.place(call.k, memory.pending_keys), line.place(call.v, memory.pending_values)
    g = None if call.g is None else line.place(call.g, memory.pending_decays)
    chunks, previous = line.split(keys), line.split(line.previous(keys, memory.last))
    tokens = weigh_tokens(chunks, previous, line.split(values), None if g is None else line.split(g), -2)
    return Placed(keys, values, g), chunks, tokens


class Segment(NamedTuple):
    """The chunks `start` to `stop` of a sequence (or of all, if each is a row); the first `full` are complete."""

    start: int
    stop: int
    full: int


class KoopmanLayout:
    """The timeline of keys `[B, T, H, R]` that come after the memory's, in chunks of `chunk_size` tokens."""

    def __init__(self, k: Tensor, memory: KoopmanMemory, chunk_size: int, packing: Packing) -> None:
        self.size, self.shape = chunk_size, k.shape[:2]
        pending = memory.pending.tolist()
        new = packing.counts
        total = [a + b for a, b in zip(pending, new, strict=True)]
        # Every sequence has at least one chunk, which holds the sums that it starts from.
        counts = [max(1, -(-tokens // chunk_size)) for tokens in total]
        aligned = packing.cu_seqlens is None and len(set(pending)) == 1
        self.rows = len(total) if aligned else 1
        bounds = [0, *accumulate(counts[:1] if aligned else counts)]
        self.chunks = bounds[-1]
        self.segments = [Segment(*span, n // chunk_size) for span, n in zip(pairwise(bounds), total, strict=False)]
        firsts = range(0, self.rows * self.chunks, self.chunks) if aligned else bounds[:-1]
        # The boundaries of the sequences on the timeline, or None if each is a row.
        self.boundaries = None if aligned else torch.tensor(bounds, device=k.device) * chunk_size
        # For each sequence: the place of its first token, its number of tokens, and how many were pending or are new.
        self.first, self.total, self.pending, tokens = (
            torch.tensor(x, dtype=torch.long, device=k.device)
            for x in ([chunk * chunk_size for chunk in firsts], total, pending, new)
        )
        row, token = _sequence_and_number(tokens)
        self.slots = (self.first + self.pending)[row] + token

    def place(self, x: Tensor, pending: Tensor | None = None) -> Tensor:
        """Put `[B, T, …]` on the timeline, after the pending tokens; zeros stand where there is no token."""
        flat = x.new_zeros(self.rows * self.chunks * self.size, *x.shape[2:]).index_copy(0, self.slots, x.flatten(0, 1))
        if pending is not None and pending.shape[1]:
            row, token = _sequence_and_number(self.pending)
            flat = flat.index_copy(0, self.first[row] + token, pending[row, token])
        return flat.unflatten(0, (self.rows, self.chunks * self.size))

    def split(self, x: Tensor) -> Tensor:
        """Cut the timeline into chunks `[n, rows, H, S, …]`."""
        chunks = x.view(self.rows, self.chunks, self.size, *x.shape[2:])
        return chunks.permute(1, 0, 3, 2, 4).contiguous()

    def restore(self, y: Tensor) -> Tensor:
        """Undo `split` and `place`: `[n, rows, H, S, …]` → `[B, T, H, …]`."""
        return y.permute(1, 0, 3, 2, 4).flatten(0, 2).index_select(0, self.slots).unflatten(0, self.shape)

    def previous(self, keys: Tensor, last: Tensor) -> Tensor:
        """The key before each key of the timeline; before the first ones stands `last [N, H, R]`."""
        shifted = torch.cat([keys[:, :1], keys[:, :-1]], 1)
        return shifted.flatten(0, 1).index_copy(0, self.first, last).view(keys.shape)

    def running_sums(self, tokens: Weighted, initial: Sums) -> tuple[Sums, Sums]:
        """The sums entering each chunk, `[n rows, …]`, and the sums after the last full chunk of each sequence."""
        grid = len(self.segments), self.rows
        first, decay = [x.unflatten(0, grid) for x in initial], tokens.decay
        logs = (None, None) if decay is None else (decay.matrix, decay.values)
        entering = _Scan.apply(*tokens[:3], *first[:3], *logs, self.segments)
        norm = self.running_norms(tokens, initial)
        sums = *entering[:3], norm[0], *entering[3:], norm[1]
        return Sums(*(x.flatten(0, 1) for x in sums[:4])), Sums(*(x.flatten(0, 1) for x in sums[4:]))

    def running_norms(self, tokens: Weighted, initial: Sums) -> tuple[Tensor, Tensor]:
        """Running maxima of the squared norms, those entering each chunk and those after each last full chunk."""
        norms, first = tokens.norms.amax(-1), initial.norm.unflatten(0, (len(self.segments), self.rows))
        upto = []
        for i, (start, stop, _) in enumerate(self.segments):
            g = None if tokens.decay is None else tokens.decay.norm[start:stop]
            logs = None if g is None else torch.cat([torch.zeros_like(first[i, None]), g])
            upto.append(running_norms(torch.cat([first[i, None], norms[start:stop]]), logs))
        leaving = [x[segment.full] for x, segment in zip(upto, self.segments, strict=True)]
        return (torch.cat([x[:-1] for x in upto]), torch.stack(leaving)) if upto else (norms, first)

    def largest_norm(self, keys: Tensor, initial: Sums) -> Tensor:
        """The largest squared norm in the whole sequence of each chunk, the future included: `[n rows, H]`."""
        norms, first = keys.square().sum(-1).amax(-1), initial.norm.unflatten(0, (len(self.segments), self.rows))
        whole = [norms[start:stop].amax(0) for start, stop, _ in self.segments]
        return self.same_norm(torch.maximum(torch.stack(whole), first).flatten(0, 1) if whole else initial.norm)

    def same_norm(self, norm: Tensor) -> Tensor:
        """A norm of each sequence `[N, H]`, for each of its chunks: `[n rows, H]`."""
        of_sequence = norm.unflatten(0, (len(self.segments), self.rows))
        spread = [of_sequence[i].expand(stop - start, -1, -1) for i, (start, stop, _) in enumerate(self.segments)]
        return torch.cat(spread).flatten(0, 1) if spread else norm


def _sequence_and_number(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequence of each token, and its number in the sequence, for sequences with `counts [N]` tokens."""
    row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return row, torch.arange(len(row), device=counts.device) - (counts.cumsum(0) - counts)[row]


class _Scan(torch.autograd.Function):
    """G, M and C entering each chunk and after the full chunks of each segment.

    The inputs are chunks of keys, previous keys and values, the sums before each segment, and the log-decays of each
    chunk, of G and M `[n, rows, H, 1 or R, 1 or R]` and of C `[n, rows, H, 1, 1 or R]`, or None. The products of all
    chunks are computed in one batch. They are added up in place, one chunk after the other.
    """

    @staticmethod
    def forward(ctx, keys, previous, values, gram, transition, read, matrix_log, values_log, segments):  # type: ignore[override]
        pairs = (
            (keys, keys, gram, matrix_log), (keys, previous, transition, matrix_log), (values, keys, read, values_log)
        )  # fmt: skip
        entering, leaving = zip(*(_forward(*pair, segments) for pair in pairs), strict=True)
        saved = () if matrix_log is None else entering
        ctx.save_for_backward(keys, previous, values, matrix_log, values_log, *saved)
        ctx.segments = segments
        return *entering, *leaving

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[override]
        keys, previous, values, matrix_log, values_log, *entering = ctx.saved_tensors
        logs = matrix_log, matrix_log, values_log
        (gram, dgram), (transition, dtransition), (read, dread) = (
            _backward(grads[i], grads[i + 3], logs[i], ctx.segments) for i in range(3)
        )
        dkeys = keys @ gram + keys @ gram.mT + previous @ transition.mT + values @ read
        dlogs = None, None
        if entering:
            terms = [d * x for d, x in zip((gram, transition, read), entering, strict=True)]
            pairs = (terms[0] + terms[1], matrix_log), (terms[2], values_log)
            dlogs = [term.sum_to_size(log.shape) * log.exp() for term, log in pairs]
        return dkeys, keys @ transition, keys @ read.mT, dgram, dtransition, dread, *dlogs, None


def _forward(
    left: Tensor, right: Tensor, first: Tensor, log_decay: Tensor | None, segments: list[Segment]
) -> tuple[Tensor, Tensor]:
    """Running sums of `leftᵀ right` over chunks `[n, rows, H, S, …]`, and those after each segment's full chunks."""
    # Slot j + 1 first holds the product of chunk j; adding up turns it into the sum entering chunk j + 1.
    sums = left.new_empty(len(left) + 1, *left.shape[1:3], left.shape[-1], right.shape[-1])
    torch.bmm(left.flatten(0, 2).mT, right.flatten(0, 2), out=sums[1:].flatten(0, 2))
    leaving = []
    for i, (start, stop, full) in enumerate(segments):
        segment = sums[start : stop + 1]
        segment[0] = first[i]
        _accumulate(segment, None if log_decay is None else log_decay[start:stop])
        leaving.append(segment[full].clone())  # the next segment overwrites the last slot
    return sums[:-1], torch.stack(leaving) if leaving else first


def _backward(
    entering: Tensor, leaving: Tensor, log_decay: Tensor | None, segments: list[Segment]
) -> tuple[Tensor, Tensor]:
    """The gradients of the product of each chunk and of the sums before each segment, from those of later sums."""
    products, first = torch.empty_like(entering), []
    for i, (start, stop, full) in enumerate(segments):
        segment, given = products[start:stop], entering[start:stop]
        segment[:-1], segment[-1] = given[1:], 0
        if full:
            segment[full - 1] += leaving[i]
        logs = None if log_decay is None else log_decay[start:stop]
        _accumulate(segment, logs if logs is None else logs[1:], backwards=True)
        before = segment[0] if logs is None else logs[0].exp() * segment[0]
        first.append(before + given[0] if full else before + given[0] + leaving[i])
    return products, torch.stack(first) if first else entering


def _accumulate(x: Tensor, log_decay: Tensor | None, backwards: bool = False) -> None:
    """Running sums along axis 0, in place, or `backwards`; entry i decays by `log_decay[i]` to i + 1."""
    parts = x.unbind(0)  # on a CPU, cumsum along the first axis takes ten times as long
    pairs = list(pairwise(parts[::-1] if backwards else parts))
    if log_decay is None:
        for a, b in pairs:
            b.add_(a)
        return
    kept, change = (part.unbind(0)[:: -1 if backwards else 1] for part in split_decay(log_decay))
    for (a, b), whole, rest in zip(pairs, kept, change, strict=True):
        b.addcmul_(rest, a).addcmul_(whole, a)
