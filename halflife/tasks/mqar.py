"""Multi-query associative recall."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halflife.registry import unknown
from halflife.tasks.base import IGNORED, TASKS, Task, TaskBatch, distinct
from halflife.tasks.layout import FILLERS as FILLER_IDS
from halflife.tasks.layout import KEYS, VALUES, VOCABULARY

FILLERS = ("disjoint", "zoology", "recall")


@TASKS.add("mqar")
@dataclass(frozen=True, kw_only=True)
class MQAR(Task):
    """Multi-query associative recall: K pairs `k v`, then each key once more → its value.

    The sequence begins with the K pairs. Of the T − 2K positions that follow, every second one is a slot, i = 1, 2, …,
    beginning with the first. Each key is placed in one slot, drawn without replacement with p ∝ i^(a−1). The label at
    that position is the key's value, which does not occur again in the inputs. All other positions are fillers. At
    K = T/4 every slot has a key, so p affects only the order of the queries.

    Args:
        vocab_size: V. Values are the upper half of the ids; `filler` determines the others.
        length: T, tokens of a sequence, at least 4K + gap.
        num_pairs: K.
        power: a in the distribution of the slots.
        gap: number of fillers between the last pair and the first slot, the distractors of Echo (§4.2).
        filler: "disjoint", "zoology" or "recall". "disjoint": fillers are the lowest eighth of the ids, and keys the
            rest of the lower half. "zoology": keys are the lower half without 0, and a filler is any id, as in the
            published generator, so that a filler can repeat a key. "recall" (V = 128): the ids of the recall tasks
            (`layout`), which are 16–47 for keys, 48–79 for values, and 80–127 for fillers.

    Chance is one over the number of values, 2/V, or 1/32 with "recall". Naming any bound value scores 1/K.
    Source: Arora et al. 2023. The layout is in docs/tasks.md.
    """

    vocab_size: int = 8192
    length: int = 512
    num_pairs: int = 128
    power: float = 0.01
    filler: str = "disjoint"
    gap: int = 0

    name = "mqar"

    def __post_init__(self) -> None:
        if self.filler not in FILLERS:
            raise unknown("filler", self.filler, list(FILLERS))
        if self.gap < 0:
            raise ValueError(f"gap must be 0 or more; got {self.gap}")
        if self.num_pairs < 1 or self.num_slots < self.num_pairs:
            raise ValueError(
                f"{self.num_pairs} pairs need 1 ≤ K and a length of at least 4K + gap; got length {self.length} and "
                f"gap {self.gap}"
            )
        if self.filler == "recall" and self.vocab_size != VOCABULARY:
            raise ValueError(f'filler "recall" has {VOCABULARY} token ids; got vocab_size {self.vocab_size}')
        low, high = self.key_range
        if high - low < self.num_pairs:
            raise ValueError(f"{self.num_pairs} pairs need as many keys; vocab_size {self.vocab_size} has {high - low}")

    @property
    def num_slots(self) -> int:
        """Number of slots, the positions at which a query can be placed."""
        return (self.length - 2 * self.num_pairs - self.gap) // 2

    @property
    def key_range(self) -> tuple[int, int]:
        """First id of the keys, and one more than the last."""
        if self.filler == "recall":
            return KEYS
        return (self.vocab_size // 8 if self.filler == "disjoint" else 1), self.vocab_size // 2

    @property
    def value_range(self) -> tuple[int, int]:
        """First id of the values, and one more than the last."""
        return VALUES if self.filler == "recall" else (self.vocab_size // 2, self.vocab_size)

    @property
    def filler_range(self) -> tuple[int, int]:
        """First id of the fillers, and one more than the last."""
        if self.filler == "recall":
            return FILLER_IDS
        return 0, self.key_range[0] if self.filler == "disjoint" else self.vocab_size

    @property
    def chance(self) -> float:
        low, high = self.value_range
        return 1 / (high - low)

    @property
    def shortcut_accuracy(self) -> float:
        return 1 / self.num_pairs

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        keys = distinct(num_examples, self.num_pairs, *self.key_range, draw)
        values = distinct(num_examples, self.num_pairs, *self.value_range, draw)
        inputs = torch.randint(*self.filler_range, (num_examples, self.length), generator=draw)
        inputs[:, 0 : 2 * self.num_pairs : 2] = keys
        inputs[:, 1 : 2 * self.num_pairs : 2] = values
        at = 2 * self.num_pairs + self.gap + 2 * self._slots(num_examples, draw)
        labels = torch.full_like(inputs, IGNORED)
        slices = {"num_pairs": torch.full((num_examples,), self.num_pairs)}
        facts = (torch.arange(self.length) < 2 * self.num_pairs).expand_as(inputs)
        return TaskBatch(inputs.scatter_(1, at, keys), labels.scatter_(1, at, values), slices, facts)

    def _slots(self, num_examples: int, draw: torch.Generator) -> Tensor:
        """Draw slots `[N, K]` without replacement, p ∝ i^(a−1): the first K of an exponential race with these rates."""
        rate = torch.arange(1, self.num_slots + 1).pow(self.power - 1)
        race = torch.empty(num_examples, self.num_slots).exponential_(generator=draw) / rate
        if self.num_slots == self.num_pairs:
            return race.argsort(1)
        return race.topk(self.num_pairs, dim=1, largest=False).indices
