"""Linear attention with no decay or a scalar one, and GateRank on it: what launches the kernels of `walks.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from halflife.ops.arguments import even
from halflife.ops.backends.split import new_gradient
from halflife.ops.backends.triton.gates import GATE_RANK, NONE, Gates, mode_of, precision_of
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.linear_grads import FOUND, grads_kernel, log_grads_kernel
from halflife.ops.backends.triton.passes.parts import sums_of_parts
from halflife.ops.backends.triton.segments import (
    Segments,
    Settings,
    block,
    make_segments,
    scan_kernel,
    settings_of,
)
from halflife.ops.backends.triton.shared.shared_grads import LARGEST, heads_of_program, shared_grads_kernel, tiles_of
from halflife.ops.backends.triton.sums import COUNTS
from halflife.ops.backends.triton.walks import walk_kernel
from halflife.ops.chunked.groups import grads_of_heads


class Operands(NamedTuple):
    """What the kernels of one pass share."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    sums: Tensor | None
    scale: float
    segments: Segments
    walk: Settings
    grads: Settings
    gain: Tensor | None = None
    skip: Tensor | None = None

    @property
    def mode(self) -> int:
        return mode_of(*self.gates)

    @property
    def heads(self) -> int:
        return max(self.k.shape[2], self.v.shape[2])  # keys, whose heads may be shared, are v where states are flipped

    def new_states(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate states `[count, H, K', V]`, with K' = 2K for two states."""
        rows = self.q.shape[3] * (2 if self.mode == GATE_RANK else 1)
        return self.q.new_empty(count, self.heads, rows, self.v.shape[3], dtype=dtype)

    def tail(self) -> tuple:
        """The arguments about places, which are the last ones of both walks."""
        s, shared = self.segments, (self.heads // max(1, x.shape[2]) for x in (self.q, self.k))
        strides = (stride for x in (self.q, self.k, self.v) for stride in (x.stride(1), x.stride(2)))
        length, tokens = self.v.shape[1], self.v.shape[0] * self.v.shape[1]
        return s.table, self.scale, length, s.length, s.per_sequence, tokens, self.heads, *shared, *strides

    def flipped(self, do: Tensor) -> Operands:
        """The call whose outputs are the gradients of queries, and whose states are transposed."""
        states = 2 if self.mode == GATE_RANK else 1
        walk = settings_of("walk", self.v.shape[3], self.k.shape[3], self.q, states, self.walk.chunk)
        return self._replace(q=do, k=self.v, v=self.k, walk=walk._replace(chunk=self.walk.chunk))

    def constants(self, tiles: Settings) -> dict:
        return {
            "K": self.q.shape[3], "V": self.v.shape[3], "C": tiles.chunk, "MODE": self.mode,
            "PRECISION": precision_of(self.q), "BK": tiles.rows, "BV": tiles.columns, "STAGES": tiles.stages,
            "num_warps": tiles.warps,
        }  # fmt: skip


def rows_of(x: Tensor) -> Tensor:
    """`x [B, T, H, D]` itself if its tokens are evenly spaced rows, as in a slice of channels, else a copy.

    Strides are constants of a kernel, so heads outside of tokens, whose stride is the length, are copied too.
    """
    rows = x.stride(3) == 1 and x.stride(2) <= x.stride(1)
    return x if rows and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)) else even(x)


def gradient_of(x: Tensor, heads: int) -> Tensor:
    """Allocate the gradients `[B, T, H, K]` of `x [B, T, G, K]` head by head, in their place where G = H."""
    return new_gradient(x) if x.shape[2] == heads else grads_of_heads(x, heads)


def new_sums(q: Tensor, v: Tensor, gates: Gates) -> Tensor | None:
    """Allocate the sums of log-decays in chunks, `[numbers a token, H, B·T]`; None without decays. See `sums.py`."""
    (batch, length, heads, _), mode = v.shape, mode_of(*gates)
    dtype = torch.float64 if q.dtype == torch.float32 else torch.float32
    return None if mode == NONE else q.new_empty(COUNTS[mode], heads, batch * length, dtype=dtype)


def _call(
    q: Tensor, k: Tensor, v: Tensor, g_slow: Tensor | None, g_fast: Tensor | None, gain: Tensor | None,
    skip: Tensor | None, cu_seqlens: Tensor | None, scale: float, chunk_size: int, back: bool,
) -> Operands:  # fmt: skip
    (batch, length, heads, value), key, gates = v.shape, q.shape[3], (g_slow, g_fast)
    chunk = block(min(chunk_size, length))
    segments = make_segments(batch, length, cu_seqlens, chunk, heads * triton.cdiv(value, 64))
    states = 2 if mode_of(*gates) == GATE_RANK else 1
    walk, grads = (settings_of(kind, key, value, q, states, chunk) for kind in ("walk", "grads"))
    if back:  # one size of chunks, whose sums are computed once
        chunk = min(walk.chunk, grads.chunk)
        walk, grads = walk._replace(chunk=chunk), grads._replace(chunk=chunk)
    sums = new_sums(q, v, gates)
    return Operands(rows_of(q), rows_of(k), rows_of(v), gates, sums, scale, segments, walk, grads, gain, skip)


