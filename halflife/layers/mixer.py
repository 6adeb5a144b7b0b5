"""The contract of a layer, and the design-space block: any decay × any update in one mixer.

Every mixer is `(x, state) → (y, state)`. A state is a dict of tensors with one row a sequence; feeding a
sequence in pieces, each with the state that the piece before returned, gives what one call gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife import decay as decays
from halflife.layers import packing
from halflife.layers.gate_rank import GateRank, apply_update
from halflife.layers.parts import HeadwiseGate, LowRankGate, ShortConv, l2_normalize
from halflife.ops import dplr
from halflife.ops.call import check_cu_seqlens
from halflife.position import check_pairs, lrpe, rope
from halflife.registry import Registry, unknown

State = dict[str, Tensor]
Shared = dict[str, Tensor]

LAYERS: Registry[type[Mixer]] = Registry("layer")


class Mixer(nn.Module):
    """A sequence mixer: `y, state = mixer(x, state, cu_seqlens, attention_mask)`.

    A subclass writes `mix`; padding is dealt with here, by packing, so that it changes nothing. Every state holds
    `position [N]`, the tokens seen.
    """

    reads_action_mask = False  # whether it heeds `shared["action_mask"]`

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        shared: Shared | None = None,
    ) -> tuple[Tensor, State]:
        """Mixes `x [B, T, D]` along T.

        Args:
            x: inputs `[B, T, D]`.
            state: what the previous piece returned, one row a sequence; None at the start. It is not modified.
            cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1).
            attention_mask: `[B, T]`, 0 at padding, left or right: those positions are left out (y is 0 there).
            shared: what the layers of one forward pass hand on to later ones (RWKV-7's first values), and what is
                given to all of them (SKA's action mask); a model gives all of its layers the same dict.

        Returns:
            `y [B, T, D]` and the new state.

        Raises:
            ValueError: both cu_seqlens and attention_mask, or a shape that does not fit.
        """
        if x.ndim != 3:
            raise ValueError(f"x must be [B, T, D]; got {tuple(x.shape)}")
        sequences = check_cu_seqlens(cu_seqlens, *x.shape[:2])
        if state and len(state["position"]) != sequences:
            raise ValueError(f"the state is of {len(state['position'])} sequences, the input of {sequences}")
        if attention_mask is None:
            return self.mix(x, state, cu_seqlens, shared)
        if cu_seqlens is not None:
            raise ValueError("give cu_seqlens (packed) or attention_mask (padded), not both")
        packed, cu_seqlens, index = packing.unpad(x, attention_mask)
        y, state = self.mix(packed, state, cu_seqlens, shared)
        return packing.repad(y, index, *x.shape[:2]), state

    def mix(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None, shared: Shared | None
    ) -> tuple[Tensor, State]:
        """`forward` without padding."""
        raise NotImplementedError


def build(name: str, *, hidden_size: int, **options: Any) -> Mixer:
    """The layer `name`, one of `LAYERS.names()`; `options` are its own (see its docstring).

    Raises:
        ValueError: an unknown name (the message lists the choices) or an option that makes no sense.
    """
    return LAYERS[name](hidden_size=hidden_size, **options)


class DecayProjection(nn.Module):
    """The activation f of a decay: one number a head, or one a channel through a low-rank or full map.

    Args:
        hidden_size: D of the input.
        shape: `(H,)` or `(H, K)`, that of one token's log-decays.
        rank: width between the two maps of a vector decay; None for one full map.
        bias: of the last map.
    """

    def __init__(self, hidden_size: int, shape: tuple[int, ...], rank: int | None, bias: bool) -> None:
        super().__init__()
        self.shape = shape
        self.down, width = nn.Identity(), hidden_size
        if rank is not None and len(shape) == 2:
            self.down, width = nn.Linear(hidden_size, rank, bias=False), rank
        self.up = nn.Linear(width, torch.Size(shape).numel(), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, D]` → `[B, T, H]` or `[B, T, H, K]`."""
        return self.up(self.down(x)).unflatten(-1, self.shape)


@LAYERS.add("linear")
class LinearMixer(Mixer):
    """The design-space block: any decay × granularity × key sharing × position × update.

    The defaults are the Decay Linear Transformer's (Decay, §3): SiLU on queries and keys, a low-rank sigmoid output
    gate, then RMS norm. GLA, RetNet, DeltaNet and Gated DeltaNet are this block with other settings.

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K; None means D / H.
        value_dim: V; None means D / H.
        decay: a name of `decay.DECAYS`, or None for no decay.
        decay_options: the strategy's own options.
        granularity: "scalar" or "vector".
        post: options of `decay.PoST` to wrap the decay in, or None.
        share_keys: write `k = 1 − λ` instead of a key of its own (vector decay only).
        update: "linear", "delta", or "dplr": `S_t = (diag λ_t − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ`, which reads the
            state before it decays, where the delta rule reads it after; without a decay they are the same.
        position: "none", "rope", or "lrpe", which doubles the rows of the state.
        tie_pairs: RoPE under a vector decay: the two channels that it rotates share one decay. None means: where
            RoPE needs it; False is refused there.
        conv_size: taps of a short convolution on q, k, v; 0 for none.
        activation: "silu" or "none", on q and k (the short convolution has its own SiLU, on q, k and v).
        gate_rank: options of `GateRank` to hold a slow state beside the fast one, or None; it needs a scalar decay
            and the linear or the delta update.
        allow_neg_eigval: writing strengths β in (0, 2) instead of (0, 1), so that the delta rule's transition
            `I − β k kᵀ` can have negative eigenvalues and track states (Grazzi et al. 2025).
        qk_norm: L2-normalise q and k; None means: for the delta rule and DPLR, which need it.
        gate: "low_rank" (the paper's), "swish" (norm a head, then a full SiLU gate) or "none".
        decay_rank: low rank of a vector decay's projection; None means D / H, 0 a full map.
        decay_bias: bias of that projection.
        layer_idx, num_layers: where the layer stands.
        chunk_size, backend: passed to the op.

    Raises:
        ValueError: an unknown name, or a combination that has no meaning; the message says why.
    """

    UPDATES = ("linear", "delta", "dplr")
    POSITIONS = ("none", "rope", "lrpe")
    GATES = ("low_rank", "swish", "none")
    ACTIVATIONS = ("silu", "none")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        decay: str | None = "simple",
        decay_options: Mapping[str, Any] | None = None,
        granularity: str = "vector",
        post: Mapping[str, Any] | None = None,
        gate_rank: Mapping[str, Any] | None = None,
        share_keys: bool = False,
        allow_neg_eigval: bool = False,
        update: str = "linear",
        position: str = "none",
        tie_pairs: bool | None = None,
        conv_size: int = 0,
        activation: str = "silu",
        qk_norm: bool | None = None,
        gate: str = "low_rank",
        decay_rank: int | None = None,
        decay_bias: bool = False,
        norm_eps: float = 1e-5,
        layer_idx: int = 0,
        num_layers: int = 1,
        chunk_size: int = 64,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim or check_heads(hidden_size, num_heads)
        self.value_dim = value_dim or check_heads(hidden_size, num_heads)
        for kind, value, choices in (
            ("update", update, self.UPDATES), ("position", position, self.POSITIONS), ("gate", gate, self.GATES),
            ("activation", activation, self.ACTIVATIONS),
        ):  # fmt: skip
            if value not in choices:
                raise unknown(kind, value, list(choices))
        if share_keys and (decay is None or granularity != "vector"):
            raise ValueError("share_keys writes k = 1 − λ, one number a channel: it needs a vector decay")
        if allow_neg_eigval and update == "linear":
            raise ValueError("allow_neg_eigval is about the writing strength β of the delta rule: the update is linear")
        if gate_rank is not None and (decay is None or granularity != "scalar" or update == "dplr"):
            raise ValueError(
                "GateRank has a fast decay of one number a head and the linear or the delta update; got "
                f"decay {decay!r}, granularity {granularity!r}, update {update!r}"
            )
        self.update, self.position, self.activation = update, position, activation
        self.beta_scale = 2 if allow_neg_eigval else 1
        self.qk_norm = update != "linear" if qk_norm is None else qk_norm
        self.share_keys, self.chunk_size, self.backend = share_keys, chunk_size, backend

        rotated = position == "rope" and decay is not None and granularity == "vector"
        if position == "rope":
            check_pairs(self.head_dim)
        if tie_pairs is not None and tie_pairs != rotated:
            raise ValueError(
                "RoPE keeps its relative meaning only if the two channels of a rotated pair decay alike (Decay, App. "
                f"A.3): tie_pairs goes with RoPE and a vector decay; got {tie_pairs} with {position} and {granularity}"
            )
        # The encoded keys have two channels for each decay: RoPE's pair, or LRPE's cosine and sine.
        self.paired = rotated or (position == "lrpe" and decay is not None and granularity == "vector")
        self.decay = build_decay(
            decay, decay_options, post, num_heads=num_heads, granularity=granularity, layer_idx=layer_idx,
            num_layers=num_layers, head_dim=self.head_dim // 2 if rotated else self.head_dim,
        )  # fmt: skip
        self.decay_proj = None
        if self.decay is not None and self.decay.data_dependent:
            rank = hidden_size // num_heads if decay_rank is None else decay_rank
            self.decay_proj = DecayProjection(
                hidden_size, self.decay.shape, None if share_keys else rank or None, decay_bias
            )
        self.splits = [num_heads * self.head_dim] * (1 if share_keys else 2) + [num_heads * self.value_dim]
        self.qkv_proj = nn.Linear(hidden_size, sum(self.splits), bias=False)
        self.conv = ShortConv(sum(self.splits), conv_size) if conv_size else None
        self.beta_proj = nn.Linear(hidden_size, num_heads, bias=False) if update != "linear" else None
        self.gate_rank = None if gate_rank is None else GateRank(hidden_size, num_heads, **gate_rank)
        self.gate = {"low_rank": LowRankGate, "swish": HeadwiseGate}[gate](
            hidden_size, num_heads, self.value_dim, norm_eps
        ) if gate != "none" else nn.RMSNorm(self.value_dim, eps=norm_eps)  # fmt: skip
        self.out_proj = nn.Linear(num_heads * self.value_dim, hidden_size, bias=False)

    def mix(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None, shared: Shared | None
    ) -> tuple[Tensor, State]:
        state = state or {}
        new = {"position": packing.lengths(x, cu_seqlens) + state.get("position", 0)}
        position = packing.positions(x, state.get("position"), cu_seqlens)
        g, decayed = self.log_decays(x, position, state.get("decay"), cu_seqlens)
        if decayed is not None:
            new["decay"] = decayed
        qkv = self.qkv_proj(x)
        if self.conv is not None:
            qkv, new["conv"] = self.conv(qkv, state.get("conv"), cu_seqlens)
        q, k, v = self.heads(qkv, g, position)
        beta = None if self.beta_proj is None else self.beta_scale * self.beta_proj(x).sigmoid()
        options = {"scale": self.head_dim**-0.5, "chunk_size": self.chunk_size, "backend": self.backend}
        if self.update == "dplr":
            assert beta is not None
            written = k * beta.unsqueeze(-1)
            # A view: torch.compile refuses an autograd function that gets one tensor twice.
            o, memory = dplr(
                q, written, v, -k, written.view_as(written), g, initial_state=state.get("memory"),
                output_final_state=True, cu_seqlens=cu_seqlens, **options,
            )  # fmt: skip
            kept: dict[str, Any] = {"memory": memory}
        else:
            o, kept = apply_update(self.gate_rank, x, q, k, v, g, beta, state, cu_seqlens, **options)
        new |= kept
        o = o.to(x.dtype)
        gated = self.gate(o).flatten(-2) if isinstance(self.gate, nn.RMSNorm) else self.gate(o, x)
        return self.out_proj(gated), new

    def log_decays(
        self, x: Tensor, position: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """`g [B, T, H]` or `[B, T, H, K]` and the decay's own state, if it has one."""
        if self.decay is None:
            return None, None
        shape = (*x.shape[:2], *self.decay.shape)
        f = x.new_zeros(()).expand(shape) if self.decay_proj is None else self.decay_proj(x)
        g, state = self.decay.scan(f, position=position, state=state, cu_seqlens=cu_seqlens)
        return (torch.cat([g, g], -1) if self.paired else g), state

    def heads(self, qkv: Tensor, g: Tensor | None, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`q, k [B, T, H, K]` (2 K under LRPE), activated, normalised and encoded, and `v [B, T, H, V]`."""
        q, *k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in qkv.split(self.splits, -1))
        if self.activation == "silu" and self.conv is None:
            q, k = F.silu(q), [F.silu(part) for part in k]
        key = k[0] if g is None or k else -torch.expm1(g[..., : self.head_dim]).to(q.dtype)
        if self.qk_norm:
            q, key = l2_normalize(q), l2_normalize(key)
        if self.position != "none":
            encode = {"rope": rope, "lrpe": lrpe}[self.position]
            q, key = encode(q, position), encode(key, position)
        return q, key, v


def check_heads(hidden_size: int, num_heads: int) -> int:
    """Channels a head, D / H; an error if the heads do not divide the hidden size."""
    if num_heads < 1 or hidden_size % num_heads:
        raise ValueError(f"num_heads must divide hidden_size; got {num_heads} and {hidden_size}")
    return hidden_size // num_heads


def build_decay(
    name: str | None, options: Mapping[str, Any] | None, post: Mapping[str, Any] | None, **sizes: Any
) -> decays.Decay | None:
    """The decay of a layer, wrapped in PoST if `post` gives its options; None stays None."""
    if name is None:
        if post is not None:
            raise ValueError("PoST orders decay rates: a layer without a decay has none")
        return None
    decay = decays.build(name, **sizes, **(options or {}))
    return decay if post is None else decays.PoST(decay, **post)
