"""The loss of a language model on text: in rows, by position, and of whole documents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.models import LanguageModel

PIECE = 4096  # tokens read at once: the state goes on, and memory does not grow with the text


@torch.no_grad()
def by_position(model: LanguageModel, rows: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Mean loss at each position of rows of one length, in nats: `[T]`, float64, on the CPU.

    Args:
        model: on its device, in evaluation mode.
        rows: `input_ids [B, T]` and `labels [B, T]` (the token after each; −100 where there is none).

    Raises:
        ValueError: no rows.
    """
    total = count = None
    for ids, labels in rows:
        losses = torch.cat([*_losses(model, ids, labels)], dim=1).double()
        scored = (labels >= 0).double()
        total = losses.sum(0) if total is None else total + losses.sum(0)
        count = scored.sum(0) if count is None else count + scored.sum(0)
    if total is None or count is None:
        raise ValueError("there are no rows to measure the loss on")
    return total / count


def _losses(model: LanguageModel, ids: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """The loss at each token, 0 where there is no label, in pieces `[B, ≤ PIECE]`."""
    device, state = model.embedding.weight.device, None
    for piece, expected in zip(ids.split(PIECE, 1), labels.split(PIECE, 1), strict=True):
        logits, state = model(piece.to(device), state)
        flat = F.cross_entropy(
            logits.float().flatten(0, 1), expected.to(device).flatten(), reduction="none", ignore_index=-100
        )
        yield flat.view(expected.shape).cpu()


def perplexity(losses: Tensor, length: int) -> float:
    """Perplexity of texts of `length` tokens, from the losses `[≥ length]` of `by_position`."""
    return math.exp(losses[:length].mean().item())


class DocumentLoss(NamedTuple):
    """Nats of all tokens that follow another in their document, how many those are, and the documents' number."""

    nats: float
    tokens: int
    documents: int


@torch.no_grad()
def document_loss(model: LanguageModel, documents: Iterable[Sequence[int] | Tensor]) -> DocumentLoss:
    """The loss on whole documents, each read from its first token on with the state carried to its end.

    The first token of a document follows nothing and is not in the sum.

    Args:
        model: on its device, in evaluation mode.
        documents: token ids of each.
    """
    nats, tokens, count = 0.0, 0, 0
    for pack in _packs(torch.as_tensor(document, dtype=torch.long) for document in documents):
        count += len(pack)
        ids, labels = torch.cat(pack), torch.cat([_next(document) for document in pack])
        if len(pack) == 1:
            found = torch.cat([*_losses(model, ids.unsqueeze(0), labels.unsqueeze(0))], dim=1)[0]
        else:
            bounds = torch.tensor([0, *(len(document) for document in pack)]).cumsum(0, dtype=torch.int32)
            device = model.embedding.weight.device
            logits, _ = model(ids.unsqueeze(0).to(device), cu_seqlens=bounds.to(device))
            found = F.cross_entropy(logits[0].float(), labels.to(device), reduction="none", ignore_index=-100)
        nats += found.double().sum().item()
        tokens += int((labels >= 0).sum())
    return DocumentLoss(nats, tokens, count)


def _next(document: Tensor) -> Tensor:
    return torch.cat([document[1:], document.new_full((1,), -100)])


def _packs(documents: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Short documents together, up to `PIECE` tokens; a longer one alone; those without a token left out."""
    held: list[Tensor] = []
    for document in documents:
        if not len(document):
            continue
        if held and sum(map(len, held)) + len(document) > PIECE:
            yield held
            held = []
        held.append(document)
    if held:
        yield held


def octave_means(losses: Tensor) -> list[tuple[int, int, float]]:
    """The losses `[T]` of `by_position` in buckets that double: (first position, last, mean loss), from 1 on."""
    edges = [0, *(2**i for i in range(len(losses).bit_length()) if 2**i < len(losses)), len(losses)]
    return [(a + 1, b, losses[a:b].mean().item()) for a, b in pairwise(edges)]
