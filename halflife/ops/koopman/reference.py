"""The definition of `koopman_attention`: a loop over sequences and tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from halflife.ops.backends.dispatch import implements
from halflife.ops.call import pieces
from halflife.ops.koopman.call import KoopmanCall
from halflife.ops.koopman.readout import KoopmanReadout
from halflife.ops.koopman.state import KoopmanMemory, Sums, previous_keys, sum_tokens, with_pending


@implements("koopman_attention", "reference")
def reference(call: KoopmanCall, memory: KoopmanMemory, readout: KoopmanReadout) -> tuple[Tensor, KoopmanMemory, int]:
    """The definition: for every token an operator is summed up from its tokens and solved."""
    outputs, states, retries = [], [], 0
    for rows, tokens in pieces(call.k.shape[1], call.cu_seqlens):
        part = KoopmanMemory.from_state({name: x[rows] for name, x in memory._replace(inverse=None).to_state().items()})
        y, last, failed = _loop(call, tokens, part, readout)
        outputs.append(y)
        states.append(last.to_state())
        retries += failed
    whole = {name: torch.cat([state[name] for state in states]) for name in states[0]} if states else memory.to_state()
    y = torch.cat(outputs, 1) if outputs else torch.zeros_like(call.v)
    return y, KoopmanMemory.from_state(whole), retries


def _loop(
    call: KoopmanCall, tokens: slice, memory: KoopmanMemory, readout: KoopmanReadout
) -> tuple[Tensor, KoopmanMemory, int]:
    """Sequences of equal length whose memories have the same number of pending tokens."""
    chunk_size, length = call.tokens_per_operator, tokens.stop - tokens.start
    k, v = with_pending(call.k[:, tokens], call.v[:, tokens], memory)
    pending, previous = k.shape[1] - length, previous_keys(k, memory.last)
    norm = None
    if call.normalization == "sequence":
        norm = torch.cat([memory.sums.norm.unsqueeze(1), k.square().sum(-1)], 1).amax(1)

    def sums_before(stop: int) -> Sums:
        sums = sum_tokens(k[:, :stop], v[:, :stop], previous[:, :stop]).after(memory.sums)
        return sums.normalized(call.normalization, memory.sums.norm)

    rows, retries = [], 0
    for t in range(length):
        sums = sums_before((pending + t) // chunk_size * chunk_size)
        y, failed = readout.read(sums, call.q[:, tokens.start + t].unsqueeze(-2), norm)
        rows.append(y.squeeze(-2))
        retries += failed
    whole = k.shape[1] // chunk_size * chunk_size
    left = k.shape[1] - whole
    final = memory.full_chunks(sums_before(whole), k[:, whole - 1] if whole else memory.last)._replace(
        pending_keys=torch.cat([k[:, whole:], torch.zeros_like(memory.pending_keys[:, left:])], 1),
        pending_values=torch.cat([v[:, whole:], torch.zeros_like(memory.pending_values[:, left:])], 1),
        pending=torch.full_like(memory.pending, left),
    )
    return torch.stack(rows, 1) if rows else torch.zeros_like(v[:, :0]), final, retries
