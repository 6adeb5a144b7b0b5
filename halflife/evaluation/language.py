"""The loss of a language model on text: by position in rows of one length, and of whole documents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.files import read_bytes
from halflife.models import LanguageModel
from halflife.models.loss import token_losses
from halflife.ops.linear import fast_linears

BLOCKS = 16  # of a text, whose mean losses give the standard error
PIECE = 4096  # tokens read at once; the state is carried over, so memory does not grow with the text


@torch.no_grad()
def by_position(model: LanguageModel, rows: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean loss at each position in nats, `[T]`, float64, on the CPU; NaN at a position without labels.

    Args:
        model: the model, on its device and in evaluation mode.
        rows: pairs of `input_ids [B, T]` and `labels [B, T]`, with one T for all. A label is the next token, or −100 if
            there is none.
    """
    total = count = None
    with fast_linears(model):
        for ids, labels in rows:
            losses = torch.cat([*_losses(model, ids, labels)], dim=1).double()
            scored = (labels >= 0).double()
            total = losses.sum(0) if total is None else total + losses.sum(0)
            count = scored.sum(0) if count is None else count + scored.sum(0)
    if total is None or count is None:
        raise ValueError("there are no rows to measure the loss on")
    return total / count


def _losses(model: LanguageModel, ids: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """Yield the loss at each token (0 without a label) in pieces `[B, ≤ PIECE]`."""
    device, state = model.embedding.weight.device, None
    for piece, expected in zip(ids.split(PIECE, 1), labels.split(PIECE, 1), strict=True):
        hidden, state = model.hidden(piece.to(device), state)
        flat = token_losses(hidden.flatten(0, 1), model.head_or_weight, expected.to(device).flatten())
        yield flat.view(expected.shape).cpu()


def exponential(nats: float) -> float:
    """Return `e^nats`; a loss that overflows, as a diverged model's may, gives infinity."""
    return torch.tensor(nats, dtype=torch.float64).exp().item()


def perplexity(losses: Tensor, length: int) -> float:
    """The perplexity of texts of `length` tokens from losses of `by_position`; those without labels do not count."""
    return exponential(losses[:length].nanmean().item())


class DocumentLoss(NamedTuple):
    """The summed loss of documents."""

    nats: float  # loss of all tokens except the first of each document
    tokens: int  # number of those tokens
    documents: int  # number of documents with at least one token


def document_loss(model: LanguageModel, documents: Iterable[Sequence[int] | Tensor]) -> DocumentLoss:
    """Return the loss on whole documents. The state is carried from the first token of a document to its last.

    The first token of a document has no prediction and is not counted.

    Args:
        model: the model, on its device and in evaluation mode.
        documents: token ids of each document.
    """
    nats, tokens, count, device = 0.0, 0, 0, model.embedding.weight.device
    with torch.no_grad(), fast_linears(model):
        for pack in _pack_documents(torch.as_tensor(document, dtype=torch.long) for document in documents):
            count += len(pack)
            ids, labels = torch.cat(pack), torch.cat([F.pad(document[1:], (0, 1), value=-100) for document in pack])
            if len(pack) == 1:
                losses = torch.cat([*_losses(model, ids.unsqueeze(0), labels.unsqueeze(0))], dim=1)[0]
            else:
                bounds = torch.tensor([0, *(len(document) for document in pack)]).cumsum(0, dtype=torch.int32)
                hidden, _ = model.hidden(ids.unsqueeze(0).to(device), cu_seqlens=bounds.to(device))
                losses = token_losses(hidden[0], model.head_or_weight, labels.to(device))
            nats += losses.cpu().double().sum().item()
            tokens += int((labels >= 0).sum())
    return DocumentLoss(nats, tokens, count)


def _pack_documents(documents: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield packs of short documents of up to `PIECE` tokens; a longer document is alone, an empty one is skipped."""
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


def measure_texts(model: LanguageModel, tokenizer: Any, files: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Return file → what the model's loss on it is. A file is one document; its first token is not predicted.

    Args:
        model: the model, on its device and in evaluation mode.
        tokenizer: encodes bytes into the model's token ids (`data.tokenizers.Tokenizer`).
        files: the files; `.gz` files are decompressed.

    Returns:
        "bits_per_byte" and "perplexity" (of a token), with their standard errors "bits_stderr" and "perplexity_stderr"
        over `BLOCKS` equal blocks of the text (NaN for a text of fewer tokens), and those of a guess among all tokens,
        "bits_guess" and "perplexity_guess"; "tokens", the number of predicted tokens, and "bytes", of the file.
    """
    measured = {}
    for file in files:
        data = read_bytes(file)
        ids = torch.as_tensor(tokenizer.encode(data), dtype=torch.long)
        if len(ids) < 2:
            raise ValueError(f"{file} has fewer than two tokens, so there is nothing to predict")
        with torch.no_grad(), fast_linears(model):
            pieces = [*_losses(model, ids[None], F.pad(ids[1:], (0, 1), value=-100)[None])]
        losses = torch.cat(pieces, dim=1)[0, :-1].double()
        bits, error = len(losses) / math.log(2) / len(data), blocked_error(losses)
        mean, guess = losses.mean().item(), math.log(model.config.vocab_size)
        measured[str(file)] = {
            "bits_per_byte": bits * mean, "bits_stderr": bits * error, "bits_guess": bits * guess,
            "perplexity": exponential(mean), "perplexity_stderr": exponential(mean) * error,
            "perplexity_guess": float(model.config.vocab_size), "tokens": len(losses), "bytes": len(data),
        }  # fmt: skip
    return measured


def blocked_error(losses: Tensor) -> float:
    """The standard error of the mean of losses `[T]`, whose neighbours depend on each other, by equal blocks.

    Each of `BLOCKS` blocks counts as one observation. NaN for fewer tokens than blocks.
    """
    if len(losses) < BLOCKS:
        return math.nan
    means = losses[: len(losses) // BLOCKS * BLOCKS].view(BLOCKS, -1).mean(1)
    return (means.std() / BLOCKS**0.5).item()


def octave_means(losses: Tensor) -> list[tuple[int, int, float]]:
    """(first position, last position, mean) of losses `[T]` of `by_position`, in buckets that double, from 1 on."""
    edges = [0, *(2**i for i in range(len(losses).bit_length()) if 2**i < len(losses)), len(losses)]
    return [(a + 1, b, losses[a:b].nanmean().item()) for a, b in pairwise(edges)]