def _walk(
    call: Operands, *, back: bool = False, beside: Tensor | None = None, entering: Tensor | None = None,
    out: Tensor | None = None, leaving: Tensor | None = None, carried: Tensor | None = None,
    states: Tensor | None = None, reads: Tensor | None = None, every: int = 2, longer: Tensor | None = None,
) -> None:  # fmt: skip
    """The walk over segments; with `back` that from the end, and with `beside` that of transposed states.

    The first one of a pass stores sums of log-decays, which all kernels read.
    """
    if call.segments.count * call.heads:
        other = call.q if beside is None else beside
        first = not back and (beside is not None or leaving is not None or states is not None)
        gates = call.gates if first else (None, None)
        launch(walk_kernel, (call.heads * triton.cdiv(call.v.shape[3], call.walk.columns), call.segments.count))(
            call.q, call.k, call.v, beside, call.sums, longer, *gates, call.gain,
            call.skip if beside is None and out is not None else None, entering, out, leaving, carried, states, reads,
            *call.tail(), 0 if out is None else out.stride(1), call.heads // max(1, call.v.shape[2]),
            call.heads // max(1, other.shape[2]), *other.stride()[1:3], EVERY=every, BACK=back,
            FLIPPED=beside is not None, **call.constants(call.walk),
        )  # fmt: skip


def scan(
    call: Any, update: Tensor, carried: Tensor, first: Tensor | None, mode: int, back: bool
) -> tuple[Tensor, Tensor]:
    """The states entering the segments, and the last ones of all sequences; no `first` ones are zeros."""
    entering, last = torch.empty_like(update), call.new_states(call.segments.num_sequences)
    (rows, value), segments = update.shape[2:], call.segments
    size = rows * value // (2 if mode == GATE_RANK else 1)
    if last.numel():
        launch(scan_kernel, (len(last) * call.heads, triton.cdiv(size, 256)))(
            update, carried, first, entering, last, segments.sequences, segments.per_sequence, call.heads, size, value,
            mode, back, 256, num_warps=2,
        )  # fmt: skip
    return entering, last


