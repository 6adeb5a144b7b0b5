"""Multi-query associative recall."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halflife.registry import check_choice
from halflife.tasks.base import IGNORED, TASKS, Task, TaskBatch, constant_slices, distinct
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

    With `updates` u each key stands in u + 1 pairs, all with different values. The (u + 1) K pairs have a random order,
    and the label is the value of the key's last pair.

    With values of L tokens the pairs are `k v₁ … v_L`, and a query repeats `k v₁ … v_{L−1}`, whose labels are
    v₁ … v_L. A slot then has L positions and `spacing` fillers. With `hold` each token of this layout stands h times in
    a row, and the label is at the last of the h positions.

    Args:
        vocab_size: V. Values are the upper half of the ids; `filler` determines the others.
        length: T, tokens of a sequence: a multiple of `hold`, and at least hold · ((2L + 1 + spacing + u (L + 1)) K +
            gap), which is 4K + gap by default. With spacing 0 and this least length there are no fillers.
        num_pairs: K.
        value_size: L, tokens of a value. All K · L of them differ, and all (u + 1) K · L with updates.
        spacing: fillers after each slot.
        hold: h, steps for which each token stands.
        updates: u, how often each key is reassigned.
        power: a in the distribution of the slots.
        gap: number of fillers between the last pair and the first slot, the distractors of Echo (§4.2).
        filler: "disjoint", "zoology" or "recall". "disjoint": fillers are the lowest eighth of the ids, and keys the
            rest of the lower half. "zoology": keys are the lower half without 0, and a filler is any id, as in the
            published generator, so that a filler can repeat a key. "recall" (V = 128): the ids of the recall tasks
            (`layout`), which are 16–47 for keys, 48–79 for values, and 80–127 for fillers.

    Slices: `num_pairs`, and `lag`, the number of tokens from a value to the position that asks for it (0 where nothing
    is scored). With a length of 4K + gap every slot has a key, and lags lie between gap + 1 and gap + 4K − 3. With more
    slots most lags are short, because early slots are likelier.

    Chance is one over the number of values, 2/V, or 1/32 with "recall". Naming any last value scores 1/K, and naming
    any value of the asked key 1/(u + 1).
    Source: Arora et al. 2023. The layout is in docs/tasks.md.
    """

    vocab_size: int = 8192
    length: int = 512
    num_pairs: int = 128
    power: float = 0.01
    filler: str = "disjoint"
    gap: int = 0
    value_size: int = 1
    spacing: int = 1
    hold: int = 1
    updates: int = 0

    name = "mqar"

    def __post_init__(self) -> None:
        check_choice("filler", self.filler, FILLERS)
        for name, least in {"gap": 0, "spacing": 0, "value_size": 1, "hold": 1, "updates": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more; got {getattr(self, name)}")
        if self.length % self.hold:
            raise ValueError(f"length must be a multiple of hold; got {self.length} and {self.hold}")
        if self.num_pairs < 1 or self.num_slots < self.num_pairs:
            raise ValueError(
                f"{self.num_pairs} pairs need 1 ≤ K and a length of at least 4K + gap (hold · ((2 · value_size + 1 + "
                f"spacing + updates · (value_size + 1)) K + gap) in general); got length {self.length} and gap "
                f"{self.gap}"
            )
        if self.filler == "recall" and self.vocab_size != VOCABULARY:
            raise ValueError(f'filler "recall" has {VOCABULARY} token ids; got vocab_size {self.vocab_size}')
        for name, count, (low, high) in (
            ("keys", self.num_pairs, self.key_range),
            ("values", self.num_written * self.value_size, self.value_range),
            ("fillers", 1, self.filler_range),
        ):  # fmt: skip
            if high - low < count:
                raise ValueError(
                    f"{self.num_written} pairs need {count} {name}; vocab_size {self.vocab_size} has {high - low}"
                )

    @property
    def num_written(self) -> int:
        """Number of pairs that stand in a sequence, `(u + 1) K`."""
        return self.num_pairs * (self.updates + 1)

    @property
    def first_slot(self) -> int:
        """Number of steps before the first slot, those of the pairs and of the gap; a step is `hold` positions."""
        return self.num_written * (1 + self.value_size) + self.gap

    @property
    def num_slots(self) -> int:
        """Number of slots, the places of a query."""
        return (self.length // self.hold - self.first_slot) // (self.value_size + self.spacing)

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
        values = distinct(num_examples, self.num_written * self.value_size, *self.value_range, draw)
        values = values.unflatten(1, (self.num_written, self.value_size))
        written, last = self._order(num_examples, draw)
        inputs = torch.randint(*self.filler_range, (num_examples, self.length // self.hold), generator=draw)
        pairs = torch.cat([keys.gather(1, written).unsqueeze(2), values], 2)
        inputs[:, : self.num_written * (1 + self.value_size)] = pairs.flatten(1)
        asked = pairs.gather(1, last.unsqueeze(2).expand(-1, -1, 1 + self.value_size))
        starts = self.first_slot + (self.value_size + self.spacing) * self._slots(num_examples, draw)
        at = (starts.unsqueeze(2) + torch.arange(self.value_size)).flatten(1)
        inputs.scatter_(1, at, asked[:, :, :-1].flatten(1))
        labels = torch.full((num_examples, self.length), IGNORED)
        labels.scatter_(1, self.hold * (at + 1) - 1, asked[:, :, 1:].flatten(1))
        places = (last * (1 + self.value_size)).unsqueeze(2) + torch.arange(1, 1 + self.value_size)
        lags = torch.zeros_like(labels).scatter_(1, self.hold * (at + 1) - 1, self.hold * (at - places.flatten(1)))
        slices = {**constant_slices(num_examples, num_pairs=self.num_pairs), "lag": lags}
        facts = torch.arange(self.length) < self.hold * self.num_written * (1 + self.value_size)
        return TaskBatch(inputs.repeat_interleave(self.hold, 1), labels, slices, facts.expand(num_examples, -1))

    def _order(self, num_examples: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """The key of each pair `[N, (u + 1) K]`, a number below K, and the last pair of each key `[N, K]`."""
        pairs = torch.arange(self.num_written).expand(num_examples, -1)
        if not self.updates:
            return pairs, pairs
        written = torch.rand(num_examples, self.num_written, generator=draw).argsort(1) % self.num_pairs
        return written, torch.zeros(num_examples, self.num_pairs, dtype=torch.long).scatter_reduce(
            1, written, pairs, "amax"
        )

    def _slots(self, num_examples: int, draw: torch.Generator) -> Tensor:
        """Draw slots `[N, K]` without replacement, p ∝ i^(a−1): the first K of an exponential race with these rates."""
        rate = torch.arange(1.0, self.num_slots + 1).pow(self.power - 1)
        race = torch.empty(num_examples, self.num_slots).exponential_(generator=draw) / rate
        if self.num_slots == self.num_pairs:
            return race.argsort(1)
        return race.topk(self.num_pairs, dim=1, largest=False).indices
