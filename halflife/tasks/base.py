"""The interface of a task: from settings and a seed to inputs, labels and slices."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from halflife.registry import Registry, check_choice, unknown

TASKS: Registry[type[Task]] = Registry("task")

IGNORED = -100  # label of positions that are not scored

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class TaskBatch:
    """Examples of a task.

    Attributes:
        inputs: token ids `[N, T]`, int64.
        labels: token to predict at each position, `[N, T]`, int64; −100 at positions that are not scored.
        slices: numbers by which results are grouped, name → `[N]`, or `[N, T]` if they differ by position.
        facts: whether each token belongs to a fact, `[N, T]`, bool; None if the task does not say. It is the action
            mask of spectral Koopman attention (Echo, Appendices F and G.1). Fillers and the query are no facts.
    """

    inputs: Tensor
    labels: Tensor
    slices: dict[str, Tensor]
    facts: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def action_mask(self) -> Tensor:
        """`facts`; a task that does not name its facts has all tokens in the mask."""
        return torch.ones_like(self.inputs, dtype=torch.bool) if self.facts is None else self.facts


@dataclass(frozen=True, kw_only=True)
class Task:
    """A generator of examples. It is a frozen dataclass of settings, which the constructor checks.

    Subclasses define `sample`, `chance` and `shortcut_accuracy`.

    Attributes:
        chance: the accuracy of a uniform guess among the possible answers.
        shortcut_accuracy: the accuracy of the best answer that ignores the key.
        vocab_size: number of token ids.
        length: T, tokens of an example.
        name: name of the task in `TASKS`.
        whole_answers: an example is right only if all of its scored positions are.
        dense: every position is scored, so runs also measure by position.
        scalable: an experiment may set the length. Tasks in text have fixed sizes, by tier.
        tiers: name of a tier → its settings.
    """

    vocab_size: int
    length: int

    chance: ClassVar[float]
    shortcut_accuracy: ClassVar[float]
    name: ClassVar[str]
    whole_answers: ClassVar[bool] = False
    dense: ClassVar[bool] = False
    scalable: ClassVar[bool] = True
    tiers: ClassVar[dict[str, dict[str, Any]]] = {}

    def generate(self, num_examples: int, seed: int) -> TaskBatch:
        """Return `num_examples` ≥ 0 examples, which depend only on the settings and the seed."""
        if num_examples < 0:
            raise ValueError(f"num_examples must be 0 or more; got {num_examples}")
        return self.sample(num_examples, torch.Generator().manual_seed(seed))

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        """Draw the examples of `generate` with a seeded generator."""
        raise NotImplementedError


def build(name: str, **config: Any) -> Task:
    """Return the task `name` with these settings.

    Raises:
        ValueError: the task or a setting is unknown (the message lists the choices), or the sizes do not fit.
    """
    task = TASKS[name]
    fields = [field.name for field in dataclasses.fields(task)]
    for key in config:
        if key not in fields:
            raise unknown(f"setting of task {name}", key, fields)
    return task(**config)


def with_tier(written: str) -> dict[str, Any]:
    """Return the arguments of `build` that `name` or `name:tier` gives: the name, and the settings of the tier.

    Raises:
        ValueError: the task or the tier is unknown, or the task has no tiers.
    """
    name, _, tier = written.partition(":")
    tiers = TASKS[name].tiers
    if tier and tier not in tiers:
        raise unknown(f"tier of {name}", tier, list(tiers)) if tiers else ValueError(f"task {name} has no tiers")
    return {"name": name, **tiers.get(tier, {})}


def stream_seed(split: str, seed: int, index: int = 0) -> int:
    """Return the seed of batch `index` of a run with `seed`: 62 bits, of which the two highest code the split.

    The splits are "train", "validation" and "test". torch's generator on a CPU reads the lowest 32 bits alone, which
    are those of a hash: a batch of one split has the examples of a batch of another with a probability of 2⁻³².
    """
    check_choice("split", split, SPLITS)
    digest = hashlib.sha256(f"{split}/{seed}/{index}".encode()).digest()
    return (SPLITS.index(split) << 60) | (int.from_bytes(digest[:8], "big") >> 4)


def median_lag(task: Task, num_examples: int = 256) -> float | None:
    """Return the median number of tokens from an answer to its question in samples; None if the task does not say."""
    batch = task.generate(num_examples, stream_seed("test", 0))
    return batch.slices["lag"][batch.labels != IGNORED].median().item() if "lag" in batch.slices else None


def constant_slices(num_examples: int, **sizes: int) -> dict[str, Tensor]:
    """Return slices that are the same for all examples."""
    return {name: torch.full((num_examples,), size) for name, size in sizes.items()}


def distinct(rows: int, count: int, low: int, high: int, draw: torch.Generator) -> Tensor:
    """Draw `count` distinct ids of [low, high) for each row, `[rows, count]`; every ordered tuple is equally likely.

    Ids are drawn with replacement, and the later of two equal ids is drawn again until none are equal. This treats all
    ids alike, so every tuple is equally likely. It sorts only the drawn ids; a permutation would sort the whole range.
    """
    if count * 4 > high - low:  # with so many collisions a permutation is cheaper
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
