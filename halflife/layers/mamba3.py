"""Mamba-3's layer: Mamba-2's recurrence with trapezoidal steps and a rotation whose speed the input sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.decay import Decay
from halflife.layers import packing
from halflife.layers.gate_rank import GateRank, apply_update
from halflife.layers.mamba2 import Skip, expand_groups
from halflife.layers.mixer import LAYERS, Mixer, Shared, State, build_decay, check_heads
from halflife.ops.chunked.layout import make_layout
from halflife.position import rotate
from halflife.precision import Float32Module, compute_dtype


class NormBias(Float32Module):
    """`RMSNorm(x) ⊙ weight` over the channels of each group, then `+ bias`, one a head; both start at 1."""

    def __init__(self, num_heads: int, state_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(state_size))
        self.bias = nn.Parameter(torch.empty(num_heads, state_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.ones_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, G·K]` → `[B, T, H, K]`, in float32 (float64 for float64)."""
        heads, size = self.bias.shape
        normed = F.rms_norm(x.to(compute_dtype(x)).unflatten(-1, (-1, size)), (size,), eps=self.eps) * self.weight
        return expand_groups(normed, heads) + self.bias


@LAYERS.add("mamba3")
class Mamba3(Mixer):
    """Mamba-3, SISO (Lahoti et al. 2026): Mamba-2 with trapezoidal steps and a data-dependent rotation.

    `[z, x, B, C, f, l, r] = u W`; the step `Δ = softplus(f + Δ₀)` and the decay `α = e^g` are Mamba-2's; `λ = σ(l)`
    says how much of a step's input is taken at its end:

        φ_t = φ_{t−1} + Δ_t π tanh(r_t),   k_t = R(φ_t) (norm(B_t) + b),   q_t = R(φ_t) (norm(C_t) + c)
        S_t = α_t (S_{t−1} + (1 − λ_t) Δ_t k_{t−1} x_{t−1}ᵀ) + λ_t Δ_t k_t x_tᵀ,   y_t = S_tᵀ q_t + D x_t

    Out through `y ⊙ silu(z)`; no short convolution. R(φ) turns the pairs (i, i + P) of the first 2P channels; all
    heads share r, each with its own Δ. tanh and π are the authors' code's, and so is every initial value but that of
    the decay: theirs draws its rate from the input, ours is learned, so that PoST can order the rates.

    Args:
        hidden_size: model width.
        num_heads: H.
        expand: inner width over hidden_size.
        head_dim: V, channels a head; None means expand · hidden_size / H.
        state_size: K, rows of the state ("d_state").
        num_groups: groups of heads that share B and C; it must divide H.
        rope_fraction: share of the K channels that is rotated, 0.5 or 1.
        decay, decay_options: one of Mamba-2's decays, and its options.
        post: options of `decay.PoST` to wrap the decay in, or None.
        gate_rank: options of `GateRank` to hold a slow state beside the fast one, or None.
        norm_eps: of the norms of B and C.
        layer_idx, num_layers: where the layer stands.
        chunk_size, backend: passed to the op.

    The state: `memory [N, H, K, V]`, the last token's `key [N, H, K]` and `value [N, H, V]`, and `angle [N, H, P]`, its
    φ in turns (of 2π) between −½ and ½.

    Raises:
        ValueError: heads or groups that do not divide, channels that do not pair up, or a decay without a step size.
    """

    ROPE_FRACTIONS = (0.5, 1)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        *,
        expand: int = 2,
        head_dim: int | None = None,
        state_size: int = 128,
        num_groups: int = 1,
        rope_fraction: float = 0.5,
        decay: str = "mamba2",
        decay_options: Mapping[str, Any] | None = None,
        post: Mapping[str, Any] | None = None,
        gate_rank: Mapping[str, Any] | None = None,
        norm_eps: float = 1e-5,
        layer_idx: int = 0,
        num_layers: int = 1,
        chunk_size: int = 64,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if not decay.startswith("mamba2"):
            raise ValueError(f"Mamba-3's layer needs a decay with a step size, which {decay!r} has none of")
        if num_groups < 1 or num_heads % num_groups:
            raise ValueError(f"num_groups must divide num_heads; got {num_groups} and {num_heads}")
        if rope_fraction not in self.ROPE_FRACTIONS:
            raise ValueError(f"rope_fraction must be 0.5 or 1; got {rope_fraction}")
        if state_size * rope_fraction % 2:
            raise ValueError(
                f"rotated channels come in pairs: state_size · rope_fraction must be even; got "
                f"{state_size} · {rope_fraction}"
            )
        self.num_heads = num_heads
        self.head_dim = head_dim or check_heads(expand * hidden_size, num_heads)
        self.chunk_size, self.backend = chunk_size, backend
        inner, shared, pairs = num_heads * self.head_dim, num_groups * state_size, int(state_size * rope_fraction) // 2
        self.splits = [inner, inner, shared, shared, num_heads, num_heads, pairs]
        self.in_proj = nn.Linear(hidden_size, sum(self.splits), bias=False)
        self.key = NormBias(num_heads, state_size, norm_eps)
        self.query = NormBias(num_heads, state_size, norm_eps)
        self.decay: Decay = build_decay(  # pyright: ignore[reportAttributeAccessIssue] (a name gives a decay)
            decay, decay_options, post, num_heads=num_heads, head_dim=state_size, granularity="scalar",
            layer_idx=layer_idx, num_layers=num_layers,
        )  # fmt: skip
        self.gate_rank = None if gate_rank is None else GateRank(hidden_size, num_heads, **gate_rank)
        self.skip = Skip(num_heads)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)

    def mix(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None, shared: Shared | None
    ) -> tuple[Tensor, State]:
        state = state or {}
        position = packing.positions(x, state.get("position"), cu_seqlens)
        z, v, b, c, f, trapezoid, rate = self.in_proj(x).split(self.splits, -1)
        v = v.unflatten(-1, (self.num_heads, self.head_dim))
        step, g = self.decay.step(f), self.decay(f, position=position)
        turns = step.unsqueeze(-1) * rate.to(compute_dtype(rate)).tanh().unsqueeze(-2) / 2
        angle, last = running_angle(turns, state.get("angle"), cu_seqlens)
        q, k = (rotate(part, 2 * math.pi * angle) for part in (self.query(c), self.key(b)))
        end = trapezoid.to(compute_dtype(trapezoid)).sigmoid()
        y, written = self.integrate(x, q, k, v, g, step, end, state, cu_seqlens)
        y = self.skip(y, v).flatten(-2) * F.silu(z)
        seen = packing.lengths(x, cu_seqlens) + state.get("position", 0)
        return self.out_proj(y), {"position": seen, "angle": last, **written}

    def integrate(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor, end: Tensor,
        state: State, cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """The trapezoidal rule as one linear attention: `q, k [B, T, H, K]`, `v [B, T, H, V]`, the rest `[B, T, H]`.

        What token t − 1 writes, at its own step's end and at the next one's beginning, enters at token t, scaled:

            W_t = α_t W_{t−1} + α_t (λ_{t−1} Δ_{t−1} + (1 − λ_t) Δ_t) k_{t−1} v_{t−1}ᵀ,   S_t = W_t + λ_t Δ_t k_t v_tᵀ

        Writing it at token t − 1 and taking off there what is too much would cost the same, but then rounding
        errors of t − 1 depend on token t: outputs would look ahead.

        So under GateRank a token enters the fast state with the token after it, after a reset there: it leaves with
        the next one. A piece's end then cannot be written ahead of its time either: what is missing is kept apart.
        """
        gain, two_states = end * step, self.gate_rank is not None
        # Without GateRank, a piece's memory holds its last token's first share already.
        before, last_gain = packing.delay(gain, state.get("gain") if two_states else None, cu_seqlens)
        k_before, key = packing.delay(k, state.get("key"), cu_seqlens)
        v_before, value = packing.delay(v, state.get("value"), cu_seqlens)
        weight = g.exp() * (before + (1 - end) * step)
        written = (weight.unsqueeze(-1) * k_before).to(v.dtype)
        y, kept = apply_update(
            self.gate_rank, x, q.to(v.dtype), written, v_before, g, None, state, cu_seqlens, scale=1,
            chunk_size=self.chunk_size, backend=self.backend,
        )  # fmt: skip
        kept |= {"key": key, "value": value}
        if two_states:
            kept["gain"] = last_gain
        else:
            last = (last_gain.unsqueeze(-1) * key).unsqueeze(-1) * value.unsqueeze(-2)
            kept["memory"] = kept["memory"] + last
        own = gain * (q * k).sum(-1)
        return torch.addcmul(y, own.unsqueeze(-1).to(v.dtype), v), kept


def running_angle(turns: Tensor, start: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums of `turns [B, T, H, P]` along each sequence from `start [N, H, P]` on, and each sequence's last one.

    Angles are in turns, of which whole ones are dropped exactly: nothing grows, whatever the length. The sums go
    chunk by chunk, each sequence in its own; differences of one sum over all would mix rounding errors of others in.
    """
    layout = make_layout(turns.shape[1], 64, cu_seqlens, turns.device)
    inside = layout.align(turns).unflatten(1, (layout.num_chunks, layout.chunk)).cumsum(2)
    bounds = None if cu_seqlens is None else F.pad(-(-cu_seqlens.diff() // layout.chunk).cumsum(0), (1, 0))
    totals = inside[:, :, -1]
    if layout.num_chunks > len(layout.first):  # a sequence has several
        totals, _ = running_angle(_drop_turns(totals), start, bounds)
    entering, _ = packing.delay(totals, start, bounds)
    angle = layout.restore(_drop_turns(inside + entering.unsqueeze(2)).flatten(1, 2))
    return angle, packing.delay(angle, start, cu_seqlens)[1]


def _drop_turns(angle: Tensor) -> Tensor:
    return angle - angle.round()
