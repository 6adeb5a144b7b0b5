"""The definition of `koopman_attention`: a loop over sequences and tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from halflife.ops.backends.dispatch import implements
from halflife.ops.koopman.call import KoopmanCall
from halflife.ops.koopman.readout import KoopmanReadout
from halflife.ops.koopman.solve import Count
from halflife.ops.koopman.state import KoopmanMemory, Sums, previous_keys, with_pending


@implements("koopman_attention", "reference")
def reference(call: KoopmanCall, memory: KoopmanMemory, readout: KoopmanReadout) -> tuple[Tensor, KoopmanMemory, Count]:
    """The definition: the sums change token by token, and for every token an operator is solved."""
    outputs, states, retries = [], [], 0
    for rows, tokens in call.packing.pieces():
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
) -> tuple[Tensor, KoopmanMemory, Count]:
    chunk_size, length = call.tokens_per_operator, tokens.stop - tokens.start
    k, v, g = with_pending(call.k[:, tokens], call.v[:, tokens], None if call.g is None else call.g[:, tokens], memory)
    pending, previous = k.shape[1] - length, previous_keys(k, memory.last)
    norm = None
    if call.normalization == "sequence":
        norm = torch.cat([memory.sums.norm.unsqueeze(1), k.square().sum(-1)], 1).amax(1)
    sums = [memory.sums]
    for t in range(k.shape[1]):
        after = _token(sums[-1], k[:, t], previous[:, t], v[:, t], None if g is None else g[:, t])
        sums.append(after.normalized(call.normalization, memory.sums.norm))

    rows, retries = [], 0
    for t in range(length):
        seen = (pending + t) // chunk_size * chunk_size
        y, failed = readout.read(sums[seen], call.q[:, tokens.start + t].unsqueeze(-2), norm)
        rows.append(y.squeeze(-2))
        retries += failed
    whole = k.shape[1] // chunk_size * chunk_size
    left = k.shape[1] - whole
    last = k[:, whole - 1] if whole else memory.last
    waiting = [
        torch.cat([x[:, whole:], x.new_zeros(len(x), chunk_size - 1 - left, *x.shape[2:])], 1)
        for x in ((k, v) if g is None else (k, v, g))
    ]
    final = KoopmanMemory(sums[whole], last, waiting[0], waiting[1], torch.full_like(memory.pending, left))
    final = final if g is None else final._replace(pending_decays=waiting[2])
    return torch.stack(rows, 1) if rows else torch.zeros_like(v[:, :0]), final, retries


def _token(sums: Sums, k: Tensor, previous: Tensor, v: Tensor, g: Tensor | None) -> Sums:
    """The sums after one more token, from `k, previous [N, H, R]`, `v [N, H, P]` and `g [N, H, 1 or R]`."""
    g = torch.zeros_like(k[..., :1]) if g is None else g
    slowest = g.amax(-1)
    rows, columns, fade = (g / 2).exp().unsqueeze(-1), (g / 2).exp().unsqueeze(-2), (slowest / 2).exp()[..., None, None]
    return Sums(
        rows * sums.gram * columns + k.unsqueeze(-1) * k.unsqueeze(-2),
        rows * sums.transition * columns + k.unsqueeze(-1) * (previous.unsqueeze(-2) * columns),
        fade * sums.values * columns + v.unsqueeze(-1) * k.unsqueeze(-2),
        torch.maximum(slowest.exp() * sums.norm, k.square().sum(-1)),
    )
