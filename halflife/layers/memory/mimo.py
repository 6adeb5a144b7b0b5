"""Mamba-3 MIMO: writes and reads of rank R, R keys, values and queries for each token and head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.layers.memory.choice import one_state
from halflife.layers.mixer import State
from halflife.ops import trapezoid
from halflife.packing import Packing
from halflife.precision import ROOMY, Float32Module


class MIMO(Float32Module):
    """The R values, gates and outputs of each head, and the trapezoidal rule on their sum.

        v_r = w^x_r ⊙ x,   S_t = α_t (S_{t−1} + (1 − λ_t) Δ_t Σ_r k_{t−1,r} v_{t−1,r}ᵀ) + λ_t Δ_t Σ_r k_{t,r} v_{t,r}ᵀ
        y_t = Σ_r w^o_r ⊙ (S_tᵀ q_{t,r} + D v_{t,r}) ⊙ silu(w^z_r ⊙ z_t)

    The R writes of a token are R rows of one linear attention, of which the first one decays. A query reads the rows up
    to its own, and products of R × R keys and queries add the others. Source: Lahoti et al. 2026, "Mamba-3", and its
    released code, with w^x = w^o = 1/R and w^z = 1 at the start.
    """

    pass_backend = "auto"  # see `parts.set_backend`

    def __init__(self, num_heads: int, rank: int, head_dim: int) -> None:
        super().__init__()
        self.mimo_rank = rank
        self.values, self.gates, self.outputs = (nn.Parameter(torch.empty(rank, num_heads, head_dim)) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.values, 1 / self.mimo_rank)
        nn.init.constant_(self.outputs, 1 / self.mimo_rank)
        nn.init.ones_(self.gates)

    def forward(
        self, x: Tensor, q: Tensor, k: Tensor, k_before: Tensor, v: Tensor, v_before: Tensor, z: Tensor, skip: Tensor,
        g: Tensor, weight: Tensor, gain: Tensor, last: tuple[Tensor, Tensor, Tensor], state: State, packing: Packing,
        norm: Callable[..., Tensor] | None = None, **options: Any,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """Compute the gated outputs of all heads.

        Args:
            x: input of the layer `[B, T, D]`.
            q, k: queries and keys `[B, T, R·H, K]`, all heads of the first of the R first.
            v, z: values and gates `[B, T, H, V]`.
            k_before, v_before: keys and values of the tokens before.
            skip: D, one per head.
            g, weight, gain: as in `integrate`.
            last: key `[N, R·H, K]`, value `[N, H, V]` and gain `[N, H]` of the last token of each sequence.
            state, packing: as in `Mixer.forward`.
            norm: `RMSNorm(y) ⊙ silu(z)` over each head, in the place of `y ⊙ silu(z)`, or None.
            **options: passed to the op.

        Returns:
            `y [B, T, H, V]`, and the new state `memory [N, H, K, V]`, `key [N, R·H, K]`, `value [N, H, V]`.
        """
        rank, room, (key, value, last_gain) = self.mimo_rank, ROOMY[v.dtype], last
        q_rows, k_rows = (part.unflatten(2, (rank, -1)).flatten(1, 2) for part in (q, k_before))
        v_rows = (v_before.unsqueeze(2) * self.values.to(v.dtype)).flatten(1, 2)
        decays = F.pad(g.unsqueeze(2), (0, 0, 0, rank - 1)).flatten(1, 2)  # rows after the first do not decay
        y, memory = one_state(
            x, q_rows, k_rows, v_rows, decays, None, state, packing.repeated(rank),
            gain=weight.unsqueeze(2).expand(-1, -1, rank, -1).flatten(1, 2), scale=1, **options,
        )  # fmt: skip

        queries, keys, keys_before = (part.unflatten(2, (rank, -1)) for part in (q, k, k_before))
        later, now = trapezoid.mimo_products(queries, keys, keys_before, weight, gain, skip, self.pass_backend)
        y = y.unflatten(1, (-1, rank))
        if norm is None:
            y = trapezoid.mimo_output(
                y, later, now, v_before.to(room), v.to(room), z.to(room), self.values, self.gates, self.outputs,
                self.pass_backend,
            )  # fmt: skip
        else:  # all heads of one of the R outputs in a row
            y = trapezoid.add_ranks(y, later, now, v_before.to(room), v.to(room), self.values)
            z = self.gates.to(v.dtype) * z.unsqueeze(2)
            y = (self.outputs.to(v.dtype) * norm(y.flatten(3), z.flatten(3)).view_as(y)).sum(2)

        keys = last_gain[:, None, :, None] * key.unflatten(1, (rank, -1))
        values = self.values.to(last_gain) * value.unsqueeze(1)
        written = (keys.unsqueeze(-1) * values.unsqueeze(-2)).sum(1)  # products of matrices would round under autocast
        return y, {"memory": memory["memory"] + written, "key": key, "value": value}
