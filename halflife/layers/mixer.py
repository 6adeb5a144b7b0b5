"""The contract of a layer, and the design-space block, which combines any decay with any update.

Every mixer is `(x, state) → (y, state)`. A state is a dict of tensors with one row a sequence. A sequence may be fed in
pieces, each with the state that the previous piece returned; the outputs equal those of a single call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife import decay as decays
from halflife.layers.gate_rank import apply_update
from halflife.layers.memory.choose import KINDS, build_states
from halflife.layers.padding import repad, unpad
from halflife.layers.parts import GATES, DecayProjection, ShortConv, build_decay, check_gain, check_heads, rotary
from halflife.ops import dplr
from halflife.ops.fused import l2_normalize
from halflife.packing import Packing
from halflife.position import check_pairs, half_lrpe, lrpe
from halflife.registry import Registry, check_options, unknown

State = dict[str, Tensor]
Shared = dict[str, Tensor]

LAYERS: Registry[type[Mixer]] = Registry("layer")


class Mixer(nn.Module):
    """A sequence mixer: `y, state = mixer(x, state, cu_seqlens, attention_mask)`.

    A subclass writes `mix`. This class packs padded inputs, so that padding has no effect, and counts the tokens that
    each sequence has seen, which every state holds as `position [N]`.
    """

    reads_action_mask = False  # whether it uses `shared["action_mask"]`

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        attention_mask: Tensor | None = None,
        shared: Shared | None = None,
    ) -> tuple[Tensor, State]:
        """Mix `x [B, T, D]` along T.

        Args:
            x: inputs `[B, T, D]`.
            state: the state after the previous piece, one row a sequence, or None at the start. It is not modified.
            cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1), or the `Packing` of x.
            attention_mask: `[B, T]`, 0 at padding on the left or right. Padding is left out, and y is 0 there.
            shared: a dict that all layers of one forward pass share. It holds values that a layer passes to later ones
                (RWKV-7's first values) and inputs of all layers (SKA's action mask).

        Returns:
            `y [B, T, D]` and the new state.

        Raises:
            ValueError: cu_seqlens and attention_mask are both given, or a shape does not fit.
        """
        if x.ndim != 3:
            raise ValueError(f"x must be [B, T, D]; got {tuple(x.shape)}")
        if attention_mask is not None:
            if cu_seqlens is not None:
                raise ValueError("give cu_seqlens (packed) or attention_mask (padded), not both")
            packed, bounds, index = unpad(x, attention_mask)
            y, new = self.forward(packed, state, Packing(1, packed.shape[1], bounds), None, shared)
            return repad(y, index, *x.shape[:2]), new
        packing, state = Packing.of(cu_seqlens, *x.shape[:2]), state or {}
        if state and len(state["position"]) != packing.num_sequences:
            raise ValueError(
                f"the state has {len(state['position'])} sequences, but the input has {packing.num_sequences}"
            )
        y, new = self.mix(x, state, packing, shared)
        return y, {"position": packing.lengths(x.device) + state.get("position", 0), **new}

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        """Mix inputs without padding.

        Args:
            x, shared: as in `forward`.
            packing: where the sequences of x lie.
            state: the state after the previous piece; an empty dict at the start.

        Returns:
            `y [B, T, D]` and the new state without `position`.
        """
        raise NotImplementedError


def build(name: str, *, hidden_size: int, **options: Any) -> Mixer:
    """Build the layer `name`, one of `LAYERS.names()`, with the options in its docstring.

    Raises:
        ValueError: a name is unknown (the message lists the choices), or the options contradict each other.
    """
    check_options(f"layer {name}", LAYERS[name], options)
    sizes = ["hidden_size", "num_heads"]
    for part, cls in {"post": decays.PoST, **KINDS}.items():
        if (own := options.get(part)) is not None and (part, name) != ("gate_rank", "rwkv7"):  # there a width
            check_options(part, cls, own, ["decay"] if part == "post" else sizes)
    return LAYERS[name](hidden_size=hidden_size, **options)


@LAYERS.add("linear")
class LinearMixer(Mixer):
    """The design-space block, which combines any decay, granularity, key sharing, position encoding and update.

    The defaults are those of the Decay Linear Transformer (Decay, §3): SiLU on queries and keys, a low-rank sigmoid
    output gate, then an RMS norm. GLA, RetNet, DeltaNet and Gated DeltaNet are this block with other settings.

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K; None means D / H.
        value_dim: V; None means D / H.
        decay: a name of `decay.DECAYS`, or None for no decay.
        decay_options: options of that decay.
        granularity: "scalar" or "vector".
        post: options of `decay.PoST`, which then wraps the decay, or None.
        gate_rank: options of `GateRank`, for a scalar decay and the linear or delta update.
        log_linear: options of `LogLinear`, for a scalar decay and the linear update.
        stretch_gain: whether PoST stretches what is written as the decay: β of the delta rule, and else k.
        share_keys: write `k = 1 − λ` instead of projected keys (vector decay only).
        allow_neg_eigval: writing strengths β in (0, 2) instead of (0, 1). The transition `I − β k kᵀ` of the delta rule
            can then have negative eigenvalues, which state tracking needs (Grazzi et al. 2025).
        update: "linear", "delta", or "dplr", `S_t = (diag λ_t − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ`. DPLR reads the
            state before the decay, and the delta rule after it; without a decay they are the same. "dplr_released", as
            the Decay paper's authors ran it, has β in (0, 2). It is the delta rule for a scalar decay, and
            `S_t = (I − β_t k_t k_tᵀ) diag λ_t S_{t−1} + k_t v_tᵀ` for a vector decay.
        position: "none", "rope", "lrpe", which doubles the rows of the state, or "half_lrpe", LRPE on half of the
            channels, which the Decay paper's authors ran as RoPE.
        tie_pairs: whether the two channels that RoPE rotates share one decay. With RoPE and a vector decay it must be
            True, elsewhere False. None means the value that fits.
        conv_size: taps of a short convolution on q, k, v; 0 for none.
        activation: "silu" or "none", on q and k. With a short convolution, its SiLU on q, k and v takes this place.
        qk_norm: whether to L2-normalise q and k. None means True for the delta rule and DPLR, which need it.
        gate: "low_rank" (the paper's); or a norm over each head, then "swish" or "sigmoid" of a full projection,
            "low_rank_sigmoid", a projection of rank V (KDA), or "none".
        decay_rank: rank of the projection of a vector decay; None means D / H, and 0 full rank.
        decay_bias: whether that projection has a bias.
        norm_eps: eps of the output norm.
        layer_idx, num_layers: the index of the layer and the number of layers.
        chunk_size, backend: passed to the op.

    Raises:
        ValueError: a name is unknown, or a combination has no meaning; the message gives the reason.
    """

    UPDATES = ("linear", "delta", "dplr", "dplr_released")
    POSITIONS = ("none", "rope", "lrpe", "half_lrpe")
    GATES = tuple(GATES)
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
        log_linear: Mapping[str, Any] | None = None,
        stretch_gain: bool = False,
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
            raise ValueError("share_keys writes k = 1 − λ with one λ a channel, so it needs a vector decay")
        if allow_neg_eigval and update == "linear":
            raise ValueError(
                "allow_neg_eigval changes the writing strength β of the delta rule, but the update is linear"
            )
        vector = decay is not None and granularity == "vector"
        if stretch_gain:
            check_gain(post, delta=update != "linear")
            if vector or type(self).update_state is not LinearMixer.update_state:
                raise ValueError("stretch_gain needs a scalar decay, and the linear, the delta or the DPLR update")
        if update == "dplr_released" and not vector:
            update, allow_neg_eigval = "delta", True
        self.update, self.position, self.activation = update, position, activation
        self.beta_scale = 2 if allow_neg_eigval or update == "dplr_released" else 1
        self.qk_norm = update != "linear" if qk_norm is None else qk_norm
        self.share_keys, self.chunk_size, self.backend = share_keys, chunk_size, backend
        self.stretch_gain = stretch_gain
        rotated = position == "rope" and vector
        if position == "rope":
            check_pairs(self.head_dim)
        if tie_pairs is not None and tie_pairs != rotated:
            raise ValueError(
                "RoPE encodes relative positions only if the two channels of a rotated pair have one decay (Decay, "
                "App. A.3), so tie_pairs is True for RoPE with a vector decay and False elsewhere; "
                f"got {tie_pairs} with {position} and {granularity}"
            )
        # The number of decays that two channels of the encoded keys share, RoPE's pair or LRPE's cosine and sine.
        self.paired = {"none": 0, "lrpe": self.head_dim}.get(position, self.head_dim // 2) if vector else 0
        self.decay = build_decay(
            decay, decay_options, post, num_heads=num_heads, granularity=granularity, layer_idx=layer_idx,
            num_layers=num_layers, head_dim=self.head_dim // 2 if rotated else self.head_dim,
        )  # fmt: skip
        self.decay_proj = None
        if self.decay is not None and self.decay.data_dependent:
            rank = None if share_keys else (hidden_size // num_heads if decay_rank is None else decay_rank) or None
            self.decay_proj = DecayProjection(hidden_size, self.decay.shape, rank, decay_bias)
        self.splits = [num_heads * self.head_dim] * (1 if share_keys else 2) + [num_heads * self.value_dim]
        self.qkv_proj = nn.Linear(hidden_size, sum(self.splits), bias=False)
        self.conv = ShortConv(sum(self.splits), conv_size) if conv_size else None
        self.beta_proj = nn.Linear(hidden_size, num_heads, bias=False) if update != "linear" else None
        self.gate_rank, self.log_linear = build_states(
            (hidden_size, num_heads), decay=decay, granularity=granularity, update=update, gate_rank=gate_rank,
            log_linear=log_linear,
        )  # fmt: skip
        self.gate = GATES[gate](hidden_size, num_heads, self.value_dim, norm_eps)
        self.out_proj = nn.Linear(num_heads * self.value_dim, hidden_size, bias=False)

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        new: dict[str, Any] = {}
        position = packing.positions(state.get("position"), x.device)
        g, shared_key, decayed = self.log_decays(x, position, state.get("decay"), packing)
        if decayed is not None:
            new["decay"] = decayed
        qkv = self.qkv_proj(x)
        if self.conv is not None:
            qkv, new["conv"] = self.conv(qkv, state.get("conv"), packing)
        q, k, v = self.heads(qkv, shared_key, position)
        o, memory = self.update_state(x, q, k, v, g, state, packing)
        return self.out_proj(self.gate(o.to(x.dtype), x)), new | memory

    def update_state(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: State, packing: Packing
    ) -> tuple[Tensor, State]:
        """Return the outputs `[B, T, H, V]` of the op and the memories after it."""
        new: dict[str, Any] = {}
        beta = None if self.beta_proj is None else self.beta_scale * self.beta_proj(x).sigmoid()
        if self.stretch_gain:
            assert isinstance(self.decay, decays.PoST)
            gain = self.decay.log_stretch(packing.positions(state.get("position"), x.device)).exp().to(k.dtype)
            k, beta = (k * gain.unsqueeze(-1), None) if beta is None else (k, beta * gain)
        options = {"scale": self.head_dim**-0.5, "chunk_size": self.chunk_size, "backend": self.backend}
        if self.update.startswith("dplr"):
            assert beta is not None
            written, read = k * beta.unsqueeze(-1), -k
            # The view is needed because torch.compile refuses an autograd function that gets one tensor twice.
            added = written.view_as(written)
            if self.update == "dplr_released":
                assert g is not None
                added, read = k, -k * g.exp().to(k.dtype)
            o, new["memory"] = dplr(
                q, added, v, read, written, g, initial_state=state.get("memory"), output_final_state=True,
                cu_seqlens=packing, **options,
            )  # fmt: skip
        else:
            states = self.gate_rank or self.log_linear
            o, new = apply_update(states, x, q, k, v, g, beta, state, packing, **options)
        return o, new

    def log_decays(
        self, x: Tensor, position: Tensor, state: Tensor | None, packing: Packing
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """`g [B, T, H]` or `[B, T, H, K]`, the shared keys or None, and the state of the decay or None."""
        if self.decay is None:
            return None, None, None
        shape = (*x.shape[:2], *self.decay.shape)
        f = x.new_zeros(()).expand(shape) if self.decay_proj is None else self.decay_proj(x)
        g, new = self.decay.scan(f, position=position, state=state, cu_seqlens=packing)
        key = None
        if self.share_keys:
            key = self.decay.shared_key(f, g, state, packing)
            key = torch.cat([key, key], -1) if self.position == "rope" else key
        return (torch.cat([g[..., : self.paired], g], -1) if self.paired else g), key, new

    def heads(self, qkv: Tensor, shared_key: Tensor | None, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`q, k [B, T, H, K]` (2 K under LRPE), activated, normalised and encoded, and `v [B, T, H, V]`."""
        q, *k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in qkv.split(self.splits, -1))
        q, k = self.activate(q), [self.activate(part) for part in k]
        key = k[0] if shared_key is None else shared_key.to(q.dtype)
        if self.qk_norm:
            q, key = l2_normalize(q), l2_normalize(key)
        if self.position == "rope":
            q, key = rotary(q, key, position)
        elif self.position != "none":
            encode = {"lrpe": lrpe, "half_lrpe": half_lrpe}[self.position]
            q, key = encode(q, position), encode(key, position)
        return q, key, v

    def activate(self, x: Tensor) -> Tensor:
        """The activation of queries and keys. A short convolution has one already."""
        return F.silu(x) if self.activation == "silu" and self.conv is None else x
