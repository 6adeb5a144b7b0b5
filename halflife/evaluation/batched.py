"""Log-likelihoods and generation for batches of texts of unequal lengths.

A context is read once, and each of its continuations starts from the resulting state. Long texts are read in pieces, so
a recurrent model needs constant memory and no text is too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.models import LanguageModel, ModelState
from halflife.models.states import select
from halflife.models.text import NOT_FINITE, draw, likeliest

Ids = Sequence[int]
Row = TypeVar("Row")
Result = TypeVar("Result")

PIECE_TOKENS = 1 << 14  # tokens read at once, over all rows of a batch
MAX_LOGITS = 1 << 26  # logits computed at once: 256 MiB of float32


@torch.no_grad()
def loglikelihoods(
    model: LanguageModel, pairs: Sequence[tuple[Ids, Ids]], *, batch_size: int = 8, show: bool = False
) -> list[tuple[float, bool]]:
    """log p(continuation | context) in nats of each pair of token ids, and whether every token of it is the likeliest.

    A context has a token or more. A batch has at most `batch_size` continuations.
    """
    # Sorting puts equal contexts side by side, and contexts of similar length into one batch, the longest first.
    order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]), *map(tuple, pairs[i])))
    results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    scores = in_batches(lambda batch: _score(model, [pairs[i] for i in batch]), [order], batch_size)
    for i, result in track(scores, "log-likelihoods", len(pairs), show):
        results[i] = result
    return results


def in_batches(
    work: Callable[[list[int]], Sequence[Result]], groups: Iterable[list[int]], size: int
) -> Iterator[tuple[int, Result]]:
    """Yield (row, result) of all rows. `work` gets at most `size` rows of a group, half as many if memory is short."""
    for group in groups:
        at = 0
        while at < len(group):
            batch = group[at : at + size]
            try:
                results = work(batch)
            except RuntimeError as error:
                no_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
                if len(batch) == 1 or not no_memory:
                    raise
                size = len(batch) // 2
                continue
            yield from zip(batch, results, strict=True)
            at += len(batch)


def track(rows: Iterable[Row], name: str, total: int, show: bool) -> Iterable[Row]:
    """Yield `rows`, and draw a progress bar if `show`."""
    from rich.progress import track

    return track(rows, name, total=total, disable=not show)


def _score(model: LanguageModel, pairs: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
    contexts = list(dict.fromkeys(tuple(context) for context, _ in pairs))
    _, state = _read_to_end(model, [context[:-1] for context in contexts])
    if state is not None:
        state = select(state, [contexts.index(tuple(context)) for context, _ in pairs])
    targets, scored = _pad_left([continuation for _, continuation in pairs])
    total, likeliest = torch.zeros(len(pairs), dtype=torch.double), torch.ones(len(pairs), dtype=torch.bool)
    inputs = [[*context[-1:], *continuation][:-1] for context, continuation in pairs]
    for columns, hidden, _ in _read_in_pieces(model, inputs, state):
        row, column = scored[:, columns].nonzero(as_tuple=True)
        for part in torch.arange(len(row)).split(max(1, MAX_LOGITS // model.config.vocab_size)):
            logits = model.logits(hidden[row[part], column[part]]).float()
            target = targets[:, columns][row[part], column[part]].to(logits.device)
            losses = F.cross_entropy(logits, target, reduction="none")
            total.index_add_(0, row[part], -losses.cpu().double())
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
    """Continue prompts of unequal lengths in one batch, and return the new tokens of each.

    Args:
        model: the model, on its device and in evaluation mode.
        prompts: token ids of each prompt, at least one.
        max_tokens: largest number of new tokens of a prompt.
        done: function of a row's new tokens that returns whether the row ends. The last token is part of the result.
        vocab_size: vocabulary of the tokenizer, if the model's is larger; larger ids are never drawn.
        temperature, top_k, top_p: as in `Session.sample`; temperature 0 takes the likeliest token.

    Raises:
        ValueError: a logit is not finite.
    """
    written: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts) if max_tokens > 0 else 0))
    hidden, state = _read_to_end(model, [prompts[row] for row in live])
    while live and hidden is not None and state is not None:
        logits = model.logits(hidden)[:, :vocab_size]
        if temperature:
            tokens = [draw(row, temperature, top_k, top_p) for row in logits]
        elif min(tokens := likeliest(logits).tolist()) < 0:
            raise ValueError(NOT_FINITE)
        for row, token in zip(live, tokens, strict=True):
            written[row].append(token)
        going = [i for i, row in enumerate(live) if len(written[row]) < max_tokens and not done(written[row])]
        if not going:
            break
        if len(going) < len(live):
            live, tokens, state = [live[i] for i in going], [tokens[i] for i in going], select(state, going)
        hidden, state = model.hidden(torch.tensor(tokens, device=logits.device).unsqueeze(1), state)
        hidden = hidden[:, -1]
    return written


def _read_to_end(model: LanguageModel, rows: Sequence[Ids]) -> tuple[Tensor | None, ModelState | None]:
    """Return the hidden states `[N, D]` of the last tokens, and the state; both are None if there are no tokens."""
    hidden = state = None
    for piece in _read_in_pieces(model, rows):
        _, hidden, state = piece
    return None if hidden is None else hidden[:, -1], state


def _read_in_pieces(
    model: LanguageModel, rows: Sequence[Ids], state: ModelState | None = None
) -> Iterator[tuple[slice, Tensor, ModelState]]:
    """Read left-padded rows in pieces; yield the columns, their hidden states `[N, t, D]`, and the new state."""
    ids, mask = _pad_left(rows)
    device = model.embedding.weight.device
    width = max(1, PIECE_TOKENS // max(1, len(rows)))
    for start in range(0, ids.shape[1], width):
        columns = slice(start, start + width)
        attended = None if mask[:, columns].all() else mask[:, columns].to(device)
        hidden, state = model.hidden(ids[:, columns].to(device), state, attention_mask=attended)
        yield columns, hidden, state


def _pad_left(rows: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """Pad rows of ids with zeros on the left; return the ids and the mask of tokens, `[N, T]` each, on the CPU."""
    ids = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(rows):
        if len(row):
            ids[i, -len(row) :], mask[i, -len(row) :] = torch.as_tensor(row), True
    return ids, mask
