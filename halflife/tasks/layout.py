"""Layout of the recall tasks over 128 token ids: meaning of the ids, blocks among fillers, a query at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halflife.tasks.base import IGNORED, Task, TaskBatch, constant_slices, distinct

VOCABULARY = 128
BOS, SYS, SEP, QUERY, CALL, RESULT = range(1, 7)  # 0 is padding
KEYS, VALUES, FILLERS = (16, 48), (48, 80), (80, 128)


@dataclass(frozen=True, kw_only=True)
class RecallTask(Task):
    """Base of the recall tasks: KV bindings, fillers, and one query at the end.

    Slices: `num_pairs`, `length`, and `gap`, the number of tokens between the answer in the context and the query.
    """

    vocab_size: int = VOCABULARY  # V, always 128
    length: int = 64  # T, tokens of a sequence with its query. The paper uses 16 to 4096.
    num_pairs: int = 4  # KV, number of bindings

    chance = 1 / (VALUES[1] - VALUES[0])
    most_pairs = VALUES[1] - VALUES[0]  # the largest KV for which there are enough keys and values

    def __post_init__(self) -> None:
        if not 1 <= self.num_pairs <= self.most_pairs:
            raise ValueError(f"num_pairs must lie between 1 and {self.most_pairs}; got {self.num_pairs}")
        check_sizes(self, self.shortest)

    @property
    def shortest(self) -> int:
        """Least length that holds the context and the query."""
        raise NotImplementedError

    @property
    def shortcut_accuracy(self) -> float:
        return 1 / self.num_pairs

    def with_query(self, inputs: Tensor, names: Tensor, at: Tensor, **slices: Tensor) -> TaskBatch:
        """Write the query `Q names…` at the end of complete contexts, and return the batch.

        Facts are the keys and values of the context, and the marks of a call. Decoys count, because no token shows
        that it is one.

        Args:
            inputs: contexts `[N, T]`, changed in place.
            names: tokens after Q, `[N, any number]`.
            at: position of the answer in the context, `[N, 1]`.
            **slices: further slices.
        """
        start = self.length - 1 - names.shape[1]
        marks = (inputs == CALL) | (inputs == RESULT)
        facts = marks | ((inputs >= KEYS[0]) & (inputs < VALUES[1]))
        facts[:, start:] = False
        inputs[:, start] = QUERY
        inputs[:, start + 1 :] = names
        labels = torch.full_like(inputs, IGNORED)
        labels[:, -1:] = inputs.gather(1, at)
        sizes = constant_slices(len(inputs), num_pairs=self.num_pairs, length=self.length)
        return TaskBatch(inputs, labels, {**sizes, "gap": start - 1 - at.squeeze(1), **slices}, facts)


def check_sizes(task: Task, shortest: int) -> None:
    """Raise ValueError if the vocabulary of a task does not have 128 ids, or its length is below `shortest`."""
    if task.vocab_size != VOCABULARY:
        raise ValueError(f"task {task.name} has {VOCABULARY} token ids; got vocab_size {task.vocab_size}")
    if task.length < shortest:
        raise ValueError(f"task {task.name} needs a length of at least {shortest} for these sizes; got {task.length}")


def draw_index(rows: int, count: int | Tensor, draw: torch.Generator) -> Tensor:
    """Draw a uniform number from 0 to `count` − 1 for each row, `[rows, 1]`; `count` may be a tensor `[rows, 1]`."""
    return (torch.rand(rows, 1, generator=draw, dtype=torch.float64) * count).long()


def fillers(rows: int, length: int, draw: torch.Generator) -> Tensor:
    """Draw filler tokens `[rows, length]`."""
    return torch.randint(*FILLERS, (rows, length), generator=draw)


def scatter(inputs: Tensor, blocks: Tensor, span: int, draw: torch.Generator) -> Tensor:
    """Write blocks into the first `span` positions; all orders and all placements without overlap are equally likely.

    The M blocks of W tokens, `[N, M, W]`, go into `inputs [N, T]` in place. Returns where each block starts, `[N, M]`.
    """
    rows, count, width = blocks.shape
    # A placement is a sequence of blocks and single tokens. It is determined by which of these items are the blocks.
    items = distinct(rows, count, 0, span - count * (width - 1), draw)
    starts = items + (width - 1) * items.argsort(1).argsort(1)
    at = starts.unsqueeze(2) + torch.arange(width)
    inputs.scatter_(1, at.flatten(1), blocks.flatten(1))
    return starts
