"""Mamba-3's trapezoidal rule, and the running angles of its rotation."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.layers.memory.choice import Memory, one_state
from halflife.layers.mixer import State
from halflife.ops.chunked.layout import make_layout
from halflife.packing import Packing
from halflife.position import turn
from halflife.precision import wide


def integrate(
    memory: Memory, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor, end: Tensor,
    state: State, packing: Packing, **options: Any,
) -> tuple[Tensor, State]:  # fmt: skip
    """Compute the trapezoidal rule as one linear attention.

    Token t − 1 writes at the end of its step and at the beginning of the next one. Both writes are added together at
    token t:

        W_t = α_t W_{t−1} + α_t (λ_{t−1} Δ_{t−1} + (1 − λ_t) Δ_t) k_{t−1} v_{t−1}ᵀ,   S_t = W_t + λ_t Δ_t k_t v_tᵀ

    They could be written at token t − 1 at the same cost and corrected there. Then the rounding errors of t − 1 would
    depend on token t, and outputs would look ahead.

    Under GateRank, token t − 1 therefore enters the fast state at token t, after a reset at t. It moves to the slow
    state at the next reset. The write of the last token of a piece is stored apart in the state (`gain`).

    Args:
        memory: one state, or the layer's GateRank.
        x, q, k, v: inputs of the layer `[B, T, D]`, queries and keys `[B, T, H, K]`, values `[B, T, H, V]`.
        g, step, end: log-decay g, step size Δ and share λ, each `[B, T, H]`.
        state, packing: as in `Mixer.forward`.
        **options: passed to the op.
    """
    gain, two_states = end * step, memory is not one_state
    # Without GateRank, the memory of a piece already holds the first write of its last token.
    before, last_gain = packing.delay(gain, state.get("gain") if two_states else None)
    k_before, key = packing.delay(k, state.get("key"))
    v_before, value = packing.delay(v, state.get("value"))
    weight = g.exp() * (before + (1 - end) * step)
    written = (weight.unsqueeze(-1) * k_before).to(v.dtype)
    y, new = memory(x, q.to(v.dtype), written, v_before, g, None, state, packing, scale=1, **options)
    new |= {"key": key, "value": value}
    if two_states:
        new["gain"] = last_gain
    else:
        last = (last_gain.unsqueeze(-1) * key).unsqueeze(-1) * value.unsqueeze(-2)
        new["memory"] = new["memory"] + last
    current = gain * (q * k).sum(-1)
    return torch.addcmul(y, current.unsqueeze(-1).to(y.dtype), v.to(y.dtype)), new


def turn_both(q: Tensor, k: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the same angles, in turns of 2π."""
    angle = 2 * math.pi * turns
    cos, sin = angle.cos(), angle.sin()
    return turn(q, cos, sin), turn(k, cos, sin)


def running_angle(turns: Tensor, start: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
    """Running sums of `turns [B, T, H, P]` along each sequence from `start [N, H, P]` on, and each sequence's last sum.

    Angles are in turns of 2π. Whole turns are subtracted exactly, so angles stay small at any length. The sums go chunk
    by chunk and separately for each sequence. Differences of one sum over all packed sequences would mix the rounding
    errors of other sequences in. The sums and the last ones are float64, because equal steps round to the same side.
    """
    sums, last = _running_sums(wide(turns), start, packing)
    return sums.to(turns.dtype), last


def _running_sums(turns: Tensor, start: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
    layout = make_layout(packing, 64, turns.device)
    inside = layout.align(turns).unflatten(1, (layout.num_chunks, layout.chunk)).cumsum(2)
    bounds = packing.cu_seqlens
    if bounds is not None:
        bounds = F.pad(-(-bounds.diff() // layout.chunk).cumsum(0), (1, 0))
    chunks = Packing(packing.batch, layout.num_chunks, bounds)
    totals = inside[:, :, -1]
    if layout.num_chunks > len(layout.first):  # a sequence has several chunks
        totals, _ = _running_sums(_drop_turns(totals), start, chunks)
    entering, _ = chunks.delay(totals, start)
    angle = layout.restore(_drop_turns(inside + entering.unsqueeze(2)).flatten(1, 2))
    return angle, packing.delay(angle, start)[1]


def _drop_turns(angle: Tensor) -> Tensor:
    return angle - angle.round()
