"""Log-linear attention in a layer: the weights of its levels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.layers.mixer import State
from halflife.ops import log_linear_attention
from halflife.ops.arguments import is_traced
from halflife.ops.fused import scale_heads
from halflife.packing import Packing
from halflife.precision import ROOMY, Float32Module, compute_dtype


class LevelScale(Float32Module):
    """`w = softplus(c ⊙ f)`, with a factor c for each head and level that starts at 1."""

    def __init__(self, num_heads: int, num_levels: int) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.empty(num_heads, num_levels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.c)

    def forward(self, f: Tensor) -> Tensor:
        """`f, w [B, T, H, L]`."""
        f = f.to(compute_dtype(f))
        return F.softplus(self.c.to(f.dtype) * f)


class LogLinear(nn.Module):
    """`ops.log_linear_attention` in a mixer. The weights of the levels depend on the input, w = softplus(c ⊙ x W).

    Source: Guo et al. 2025, "Log-Linear Attention", §3.4, and its released code.

    Args:
        num_levels: L. The last level also holds the tokens of all higher ones. T tokens have log2 T + 1 levels. A head
            stores L − 1 states at most. On a CPU it stores those that can have content, which are as many as the
            position has binary digits. Elsewhere, and in compiled code, a shape cannot depend on the position.
    """

    reads_longest = loops_over_length = True  # see `models.compiled`
    pass_backend = "auto"  # see `parts.set_backend`
    all_levels = False  # whether all L − 1 states are stored, also on a CPU; `halflife.export` sets it

    def __init__(self, hidden_size: int, num_heads: int, *, num_levels: int = 16) -> None:
        super().__init__()
        if num_levels < 2:
            raise ValueError(f"num_levels must be at least 2, the token itself and all others; got {num_levels}")
        self.proj = nn.Linear(hidden_size, num_heads * num_levels, bias=False)
        self.scale = LevelScale(num_heads, num_levels)
        self.num_heads, self.num_levels = num_heads, num_levels

    def weights(self, x: Tensor) -> Tensor:
        """The weights of the levels at each token of `x [B, T, D]`, `[B, T, H, L]`."""
        return self.scale(self.proj(x).unflatten(-1, (self.num_heads, -1)))

    def forward(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: State,
        packing: Packing, gain: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """Run the op on `q, k, gain ⊙ v, g`, with the weights of the levels computed from `x [B, T, D]`.

        Returns:
            `o [B, T, H, V]` and the new state `memory [N, H, L − 1, K, V]`, or with fewer levels (see `num_levels`).
        """
        count, initial = self._num_states(x, state, packing), None
        if (memory := state.get("memory")) is not None:
            if memory.shape[2] < count:
                memory = F.pad(memory, (0, 0, 0, 0, 0, count - memory.shape[2]))
            initial = memory, state["position"]
        v = v.to(ROOMY[v.dtype])
        v = v if gain is None else scale_heads(v, gain, self.pass_backend)
        o, final = log_linear_attention(
            q, k, v, g, self.weights(x)[..., : count + 1], initial_state=initial,
            output_final_state=True, cu_seqlens=packing, **options,
        )  # fmt: skip
        assert final is not None
        return o, {"memory": final[0]}

    def _num_states(self, x: Tensor, state: State, packing: Packing) -> int:
        """The states that have content after `x`, or all L − 1 (see `num_levels`); not fewer than `state` holds."""
        if self.all_levels or not x.is_cpu or is_traced(x):
            return self.num_levels - 1
        ends = packing.lengths(x.device) + state.get("position", 0)
        digits = int(ends.max()).bit_length() if len(ends) else 0
        held = state["memory"].shape[2] if "memory" in state else 1
        return max(held, min(self.num_levels - 1, digits))