def outputs(
    call: Any, walk: Callable[..., None], initial: Tensor | None, mode: int, numbers: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The outputs, the final states, and of segments the entering states and `numbers` about states that pass them.

    No initial states are zeros. The last two are empty where each sequence is one segment, and else go to `backward`.
    """
    v, count = call.v, call.segments.count
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if call.segments.whole:
        final = call.new_states(call.segments.num_sequences)
        walk(call, entering=initial, out=out, leaving=final)
        return out, final, final.new_empty(0), final.new_empty(0)
    update, carried = call.new_states(count), v.new_empty(count, call.heads, numbers, dtype=torch.float32)
    walk(call, leaving=update, carried=carried)
    entering, final = scan(call, update, carried, initial, mode, back=False)
    walk(call, entering=entering, out=out)
    return out, final, entering, carried


def forward(
    q: Tensor, k: Tensor, v: Tensor, g_slow: Tensor | None, g_fast: Tensor | None, gain: Tensor | None,
    skip: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `outputs` returns, with the 3 factors of states that pass a segment."""
    call = _call(q, k, v, g_slow, g_fast, gain, skip, cu_seqlens, scale, chunk_size, back=False)
    return outputs(call, _walk, initial, call.mode, 3)


def backward(
    q: Tensor, k: Tensor, v: Tensor, g_slow: Tensor | None, g_fast: Tensor | None, gain: Tensor | None,
    skip: Tensor | None, initial: Tensor | None, entering: Tensor, carried: Tensor, cu_seqlens: Tensor | None,
    scale: float, chunk_size: int, do: Tensor, dfinal: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v, both log-decays, gain, skip and the initial states. No `dfinal` is zeros."""
    given = (q, k, v, g_slow, g_fast, gain, skip, cu_seqlens, scale, chunk_size)
    if q.shape[2] == k.shape[2] < v.shape[2] and g_slow is None and q.shape[3] * v.shape[3] <= LARGEST:
        call, chunk = _call(*given, back=False), block(min(chunk_size, q.shape[1]))
        return _shared_backward(call, chunk, initial, entering, carried, do, dfinal)
    call = _call(*given, back=True)
    segments, heads, chunk, (batch, length) = call.segments, call.heads, call.grads.chunk, v.shape[:2]
    flipped, from_end = call.flipped(do), call._replace(q=call.k, k=call.q, v=do)
    tokens, key = batch * length, q.shape[3]
    parts, columns = triton.cdiv(key, call.grads.rows), triton.cdiv(key, flipped.walk.columns)
    dq, dk, dv = gradient_of(q, heads), gradient_of(k, heads), gradient_of(v, heads)
    states = reads = found = passes = None
    new = functools.partial(q.new_empty, dtype=torch.float32)
    if call.mode != NONE:
        narrow = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        states = flipped.new_states(tokens // (2 * chunk) + segments.count, narrow)
        reads = new(columns, call.mode, heads, tokens)
        if parts == 1:
            found, passes = new(FOUND[call.mode], heads, tokens), new(tokens // chunk + segments.count, heads, 3)
    _walk(flipped, beside=call.q, entering=initial if segments.whole else entering, out=dq, states=states, reads=reads)
    after, before, dinitial = _from_end(call, from_end, carried, initial, dfinal)
    numbers = (*call.gates, gain)
    grads = [None if x is None else new(parts, *x.shape) for x in numbers]
    dskip = None if skip is None else new(segments.count, heads)
    if segments.count * heads:
        launch(grads_kernel, (heads * parts, segments.count))(
            call.q, call.k, call.v, do, call.sums, states, after, before, dk, dv if parts == 1 else None, found, passes,
            reads, *numbers, skip, *grads, dskip, *call.tail(), dk.stride(1), dv.stride(1), READS=columns,
            **call.constants(call.grads),
        )  # fmt: skip
        if parts > 1:
            _walk(from_end, back=True, entering=after, out=dv)
        elif call.mode != NONE:
            launch(log_grads_kernel, (segments.count * (segments.length // chunk), heads))(
                call.sums, found, passes, reads, *call.gates, *grads[:2], segments.table, length, segments.length,
                segments.per_sequence, tokens, heads, chunk, call.mode, columns, num_warps=1,
            )  # fmt: skip
    of_numbers = [(x, like, tokens * heads) for x, like in zip(grads, numbers, strict=True)]
    dq, dk, *summed = sums_of_parts((dq, q, key), (dk, k, key), *of_numbers, (dskip, skip, heads))
    return dq, dk, dv, *summed, dinitial


def _from_end(
    call: Operands, from_end: Operands, carried: Tensor, initial: Tensor | None, dfinal: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of states after segments, those before them if a walk is to write them, and of the initial ones."""
    if call.segments.whole:
        before = None if initial is None else torch.empty_like(initial)
        return dfinal, before, before
    update = call.new_states(call.segments.count)
    _walk(from_end, back=True, leaving=update)
    after, dinitial = scan(call, update, carried, dfinal, call.mode, back=True)
    return after, None, dinitial


def _shared_backward(
    call: Operands, chunk: int, initial: Tensor | None, entering: Tensor, carried: Tensor, do: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """`backward` of heads that share queries and keys, with chunks of up to `chunk` tokens (`shared_grads.py`)."""
    call = call._replace(walk=call.walk._replace(chunk=min(32, call.walk.chunk)))  # for what walks store, too
    q, k, segments, heads, (batch, length, groups, key) = call.q, call.k, call.segments, call.heads, call.q.shape
    tokens, tiles = batch * length, tiles_of(q, call.v, chunk)
    every = tiles.chunk // call.walk.chunk
    chunks = segments.count * (segments.length // tiles.chunk) if tokens else 0
    narrow = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    count, new = tokens // tiles.chunk + segments.count, functools.partial(q.new_empty, dtype=torch.float32)
    states, after_chunks = call.new_states(count, narrow), call.new_states(count, narrow)
    sums = call.sums if every == 1 else new_sums(q, do, call.gates)
    longer = None if every == 1 else sums
    start = initial if segments.whole else entering
    _walk(call, entering=start, states=states, every=every, longer=longer)
    from_end, dv = call._replace(q=k, k=q, v=do), gradient_of(call.v, heads)
    after, before, dinitial = _from_end(call, from_end, carried, initial, dfinal)
    _walk(from_end, back=True, entering=after, out=dv, leaving=before, states=after_chunks, every=every)
    each = heads_of_program(heads // groups, chunks * groups)
    dq, dk = (grads_of_heads(x, heads // each) for x in (q, k))
    (_, g), gain = call.gates, call.gain
    dg, dgain = None if g is None else new(3, *g.shape), None if gain is None else new(gain.shape)
    dskip = None if call.skip is None else new(chunks, heads)
    if chunks * heads:
        launch(shared_grads_kernel, (3 * heads // each * chunks,))(
            q, k, call.v, do, sums, states, after_chunks, g, gain, dq, dk, dg, dgain, dskip, segments.table,
            call.scale, length, segments.length, segments.per_sequence, tokens, heads, heads // groups, each,
            *(stride for x in (q, k, call.v) for stride in x.stride()[1:3]), **call.constants(tiles),
        )  # fmt: skip
    of_numbers = (dg, g, tokens * heads), (dgain, gain, tokens * heads), (dskip, call.skip, heads)
    dq, dk, *rest = sums_of_parts((dq, q, key), (dk, k, key), *of_numbers)
    return dq, dk, dv, None, *rest, dinitial
