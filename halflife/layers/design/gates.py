"""The outputs of the design-space block: a norm, over each head or all, with a gate before or after it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halflife.layers.parts import RMSNorm
from halflife.ops import fused
from halflife.precision import ROOMY


class NormThenSwish(RMSNorm):
    """`RMSNorm(o) ⊙ silu(z)` with the norm over each head."""

    gate_kind = "silu_after"

    def forward(self, o: Tensor, z: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`o [B, T, H, V]`, `z [B, T, H·V]` → `[B, T, H·V]`."""
        assert self.eps is not None
        y = fused.gated_head_norm(o, z.to(ROOMY[z.dtype]), self.weight, self.eps, self.pass_backend)
        return y.half() if z.dtype == torch.float16 else y


class NormThenSigmoid(RMSNorm):
    """`RMSNorm(o) ⊙ σ(z)` with the norm over each head."""

    gate_kind = "sigmoid_after"

    def forward(self, o: Tensor, z: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`o [B, T, H, V]`, `z [B, T, H·V]` → `[B, T, H·V]`."""
        assert self.eps is not None
        return fused.gated_head_norm(o, z, self.weight, self.eps, self.pass_backend, "sigmoid")


class SigmoidThenNorm(RMSNorm):
    """`RMSNorm(o ⊙ σ(z))` over all heads."""

    gate_kind = "sigmoid_before"

    def forward(self, o: Tensor, z: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`o, z [B, T, H·V]` → `[B, T, H·V]`."""
        assert self.eps is not None
        y = fused.rms_norm_of_sigmoid_gated(o, z.to(ROOMY[z.dtype]), self.weight, self.eps, self.pass_backend)
        return y.half() if z.dtype == torch.float16 else y


class OutputGate(nn.Module):
    """`norm(o, z)` with the `logits` z of the input: `o [B, T, H, V]`, `x [B, T, D]` → `[B, T, H·V]`."""

    norm: RMSNorm
    over_all = False  # whether the norm is over all heads

    def logits(self, x: Tensor) -> Tensor:
        """`x [B, T, D]` → `[B, T, H·V]`."""
        raise NotImplementedError

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        return self.norm(o.flatten(-2) if self.over_all else o, self.logits(x))


class HeadwiseGate(OutputGate):
    """`RMSNorm(o) ⊙ silu(x W)` with the norm over each head, the output gate of GLA, RetNet and Gated DeltaNet."""

    of_norm: type[RMSNorm] = NormThenSwish

    def __init__(self, hidden_size: int, num_heads: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = self.of_norm(value_dim, eps=eps)
        self.proj = nn.Linear(hidden_size, num_heads * value_dim, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        return self.proj(x)


class SigmoidGate(HeadwiseGate):
    """`RMSNorm(o) ⊙ σ(x W)` with the norm over each head, Comba's output gate."""

    of_norm = NormThenSigmoid


class LowRankGate(OutputGate):
    """`RMSNorm(o ⊙ σ(x W₁ W₂))` with the norm over all heads, the output gate of the Decay Linear Transformer."""

    over_all = True

    def __init__(self, hidden_size: int, num_heads: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = SigmoidThenNorm(num_heads * value_dim, eps=eps)
        self.down = nn.Linear(hidden_size, hidden_size // num_heads, bias=False)
        self.up = nn.Linear(hidden_size // num_heads, num_heads * value_dim, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class LowRankSigmoidGate(OutputGate):
    """`RMSNorm(o) ⊙ σ(x W₁ W₂ + b)` of rank V with the norm over each head, the output gate of KDA."""

    def __init__(self, hidden_size: int, num_heads: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = NormThenSigmoid(value_dim, eps=eps)
        self.down = nn.Linear(hidden_size, value_dim, bias=False)
        self.up = nn.Linear(value_dim, num_heads * value_dim)

    def logits(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class HeadRMSNorm(RMSNorm):
    """`RMSNorm(o)` over each head, in the place of an output gate."""

    over_all = False

    def __init__(self, hidden_size: int, num_heads: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__(value_dim, eps=eps)

    @property
    def norm(self) -> HeadRMSNorm:
        return self

    def logits(self, x: Tensor) -> None:
        """There is no gate."""

    def forward(self, o: Tensor, x: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`o [B, T, H, V]` → `[B, T, H·V]`; x is not used."""
        return super().forward(o).flatten(-2)


GATES = {
    "low_rank": LowRankGate, "swish": HeadwiseGate, "sigmoid": SigmoidGate, "low_rank_sigmoid": LowRankSigmoidGate,
    "none": HeadRMSNorm,
}  # fmt: skip
