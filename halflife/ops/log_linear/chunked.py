"""Log-linear attention in chunks, whose states are merged in a tree."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halflife.ops.backends.dispatch import implements
from halflife.ops.chunked.groups import weigh
from halflife.ops.log_linear.mask import cumulative, kept_states, products, read_initial, written_states
from halflife.ops.log_linear.rows import Rows, by_rows


@implements("log_linear_attention", "chunked")
@by_rows
def chunked(rows: Rows) -> tuple[Tensor, Tensor]:
    """Chunks that begin at multiples of C, and a tree of their states. Memory is linear in T, with log T passes.

    All tokens of a chunk are on one level for every later chunk. The states of chunks are therefore merged in pairs to
    states of 2, 4, 8, … chunks, and a chunk reads at most one of each size. Inside a chunk there are C × C weights.
    """
    first, end = rows.position // rows.chunk, rows.position + rows.lengths
    (q, k, v, g, weights), index = _align(rows)
    total = cumulative(g)
    number = first.unsqueeze(-1) + torch.arange(q.shape[2], device=q.device)
    steps = number.unsqueeze(-1) * rows.chunk + torch.arange(rows.chunk, device=q.device)
    o, into = products(q, k, v, weights, steps, total), total.to(q.dtype)
    after = (into[..., -1:] - into).exp().unsqueeze(-1)  # from a token to the end of its chunk

    # The end of a sequence reads the tokens before it as a query at the next position would.
    ending = (end // rows.chunk - first).view(-1, 1, 1)
    inside = ending == torch.arange(q.shape[2], device=q.device).view(1, 1, -1)
    picked = inside.to(q.dtype)
    k_end, v_end = (torch.einsum("nhm,nhmcd->nhcd", picked.expand(x.shape[:3]), x) for x in (k, v))
    total_end = torch.where(inside.unsqueeze(-1), total, 0).sum(2)
    steps_end = torch.where(inside.squeeze(1).unsqueeze(-1), steps, end.view(-1, 1, 1)).amin(1)
    final = written_states(k_end, v_end, total_end, steps_end, end, rows.last)
    left = total_end[..., -1].to(q.dtype)

    numbers = torch.cat([number, (end // rows.chunk).unsqueeze(-1)], 1)
    for size, state, decay in _older(weigh(k, after).transpose(-1, -2) @ v, into[..., -1], first, numbers, rows.fresh):
        level = min(size + rows.chunk.bit_length(), rows.last)
        read = weights[..., level] * into.exp() * decay[:, :, :-1, None]
        o = o + weigh(q, read.unsqueeze(-1)) @ state[:, :, :-1]
        at_end = state[:, :, -1] * (decay[:, :, -1] * left.exp())[..., None, None]
        final = torch.cat(
            [final[:, :, : level - 1], (final[:, :, level - 1] + at_end).unsqueeze(2), final[:, :, level:]], 2
        )
    if not rows.fresh:
        before = into[..., -1].cumsum(-1) - into[..., -1]
        decay = (into + before.unsqueeze(-1)).flatten(2).exp()
        o = o + read_initial(rows, q.flatten(2, 3), weights.flatten(2, 3), steps.flatten(1), decay).view_as(o)
        final = final + kept_states(rows, end, into[..., -1].sum(-1).exp())
    return o.flatten(2, 3).gather(2, index[:, None, :, None].expand(*rows.v.shape)), final


def _align(rows: Rows) -> tuple[list[Tensor], Tensor]:
    """Cut rows into chunks that begin at multiples of C: `[N, H, T, …]` → `[N, H, M, C, …]`, 0 where no token is.

    The second result is the place of each token in its row of M · C places `[N, T]`.
    """
    length, shift = rows.q.shape[2], rows.position % rows.chunk
    places = length if rows.fresh else length + int(shift.max())
    places = -(-places // rows.chunk) * rows.chunk
    index = torch.arange(length, device=shift.device) + shift.unsqueeze(-1)
    tensors = []
    for x in (rows.q, rows.k, rows.v, rows.g, rows.weights):
        at = index.view(len(index), 1, -1, *[1] * (x.ndim - 3)).expand_as(x)
        empty = x.new_zeros(*x.shape[:2], places, *x.shape[3:])
        tensors.append(empty.scatter(2, at, x).unflatten(2, (-1, rows.chunk)))
    return tensors, index


def _older(
    states: Tensor, g: Tensor, first: Tensor, numbers: Tensor, fresh: bool
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For sizes of 2⁰, 2¹, … chunks the exponent, the states read `[N, H, R, K, V]`, and decays `[N, H, R]`.

    A decay is 0 for a reader without such a state. `states [N, H, M, K, V]` and `g [N, H, M]` are those of single
    chunks, numbered from the start of the sequence: `first [N]` is the first one here, `numbers [N, R]` the readers'.
    """
    between = g.new_zeros(*g.shape[:2], numbers.shape[1])
    largest = states.shape[2] if fresh else int(numbers.max())
    for size in range(largest.bit_length()):
        start, block = (first >> size).unsqueeze(-1), numbers >> size
        read, log_decay, there = _pick(states, g, torch.where(block % 2 == 1, block - 1 - start, -1))
        yield size, read, between.exp() * there
        between = between + log_decay
        parents = (first >> (size + 1)).unsqueeze(-1) + torch.arange(states.shape[2] // 2 + 1, device=g.device)
        left, g_left, _ = _pick(states, g, 2 * parents - start)
        right, g_right, _ = _pick(states, g, 2 * parents + 1 - start)
        states, g = g_right.exp()[..., None, None] * left + right, g_left + g_right


def _pick(states: Tensor, g: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take `states [N, H, M, K, V]` and `g [N, H, M]` at `index [N, R]`, with zeros where the index is outside."""
    there = ((index >= 0) & (index < g.shape[2])).unsqueeze(1).to(g.dtype)
    at = index.clamp(0, g.shape[2] - 1).unsqueeze(1).expand(-1, g.shape[1], -1)
    chosen = states.gather(2, at[..., None, None].expand(*at.shape, *states.shape[3:]))
    return chosen * there[..., None, None], torch.where(there > 0, g.gather(2, at), 0), there
