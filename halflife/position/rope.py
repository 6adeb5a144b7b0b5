"""Rotary position embedding (Su et al. 2021): queries and keys are rotated by angles that grow with the position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halflife.precision import compute_dtype, wide


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
    half = x.shape[-1] // 2
    return rotate(x, angles(position, base, spread(half, half, x.device), compute_dtype(x)).unsqueeze(-2))


def angles(position: Tensor, base: float, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `t · base^{−exponent}` modulo 2π, between −π and π.

    Products and whole turns are float64, so that the error is that of rounding to `dtype` at any position. In float32
    an angle at a million tokens would be wrong by 0.03 (and it is on Apple's MPS, which has no float64).

    Args:
        position: positions t `[…]`.
        base: base of the geometric frequencies.
        exponent: exponents `[…]`, one per channel (see `spread`).
        dtype: dtype of the result.

    Returns:
        The angles, with the axes of `position` before those of `exponent`.
    """
    angle = wide(position)[(..., *(None,) * exponent.ndim)] * base**-exponent
    return torch.remainder(angle + math.pi, 2 * math.pi).sub(math.pi).to(dtype)


def spread(count: int, size: int, device: torch.device) -> Tensor:
    """Return `[0, 1, …, count − 1] / size` in float64."""
    return wide(torch.arange(count, device=device)) / max(size, 1)


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
