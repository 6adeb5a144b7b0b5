"""The decay of LightNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halflife.decay.base import DECAYS, Decay, DecayParts
from halflife.ops.linear_attention import running_decay
from halflife.packing import Packing
from halflife.registry import check_choice


@DECAYS.add("lightnet")
class LightNetDecay(Decay):
    """λ_t = exp(lse f_{<t} − lse f_{≤t}): with k = 1 − λ, a running softmax over the past.

    g_t = −softplus(f_t − lse f_{<t}). Range [0, 1); the first token of a sequence has λ = 0. No parameters.
    Time-scale at constant f: `1 / log(t/(t−1))`, about t, so it grows with the context. Streaming carries the running
    logsumexp (lse). Source: Qin et al. 2024; Decay, Table 1.

    Args:
        first: lse before the first token, "empty" for −∞, or "zero" for 0, where the first token has λ = σ(−f).
    """

    shares_keys = True
    stateful = True
    FIRSTS = ("empty", "zero")
    default_first = "empty"

    def __init__(self, *, first: str | None = None, **sizes) -> None:
        super().__init__(**sizes)
        self.first = first or self.default_first
        check_choice("first", self.first, self.FIRSTS)

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        return self.scan(f)[0]

    def scan(
        self, f: Tensor, *, position: Tensor | None = None, state: Tensor | None = None,
        cu_seqlens: Tensor | Packing | None = None, parts: bool = False,
    ) -> tuple[Any, Tensor]:  # fmt: skip
        """Return `g` and the running logsumexp `[N, H(, K)]`, −inf (or 0, by `first`) before the first token."""
        packing = Packing.of(cu_seqlens, *f.shape[:2])
        g, last, key = running_decay(f, state, packing, self.first == "empty", with_key=parts)
        return DecayParts(g, None, None, key) if parts else g, last

    def timescales(self, position: float = 1) -> Tensor:
        t = torch.full(self.shape, float(position)) + (self.first == "zero")  # one more term of e⁰ in the sum
        return 1 / torch.log(t / (t - 1))

    def base_log_rate(self) -> Tensor:
        return -self.timescales(2).log()


@DECAYS.add("lightnet_released")
class ReleasedLightNetDecay(LightNetDecay):
    """λ_t = exp(lse f_{<t} − lse f_{≤t}) with lse = 0 before the first token; a shared key uses the f before it.

    LightNet as the authors of the Decay paper ran it: `k_t = exp(f_{t−1} − lse f_{≤t})` with f_0 = 0, where `lightnet`
    has f_t. Streaming also carries `exp(f − lse)` of the last token. Range (0, 1).
    Source: released code of the Decay paper (xmixers).
    """

    default_first = "zero"

    def scan(
        self, f: Tensor, *, position: Tensor | None = None, state: Tensor | None = None,
        cu_seqlens: Tensor | Packing | None = None, parts: bool = False,
    ) -> tuple[Any, Tensor]:  # fmt: skip
        """As `LightNetDecay.scan`. The state is `[N, 2, H]` or `[N, 2, H, K]`: lse, and exp(f − lse) of the last f."""
        g, last = super().scan(f, state=None if state is None else state[:, 0], cu_seqlens=cu_seqlens)
        state = torch.stack([last, self._weights(g, state, cu_seqlens)[1]], 1)
        return DecayParts(g, None, None) if parts else g, state

    def shared_key(
        self, f: Tensor, parts: DecayParts, state: Tensor | None, cu_seqlens: Tensor | Packing | None
    ) -> Tensor:
        return self._weights(parts.g, state, cu_seqlens)[0] * parts.g.exp()

    def _weights(self, g: Tensor, state: Tensor | None, cu_seqlens: Tensor | Packing | None) -> tuple[Tensor, Tensor]:
        """`exp(f_{t−1} − lse f_{<t})` at each token, which is 1 − λ_{t−1}, and the last one of each sequence."""
        packing = Packing.of(cu_seqlens, *g.shape[:2])
        packed = packing.cu_seqlens is not None
        first = g.new_ones(packing.num_sequences, *g.shape[2:]) if state is None else state[:, 1]
        starts = first.split(1) if packed else [first]
        pieces = (-torch.expm1(g)).split(packing.counts if packed else [packing.length], dim=1)
        joined = [torch.cat([a.unsqueeze(1), b], 1) for a, b in zip(starts, pieces, strict=True)]
        return torch.cat([part[:, :-1] for part in joined], 1), torch.cat([part[:, -1] for part in joined])
