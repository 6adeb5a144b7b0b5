"""Softmax attention with RoPE and a KV cache, the baseline whose state grows with the context."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.layers import packing
from halflife.layers.init import Linear
from halflife.layers.mixer import LAYERS, Mixer, Shared, State, check_heads
from halflife.layers.parts import rotary
from halflife.position import check_pairs


@LAYERS.add("attention")
class Attention(Mixer):
    """LLaMA's causal softmax attention `softmax(q kᵀ / √K) v` with RoPE. Its state is the KV cache.

    Args:
        hidden_size: D.
        num_heads: query heads H.
        num_kv_heads: heads of keys and values, each shared by H / num_kv_heads query heads; None means H.
        rope_base: base of the rotary frequencies.

    Raises:
        ValueError: a number of heads does not divide, or the head size is odd.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        *,
        num_kv_heads: int | None = None,
        rope_base: float = 10_000.0,
        layer_idx: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        self.head_dim = check_heads(hidden_size, num_heads)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        check_heads(num_heads, self.num_kv_heads)
        check_pairs(self.head_dim)
        self.rope_base = rope_base
        self.splits = [num_heads * self.head_dim, *[self.num_kv_heads * self.head_dim] * 2]
        self.qkv_proj = Linear(hidden_size, sum(self.splits), bias=False)
        self.out_proj = Linear(hidden_size, hidden_size, bias=False)

    def mix(self, x: Tensor, state: State, cu_seqlens: Tensor | None, shared: Shared | None) -> tuple[Tensor, State]:
        position = packing.positions(x, state.get("position"), cu_seqlens)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(x).split(self.splits, -1))
        q, k = rotary(q, k, position, self.rope_base)
        if not state and cu_seqlens is None:
            cache, o = {"keys": k, "values": v}, self._attend(q, k, v, None)
        else:
            o, cache = self._with_cache(q, k, v, state, cu_seqlens, packing.lengths(x, cu_seqlens))
        return self.out_proj(o.flatten(-2)), cache

    def _with_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        cu_seqlens: Tensor | None,
        new: Tensor,
    ) -> tuple[Tensor, State]:
        """Attention of `new [N]` tokens a sequence to the cache and to themselves, one row a sequence.

        Rows may differ in length. Each token stands at its position, and later slots are masked.
        """
        rows, seen = len(new), state["position"] if state else torch.zeros_like(new)
        total = seen + new
        if cu_seqlens is None:
            row = torch.arange(rows, device=q.device).repeat_interleave(q.shape[1])
            slot = torch.arange(q.shape[1], device=q.device).repeat(rows)
        else:
            row = packing.sequence_of_token(q.shape[1], cu_seqlens)
            slot = torch.arange(q.shape[1], device=q.device) - cu_seqlens[row]
        width, longest = int(new.max()) if rows else 0, int(total.max()) if rows else 0

        def place(tokens: Tensor, size: int, at: Tensor, old: Tensor | None) -> Tensor:
            filled = tokens.new_zeros(rows, size, *tokens.shape[2:])
            if old is not None:
                filled[:, : old.shape[1]] = old[:, :size]
            return filled.index_put((row, at), tokens.flatten(0, 1))

        keys = place(k, longest, slot + seen[row], state.get("keys"))
        values = place(v, longest, slot + seen[row], state.get("values"))
        at = torch.arange(width, device=q.device) + seen.unsqueeze(1)  # [N, width]: index of each query
        visible = torch.arange(longest, device=q.device) <= at.unsqueeze(-1)
        o = self._attend(place(q, width, slot, None), keys, values, visible.unsqueeze(1))
        return o[row, slot].unflatten(0, q.shape[:2]), {"keys": keys, "values": values}

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """`q [N, T, H, K]`, `k, v [N, S, H_kv, K]` → `[N, T, H, K]`."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=self.num_kv_heads != self.num_heads
        )
        return o.transpose(1, 2)
