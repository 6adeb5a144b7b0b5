"""`koopman_attention` without branches on values, so that `torch.export` and ONNX have it as a graph of fixed shapes.

How many tokens wait for their chunk depends on the state. The graph therefore has as many chunks as T tokens reach at
most, and tensors of indices choose what a sequence uses. It has no gradient of its own and no repeated factorisations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halflife.ops.koopman.call import KoopmanCall
from halflife.ops.koopman.decays import weigh_tokens
from halflife.ops.koopman.readout import KoopmanReadout
from halflife.ops.koopman.solve import inverse_factor
from halflife.ops.koopman.state import KoopmanMemory, Sums, previous_keys, sum_tokens


def run(call: KoopmanCall, memory: KoopmanMemory, readout: KoopmanReadout) -> tuple[Tensor, KoopmanMemory, int]:
    """Read and write the tokens of `call`, which are not packed."""
    size, (rows, length) = call.tokens_per_operator, call.k.shape[:2]
    chunks = -(-(size - 1 + length) // size)
    row = torch.arange(rows, device=call.k.device).unsqueeze(1)
    slot = memory.pending.unsqueeze(1) + torch.arange(length, device=call.k.device)

    def place(x: Tensor, waiting: Tensor | None = None) -> Tensor:
        """Put `[N, T, …]` on the timeline of all chunks, after the tokens that wait."""
        timeline = x.new_zeros(rows, chunks * size, *x.shape[2:])
        if waiting is not None and size > 1:
            timeline = torch.cat([waiting, timeline[:, size - 1 :]], 1)
        return timeline.index_put((row, slot), x)

    keys, values = place(call.k, memory.pending_keys), place(call.v, memory.pending_values)
    decays = None if call.g is None else place(call.g, memory.pending_decays)
    parts = (x.split(size, 1) for x in (keys, previous_keys(keys, memory.last), values))
    each_decay = [None] * chunks if decays is None else decays.split(size, 1)
    entering = [memory.sums]
    for k, before, v, g in zip(*parts, each_decay, strict=True):
        tokens = weigh_tokens(k, before, v, g, 1)
        after = sum_tokens(tokens).after(entering[-1], tokens.decay)
        entering.append(after.normalized(call.normalization, memory.sums.norm))
    sums = Sums(*(torch.cat(each) for each in zip(*entering[:-1], strict=True)))
    if call.normalization == "sequence":
        largest = torch.maximum(memory.sums.norm, keys.square().sum(-1).amax(1))
        sums = sums._replace(norm=largest.repeat(chunks, 1))
    queries = torch.cat(place(call.q).split(size, 1)).transpose(1, 2)
    y = readout.read_by_inverse(inverse_factor(sums, readout.ridge).matrix, sums, queries).transpose(1, 2)
    return torch.cat(y.split(rows), 1)[row, slot], _final(entering, (keys, values, decays), memory, length), 0


def _final(
    entering: list[Sums], timelines: tuple[Tensor, Tensor, Tensor | None], memory: KoopmanMemory, length: int
) -> KoopmanMemory:
    """The memory after the timelines of keys, values and decays, from the sums before and after every chunk."""
    keys = timelines[0]
    size = memory.pending_keys.shape[1] + 1
    total, row = memory.pending + length, torch.arange(len(keys), device=keys.device)
    full = total // size
    sums = Sums(*(torch.stack(each)[full, row] for each in zip(*entering, strict=True)))
    newest = keys[row, (full * size - 1).clamp(min=0)]
    last = torch.where((full > 0)[:, None, None], newest, memory.last)
    slots, left = torch.arange(size - 1, device=keys.device), total - full * size
    used = slots < left.unsqueeze(1)
    at = torch.where(used, (full * size).unsqueeze(1) + slots, 0)
    waiting = [
        None if x is None else torch.where(used[..., None, None], x[row.unsqueeze(1), at], 0.0) for x in timelines
    ]
    assert waiting[0] is not None
    assert waiting[1] is not None
    return KoopmanMemory(sums, last, waiting[0], waiting[1], left, pending_decays=waiting[2])
