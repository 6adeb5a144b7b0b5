"""The cross-entropy of a language model's head, without the logits of all tokens at once.

The logits of 8 × 1,024 tokens over a vocabulary of 128,256 are 4.2 GB of float32, and their gradient as much again. The
functions here hold the logits of one chunk of tokens. A chunk's part of the gradients is computed in the forward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halflife.ops.backends.widened import product, times
from halflife.ops.cross_entropy import cross_entropy, losses_and_errors, takes_place
from halflife.ops.linear import weight_of
from halflife.precision import compute_dtype, lacks_products, product_dtype
from halflife.tasks import IGNORED

LOGITS = 1 << 24  # logits that are held at once: 64 MiB of float32
# A GPU reads the head and adds to its gradient once a chunk (2 GB of a vocabulary of 128,256 and a width of 1,024),
# which products with fewer tokens do not hide. So it holds 512 MiB of float32 logits beside what torch makes of them,
# or 1 GiB of logits whose gradients take their place.
GPU_LOGITS, IN_PLACE = 1 << 27, 1 << 30
# A CPU is fastest with logits that its cache holds (8 MiB), but a large head is to be read for many tokens at once.
CACHED_LOGITS, MANY_TOKENS = 1 << 21, 512


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden weightᵀ`, `[…, D]` and `[V, D]` → `[…, V]`, for a weight that is read beside its module.

    Raises:
        ValueError: the weight is elsewhere, for example offloaded. torch itself would return memory as it finds it.
    """
    if weight.device != hidden.device:
        raise ValueError(
            f"the weight of the head is on {weight.device} and not on {hidden.device}; to offload a tied head, use "
            "halflife.hf, or tie_embeddings=False"
        )
    return product(hidden, weight)


