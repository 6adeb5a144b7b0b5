"""Linearised relative position embedding (Qin et al. 2023): a cosine of the distance, split between query and key."""

from __future__ import annotations

import torch
from torch import Tensor

from halflife.position.rope import angles, spread
from halflife.precision import compute_dtype


def lrpe(x: Tensor, position: Tensor, base: float = 10_000.0) -> Tensor:
    """Map x to `[x cos tθ, x sin tθ]`, twice the channels. Products become `Σ q_i k_i cos((t_q − t_k) θ_i)`.

    Args:
        x: queries or keys `[B, T, H, K]`.
        position: `[T]` or `[B, T]`.
        base: channel i of head j has the frequency `base^{−(j K + i) / (H K)}`, so each head covers another band.

    Returns:
        `[B, T, H, 2 K]` in x's dtype (angles and products in float32 or wider).

    Source: Decay, §2.2.
    """
    heads, channels = x.shape[-2:]
    exponent = spread(heads * channels, heads * channels, x.device).view(heads, channels)
    angle = angles(position, base, exponent, compute_dtype(x))
    return torch.cat([x * angle.cos(), x * angle.sin()], -1).to(x.dtype)


def half_lrpe(x: Tensor, position: Tensor, base: float = 10_000.0) -> Tensor:
    """Encode the first half of the channels by LRPE and leave the rest, `[x₁ cos tθ, x₁ sin tθ, x₂]`.

    Args:
        x: queries or keys `[B, T, H, K]`. ⌊K/2⌋ channels are encoded.
        position: `[T]` or `[B, T]`.
        base: channel i of each head has the frequency `base^{−2 i / K}`.

    Returns:
        `[B, T, H, ⌊K/2⌋ + K]` in x's dtype (angles and products in float32 or wider).

    Source: the RoPE rows of the Decay paper as its authors ran them.
    """
    half = x.shape[-1] // 2
    angle = angles(position, base, spread(half, half, x.device), compute_dtype(x)).unsqueeze(-2)
    encoded, rest = x[..., :half], x[..., half:]
    return torch.cat([encoded * angle.cos(), encoded * angle.sin(), rest], -1).to(x.dtype)
