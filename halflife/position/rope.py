"""Rotary position embedding (Su et al. 2021): queries and keys are rotated by angles that grow with the position."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, position: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate the pairs (i, i + K/2) of each head by `t · base^{−2i/K}`. Products then depend on `t_q − t_k` alone.

    Args:
        x: queries or keys `[B, T, H, K]`, K even.
        position: `[T]` or `[B, T]`.
        base: base of the geometric frequencies.

    Returns:
        The rotated `[B, T, H, K]`, in x's dtype (angles and products in float32 or wider).

    Raises:
        ValueError: K is odd, so that one channel has no partner.
    """
    check_pairs(x.shape[-1])
    half, wide = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    frequency = base ** (-torch.arange(half, device=x.device, dtype=wide) / half)
    return rotate(x, (position.to(wide).unsqueeze(-1) * frequency).unsqueeze(-2))


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate the pairs (i, i + P) of the first 2P channels by the given angles. The other channels do not change.

    Args:
        x: `[B, T, H, K]`.
        angle: angles in radians `[…, P]`, float32 or wider, P ≤ K/2. The other axes broadcast against those of x.

    Returns:
        The rotated `[B, T, H, K]` in x's dtype; products are computed in the wider dtype.
    """
    pairs, wide = angle.shape[-1], torch.promote_types(x.dtype, angle.dtype)
    first, second, rest = x.to(wide).tensor_split([pairs, 2 * pairs], -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


def check_pairs(head_dim: int) -> None:
    """Raise a ValueError if the channels do not pair up. Layers call this when they are built."""
    if head_dim % 2:
        raise ValueError(f"RoPE rotates pairs of channels, so the head size must be even; got {head_dim}")
