"""What launches the kernels of the delta rule, and of GateRank on it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from halflife.ops.backends.triton.delta.gradients import gradients_kernel, parts_kernel
from halflife.ops.backends.triton.delta.inverse import invert_kernel
from halflife.ops.backends.triton.delta.join import join_kernel
from halflife.ops.backends.triton.delta.written import write_kernel
from halflife.ops.backends.triton.gates import GATE_RANK, precision_of
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.linear import Operands, new_sums, rows_of
from halflife.ops.backends.triton.linear_grads import FOUND
from halflife.ops.backends.triton.passes.parts import sums_of_parts
from halflife.ops.backends.triton.segments import Settings, architecture, block, make_segments
from halflife.ops.chunked.groups import grads_of_heads, sum_of_heads

CHUNK = 32  # tokens of a chunk: those of 16 need twice the states, those of 64 twice the bytes of inverses

# Columns of a state in a walk, by states a head, for K and V up to 64, 128 and 256. Walks to the outputs of one small
# state have 64 on Hopper.
_COLUMNS = {1: (32, 32, 16), 2: (32, 16, 16)}
# The same in the walk to gradients, with the warps of a program, by architecture.
_GRADIENTS = {
    1: {
        "hopper": ((64, 4), (32, 4), (32, 8)), "ampere": ((32, 4), (32, 8), (16, 8)), "amd": ((32, 4), (16, 4), (16, 4))
    },
    2: {
        "hopper": ((32, 4), (64, 8), (16, 8)), "ampere": ((32, 4), (16, 4), (16, 8)), "amd": ((32, 4), (16, 4), (16, 4))
    },
}  # fmt: skip

States = tuple[Tensor | None, Tensor | None]  # of all chunks, and the powers of two that they are multiplied with


def settings_of(kind: str, key: int, value: int, q: Tensor, states: int, most: int) -> Settings:
    """The settings of a walk of queries q to "out", "states" or "gradients"; chunks have at most `most` tokens."""
    exact, largest, card = q.dtype == torch.float32, max(key, value), architecture(q)
    size, warps, single = bool(largest > 64) + bool(largest > 128), 4, exact
    columns = _COLUMNS[states][size]
    if kind == "gradients":
        most_columns, warps = _GRADIENTS[states][card][size]
        columns = min(columns, most_columns) if exact else most_columns
        # Two stages of heads of 256 need more than 99 kB of shared memory, all that many cards have.
        single = exact or card == "amd" or (largest > 128 and card == "ampere")
    elif (kind, states, card) == ("out", 1, "hopper") and largest <= 64 and not exact:
        columns = 64
    chunk = CHUNK // 2 if exact and largest > 128 else CHUNK  # the gradients of 32 need 100 kB
    return Settings(min(chunk, most), block(key, 256), block(value, columns), warps, 1 if single else 2)


class Prepared(NamedTuple):
    """What the kernels of one pass share."""

    operands: Operands
    beta: Tensor
    inverse: Tensor  # of the systems of all chunks, see `pairs.store_triangle`: [B, T, H, 24 or 48]

    def new_states(self) -> States:
        """Allocate a state for every chunk, transposed, and the powers of two."""
        x, tiles = self.operands, self.operands.walk
        batch, length, heads, value = x.v.shape
        shape = batch * length // tiles.chunk + x.segments.count, heads, 2 if x.mode == GATE_RANK else 1
        dtype = torch.float32 if x.q.dtype == torch.float32 else torch.float16
        states = x.q.new_empty(*shape, value, x.q.shape[3], dtype=dtype)
        return states, x.q.new_empty(*shape, triton.cdiv(value, tiles.columns), dtype=torch.float32)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g_slow: Tensor | None, g_fast: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, chunk_size: int, kind: str,
) -> Prepared:  # fmt: skip
    """Sum the log-decays and invert the systems of all chunks, for walks of this kind, "out" or "states"."""
    (batch, length, heads, value), key = v.shape, q.shape[3]
    states, chunk = 1 if g_slow is None else 2, block(min(chunk_size, length))
    walk, grads = (settings_of(which, key, value, q, states, chunk) for which in (kind, "gradients"))
    segments = make_segments(batch, length, cu_seqlens, chunk, heads * triton.cdiv(value, 64))
    sums = new_sums(q, v, (g_slow, g_fast))
    operands = Operands(rows_of(q), rows_of(k), rows_of(v), (g_slow, g_fast), sums, scale, segments, walk, grads)
    exact, k = q.dtype == torch.float32, operands.k
    numbers, dtype = 3 * walk.chunk // 4 if walk.chunk > 16 else walk.chunk, torch.float32 if exact else torch.bfloat16
    inverse = q.new_empty(batch, length, heads, numbers if exact else 2 * numbers, dtype=dtype)
    if segments.count * heads:
        launch(invert_kernel, (segments.count * (segments.length // walk.chunk), heads))(
            k, beta, g_slow, g_fast, sums, inverse, segments.table, length, segments.length, segments.per_sequence,
            batch * length, heads, heads // k.shape[2], k.stride(1), k.stride(2), key, walk.chunk, operands.mode,
            precision_of(k), block(key), num_warps=2,
        )  # fmt: skip
    return Prepared(operands, beta, inverse)


def _write(
    call: Prepared, entering: Tensor | None, *, out: Tensor | None = None, leaving: Tensor | None = None,
    states: States = (None, None), identity: bool = False,
) -> None:  # fmt: skip
    """The walk that writes values into the state, or one of K' columns from the identity matrix without values."""
    x = call.operands
    value = leaving.shape[3] if identity and leaving is not None else x.v.shape[3]
    options = x.constants(x.walk) | {"V": value, "BV": min(block(value), x.walk.columns)}
    if x.segments.count * x.heads:
        launch(write_kernel, (x.heads * triton.cdiv(value, options["BV"]), x.segments.count))(
            x.q, x.k, None if identity else x.v, call.beta, call.inverse, x.sums, entering, out, leaving, *states,
            *x.tail(), **options,
        )  # fmt: skip


