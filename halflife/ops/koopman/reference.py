"""The definition of `koopman_attention`: a loop over sequences and tokens."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from halflife.ops.backends.dispatch import implements
from halflife.ops.koopman import state as koopman_state
from halflife.ops.koopman.state import KoopmanState, Sums, blank


@implements("koopman_attention", "reference")
def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: KoopmanState, filter_, chunk_size: int,
    normalization: str, cu_seqlens: Tensor | None,
) -> tuple[Tensor, KoopmanState]:  # fmt: skip
    """The definition: a loop over sequences and tokens, each with its operator summed up and solved anew."""
    bounds = [0, k.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for i, (start, stop) in enumerate(pairwise(bounds)):
        own = state if cu_seqlens is None else {name: x[i : i + 1] for name, x in state.items()}
        visible = None if mask is None else mask[:, start:stop]
        y, last = _loop(
            q[:, start:stop], k[:, start:stop], v[:, start:stop], visible, own, filter_, chunk_size, normalization
        )
        outputs.append(y)
        states.append(last)
    whole = {name: torch.cat([s[name] for s in states]) for name in blank(k, v, 0, chunk_size)}
    return (torch.cat(outputs, 1) if outputs else torch.zeros_like(v)), whole


def _loop(q, k, v, mask, state, filter_, chunk_size: int, normalization: str):
    """One row of sequences of equal length whose states hold equally many pending tokens."""
    pending = int(state["pending"].max()) if len(state["pending"]) else 0
    k = torch.cat([state["pending_keys"][:, :pending], koopman_state.masked(k, mask)], 1)
    v = torch.cat([state["pending_values"][:, :pending], v], 1)
    before = koopman_state.previous(k, state["last"])
    limit = torch.cat([state["norm"].unsqueeze(1), k.square().sum(-1)], 1).amax(1)

    def upto(stop: int) -> Sums:
        return koopman_state.sums(k[:, :stop], v[:, :stop], before[:, :stop]).after(state)

    rows = []
    for t in range(q.shape[1]):
        sums = upto((pending + t) // chunk_size * chunk_size)
        rows.append(filter_.read(sums, q[:, t].unsqueeze(-2), None if normalization == "causal" else limit).squeeze(-2))
    whole = k.shape[1] // chunk_size * chunk_size
    last = k[:, whole - 1] if whole else state["last"]
    final = upto(whole).state(last, state)
    left = k.shape[1] - whole
    for name, x in (("pending_keys", k), ("pending_values", v)):
        final[name] = torch.cat([x[:, whole:], torch.zeros_like(state[name][:, left:])], 1)
    final["pending"] = torch.full_like(state["pending"], left)
    return (torch.stack(rows, 1) if rows else torch.zeros_like(v[:, :0])), final
