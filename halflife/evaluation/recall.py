"""Accuracy of a model on a task, in all and by position."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.evaluation import evaluating
from halflife.models import LanguageModel
from halflife.tasks import IGNORED, Task, stream_seed

BATCH_TOKENS, ON_A_GPU = 1 << 13, 1 << 15  # of a forward pass; they bound the memory, and a CPU is faster with few


@torch.no_grad()
def accuracy(
    model: LanguageModel,
    task: Task,
    *,
    split: str,
    seed: int,
    num_examples: int,
    bf16: bool = False,
    action_mask: bool = False,
    by_token: bool = False,
) -> float:
    """Return the fraction of scored positions whose label is the model's likeliest token.

    All scored positions have equal weight. If an answer has several characters (`task.whole_answers`), the result is
    the fraction of examples in which every character is right.

    Args:
        model: the model; it is in evaluation mode during the call, which does not change its results.
        split: "train", "validation" or "test", see `stream_seed`.
        seed: seed of the examples, see `stream_seed`.
        num_examples: number of examples, at least 1.
        bf16: whether to use mixed precision, for a model that was trained with it.
        action_mask: whether the model gets the examples' action masks.
        by_token: whether the model reads one token at a time, as in generation, and not a whole example in one pass.
    """
    right = scored = 0
    for labels, logits in _scored_logits(model, task, split, seed, num_examples, bf16, action_mask, by_token):
        mask = labels != IGNORED
        correct = torch.ones_like(mask)
        correct[mask] = logits.argmax(-1) == labels[mask]
        right += (correct.all(1) if task.whole_answers else correct[mask]).sum().item()
        scored += len(labels) if task.whole_answers else mask.sum().item()
    return right / scored


@torch.no_grad()
def by_position(
    model: LanguageModel, task: Task, *, split: str, seed: int, num_examples: int, bf16: bool = False,
    action_mask: bool = False,
) -> dict[str, list[float]]:  # fmt: skip
    """Return the accuracy and the cross-entropy (nats) at each position of a dense task; arguments as `accuracy`."""
    right = torch.zeros(task.length, dtype=torch.double)
    loss = torch.zeros(task.length, dtype=torch.double)
    for labels, logits in _scored_logits(model, task, split, seed, num_examples, bf16, action_mask):
        every = logits.unflatten(0, labels.shape)
        right += (every.argmax(-1) == labels).double().sum(0)
        loss += F.cross_entropy(every.transpose(1, 2), labels, reduction="none").double().sum(0)
    return {"accuracy": (right / num_examples).tolist(), "loss": (loss / num_examples).tolist()}


def _scored_logits(
    model: LanguageModel, task: Task, split: str, seed: int, num_examples: int, bf16: bool, action_mask: bool,
    by_token: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Yield `labels [b, T]` and the float32 logits at the scored positions, on the CPU, batch by batch."""
    if num_examples < 1:
        raise ValueError(f"num_examples must be at least 1; got {num_examples}")
    device = next(model.parameters()).device
    examples = task.generate(num_examples, stream_seed(split, seed))
    rows = max(1, (BATCH_TOKENS if device.type == "cpu" else ON_A_GPU) // task.length)
    parts = zip(*(x.split(rows) for x in (examples.inputs, examples.labels, examples.action_mask())), strict=True)
    with evaluating(model):  # training mode would count GateRank's resets
        for inputs, labels, facts in parts:
            ids, mask = inputs.to(device), facts.to(device) if action_mask else None
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                hidden = _by_token(model, ids, mask) if by_token else model.hidden(ids, action_mask=mask)[0]
                logits = model.logits(hidden[(labels != IGNORED).to(device)])
            yield labels, logits.float().cpu()


def _by_token(model: LanguageModel, ids: Tensor, mask: Tensor | None) -> Tensor:
    """The hidden states `[b, T, D]` of a model that reads one token at a time."""
    hidden, state = [], None
    for t in range(ids.shape[1]):
        own = None if mask is None else mask[:, t : t + 1]
        new, state = model.hidden(ids[:, t : t + 1], state, action_mask=own)
        hidden.append(new)
    return torch.cat(hidden, 1)
