"""State tracking: the running product of a word in a finite group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations
from typing import ClassVar

import torch
from torch import Tensor

from halflife.registry import check_choice
from halflife.tasks.base import TASKS, Task, TaskBatch

GROUPS = ("s5", "s3", "a5", "z60", "z2")
WORDS = ("all", "swaps", "mixed")
MIXED_PERIOD = 8  # one letter of this many in mixed words is any element


@TASKS.add("s5")
@dataclass(frozen=True, kw_only=True)
class GroupWords(Task):
    """Words in a finite group: x₁ x₂ … → at every position t the product x₁ x₂ ⋯ x_t.

    Letters are uniform and independent. In the inputs and in the labels, a token is an element of the group:

        s3, s5   all permutations of 3 or 5 things, in lexicographic order of the images (p(0), p(1), …)
        a5       the even permutations of s5, in the same order
        z60, z2  the remainders modulo 60 or 2 under addition; z2 is parity

    Element 0 is the identity. Products are composed from left to right: ab is first a and then b, and maps i to
    b(a(i)). S5 and A5 are not solvable, so their word problem is NC¹-complete; that of the other groups is not. Z60 and
    A5 have the same number of elements.

    Args:
        vocab_size: the number of elements |G|; the default 0 stands for it.
        length: T. The paper trains at 16 and tests at 64.
        group: "s5", "s3", "a5", "z60" or "z2".
        words: "all", or "swaps" for words of transpositions of s3 or s5. Transpositions generate the whole group, so
            the products are as hard to track. But a transposition is a reflection, which is one step of a delta rule
            with β = 2, while an element of S5 takes up to four steps (Grazzi et al. 2025, who test both). "mixed" is
            ours: one letter of eight is any element and the others are transpositions, a step between the two.

    Chance is 1/|G| at every position. For swaps it is 2/|G|, because their number determines whether the product is
    even. `shortcut_accuracy` is the accuracy of an answer that knows the last token and the likeliest product before
    it; for all words it is (1 + (T − 1)/|G|)/T. Slices: `length`; `position`, `[N, T]`, from 0. Source: GateRank,
    Section 4.4, and Merrill et al. 2024, which leave the order of composition open; layout in docs/tasks.md.
    """

    vocab_size: int = 0
    length: int = 16
    group: str = "s5"
    words: str = "all"

    name = "s5"
    dense = True
    tiers: ClassVar = {group: {"group": group} for group in GROUPS}

    def __post_init__(self) -> None:
        check_choice("group", self.group, GROUPS)
        if self.length < 1:
            raise ValueError(f"length must be 1 or more; got {self.length}")
        check_choice("kind of words", self.words, WORDS)
        if self.words != "all" and self.group[0] != "s":
            raise ValueError(f"only s3 and s5 hold transpositions; group {self.group} has no {self.words} words")
        order = len(multiplication_table(self.group))
        if self.vocab_size not in (0, order):
            raise ValueError(f"group {self.group} has {order} elements as token ids; got vocab_size {self.vocab_size}")
        object.__setattr__(self, "vocab_size", order)

    @property
    def chance(self) -> float:
        return (2 if self.words == "swaps" else 1) / self.vocab_size

    @property
    def shortcut_accuracy(self) -> float:
        return _guess(self.group, self.words, self.length)

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        letters = word_letters(self.group, self.words)
        inputs = letters[torch.randint(len(letters), (num_examples, self.length), generator=draw)]
        labels = running_product(inputs, multiplication_table(self.group))
        length = torch.full((num_examples,), self.length)
        return TaskBatch(inputs, labels, {"length": length, "position": torch.arange(self.length).expand_as(inputs)})


def running_product(words: Tensor, table: Tensor) -> Tensor:
    """Return the products of the first, the first two, … elements of each row, `[N, T]`, by a scan of log₂ T gathers.

    The elements are `words [N, T]`, and the multiplication `table [|G|, |G|]` has ab at row a and column b.
    """
    # After a step with shift s, position t has the product of the last 2s elements up to t.
    products, shift = words.clone(), 1
    while shift < words.shape[1]:
        products[:, shift:] = table.take(products[:, :-shift] * len(table) + products[:, shift:])
        shift *= 2
    return products


@lru_cache
def multiplication_table(group: str) -> Tensor:
    """The multiplication table of a group, `[|G|, |G|]`, with ab at row a and column b. Do not modify it."""
    kind, size = group[0], int(group[1:])
    if kind == "z":
        remainders = torch.arange(size)
        return (remainders.unsqueeze(1) + remainders) % size
    inversions = {p: sum(left > right for left, right in combinations(p, 2)) for p in permutations(range(size))}
    images = [p for p, count in inversions.items() if kind == "s" or count % 2 == 0]
    elements = torch.tensor(images)
    products = elements[:, elements].transpose(0, 1)  # entry [a, b, i] is b(a(i))
    digits = size ** torch.arange(size - 1, -1, -1)  # numbers with the images as digits are in lexicographic order
    return torch.searchsorted((elements * digits).sum(-1), (products * digits).sum(-1))


def word_letters(group: str, words: str) -> Tensor:
    """Return the letters of words, which are uniform draws of these: all elements, those of s3 or s5 that swap two
    things, or for mixed words both, with repeated transpositions.
    """
    everything = torch.arange(len(multiplication_table(group)))
    if words == "all":
        return everything
    images = list(permutations(range(int(group[1:]))))
    swaps = torch.tensor([i for i, p in enumerate(images) if sum(at != image for at, image in enumerate(p)) == 2])
    if words == "swaps":
        return swaps
    return torch.cat([everything, swaps.repeat((MIXED_PERIOD - 1) * len(everything) // len(swaps))])


@lru_cache
def _guess(group: str, words: str, length: int) -> float:
    """Return the mean over positions t of the largest probability of a product of t − 1 letters."""
    letters, table = word_letters(group, words), multiplication_table(group)
    likely = torch.zeros(len(table), dtype=torch.double)
    likely[0], total = 1.0, 0.0
    for _ in range(length):
        total += likely.max().item()
        spread = likely.repeat_interleave(len(letters)) / len(letters)
        likely = torch.zeros_like(likely).index_add(0, table[:, letters].flatten(), spread)
    return total / length
