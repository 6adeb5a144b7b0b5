"""Linear attention with a vector decay: what launches its kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from halflife.ops.backends.triton.gates import precision_of
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.linear import gradient_of, outputs, rows_of, scan
from halflife.ops.backends.triton.passes.parts import sums_of_parts
from halflife.ops.backends.triton.segments import Segments, architecture, block, make_segments
from halflife.ops.backends.triton.vector.prepare import prepare_kernel
from halflife.ops.backends.triton.vector.small_walk import walk_kernel as small_walk_kernel
from halflife.ops.backends.triton.vector.vector_grads import grads_kernel
from halflife.ops.backends.triton.vector.vector_walk import walk_kernel

VECTOR = 3  # the mode of `segments.scan_kernel`


class Tiles(NamedTuple):
    """The sizes of the kernels' blocks."""

    chunk: int  # tokens of a chunk
    columns: int  # columns of the state in a walk, which has all rows
    keys: int  # channels of queries and keys that a program of one chunk has at once
    values: int  # channels of values that a step of the gradients has


# Architecture → tokens of a chunk and columns of the state in a walk, for K and V up to 64.
_SMALL = {"hopper": (32, 64), "ampere": (32, 32), "amd": (16, 32)}


def tiles_of(key: int, value: int, q: Tensor, most: int) -> Tiles:
    """The sizes of blocks for chunks of at most `most` tokens. Products of float32 use no tensor cores."""
    if q.dtype == torch.float32:
        return Tiles(block(most, 16), block(value, 32), block(key, 32), block(value, 32))
    chunk, columns = _SMALL[architecture(q)] if max(key, value) <= 64 else (32, 64 if key <= 64 else 32)
    return Tiles(block(most, chunk), block(value, columns), block(key, 64), block(value, 64))


class Prepared(NamedTuple):
    """The results of `prepare.py`."""

    reads: Tensor
    writes: Tensor
    pairs: Tensor
    totals: Tensor


class Operands(NamedTuple):
    """What the kernels of one pass share. Walks over small heads need nothing `prepared`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    scale: float
    segments: Segments
    tiles: Tiles
    prepared: Prepared | None = None

    @property
    def heads(self) -> int:
        return self.v.shape[2]

    @property
    def levels(self) -> int:
        return self.tiles.chunk.bit_length() - 1

    def places(self) -> tuple[Any, ...]:
        s = self.segments
        return self.v.shape[1], s.length, s.per_sequence, self.heads

    def slots(self) -> int:
        """How many states of chunks there may be."""
        return self.v.shape[0] * self.v.shape[1] // self.tiles.chunk + self.segments.count

    def new_states(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate states `[count, H, K, V]`."""
        return self.v.new_empty(count, self.heads, self.q.shape[3], self.v.shape[3], dtype=dtype)


