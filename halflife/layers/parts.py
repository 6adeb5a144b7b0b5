"""Norms, gates and the short convolution that mixers share."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.ops import causal_conv1d
from halflife.precision import compute_dtype


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / √(‖x‖² + eps)` over the last axis, in float32; zero vectors stay zero, with finite gradients."""
    wide = x.to(compute_dtype(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """Mamba-2's output norm `RMSNorm(y ⊙ silu(z)) ⊙ weight` over groups of channels; without z, `RMSNorm(y) ⊙ weight`.

    Args:
        size: channels D of `y, z [B, T, D]`.
        groups: number of equal groups of channels; each group has its own mean square.
        eps: added to the mean square.
    """

    def __init__(self, size: int, groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, y: Tensor, z: Tensor | None = None) -> Tensor:
        gated = (y if z is None else y * F.silu(z)).unflatten(-1, (self.groups, -1))
        return F.rms_norm(gated, gated.shape[-1:], eps=self.eps).flatten(-2) * self.weight


class HeadwiseGate(nn.Module):
    """`RMSNorm(o) ⊙ silu(x W)` with the norm over each head, the output gate of GLA, RetNet and Gated DeltaNet."""

    def __init__(self, hidden_size: int, num_heads: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(value_dim, eps=eps)
        self.proj = nn.Linear(hidden_size, num_heads * value_dim, bias=False)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        """`o [B, T, H, V]`, `x [B, T, D]` → `[B, T, H·V]`."""
        return self.norm(o).flatten(-2) * F.silu(self.proj(x))


class LowRankGate(nn.Module):
    """`RMSNorm(o ⊙ σ(x W₁ W₂))` with the norm over all heads, the output gate of the Decay Linear Transformer."""

    def __init__(self, hidden_size: int, num_heads: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(num_heads * value_dim, eps=eps)
        self.down = nn.Linear(hidden_size, hidden_size // num_heads, bias=False)
        self.up = nn.Linear(hidden_size // num_heads, num_heads * value_dim, bias=False)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        """`o [B, T, H, V]`, `x [B, T, D]` → `[B, T, H·V]`."""
        return self.norm(o.flatten(-2) * self.up(self.down(x)).sigmoid())


class DecayProjection(nn.Module):
    """The projection to the activation f of a decay. For a vector decay it may have low rank.

    Args:
        hidden_size: D of the input.
        shape: shape of one token's log-decays, `(H,)` or `(H, K)`.
        rank: rank of the projection for a vector decay; None for full rank.
        bias: whether the last map has a bias.
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


class ShortConv(nn.Module):
    """Causal depthwise convolution with W taps and SiLU. Its state is the last W − 1 inputs `[B, D, W − 1]`."""

    def __init__(self, channels: int, size: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.size)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """`x [B, T, D]` → `(y [B, T, D], state)`."""
        y, state = causal_conv1d(
            x, self.weight, self.bias, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens
        )
        assert state is not None
        return y, state
