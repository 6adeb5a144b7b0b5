"""Padded batches as packed ones, and back."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def unpad(x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pack a padded batch, row after row.

    Args:
        x: `[B, T, …]`.
        attention_mask: `[B, T]`, 1 for tokens and 0 for padding, which may stand anywhere.

    Returns:
        `(packed [1, tokens, …], cu_seqlens [B + 1], index [tokens])`. `repad` reverses this.
    """
    if attention_mask.shape != x.shape[:2]:
        raise ValueError(f"attention_mask must be [B, T] = {tuple(x.shape[:2])}; got {tuple(attention_mask.shape)}")
    mask = attention_mask.bool()
    index = mask.flatten().nonzero().squeeze(1)
    return x.flatten(0, 1).index_select(0, index).unsqueeze(0), F.pad(mask.sum(1).cumsum(0), (1, 0)), index


def repad(packed: Tensor, index: Tensor, batch: int, length: int) -> Tensor:
    """Undo `unpad`: `[1, tokens, …]` → `[B, T, …]`, with zeros at the padding."""
    rows = packed.new_zeros(batch * length, *packed.shape[2:])
    return rows.index_copy(0, index, packed[0]).unflatten(0, (batch, length))