def _shared(q: Tensor, k: Tensor, heads: int) -> tuple[int, ...]:
    """How many heads share a row of queries and of keys, and the strides of both."""
    return *(heads // max(1, x.shape[2]) for x in (q, k)), *(s for x in (q, k) for s in (x.stride(1), x.stride(2)))


def _call(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor | None, scale: float, chunk_size: int
) -> Operands:
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    (batch, length, heads, value), key = v.shape, q.shape[3]
    tiles = tiles_of(key, value, q, min(chunk_size, length))
    segments = make_segments(batch, length, cu_seqlens, tiles.chunk, heads * triton.cdiv(value, 64))
    call = Operands(q, k, v, g, scale, segments, tiles)
    return call if key <= tiles.keys and value <= tiles.values else call._replace(prepared=_prepare(call))


def _prepare(call: Operands) -> Prepared:
    q, segments, tiles = call.q, call.segments, call.tiles
    (batch, length, heads, _), key = call.v.shape, q.shape[3]
    reads, writes = (q.new_empty(batch, length, heads, key) for _ in range(2))
    pairs = q.new_empty(batch, length, heads, tiles.chunk)
    totals = q.new_empty(call.slots(), heads, key, dtype=torch.float32)
    if segments.count * heads:
        launch(prepare_kernel, (segments.count * (segments.length // tiles.chunk) * heads,))(
            q, call.k, call.g, reads, writes, pairs, totals, segments.table, call.scale, *call.places(),
            *_shared(q, call.k, heads), key, tiles.chunk, call.levels, precision_of(q), tiles.keys,
            num_warps=2 if key <= 64 else 4,
        )  # fmt: skip
    return Prepared(reads, writes, pairs, totals)


def _walk(
    call: Operands, do: Tensor | None = None, *, entering: Tensor | None = None, out: Tensor | None = None,
    leaving: Tensor | None = None, carried: Tensor | None = None, states: Tensor | None = None,
) -> None:  # fmt: skip
    """The walk over segments; with `do` that from the end, for gradients of states and of v."""
    given, tiles, key, value = call.prepared, call.tiles, call.q.shape[3], call.v.shape[3]
    if not call.segments.count * call.heads:
        return
    grid = call.heads * triton.cdiv(value, tiles.columns), call.segments.count
    v, precision, row = call.v if do is None else do, precision_of(call.q), 0 if out is None else out.stride(1)
    written, stages = (entering, out, leaving, carried, states), 1 if precision == "ieee" else 2
    if given is None:
        q, k = (call.q, call.k) if do is None else (call.k, call.q)
        launch(small_walk_kernel, grid)(
            q, k, v, call.g, *written, call.segments.table, call.scale, *call.places(), *_shared(q, k, call.heads),
            v.stride(1), v.stride(2), row, key, value, tiles.chunk, call.levels, do is not None, precision,
            tiles.keys, tiles.columns, stages, num_warps=4,
        )  # fmt: skip
    else:
        reads, writes = (given.reads, given.writes) if do is None else (given.writes, given.reads)
        launch(walk_kernel, grid)(
            reads, writes, v, given.pairs, given.totals, *written, call.segments.table, *call.places(), v.stride(1),
            v.stride(2), row, key, value, tiles.chunk, do is not None, precision, block(key, 256), tiles.columns,
            stages, num_warps=4,
        )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `linear.outputs` returns, with the log-decays of the rows of states that pass a segment."""
    call = _call(q, k, v, g, cu_seqlens, scale, chunk_size)
    return outputs(call, _walk, initial, VECTOR, q.shape[3])


def backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, entering: Tensor, carried: Tensor,
    cu_seqlens: Tensor | None, scale: float, chunk_size: int, do: Tensor, dfinal: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v, the log-decays and the initial states. No `dfinal` is zeros."""
    call = _call(q, k, v, g, cu_seqlens, scale, chunk_size)
    q, k, v, segments, heads, tiles, key = call.q, call.k, call.v, call.segments, call.heads, call.tiles, q.shape[3]
    narrow = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    states, after = (call.new_states(call.slots(), narrow) for _ in range(2))
    dq, dk, dv, dg = *(gradient_of(x, heads) for x in (q, k, v)), torch.empty_like(g)
    if segments.whole:
        dinitial = None if initial is None else torch.empty_like(initial)
        _walk(call, entering=initial, states=states)
        _walk(call, do, entering=dfinal, out=dv, leaving=dinitial, states=after)
    else:
        update = call.new_states(segments.count)
        _walk(call, do, leaving=update)
        end, dinitial = scan(call, update, carried, dfinal, VECTOR, back=True)
        _walk(call, entering=entering, states=states)
        _walk(call, do, entering=end, out=dv, states=after)
    if segments.count * heads:
        chunks = segments.count * (segments.length // tiles.chunk)
        launch(grads_kernel, (chunks * heads * triton.cdiv(key, tiles.keys),))(
            q, k, v, do, g, states, after, dq, dk, dg, segments.table, scale, *call.places(), *_shared(q, k, heads),
            v.stride(1), v.stride(2), dq.stride(1), dk.stride(1), key, v.shape[3], tiles.chunk, call.levels,
            precision_of(q), tiles.keys, tiles.values, call.prepared is None, num_warps=4,
        )  # fmt: skip
    dq, dk = sums_of_parts((dq, q, key), (dk, k, key))
    return dq, dk, dv, dg, dinitial
