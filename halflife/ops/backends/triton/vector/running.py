"""Log-decays of a running softmax, and their keys, as `halflife.ops.linear_attention` defines them.

A program goes over one sequence and some channels, tile after tile, with the sum of what it has seen as `share e^most`.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.split import new_gradient
from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.laws import sigmoid, softplus
from halflife.ops.backends.triton.op import declare, declare_gradients
from halflife.ops.backends.triton.passes.angles import span, tanh
from halflife.ops.backends.triton.passes.rows import as_rows

TILE = 1024  # entries of a program at once
CHANNELS, FEWEST = 16, 4  # of a program, at most, and where sequences are too few for so many programs
PROGRAMS = 256


@triton.jit
@no_type_check
def _added(most, share, other, other_share):
    """The sum of `share e^most` and another such number, in this form."""
    larger = tl.maximum(most, other, propagate_nan=tl.PropagateNan.ALL)
    factor = tl.exp(tl.minimum(most, other) - tl.where(larger == float("-inf"), 0.0, larger))
    return larger, tl.where(most > other, share + other_share * factor, share * factor + other_share)


@triton.jit
@no_type_check
def _followed(decay, added, decay_after, added_after):
    """The map `a → decay · a + added`, after another one, as one map."""
    return decay * decay_after, added_after + decay_after * added


@triton.jit
@no_type_check
def _running_kernel(
    f, first, cu_seqlens, g, key, last, T, D, f_t, EMPTY: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    groups = tl.cdiv(D, BC)
    n = tl.program_id(0) // groups
    start, stop = span(cu_seqlens, n, T)
    cols = (tl.program_id(0) % groups) * BC + tl.arange(0, BC)
    whole = n.to(tl.int64) * D + cols
    seen = tl.where(cols < D, float("-inf") if EMPTY else 0.0, 0.0)
    if first is not None:
        seen = tl.load(first + whole, mask=cols < D, other=0.0)
    weight = tl.full([BC], 1.0, tl.float32)
    for begin in range(start, stop, BR):
        rows = (begin + tl.arange(0, BR)).to(tl.int64)
        here = cols[None, :] < D
        inside = (rows < stop)[:, None] & here
        place = rows[:, None] * f_t + cols[None, :]
        x = tl.load(f + place, mask=inside, other=float("-inf")).to(tl.float32)
        earlier = ((rows > begin) & (rows <= stop))[:, None] & here
        before = tl.load(f + place - f_t, mask=earlier, other=float("-inf")).to(tl.float32)
        before, share = tl.associative_scan((before, tl.full(before.shape, 1.0, tl.float32)), 0, _added)
        before, share = _added(before, share, seen[None, :], weight[None, :])
        place = rows[:, None] * D + cols[None, :]
        above = tl.where(inside, x, 0.0) - (before + tl.log(share))
        tl.store(g + place, -softplus(above), mask=inside)
        if key is not None:
            tl.store(key + place, sigmoid(above).to(key.dtype.element_ty), mask=inside)
        most = tl.max(x, 0)
        total = tl.sum(tl.exp(x - tl.where(most == float("-inf"), 0.0, most)[None, :]), 0)
        seen, weight = _added(seen, weight, most, total)
    tl.store(last + whole, seen + tl.log(weight), mask=cols < D)


@triton.jit
@no_type_check
def _gradients_of(g, dg, dkey, place, inside):
    """Return `(λ, 1 − λ, the whole gradient of g)`; 1, 0 and 0 outside."""
    given = tl.load(g + place, mask=inside, other=0.0)
    decay = tl.exp(given)
    d = tl.load(dg + place, mask=inside, other=0.0)
    if dkey is not None:
        d -= decay * tl.load(dkey + place, mask=inside, other=0.0).to(tl.float32)
    return decay, tanh(tl.minimum(-given, 64.0) / 2) * (1 + decay), d


@triton.jit
@no_type_check
def _running_back_kernel(
    g, dg, dkey, dlast, cu_seqlens, df, dfirst, T, D, df_t, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """The gradients of one sequence, from the last tile to the first; `later` is that of the logsumexp after a tile."""
    groups = tl.cdiv(D, BC)
    n = tl.program_id(0) // groups
    start, stop = span(cu_seqlens, n, T)
    cols = (tl.program_id(0) % groups) * BC + tl.arange(0, BC)
    whole = n.to(tl.int64) * D + cols
    later = tl.zeros([BC], tl.float32)
    if dlast is not None:
        later += tl.load(dlast + whole, mask=cols < D, other=0.0)
    for tile in range(tl.cdiv(stop - start, BR)):
        end = stop - tile * BR
        rows = (end - BR + tl.arange(0, BR)).to(tl.int64)
        here = (cols < D)[None, :]
        inside = (rows >= start)[:, None] & here
        place = rows[:, None] * D + cols[None, :]
        after = ((rows >= start) & (rows < end - 1))[:, None] & here
        decay, key, d = _gradients_of(g, dg, dkey, place + D, after)
        decay, added = tl.associative_scan((decay, d * key), 0, _followed, reverse=True)
        of_seen = added + decay * later[None, :]  # the gradient of the logsumexp after each token
        decay, key, d = _gradients_of(g, dg, dkey, place, inside)
        tl.store(df + rows[:, None] * df_t + cols[None, :], (key * (of_seen - d)).to(df.dtype.element_ty), mask=inside)
        of_seen = decay * of_seen + d * key
        later = tl.sum(tl.where((rows == tl.maximum(start, end - BR))[:, None], of_seen, 0.0), 0)
    if dfirst is not None:
        tl.store(dfirst + whole, later, mask=cols < D)


def _grid(f: Tensor, cu_seqlens: Tensor | None) -> tuple[int, tuple[int], tuple[int, int], dict[str, int]]:
    """The number of sequences, the grid, T and D, and the size of a tile."""
    batch, length, channels = f.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    columns = triton.next_power_of_2(min(CHANNELS, channels))
    while columns > FEWEST and sequences * channels < columns * PROGRAMS:
        columns //= 2
    rows = max(16, min(triton.next_power_of_2(length), TILE // columns))
    return sequences, (sequences * triton.cdiv(channels, columns),), (length, channels), {"BR": rows, "BC": columns}


def _running(
    f: Tensor, first: Tensor | None, cu_seqlens: Tensor | None, empty: bool, with_key: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """g and the last logsumexp of each sequence in float32, and the keys, without entries if they are not asked for."""
    sequences, grid, sizes, tile = _grid(f, cu_seqlens)
    g, key = f.new_empty(f.shape, dtype=torch.float32), f.new_empty(f.shape if with_key else 0)
    last = f.new_empty(sequences, sizes[1], dtype=torch.float32)
    if last.numel():
        rows, f_t = as_rows(f, sizes[1])
        launch(_running_kernel, grid)(
            rows, None if first is None else first.contiguous(), cu_seqlens, g, key if with_key else None, last, *sizes,
            f_t, EMPTY=empty, **tile,
        )  # fmt: skip
    return g, last, key


def _running_backward(
    dg: Tensor, dlast: Tensor | None, dkey: Tensor | None, g: Tensor, f: Tensor, first: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of f and of the first logsumexp, which has no entries for None."""
    _, grid, sizes, tile = _grid(g, cu_seqlens)
    df, dfirst = new_gradient(f), g.new_empty(0 if first is None else first.shape)
    if grid[0]:
        launch(_running_back_kernel, grid)(
            g, dg, dkey, dlast, cu_seqlens, df, None if first is None else dfirst, *sizes,
            as_rows(df, sizes[1])[1], **tile,
        )  # fmt: skip
    return df, dfirst


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, ctx.with_key = inputs
    ctx.save_for_backward(output[0], *tensors)
    ctx.set_materialize_grads(False)  # a training step does not use the last logsumexp


def _grad(ctx: Any, dg: Tensor | None, dlast: Tensor | None, dkey: Tensor | None) -> tuple[Any, ...]:
    only_first_derivatives()
    g, f, first, bounds = ctx.saved_tensors
    dg = torch.zeros_like(g) if dg is None else dg
    of_key = dkey.contiguous() if dkey is not None and ctx.with_key else None
    of_last = None if dlast is None else dlast.contiguous()
    df, dfirst = _gradients(dg.contiguous(), of_last, of_key, g, f, first, bounds)
    return df, None if first is None else dfirst, None, None, None


_gradients = declare_gradients("triton_running_decay_backward", _running_backward)
declare("triton_running_decay", _running).register_autograd(_grad, setup_context=_save)
