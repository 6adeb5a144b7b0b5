"""Mamba-3's trapezoidal rule as one linear attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halflife.layers.memory.choice import Memory, one_state
from halflife.layers.mixer import State
from halflife.ops.trapezoid import trapezoid_output
from halflife.packing import Packing


def integrate(
    memory: Memory, x: Tensor, q: Tensor, k_before: Tensor, v: Tensor, g: Tensor, v_before: Tensor, weight: Tensor,
    gain: Tensor, dot: Tensor, state: State, packing: Packing, skip: Tensor | None = None, z: Tensor | None = None,
    pass_backend: str = "auto", **options: Any,
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
        x: input of the layer `[B, T, D]`.
        q, v: queries `[B, T, H, K]` and values `[B, T, H, V]`.
        k_before, v_before: keys and values of the tokens before.
        g, weight, gain: log-decay g, and the factors of k_{t−1} v_{t−1}ᵀ in W_t and of k_t v_tᵀ, each `[B, T, H]`.
        dot: products of each token's query and key `[B, T, H]`.
        state, packing: as in `Mixer.forward`.
        skip, z: D and the gate, as in `trapezoid_output`.
        pass_backend: backend of `trapezoid_output`.
        **options: passed to the op.

    Returns:
        `[B, T, H·V]`, and the new states of the memory, without the write of the last token.
    """
    y, new = memory(x, q, k_before, v_before, g, None, state, packing, gain=weight, scale=1, **options)
    return trapezoid_output(y, v, dot, gain, skip, z, pass_backend), new


def with_last(memory: Memory, new: State, key: Tensor, value: Tensor, gain: Tensor) -> State:
    """The new state with the last token of each sequence; without GateRank its memory has the first write."""
    if memory is not one_state:
        return {**new, "key": key, "value": value, "gain": gain}
    state = new["memory"]
    written = (gain.unsqueeze(-1) * key).to(state.dtype).unsqueeze(-1)
    state = torch.addcmul(state, written, value.to(state.dtype).unsqueeze(-2))
    return {**new, "memory": state, "key": key, "value": value}