def _gradients(call: Prepared, do: Tensor, *given: Tensor | None, whole: bool) -> None:
    """The walk from the end: with tiles for gradients of inputs (`whole`), or of the state alone."""
    x = call.operands
    tiles = x.grads if whole else x.walk
    small = {"matrix_instr_nonkdim": 16} if architecture(x.q) == "amd" else {}  # products that hold fewer registers
    if x.segments.count * x.heads:
        launch(gradients_kernel, (x.heads * triton.cdiv(do.shape[3], tiles.columns), x.segments.count))(
            x.q, x.k, x.v, do, call.beta, call.inverse, x.sums, x.gates[1], *given,
            *(None,) * (12 - len(given)), *x.tail(), COLUMNS=x.walk.columns, **x.constants(tiles), **small,
        )  # fmt: skip


def _join(
    call: Prepared, update: Tensor, transition: Tensor, first: Tensor | None, back: bool
) -> tuple[Tensor, Tensor]:
    """The states entering the segments, and the last ones of all sequences; no `first` ones are zeros."""
    segments = call.operands.segments
    entering, last = torch.empty_like(update), call.operands.new_states(segments.num_sequences)
    sequences, heads, rows, value = last.shape
    first = torch.zeros_like(last) if first is None else first
    if sequences * heads:
        launch(join_kernel, (sequences * heads, triton.cdiv(value, 16)))(
            update, transition, first, entering, last, segments.sequences, segments.per_sequence, heads, rows, value,
            back, precision_of(call.operands.q), block(rows), 16, num_warps=4,
        )  # fmt: skip
    return entering, last


def forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g_slow: Tensor | None, g_fast: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the outputs, the final states, and of segments the entering states and how they change states.

    No initial states are zeros. The last two are empty where each sequence is one segment, and else go to `backward`.
    """
    call = prepare(q, k, v, beta, g_slow, g_fast, cu_seqlens, scale, chunk_size, "out")
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    segments = call.operands.segments
    if segments.whole:
        final = call.operands.new_states(segments.num_sequences)
        _write(call, initial, out=out, leaving=final)
        return out, final, final.new_empty(0), final.new_empty(0)
    update = call.operands.new_states(segments.count)
    transition = update.new_empty(*update.shape[:3], update.shape[2])
    _write(call, None, leaving=update)
    _write(call, None, leaving=transition, identity=True)
    entering, final = _join(call, update, transition, initial, back=False)
    _write(call, entering, out=out)
    return out, final, entering, transition


def _gradients_of_inputs(
    call: Prepared, do: Tensor, after: Tensor | None, before: Tensor | None, states: States
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, beta and both log-decays, from the parts that blocks of columns have."""
    x, beta = call.operands, call.beta
    (batch, length, heads, value), key = do.shape, x.q.shape[3]
    parts = triton.cdiv(value, x.grads.columns)
    dq, dk = (grads_of_heads(given, heads * parts) for given in (x.q, x.k))
    dv, dbeta = torch.empty_like(do), beta.new_empty(parts, *beta.shape)
    if x.mode != GATE_RANK:
        g_fast = x.gates[1]
        dg_fast = None if g_fast is None else g_fast.new_empty(parts, *g_fast.shape)
        _gradients(call, do, after, before, *states, dq, dk, dv, dbeta, dg_fast, whole=True)
        of_numbers = [(given, like, beta.numel()) for given, like in ((dbeta, beta), (dg_fast, g_fast))]
        dq, dk, dbeta, dg_fast = sums_of_parts((dq, x.q, key), (dk, x.k, key), *of_numbers)
        return dq, dk, dv, dbeta, None, dg_fast
    new = functools.partial(beta.new_empty, dtype=torch.float32)
    found, reads = (new(parts, count, heads, batch * length) for count in (FOUND[x.mode], x.mode))
    passes = new(batch * length // x.grads.chunk + x.segments.count, heads, parts, 3)
    _gradients(call, do, after, before, *states, dq, dk, dv, dbeta, None, found, passes, reads, whole=True)
    whole = [grads_of_heads(given, heads) for given in (x.q, x.k)]
    whole += [torch.empty_like(given) for given in (beta, *x.gates) if given is not None]
    if x.segments.count * heads:
        table, _, _, each, per_sequence, tokens, *_ = x.tail()
        launch(parts_kernel, (x.segments.count * (each // x.grads.chunk), heads))(
            x.sums, found, passes, reads, *x.gates, *whole[3:], dq, dk, dbeta, *whole[:3], table, length, each,
            per_sequence, tokens, heads, key, x.grads.chunk, x.mode, x.grads.rows, parts, num_warps=2,
        )  # fmt: skip
    return sum_of_heads(whole[0], x.q), sum_of_heads(whole[1], x.k), dv, *whole[2:]


def backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g_slow: Tensor | None, g_fast: Tensor | None,
    initial: Tensor | None, entering: Tensor, transition: Tensor, cu_seqlens: Tensor | None, scale: float,
    chunk_size: int, do: Tensor, dfinal: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v, beta, both log-decays and the initial states. No `dfinal` is zeros."""
    call = prepare(q, k, v, beta, g_slow, g_fast, cu_seqlens, scale, chunk_size, "states")
    x, states = call.operands, call.new_states()
    if x.segments.whole:
        after, before = dfinal, None if initial is None else torch.empty_like(initial)
        dinitial = before
        _write(call, initial, states=states)
    else:
        _write(call, entering, states=states)
        update = x.new_states(x.segments.count)
        _gradients(call, do, None, update, whole=False)
        (after, dinitial), before = _join(call, update, transition, dfinal, back=True), None
    found = _gradients_of_inputs(call, do, after, before, states)
    return *found, dinitial
