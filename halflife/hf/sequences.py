"""Where sequences begin and end, in the arguments that transformers and its collators have for it."""

from __future__ import annotations

import torch
from torch import Tensor

# Keyword arguments that change nothing in a recurrent model: lengths that follow from the boundaries, switches of other
# models' caches and outputs, and ids of segments that no embedding reads.
IGNORED = frozenset({
    "max_length_q", "max_length_k", "cache_position", "return_dict", "output_router_logits", "token_type_ids",
    "tokenizer", "stop_strings", "is_first_iteration",
})  # fmt: skip


def boundaries(shape: tuple[int, int], mask: Tensor | None, given: dict[str, Tensor | None]) -> Tensor | None:
    """Return the boundaries `[N + 1]` of the sequences in all rows after one another, or None if a row is a sequence.

    Args:
        shape: B and T.
        mask: `[B, T]`, false at padding, which is left out; None if there is none.
        given: `position_ids [B, T]` or `[1, T]`, `seq_idx [B, T]`, `cu_seqlens`, `cu_seq_lens_q` and `cu_seq_lens_k`
            `[N + 1]`; None is not given.

    Raises:
        ValueError: a shape does not fit, a position is neither the one before plus 1 nor a new start, or two arguments
            contradict each other.
    """
    found: dict[str, Tensor] = {}
    for name, x in given.items():
        if x is None or (name in ("position_ids", "seq_idx") and shape[1] == 1):
            continue
        if name in ("position_ids", "seq_idx"):
            if (bounds := _starts(name, x, shape, mask)) is not None:
                found[name] = bounds
        elif mask is not None:
            raise ValueError(f"give {name} (packed) or an attention_mask with padding, not both")
        else:
            found[name] = x
    if not found:
        return None
    (first, bounds), *others = found.items()
    for name, other in others:
        if bounds.tolist() != other.tolist():
            raise ValueError(f"{first} and {name} contradict each other: {bounds.tolist()} and {other.tolist()}")
    return bounds


def _starts(name: str, x: Tensor, shape: tuple[int, int], mask: Tensor | None) -> Tensor | None:
    """The boundaries that positions or numbers of sequences say; None if there are none within a row."""
    if x.ndim != 2 or x.shape[1] != shape[1] or x.shape[0] not in (1, shape[0]):
        raise ValueError(f"{name} must be [B, T] = {list(shape)} or [1, T]; got {list(x.shape)}")
    kept = torch.ones(shape, dtype=torch.bool, device=x.device) if mask is None else mask.to(x.device)
    x, row = x.expand(shape)[kept], torch.arange(shape[0], device=x.device).unsqueeze(1).expand(shape)[kept]
    step, same_row = x.diff(), row.diff() == 0
    starts = step != 0 if name == "seq_idx" else step <= 0
    if name == "position_ids" and (same_row & (step > 1)).any():
        raise ValueError("position_ids must count on by one within a sequence: a recurrence reads no other positions")
    if not (starts & same_row).any():
        return None
    ends = (starts | ~same_row).nonzero().flatten() + 1
    return torch.cat([ends.new_zeros(1), ends, ends.new_tensor([len(x)])])


def check_others(others: dict[str, object]) -> None:
    """Check keyword arguments that the model does not know.

    Raises:
        TypeError: one may change what the call means.
    """
    unknown = [name for name, x in others.items() if name not in IGNORED and x is not None]
    if unknown:
        raise TypeError(f"unknown keyword arguments of the forward pass: {', '.join(sorted(unknown))}")
