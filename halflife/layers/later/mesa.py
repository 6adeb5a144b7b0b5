"""MesaNet's layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.layers.later.delta import fix_options
from halflife.layers.mixer import LAYERS, LinearMixer, State
from halflife.layers.parts import ShortConv
from halflife.ops import ridge_attention
from halflife.packing import Packing
from halflife.precision import Float32Module, inverse_softplus_of


class KeyConv(ShortConv):
    """A short convolution on the first channels, those of q and k. The others pass unchanged."""

    def forward(self, x: Tensor, state: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
        convolved, others = x.tensor_split([len(self.weight)], -1)
        convolved, state = super().forward(convolved, state, packing)
        return torch.cat([convolved, others], -1), state


class Ridge(Float32Module):
    """`λ = softplus(l) + λ_min`, one a head and key channel, 1 at the start."""

    def __init__(self, num_heads: int, head_dim: int, smallest: float) -> None:
        super().__init__()
        if not 0 < smallest < 1:
            raise ValueError(f"smallest_ridge must lie between 0 and 1, where the ridge starts; got {smallest}")
        self.smallest = smallest
        self.logit = nn.Parameter(torch.empty(num_heads, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.logit, inverse_softplus_of(1 - self.smallest))

    def forward(self) -> Tensor:
        """`[H, K]`."""
        return F.softplus(self.logit) + self.smallest


@LAYERS.add("mesa")
class MesaNet(LinearMixer):
    """MesaNet (von Oswald et al. 2025): ridge regression on all tokens so far, solved at every token.

        G_t = e^{g_t} G_{t−1} + β_t k_t k_tᵀ,   C_t = e^{g_t} C_{t−1} + β_t v_t k_tᵀ,   o_t = C_t (G_t + Λ)⁻¹ q_t

    `g = logsigmoid(x W_g + b)` and `β = σ(x W_β + b)`, one a head. Queries and keys go through a short convolution with
    SiLU and have norm 1, and values do not. The output is `RMSNorm(o) W_o` with the norm over each head, and with
    `gate="swish"` gated. This is the design-space block with another op, and `options` are `LinearMixer`'s.
    The state holds `gram [N, H, K, K]`, `memory [N, H, K, V]` and the convolution's last inputs.
    Source: its §3 and fla's layer of that name.

    Args:
        hidden_size: D.
        num_heads: H.
        smallest_ridge: λ_min.
        iterations, tolerance: of conjugate gradients, see `ops.ridge_attention`.
        options: those of `LinearMixer`.
    """

    def __init__(
        self, hidden_size: int, num_heads: int = 4, *, smallest_ridge: float = 0.25, iterations: int = 30,
        tolerance: float = 1e-6, **options: Any,
    ) -> None:  # fmt: skip
        fast = {"decay_options": {"tau": 1.0}} if options.get("decay", "gla") == "gla" else {}
        defaults = {
            "decay": "gla", **fast, "conv_size": 4, "gate": "none", "decay_bias": True,
            "decay_rank": 0,
        }  # fmt: skip
        fixed = fix_options("MesaNet", options, granularity="scalar", update="delta", gate_rank=None)
        chosen = {**defaults, **fixed}
        if chosen["decay"] is None:
            raise ValueError("MesaNet needs a decay; got None")
        super().__init__(hidden_size, num_heads, **chosen)
        self.beta_proj = nn.Linear(hidden_size, num_heads, bias=True)
        if self.conv is not None:
            self.conv = KeyConv(sum(self.splits[:2]), self.conv.size)
        more = {"lrpe": self.head_dim, "half_lrpe": self.head_dim // 2}.get(self.position, 0)
        self.ridge = Ridge(num_heads, self.head_dim + more, smallest_ridge)
        self.solver = {"iterations": iterations, "tolerance": tolerance}

    def update_state(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: State, packing: Packing
    ) -> tuple[Tensor, State]:
        assert g is not None
        assert self.beta_proj is not None
        initial = (state["gram"], state["memory"]) if "gram" in state else None
        o, sums = ridge_attention(
            q, k, v, g, self.beta_scale * self.beta_proj(x).sigmoid(), self.ridge().to(g.dtype), initial_state=initial,
            output_final_state=True, cu_seqlens=packing, chunk_size=self.chunk_size, backend=self.backend,
            **self.solver,
        )  # fmt: skip
        assert sums is not None
        return o, {"gram": sums[0], "memory": sums[1]}
