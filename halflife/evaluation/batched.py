"""Texts of unequal lengths read and written in batches, with the model's own state.

A context is read once, and every continuation of it goes on from that state; what is long is read in pieces, so that a
recurrent model takes constant memory and no text is too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.models import LanguageModel, ModelState
from halflife.models.session import draw

Ids = Sequence[int]

PIECE_TOKENS = 1 << 14  # read at once, over all rows of a batch
LOGITS = 1 << 26  # numbers at once: 256 MiB of float32


@torch.no_grad()
def loglikelihoods(
    model: LanguageModel, pairs: Sequence[tuple[Ids, Ids]], *, batch_size: int = 8, show: bool = False
) -> list[tuple[float, bool]]:
    """For each (context, continuation): log p(continuation | context) in nats, and whether each token is the likeliest.

    Args:
        model: on its device, in evaluation mode.
        pairs: token ids; a context has at least one.
        batch_size: continuations at once.
        show: a progress bar.
    """
    from rich.progress import track

    # Neighbours have the same context, then contexts of about one length, the longest first.
    order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]), *map(tuple, pairs[i])))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    for batch in track(batches, "log-likelihoods", disable=not show):
        for i, answer in zip(batch, _score(model, [pairs[i] for i in batch]), strict=True):
            found[i] = answer
    return found


def _score(model: LanguageModel, pairs: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
    """`loglikelihoods` of one batch."""
    contexts = list(dict.fromkeys(tuple(context) for context, _ in pairs))
    _, state = _read(model, [context[:-1] for context in contexts])
    if state is not None:
        state = _select(state, [contexts.index(tuple(context)) for context, _ in pairs])
    targets, scored = _padded([continuation for _, continuation in pairs])
    total, likeliest = torch.zeros(len(pairs), dtype=torch.double), torch.ones(len(pairs), dtype=torch.bool)
    inputs = [[*context[-1:], *continuation][:-1] for context, continuation in pairs]
    for columns, hidden, _ in _pieces(model, inputs, state):
        row, column = scored[:, columns].nonzero(as_tuple=True)
        for part in torch.arange(len(row)).split(max(1, LOGITS // model.config.vocab_size)):
            logits = model.logits(hidden[row[part], column[part]]).float()
            target = targets[:, columns][row[part], column[part]].to(logits.device)
            losses = F.cross_entropy(logits, target, reduction="none").double()
            total.index_add_(0, row[part], -losses.cpu())
            likeliest[row[part][(logits.argmax(-1) != target).cpu()]] = False
    return list(zip(total.tolist(), likeliest.tolist(), strict=True))


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Ids],
    max_tokens: int,
    done: Callable[[list[int]], bool],
    *,
    vocab_size: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> list[list[int]]:
    """Continues prompts of unequal lengths in one batch; returns the new tokens of each.

    Args:
        model: on its device, in evaluation mode.
        prompts: token ids, at least one each.
        max_tokens: new tokens at most.
        done: whether a row ends after these tokens; the last of them is kept.
        vocab_size: of the tokenizer, if that of the model is larger: ids from there on are never drawn.
        temperature, top_k, top_p: see `Session.sample`; temperature 0 takes the likeliest token.
    """
    written: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts) if max_tokens > 0 else 0))
    hidden, state = _read(model, [prompts[row] for row in live])
    while live and hidden is not None and state is not None:
        logits = model.logits(hidden)[:, :vocab_size]
        tokens = [draw(row, temperature, top_k, top_p) for row in logits] if temperature else logits.argmax(-1).tolist()
        for row, token in zip(live, tokens, strict=True):
            written[row].append(token)
        kept = [i for i, row in enumerate(live) if len(written[row]) < max_tokens and not done(written[row])]
        if not kept:
            break
        if len(kept) < len(live):
            live, tokens, state = [live[i] for i in kept], [tokens[i] for i in kept], _select(state, kept)
        hidden, state = model.hidden(torch.tensor(tokens, device=logits.device).unsqueeze(1), state)
        hidden = hidden[:, -1]
    return written


def _read(model: LanguageModel, rows: Sequence[Ids]) -> tuple[Tensor | None, ModelState | None]:
    """The hidden states after the last tokens, `[N, D]`, and the state; None for both if there are no tokens."""
    hidden = state = None
    for piece in _pieces(model, rows):
        _, hidden, state = piece
    return None if hidden is None else hidden[:, -1], state


def _pieces(
    model: LanguageModel, rows: Sequence[Ids], state: ModelState | None = None
) -> Iterator[tuple[slice, Tensor, ModelState]]:
    """Reads rows, padded on the left, piece by piece: the columns, their hidden states `[N, t, D]`, the new state."""
    ids, mask = _padded(rows)
    device = model.embedding.weight.device
    width = max(1, PIECE_TOKENS // max(1, len(rows)))
    for start in range(0, ids.shape[1], width):
        columns = slice(start, start + width)
        kept = None if mask[:, columns].all() else mask[:, columns].to(device)
        hidden, state = model.hidden(ids[:, columns].to(device), state, attention_mask=kept)
        yield columns, hidden, state


def _padded(rows: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """Rows of ids with zeros on the left of the shorter ones, and where there are tokens: `[N, T]` both, on the CPU."""
    ids = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(rows):
        if len(row):
            ids[i, -len(row) :], mask[i, -len(row) :] = torch.as_tensor(row), True
    return ids, mask


def _select(state: ModelState, rows: Sequence[int]) -> ModelState:
    """The state of these rows, in this order; one may come several times."""
    return tuple(
        {name: part.index_select(0, torch.tensor(rows, device=part.device)) for name, part in layer.items()}
        for layer in state
    )
