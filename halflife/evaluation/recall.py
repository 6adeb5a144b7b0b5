"""Accuracy of a model on a task."""

from __future__ import annotations

import torch

from halflife.models import LanguageModel
from halflife.tasks import IGNORED, Task, stream_seed


@torch.no_grad()
def accuracy(
    model: LanguageModel,
    task: Task,
    *,
    split: str,
    seed: int,
    num_examples: int,
    batch_tokens: int = 1 << 15,
    bf16: bool = False,
) -> float:
    """The fraction of scored positions at which the model's first choice is the label.

    All positions count alike; in MQAR every example has the same number of them. Where an answer has several characters
    (`task.whole_answers`) it is the fraction of examples with all of them right.

    Args:
        model: put into evaluation mode for the call (it changes nothing that the model computes).
        split, seed: which examples, see `stream_seed`.
        num_examples: at least 1.
        batch_tokens: tokens of a forward pass, which bounds the memory.
        bf16: mixed precision, for a model that was trained in it.
    """
    device = next(model.parameters()).device
    examples = task.generate(num_examples, stream_seed(split, seed))
    right = scored = 0
    for inputs, labels in zip(
        examples.inputs.split(max(1, batch_tokens // task.length)),
        examples.labels.split(max(1, batch_tokens // task.length)),
        strict=True,
    ):
        mask = labels != IGNORED
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            hidden, _ = model.hidden(inputs.to(device))
            answers = model.logits(hidden[mask.to(device)]).argmax(-1).cpu()
        correct = torch.ones_like(mask)
        correct[mask] = answers == labels[mask]
        right += (correct.all(1) if task.whole_answers else correct[mask]).sum().item()
        scored += len(labels) if task.whole_answers else mask.sum().item()
    return right / scored
