"""`koopman_attention` without branches on values: for accelerators, which would wait for them, and for `torch.export`.

How many tokens wait for their chunk, and where packed sequences end, is on the device. A call therefore has as many
chunks as its tokens reach at most, and tensors of indices choose what a sequence uses. The sums G, M and Cᵀ stand side
by side in one matrix `[R, 2 R + P]`, so that one product and one scan compute all three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from halflife.ops.backends import triton
from halflife.ops.koopman.call import KoopmanCall
from halflife.ops.koopman.decays import SumDecay, Weighted, running_norms
from halflife.ops.koopman.layout import arrange
from halflife.ops.koopman.readout import KoopmanReadout
from halflife.ops.koopman.solve import Count, inverse_factor
from halflife.ops.koopman.state import KoopmanMemory, Sums, memory_after, previous_keys
from halflife.packing import Packing

Reader = Callable[..., tuple[Tensor, Count]]


def run(
    call: KoopmanCall, memory: KoopmanMemory, readout: KoopmanReadout, read: Reader | None = None
) -> tuple[Tensor, KoopmanMemory, Count]:
    """Read and write the tokens of `call`. `read` takes the place of products of torch, see `triton.read_operators`."""
    line, dtype = Timeline(call, memory), memory.last.dtype
    if read is not None and _summed_by_kernel(line, call):
        return _run_fresh(line, call, memory, readout, read)
    call = replace(call, k=call.k.to(dtype), v=call.v.to(dtype))
    placed, chunks, tokens = arrange(line, call, memory)
    joined, norms = line.running_sums(tokens, memory.sums)
    leaving = _sums(line.leaving(joined), line.leaving(norms)).normalized(call.normalization, memory.sums.norm)
    joined, norms = line.entering(joined), line.entering(norms)
    entering = _sums(joined, norms).normalized(call.normalization, line.spread(memory.sums.norm))
    if call.normalization == "sequence":
        entering = entering._replace(norm=line.largest(chunks.square().sum(-1).amax(-1), memory.sums.norm))
    memory = line.memory_after(leaving, placed, memory)
    if read is not None:
        y, retries = line.read(call.q, joined, entering.norm, readout, read)
        return y, memory, retries
    queries = line.split(line.place(call.q)).flatten(0, 1)
    entering, retries = Sums(*(x.flatten(0, 1) for x in entering)), 0
    if torch.compiler.is_exporting():
        y = readout.read_by_inverse(inverse_factor(entering, readout.ridge).matrix, entering, queries)
    else:
        y, retries = readout.read(entering, queries)
    y = y.unflatten(0, (line.chunks, line.rows)).permute(1, 0, 3, 2, 4)
    return line.restore(y), memory, retries


def _summed_by_kernel(line: Timeline, call: KoopmanCall) -> bool:
    """Whether a Triton kernel can take the sums: from no state, and in 16 bits, whose products are exact in TF32."""
    narrow = call.k.dtype.itemsize == call.v.dtype.itemsize == 2
    return line.fresh and narrow and call.g is None and call.normalization != "sequence"


def _run_fresh(
    line: Timeline, call: KoopmanCall, memory: KoopmanMemory, readout: KoopmanReadout, read: Reader
) -> tuple[Tensor, KoopmanMemory, Count]:
    """`run` without decays from no state, with sums by a Triton kernel."""
    joined, norms, *parts, last = triton.custom_op("koopman_sums")(call.k, call.v, line.size, line.chunks)
    entering = _sums(joined, norms).normalized(call.normalization, line.spread(memory.sums.norm))
    leaving = Sums(*parts).normalized(call.normalization, memory.sums.norm)
    y, retries = line.read(call.q, joined, entering.norm, readout, read)
    return y, line.memory_after(leaving, (call.k, call.v, None), memory, last), retries


class Timeline:
    """The tokens of a call in chunks: a row for each sequence, or a single row of all packed sequences.

    A packed sequence has a chunk for the tokens after its last full chunk, even if there are none. The chunks behind
    the last sequence are empty. `fresh` rows have no tokens from earlier calls, so their places are known.
    """

    def __init__(self, call: KoopmanCall, memory: KoopmanMemory) -> None:
        packing, self.size, device = call.packing, call.tokens_per_operator, call.k.device
        self.shape, self.packed = call.k.shape[:2], packing.cu_seqlens is not None
        (batch, length), sequences = self.shape, packing.num_sequences
        self.fresh = call.initial_state is None and not self.packed
        spare = 0 if call.initial_state is None else self.size - 1
        self.rows, self.chunks = batch, max(1, -(-(length + spare) // self.size))
        if self.fresh:
            return
        if self.packed:
            packing = packing.to(device)
            self.rows, self.chunks = 1, (length + spare * sequences) // self.size + sequences
        self.total = memory.pending + packing.lengths(device)
        self.full = self.total // self.size  # complete chunks of each sequence
        self.sequence = torch.arange(sequences, device=device)
        self.first = self.sequence * self.chunks  # the first chunk of each sequence, of all rows together
        if self.packed:
            self.first = (self.full + 1).cumsum(0) - self.full - 1
            chunk = torch.arange(self.chunks, device=device)
            self.of_chunk = torch.searchsorted(self.first, chunk, right=True) - 1  # the sequence of each chunk
            self.starts = (self.first[self.of_chunk] == chunk).view(-1, 1, 1)
        self.slots = self._slots(memory, packing)

    def _slots(self, memory: KoopmanMemory, packing: Packing) -> Tensor:
        """The place of each token in all rows together `[B T]`."""
        begin = self.first * self.size + memory.pending
        token = torch.arange(self.shape[1], device=begin.device)
        if packing.cu_seqlens is None:
            return (begin.unsqueeze(1) + token).flatten()
        return (begin - packing.cu_seqlens[:-1])[packing.sequence] + token

    def place(self, x: Tensor, waiting: Tensor | None = None) -> Tensor:
        """Put `[B, T, …]` on the timeline `[rows, n S, …]`, after the tokens that wait; behind these stand zeros."""
        places = self.chunks * self.size
        if self.fresh:
            return x if x.shape[1] == places else F.pad(x, (0, 0, 0, 0, 0, places - x.shape[1]))
        flat = x.new_zeros(self.rows * places, *x.shape[2:])
        if waiting is not None and waiting.shape[1]:
            at = (self.first * self.size).unsqueeze(1) + torch.arange(waiting.shape[1], device=x.device)
            flat = flat.index_put((at,), waiting)
        return flat.index_put((self.slots,), x.flatten(0, 1)).unflatten(0, (self.rows, places))

    def previous(self, keys: Tensor, last: Tensor) -> Tensor:
        """The key before each key of the timeline; before the first ones stands `last [N, H, R]`."""
        if not self.packed:
            return previous_keys(keys, last)
        return previous_keys(keys, keys[:, 0]).flatten(0, 1).index_put((self.first * self.size,), last).unsqueeze(0)

    def split(self, x: Tensor) -> Tensor:
        """Cut the timeline into chunks `[n, rows, H, S, …]`."""
        return x.unflatten(1, (self.chunks, self.size)).permute(1, 0, 3, 2, 4).contiguous()

    def restore(self, y: Tensor) -> Tensor:
        """Undo `place`: chunks `[rows, n, S, H, …]` → `[B, T, H, …]`."""
        y = y.flatten(1, 2)
        if self.fresh:
            return y[:, : self.shape[1]]
        return y.flatten(0, 1).index_select(0, self.slots).unflatten(0, self.shape)

    def read(
        self, q: Tensor, joined: Tensor, norms: Tensor, readout: KoopmanReadout, read: Reader
    ) -> tuple[Tensor, Count]:
        """The outputs `[B, T, H, P]` of queries `[B, T, H, R]` that read sums and m² of chunks."""
        queries = self.place(q).unflatten(1, (self.chunks, self.size))
        y, retries = read(queries, joined, norms, readout.gamma.flatten(), readout.weights.flatten(1), readout.ridge)
        return self.restore(y), retries

    def running_sums(self, tokens: Weighted, initial: Sums) -> tuple[Tensor, Tensor]:
        """The sums `[G M Cᵀ]` entering each chunk, `[n, rows, …]`, and their m²; of rows, those after all as well."""
        rank, width = tokens.keys.shape[-1], tokens.values.shape[-1]
        updates = tokens.keys.mT @ torch.cat([tokens.keys, tokens.previous, tokens.values], -1)
        first = torch.cat([initial.gram, initial.transition, initial.values.mT], -1)
        entries, logs = self._entries(updates, first, _logs(tokens.decay, rank, width))
        sums = running(entries, logs) if torch.compiler.is_exporting() else _Running.apply(entries, logs)
        decay = None if tokens.decay is None else tokens.decay.norm
        norms, decay = self._entries(tokens.norms.amax(-1), initial.norm, decay)
        return sums, running_norms(norms, decay)

    def _entries(self, updates: Tensor, first: Tensor, logs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What a running sum adds at each step, and the log-decay of the sum before it; the first step has none."""
        if not self.packed:
            entries = torch.cat([first.unsqueeze(0), updates])
            return entries, logs if logs is None else torch.cat([torch.zeros_like(logs[:1]), logs])
        starts = self.starts.view(-1, *[1] * (updates.ndim - 1))
        entries = torch.where(starts, first[self.of_chunk].unsqueeze(1), updates.roll(1, 0))
        logs = updates.new_zeros(1, *[1] * (updates.ndim - 1)) if logs is None else logs.roll(1, 0)
        return entries, torch.where(starts, -torch.inf, logs)

    def entering(self, x: Tensor) -> Tensor:
        """Of running sums, those that enter chunks `[n, rows, …]`."""
        return x if self.packed else x[:-1]

    def leaving(self, x: Tensor) -> Tensor:
        """Of running sums, those after the last full chunk of each sequence `[N, …]`."""
        if self.fresh:
            return x[self.shape[1] // self.size]
        return x[self.first + self.full, 0] if self.packed else x[self.full, self.sequence]

    def spread(self, x: Tensor) -> Tensor:
        """Numbers of sequences `[N, H]` for each of their chunks `[n, rows, H]`."""
        return x[self.of_chunk].unsqueeze(1) if self.packed else x.expand(self.chunks, *x.shape)

    def largest(self, norms: Tensor, first: Tensor) -> Tensor:
        """The largest norm `[n, rows, H]` of the whole sequence of each chunk, and of its past `first [N, H]`."""
        if not self.packed:
            return self.spread(torch.maximum(norms.amax(0), first))
        of_chunk = self.of_chunk.unsqueeze(1).expand(-1, first.shape[1])
        return self.spread(first.scatter_reduce(0, of_chunk, norms[:, 0], "amax"))

    def memory_after(
        self, leaving: Sums, timelines: tuple[Tensor, Tensor, Tensor | None], memory: KoopmanMemory,
        last: Tensor | None = None,
    ) -> KoopmanMemory:  # fmt: skip
        """The memory after all tokens, with the sums of all full chunks, and their last key if it is known."""
        if not self.fresh:
            return memory_after(leaving, timelines, self.first * self.size, self.total, memory)
        whole = self.shape[1] // self.size * self.size
        left, room = self.shape[1] - whole, self.size - 1
        waiting = [
            None if x is None else F.pad(x[:, whole : whole + left].to(memory.last.dtype), (0, 0, 0, 0, 0, room - left))
            for x in timelines
        ]
        if last is None:
            last = timelines[0][:, whole - 1] if whole else memory.last.clone()
        return KoopmanMemory(
            leaving, last, waiting[0], waiting[1], torch.full_like(memory.pending, left), pending_decays=waiting[2]  # type: ignore[arg-type]
        )  # fmt: skip


def _sums(joined: Tensor, norm: Tensor) -> Sums:
    rank = joined.shape[-2]
    gram, transition, values = joined.split([rank, rank, joined.shape[-1] - 2 * rank], -1)
    return Sums(gram, transition, values.mT, norm)


def _logs(decay: SumDecay | None, rank: int, width: int) -> Tensor | None:
    """The log-decays of `[G M Cᵀ]` at each chunk, `[n, rows, H, 1, 1]` or `[n, rows, H, R, 2 R + P]`."""
    if decay is None or decay.matrix.shape[-1] == 1:
        return None if decay is None else decay.matrix
    values = decay.values.mT.expand(*decay.values.shape[:-2], rank, width)
    return torch.cat([decay.matrix, decay.matrix, values], -1)


def running(x: Tensor, logs: Tensor | None, backwards: bool = False) -> Tensor:
    """Running sums `s_c = e^{logs_c} s_{c−1} + x_c` along axis 0, in log n steps; None is no decay.

    With `backwards`, `s_c = e^{logs_{c+1}} s_{c+1} + x_c`.
    """
    if logs is None:
        return x.flip(0).cumsum(0).flip(0) if backwards else x.cumsum(0)
    if backwards:
        moved = torch.cat([torch.zeros_like(logs[:1]), logs[1:].flip(0)])
        return running(x.flip(0), moved).flip(0)
    shift = 1
    while shift < len(x):
        x = torch.cat([x[:shift], torch.addcmul(x[shift:], logs[shift:].exp(), x[:-shift])])
        logs = torch.cat([logs[:shift], logs[shift:] + logs[:-shift]])
        shift *= 2
    return x


class _Running(torch.autograd.Function):
    """`running` forwards; its gradient is a running sum backwards."""

    @staticmethod
    def forward(ctx, x: Tensor, logs: Tensor | None) -> Tensor:  # type: ignore[override]
        sums = running(x, logs)
        ctx.save_for_backward(logs, None if logs is None else sums)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        logs, sums = ctx.saved_tensors
        dx = running(grad, logs, backwards=True)
        if logs is None or not ctx.needs_input_grad[1]:
            return dx, None
        terms = dx * torch.cat([torch.zeros_like(sums[:1]), sums[:-1]])
        return dx, terms.sum_to_size(logs.shape) * logs.exp()
