"""Forgetting attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halflife import decay as decays
from halflife.layers.attention import Attention
from halflife.layers.init import zero_bias
from halflife.layers.mixer import LAYERS, State
from halflife.layers.options import Place
from halflife.layers.parts import DecayProjection
from halflife.precision import compute_dtype

MAX_WEIGHTS = 1 << 25  # weights of the softmax in memory at once, over all rows and heads


@LAYERS.add("fox")
class ForgettingAttention(Attention):
    """Forgetting attention (Lin et al. 2025): softmax attention in which old tokens fade, without positions.

        o_i = Σ_{j ≤ i} softmax_j(q_iᵀ k_j / √K + Σ_{l = j+1}^{i} log f_l) v_j,   f_l = σ(w_h x_l + b_h)

    b starts at 0, as in the authors' code. The state is the KV cache, with `forget [N, S, H]`, log f in float32.

    Args:
        place: a group of options.
        position: "none", or "rope" for RoPE.
        options: those of `Attention`.
    """

    def __init__(self, place: Place, *, position: str = "none", **options: Any) -> None:
        super().__init__(place, position=position, **options)
        self.decay = decays.build("gla", num_heads=self.num_heads, head_dim=self.head_dim, tau=1)  # log σ(f)
        self.decay_proj = DecayProjection(place.hidden_size, self.decay.shape, None, bias=True, law=zero_bias)

    def cached(self, x: Tensor, k: Tensor, v: Tensor) -> State:
        return {"keys": k, "values": v, "forget": self.decay(self.decay_proj(x))}

    def attend(self, q: Tensor, cache: State, at: Tensor | None, visible: Tensor | None) -> Tensor:
        dtype, length = compute_dtype(q), q.shape[1]
        total = cache["forget"].cumsum(1).transpose(1, 2)  # [N, H, S]
        queries, k, v = (x.to(dtype).transpose(1, 2) for x in (q, cache["keys"], cache["values"]))
        if at is None:
            at = torch.arange(length, device=q.device).expand(len(q), -1)
        at_once = max(1, MAX_WEIGHTS // max(1, total.numel()))
        read = []
        for start in range(0, max(length, 1), at_once):
            rows = slice(start, start + at_once)
            seen = total.shape[-1] if visible is not None else min(start + at_once, length)
            place = at[:, rows].clamp(max=max(total.shape[-1] - 1, 0)).unsqueeze(1).expand(-1, self.num_heads, -1)
            bias = total.gather(2, place).unsqueeze(-1) - total[:, :, None, :seen]
            mask = torch.arange(seen, device=q.device) <= at[:, rows, None] if visible is None else visible[:, rows]
            scores = _by_group(queries[:, :, rows], k[:, :, :seen].mT) * self.head_dim**-0.5 + bias
            weights = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(-1)
            read.append(_by_group(weights, v[:, :, :seen]))
        return torch.cat(read, 2).transpose(1, 2).to(cache["values"].dtype)


def _by_group(rows: Tensor, matrices: Tensor) -> Tensor:
    """`rows [N, H, T, K] @ matrices [N, G, K, V]`, where each matrix serves the rows of H / G heads."""
    shared = rows.unflatten(1, (matrices.shape[1], -1))
    return (shared.flatten(2, 3) @ matrices).unflatten(2, shared.shape[2:4]).flatten(1, 2)
