"""What launches the kernels of DPLR."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from halflife.ops.backends.triton.delta.join import join_kernel
from halflife.ops.backends.triton.dplr.factors import NONE, SCALAR, VECTOR
from halflife.ops.backends.triton.dplr.of_inputs import inputs_kernel, scores_kernel
from halflife.ops.backends.triton.dplr.reduced import reduce_kernel
from halflife.ops.backends.triton.dplr.states import states_kernel
from halflife.ops.backends.triton.gates import precision_of
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.linear import rows_of
from halflife.ops.backends.triton.segments import Segments, architecture, block, make_segments
from halflife.ops.chunked.groups import grads_of_heads, sum_of_heads

CHUNK, EXACT_CHUNK = 32, 16  # tokens of a chunk: smaller ones need more states, and larger ones more registers
ROWS = 16  # channels of a program of gradients; 32 spill 300 times


class Reduced(NamedTuple):
    """The chunks of a call, in the letters of `reduced.py`; the last four are for the backward pass alone.

    Without b, `m` is Z.
    """

    w: Tensor
    b: Tensor
    k: Tensor
    q: Tensor
    pairs: Tensor
    kept: Tensor
    a: Tensor | None = None
    solved_b: Tensor | None = None
    m: Tensor | None = None
    n: Tensor | None = None


class Operands(NamedTuple):
    """What the kernels of one pass share."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor | None  # None is k
    g: Tensor | None
    scale: float
    segments: Segments
    chunk: int

    @property
    def columns(self) -> int:
        """Columns of a state in a walk."""
        key, narrow = self.q.shape[3], self.q.dtype != torch.float32
        most = 64 if key <= 64 and narrow and architecture(self.q) == "hopper" else 32 if key <= 128 else 16
        return block(self.v.shape[3], most)

    @property
    def chunks(self) -> int:
        return self.segments.count * (self.segments.length // self.chunk)

    def places(self) -> tuple:
        """Where the tokens are."""
        return self.segments.table, self.v.shape[1], self.segments.length, self.segments.per_sequence, self.v.shape[2]

    def shared(self) -> tuple:
        """How many heads share a query and a key, and the strides of both."""
        heads = self.v.shape[2]
        return *[heads // x.shape[2] for x in (self.q, self.k)], *[s for x in (self.q, self.k) for s in x.stride()[1:3]]

    def constants(self) -> dict:
        g = self.g
        return {
            "K": self.q.shape[3], "C": self.chunk, "LEVELS": self.chunk.bit_length() - 1,
            "MODE": NONE if g is None else SCALAR if g.ndim == 3 else VECTOR, "PRECISION": precision_of(self.q),
        }  # fmt: skip

    @property
    def narrow(self) -> torch.dtype:
        """The dtype of what goes from kernel to kernel: float16 would overflow."""
        return torch.bfloat16 if self.q.dtype == torch.bfloat16 else torch.float32

    def new_states(self) -> Tensor:
        """Allocate a state for every chunk, transposed."""
        batch, length, heads, value = self.v.shape
        count = batch * length // self.chunk + self.segments.count
        return self.q.new_empty(count, heads, value, self.q.shape[3], dtype=self.narrow)


def _operands(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor | None, g: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, chunk_size: int,
) -> Operands:  # fmt: skip
    batch, length, heads, value = v.shape
    most = block(min(chunk_size, length))
    segments = make_segments(batch, length, cu_seqlens, most, heads * triton.cdiv(value, 64))
    a, (b, g) = a.contiguous(), (None if x is None else x.contiguous() for x in (b, g))
    return Operands(
        rows_of(q), rows_of(k), rows_of(v), a, b, g, scale, segments,
        min(EXACT_CHUNK if q.dtype == torch.float32 else CHUNK, most),
    )  # fmt: skip


def reduce(x: Operands, back: bool) -> Reduced:
    """Reduce all chunks."""
    batch, length, heads, _ = x.v.shape

    def new(size: int) -> Tensor:
        return x.q.new_empty(batch, length, heads, size, dtype=x.narrow)

    key, rows = x.q.shape[3], batch * length // x.chunk + x.segments.count
    kept = x.q.new_empty(rows, heads, key, dtype=torch.float32)
    found = Reduced(new(key), new(key), new(key), new(key), new(x.chunk), kept)
    if back:
        found = found._replace(a=new(key), m=new(x.chunk))
    if back and x.b is not None:
        found = found._replace(solved_b=new(key), n=new(x.chunk))
    if x.chunks * heads:
        table, *places = x.places()
        launch(reduce_kernel, (x.chunks, heads))(
            x.q, x.k, x.a, x.b, x.g, *found, table, x.scale, *places, *x.shared(), **x.constants(), BK=16,
            num_warps=2,
        )  # fmt: skip
    return found if x.b is not None else found._replace(solved_b=found.k, n=found.pairs)


def _walk(
    x: Operands, chunks: Reduced, v: Tensor | None, entering: Tensor | None, *, back: bool = False,
    out: Tensor | None = None, leaving: Tensor | None = None, solved: Tensor | None = None,
    states: Tensor | None = None,
) -> None:  # fmt: skip
    """The walk with values v, or from the end with the gradients of outputs (`back`); None is the identity matrix."""
    r = chunks
    parts = (r.solved_b, r.a, r.q, r.k, r.pairs, r.n) if back else (r.w, r.b, r.k, r.q, r.pairs, r.m)
    key, value = x.q.shape[3], x.q.shape[3] if v is None else x.v.shape[3]
    columns, exact = block(value, x.columns), x.q.dtype == torch.float32
    if x.segments.count * x.v.shape[2]:
        launch(states_kernel, (x.v.shape[2] * triton.cdiv(value, columns), x.segments.count))(
            *parts, r.kept, v, entering, out, leaving, solved, states, *x.places(),
            *((0, 0) if v is None else v.stride()[1:3]), key, value, x.chunk, back, precision_of(x.q), block(key, 256),
            columns, 1 if exact else 2, num_warps=4 if exact or columns == 64 or key > 64 else 2,
        )  # fmt: skip


def _scores(x: Operands, do: Tensor, solved: Tensor, adjoint: Tensor) -> Tensor:
    """The gradients of the scores of all chunks, in the order qk, qb, ak, ab; without b of qk, ak."""
    batch, length, heads, value = x.v.shape
    count = batch * length // x.chunk + x.segments.count
    dscores = x.q.new_empty(count, heads, 2 if x.b is None else 4, x.chunk, x.chunk, dtype=x.narrow)
    if x.chunks * heads:
        table, *places = x.places()
        launch(scores_kernel, (x.chunks, heads))(
            do, None if x.b is None else x.v, solved, adjoint, dscores, table, x.scale, *places, *x.v.stride()[1:3],
            value, x.chunk, precision_of(x.q), block(value), num_warps=4,
        )  # fmt: skip
    return dscores


def _inputs(x: Operands, *given: Tensor | None) -> None:
    """Write the gradients of q, k, a, b and g, the last five of the kernel's tensors."""
    batch, length, heads, value = x.v.shape
    if x.chunks * heads:
        (table, *places, _), key = x.places(), x.q.shape[3]
        values = given[2]
        assert values is not None
        launch(inputs_kernel, (x.chunks, heads * triton.cdiv(key, ROWS)))(
            x.q, x.k, x.a, x.b, x.g, *given, table, x.scale, *places, batch * length, heads, *x.shared(),
            *values.stride()[1:3], **x.constants(), V=value, BK=ROWS, BV=block(value), num_warps=2,
        )  # fmt: skip


def _join(x: Operands, update: Tensor, transition: Tensor, first: Tensor | None, back: bool) -> tuple[Tensor, Tensor]:
    """The states entering the segments, and the last ones of all sequences; no `first` ones are zeros."""
    entering, last = torch.empty_like(update), update.new_empty(x.segments.num_sequences, *update.shape[1:])
    first = torch.zeros_like(last) if first is None else first
    sequences, heads, rows, value = last.shape
    if sequences * heads:
        launch(join_kernel, (sequences * heads, triton.cdiv(value, 16)))(
            update, transition, first, entering, last, x.segments.sequences, x.segments.per_sequence, heads, rows,
            value, back, precision_of(x.q), block(rows), 16, num_warps=4,
        )  # fmt: skip
    return entering, last


def forward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor | None, g: Tensor | None, initial: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the outputs, the final states, and of segments the entering states and how they change states.

    No b is k, and no initial states are zeros. The last two are empty where each sequence is one segment, and else go
    to `backward`.
    """
    x = _operands(q, k, v, a, b, g, cu_seqlens, scale, chunk_size)
    chunks, out = reduce(x, back=False), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    shape = v.shape[2], q.shape[3], v.shape[3]
    if x.segments.whole:
        final = v.new_empty(x.segments.num_sequences, *shape, dtype=torch.float32)
        _walk(x, chunks, x.v, initial, out=out, leaving=final)
        return out, final, final.new_empty(0), final.new_empty(0)
    update = v.new_empty(x.segments.count, *shape, dtype=torch.float32)
    transition = update.new_empty(*update.shape[:3], shape[1])
    _walk(x, chunks, x.v, None, leaving=update)
    _walk(x, chunks, None, None, leaving=transition)
    entering, final = _join(x, update, transition, initial, back=False)
    _walk(x, chunks, x.v, entering, out=out)
    return out, final, entering, transition


def gradients(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor | None, g: Tensor | None, initial: Tensor | None,
    entering: Tensor, transition: Tensor, cu_seqlens: Tensor | None, scale: float, chunk_size: int, do: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of q, k, v, a, b, the log-decays and the initial states; of q and k head by head.

    Without b, that of k has both parts.
    """
    x = _operands(q, k, v, a, b, g, cu_seqlens, scale, chunk_size)
    chunks, heads, states, dstates = reduce(x, back=True), v.shape[2], x.new_states(), x.new_states()
    solved, adjoint = (torch.empty_like(do, dtype=x.narrow) for _ in range(2))
    dv, whole = torch.empty_like(do), x.segments.whole
    _walk(x, chunks, x.v, initial if whole else entering, solved=solved, states=states)
    if whole:
        after, before = dfinal, None if initial is None else torch.empty_like(initial)
        dinitial = before
    else:
        update = torch.empty_like(entering)
        _walk(x, chunks, do, None, back=True, leaving=update)
        (after, dinitial), before = _join(x, update, transition, dfinal, back=True), None
    _walk(x, chunks, do, after, back=True, out=dv, leaving=before, solved=adjoint, states=dstates)
    dq, dk, da = grads_of_heads(q, heads), grads_of_heads(k, heads), torch.empty_like(x.a)
    db = None if x.b is None else torch.empty_like(x.b)
    dg = None
    if x.g is not None:  # of a scalar log-decay each block of channels has its part
        shape = (triton.cdiv(q.shape[3], ROWS), *x.g.shape) if x.g.ndim == 3 else x.g.shape
        dg = x.g.new_empty(shape, dtype=torch.float32 if x.g.ndim == 3 else x.g.dtype)
    dscores = _scores(x, do, solved, adjoint)
    of_values = (solved, None) if x.b is None else (x.v, solved)
    _inputs(x, do, adjoint, *of_values, dscores, states, dstates, dq, dk, da, db, dg)
    if x.g is not None and dg is not None and x.g.ndim == 3:
        dg = dg.sum(0).to(x.g.dtype)
    return dq, dk, dv, da, db, dg, dinitial


def backward(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """Return the `gradients` of a call, in the shapes of its tensors."""
    dq, dk, dv, da, db, dg, dinitial = gradients(q, k, *rest)
    return sum_of_heads(dq, q), sum_of_heads(dk, k), dv, da, db, dg, dinitial
