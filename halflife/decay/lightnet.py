"""The decay of LightNet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.decay.base import DECAYS, Decay


@DECAYS.add("lightnet")
class LightNetDecay(Decay):
    """λ_t = exp(lse f_{<t} − lse f_{≤t}): with k = 1 − λ, a running softmax over the past.

    g_t = −softplus(f_t − lse f_{<t}). Range [0, 1); the first token of a sequence has λ = 0. No parameters.
    Time-scale at constant f: `1 / log(t/(t−1))`, about t, so it grows with the context. Streaming carries the running
    logsumexp (lse). Source: Qin et al. 2024; Decay, Table 1.
    """

    shares_keys = True
    stateful = True

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        return self.scan(f)[0]

    def scan(
        self,
        f: Tensor,
        *,
        position: Tensor | None = None,
        state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return `g` and the running logsumexp `[N, H]` or `[N, H, K]`, which is −inf before the first token."""
        f = f if f.dtype == torch.float64 else f.float()
        if cu_seqlens is None:
            return _running(f, state)
        pieces, states = [], []
        for row, piece in enumerate(f.split(cu_seqlens.diff().tolist(), dim=1)):
            g, last = _running(piece, None if state is None else state[row : row + 1])
            pieces.append(g)
            states.append(last)
        return torch.cat(pieces, 1), torch.cat(states)

    def timescales(self, position: float = 1) -> Tensor:
        t = torch.full(self.shape, float(position))
        return 1 / torch.log(t / (t - 1))

    def base_log_rate(self) -> Tensor:
        return -self.timescales(2).log()


def _running(f: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """One row of sequences: `g [B, T, …]` and the logsumexp after the last token."""
    if state is None:
        state = f.new_full((f.shape[0], *f.shape[2:]), -torch.inf)
    if f.shape[1] == 0:
        return f, state
    seen = torch.logaddexp(f.logcumsumexp(1), state.unsqueeze(1))
    before = torch.cat([state.unsqueeze(1), seen[:, :-1]], 1)
    return -F.softplus(f - before), seen[:, -1]
