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
from halflife.ops.koopman.state import KoopmanMemory, Sums, memory_after, previous_keys, sum_tokens


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
    total = memory.pending + length
    final = Sums(*(torch.stack(each)[total // size, row.squeeze(1)] for each in zip(*entering, strict=True)))
    after = memory_after(final, (keys, values, decays), row.squeeze(1) * (chunks * size), total, memory)
    return torch.cat(y.split(rows), 1)[row, slot], after, 0
