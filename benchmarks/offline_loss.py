"""What the loss over a large vocabulary asks of a GPU, and the loss with all logits, counted without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from offline_models import BATCH, HIDDEN, LENGTH, counted, on_a_gpu
from torch import Tensor

VOCABULARIES = (32_000, 128_256)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def all_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def in_chunks(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from halflife.models import loss

    tokens = loss.tokens_at_once(len(weight), "cuda", hidden.dtype.itemsize)
    with mock.patch.object(loss, "tokens_at_once", return_value=tokens):
        return loss.ChunkedLoss.apply(hidden, weight, labels)


def rows(rates: dict[str, float]) -> dict[str, Any]:
    """Loss and vocabulary → figures of head, loss and gradients, in bfloat16 with float32 weights."""
    found: dict[str, Any] = {}
    for vocabulary in VOCABULARIES:
        for name, loss in (("all logits", all_logits), ("ours", in_chunks)):
            found[f"{name}, {vocabulary:,}"] = row(loss, vocabulary, rates)
    return found


def row(loss: Loss, vocabulary: int, rates: dict[str, float]) -> dict[str, Any]:
    hidden = torch.empty(BATCH * LENGTH, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(vocabulary, HIDDEN, device="meta", requires_grad=True)
    labels = torch.empty(BATCH * LENGTH, dtype=torch.long, device="meta")
    own = {x.untyped_storage()._cdata for x in (hidden, weight, labels)}
    with on_a_gpu():
        with counted(rates, own) as forward:
            value = loss(hidden, weight.to(hidden.dtype), labels)
        with counted(rates) as backward:
            value.backward()
    return {
        "launches": forward.launches + backward.launches, "bytes": forward.bytes + backward.bytes,
        "syncs": forward.syncs + backward.syncs, "saved_bytes": sum(forward.saved.values()),
        "predicted_ms": round(1e3 * (forward.seconds + backward.seconds), 1),
    }  # fmt: skip
