"""Padding, packing and positions of sequences, for all layers."""

from __future__ import annotations

import torch
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


def sequence_of_token(length: int, cu_seqlens: Tensor) -> Tensor:
    """The sequence to which each packed token belongs: `[T]`."""
    sequences = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    return sequences.repeat_interleave(cu_seqlens.diff(), output_size=length)


def positions(x: Tensor, start: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The positions of the tokens of `x [B, T, …]`, from 1, `[T]` or `[B, T]`.

    They continue from `start [N]`, the number of tokens that each sequence has seen (None: 0). Each packed sequence has
    its own positions.
    """
    length = x.shape[1]
    count = torch.arange(1, length + 1, device=x.device)
    if cu_seqlens is not None:
        sequence = sequence_of_token(length, cu_seqlens)
        offset = -cu_seqlens[:-1] if start is None else start - cu_seqlens[:-1]
        return (count + offset[sequence]).unsqueeze(0)
    return count if start is None else count + start.unsqueeze(1)


def lengths(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The number of tokens of each sequence in `x [B, T, …]`: `[N]`."""
    if cu_seqlens is not None:
        return cu_seqlens.diff()
    return torch.full((x.shape[0],), x.shape[1], device=x.device)


def delay(x: Tensor, first: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the entry before each entry of `x [B, T, …]`, and the last entry of each sequence `[N, …]`.

    `first [N, …]` (None: zeros) stands before the first entry of each sequence. For an empty sequence it is also the
    last entry.
    """
    sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    first = x.new_zeros(sequences, *x.shape[2:]) if first is None else first.to(x.dtype)
    if cu_seqlens is None:
        joined = torch.cat([first.unsqueeze(1), x], 1)
        return joined[:, :-1], joined[:, -1]
    length = x.shape[1]
    token, sequence = torch.arange(length, device=x.device), sequence_of_token(length, cu_seqlens)
    row = length + torch.arange(sequences, device=x.device)  # the row of `first` in `joined` below
    before = torch.where(token == cu_seqlens[sequence], row[sequence], token - 1)
    last = torch.where(cu_seqlens.diff() > 0, cu_seqlens[1:] - 1, row)
    joined = torch.cat([x[0], first])
    return joined.index_select(0, before).unsqueeze(0), joined.index_select(0, last)