def mean_loss(hidden: Tensor, head: Tensor | nn.Module, labels: Tensor, backend: str = "auto") -> Tensor:
    """The mean cross-entropy in nats of `softmax(hidden weightᵀ)`, with gradients.

    The logits of few tokens are computed at once, and more by `ChunkedLoss`, whose gradients cannot be differentiated
    again. `torch.nn.functional.linear_cross_entropy` of torch 2.13 is not used: on a CPU its chunks take 5 to 13 times
    as long, and for bfloat16 its loss is off by 15 % (docs/benchmarks.md).

    Args:
        hidden: `[N, D]`. Under autocast, the products have its precision.
        head: the weight of the head, `[V, D]`, or the head itself. One that is no plain `nn.Linear` without hooks (an
            adapter or a quantised map) is called, and its logits are computed again in the backward pass.
        labels: `[N]`, int64; those of −100 count for nothing. Without any other the loss is 0.
        backend: of the loss from logits, see `ops.cross_entropy`.
    """
    hidden, labels = _scored(hidden, labels)
    weight = _plain_weight(head)
    if weight is None:
        return _recomputed_loss(hidden, head, labels, backend)
    if len(hidden) <= min(tokens_at_once(len(weight), hidden.device.type), max(1, LOGITS // len(weight))):
        return _sum_of_losses(logits_of(hidden, weight), labels, backend) / _number(labels)
    device = hidden.device.type
    hidden = hidden.to(product_dtype(hidden))
    with torch.autocast(device, enabled=False):
        loss: Tensor = ChunkedLoss.apply(hidden, weight.to(hidden.dtype), labels, backend)  # pyright: ignore[reportAssignmentType]
    return loss


def _sum_of_losses(logits: Tensor, labels: Tensor, backend: str) -> Tensor:
    if logits.is_cpu:
        return F.cross_entropy(logits.to(compute_dtype(logits)), labels, reduction="sum")
    return cross_entropy(logits, labels, IGNORED, backend).sum()


def _scored(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """On a CPU the tokens with a label, if there are any. A device would have to wait for their number."""
    if hidden.is_cpu and (scored := labels != IGNORED).any():
        return hidden[scored], labels[scored]
    return hidden, labels


def _plain_weight(head: Tensor | nn.Module) -> Tensor | None:
    return head if isinstance(head, Tensor) else weight_of(head)


def _recomputed_loss(hidden: Tensor, head: Any, labels: Tensor, backend: str) -> Tensor:
    """The mean loss for any head, which is called once a chunk of tokens, and again in the backward pass."""

    def part(hidden: Tensor, labels: Tensor) -> Tensor:
        return _sum_of_losses(head(hidden), labels, backend)

    rows = _rows(head, hidden)
    chunks = zip(hidden.split(rows), labels.split(rows), strict=True)
    sums = [checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum() / _number(labels)


def _number(labels: Tensor) -> Tensor:
    """How many labels count, at least 1, as a tensor: a device would have to wait for a number."""
    return (labels != IGNORED).sum().clamp_min(1)


def token_losses(hidden: Tensor, head: Tensor | nn.Module, labels: Tensor) -> Tensor:
    """The cross-entropy `[N]` of each token, 0 where the label is −100, without gradients; shapes as in `mean_loss`."""
    weight = _plain_weight(head)
    read: Any = head if weight is None else partial(logits_of, weight=weight)
    rows = _rows(head, hidden)
    pairs = zip(hidden.split(rows), labels.split(rows), strict=True)
    return torch.cat([cross_entropy(read(h), y, IGNORED) for h, y in pairs])


def tokens_at_once(vocabulary: int, device: str, in_place: int = 0) -> int:
    """The number of tokens whose logits are computed at once on a type of device.

    `in_place` are the bytes of a logit whose gradient takes its place, or 0.
    """
    if in_place:
        return max(1, IN_PLACE // in_place // vocabulary)
    most = max(1, (GPU_LOGITS if device == "cuda" else LOGITS) // vocabulary)
    return min(most, max(MANY_TOKENS, CACHED_LOGITS // vocabulary)) if device == "cpu" else most


def _rows(head: Tensor | nn.Module, hidden: Tensor) -> int:
    vocabulary = len(head) if isinstance(head, Tensor) else getattr(head, "out_features", 1 << 17)
    return tokens_at_once(vocabulary, hidden.device.type)


class ChunkedLoss(torch.autograd.Function):
    """The mean loss and its gradients, chunk by chunk. The arguments are those of `mean_loss`, with one dtype.

    For probabilities p and one-hot labels y, ∂/∂hidden = (p − y) weight / N and ∂/∂weight = (p − y)ᵀ hidden / N over
    the N tokens whose labels count.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, backend: str = "auto") -> Tensor:
        in_place = hidden.dtype.itemsize if takes_place(hidden, labels, backend) else 0
        number = _number(labels).to(compute_dtype(weight))
        # 1 / number would be lost to float16 before the sums. A power of two is a factor of their results.
        mantissa, exponent = torch.frexp(number)
        factor, power = 1 / mantissa, torch.exp2(-exponent.to(number.dtype))
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=number.dtype) if ctx.needs_input_grad[1] else None
        rows, nats = tokens_at_once(len(weight), hidden.device.type, in_place), []
        for first in range(0, max(1, len(hidden)), rows):
            part = hidden[first : first + rows]
            losses, errors = losses_and_errors(
                logits_of(part, weight), labels[first : first + rows], factor, IGNORED, backend
            )
            nats.append(losses)
            if to_hidden is not None:
                place = to_hidden[first : first + rows]
                if lacks_products(errors):
                    place.copy_(times(errors, weight))
                else:
                    torch.mm(errors, weight, out=place)
            if to_weight is not None:
                to_weight += times(errors.T, part)
            del errors  # before the logits of the next chunk
        ctx.save_for_backward(to_hidden, None if to_weight is None else _times(to_weight, power, weight.dtype), power)
        return torch.cat(nats).sum() / number

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        to_hidden, to_weight, power = ctx.saved_tensors
        if to_hidden is not None:
            to_hidden = _times(to_hidden, gradient * power, to_hidden.dtype)
        return to_hidden, None if to_weight is None else _times(to_weight, gradient, to_weight.dtype), None, None


def _times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`x · factor` in `dtype`. The factor has an axis, so that it is not rounded to the dtype of x before."""
    return torch.mul(x, factor.view(1), out=torch.empty_like(x, dtype=dtype))
