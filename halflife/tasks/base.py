"""The contract of a task: configuration and seed in, inputs, labels and slices out."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from halflife.registry import Registry, unknown

TASKS: Registry[type[Task]] = Registry("task")

IGNORED = -100  # the label of positions that are not scored

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class TaskBatch:
    """Examples of a task.

    Attributes:
        inputs: token ids `[N, T]`, int64.
        labels: what to predict at each position `[N, T]`, int64; −100 where nothing is scored.
        slices: for each example the numbers that results are grouped by, name → `[N]`, or `[N, T]` by position.
    """

    inputs: Tensor
    labels: Tensor
    slices: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A generator of examples: a frozen dataclass of its settings, checked when it is made.

    Subclasses give `sample`, `chance` (the accuracy of a uniform guess among possible answers) and
    `shortcut_accuracy` (that of the best answer which ignores the key).
    """

    vocab_size: int
    length: int

    name: ClassVar[str]
    whole_answers: ClassVar[bool] = False  # an example counts as a whole, not each scored position
    dense: ClassVar[bool] = False  # every position is scored: runs measure it by position too
    scalable: ClassVar[bool] = True  # an experiment may set its length; tasks of text have their own sizes, by tier

    def generate(self, num_examples: int, seed: int) -> TaskBatch:
        """`num_examples` examples, a pure function of the settings and the seed.

        Raises:
            ValueError: a negative number of examples.
        """
        if num_examples < 0:
            raise ValueError(f"num_examples must be 0 or more; got {num_examples}")
        return self.sample(num_examples, torch.Generator().manual_seed(seed))

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        """`generate`, from a seeded generator."""
        raise NotImplementedError

    @property
    def chance(self) -> float:
        """Accuracy of a uniform guess among the possible answers."""
        raise NotImplementedError

    @property
    def shortcut_accuracy(self) -> float:
        """Accuracy of the best answer that ignores the key."""
        raise NotImplementedError


def build(name: str, **config: Any) -> Task:
    """The task `name` with these settings.

    Raises:
        ValueError: an unknown task or setting (the message lists the choices), or sizes that do not fit.
    """
    task = TASKS[name]
    fields = [field.name for field in dataclasses.fields(task)]
    for key in config:
        if key not in fields:
            raise unknown(f"setting of task {name}", key, fields)
    return task(**config)


def stream_seed(split: str, seed: int, index: int = 0) -> int:
    """A seed for batch `index` of a run with this `seed`; the splits' seeds come from disjoint ranges.

    Args:
        split: "train", "validation" or "test".
        seed: the run's seed; index: which batch.

    Returns:
        An integer of 62 bits whose two highest say which split it belongs to.
    """
    if split not in SPLITS:
        raise unknown("split", split, list(SPLITS))
    digest = hashlib.sha256(f"{split}/{seed}/{index}".encode()).digest()
    return (SPLITS.index(split) << 60) | (int.from_bytes(digest[:8], "big") >> 4)


def distinct(rows: int, count: int, low: int, high: int, draw: torch.Generator) -> Tensor:
    """`count` distinct ids of [low, high) a row, uniform over all orders: `[rows, count]`.

    Draws with replacement and draws the later of two equal ids again until there are none. That treats all ids
    alike, so that every tuple of distinct ids is equally likely; it costs a sort of what was drawn, where a
    permutation of the whole range would cost a sort of that.
    """
    if count * 4 > high - low:  # so many collisions that a permutation is cheaper
        return torch.rand(rows, high - low, generator=draw).argsort(1)[:, :count] + low
    ids = torch.randint(low, high, (rows, count), generator=draw)
    pending = torch.arange(rows)
    while len(pending):
        ordered, order = ids[pending].sort(dim=1, stable=True)
        repeated = torch.zeros_like(ordered, dtype=torch.bool)
        repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        row, column = repeated.nonzero(as_tuple=True)
        ids[pending[row], order[row, column]] = torch.randint(low, high, (len(row),), generator=draw)
        pending = pending[repeated.any(1)]
    return ids
