"""Selective copying and noisy in-context recall, after MAD (Poli et al. 2024, Mechanistic Architecture Design).

MAD's generators (athms/mad-lab, `mad/data/instances.py`) make one example at a time. The docstrings say where the
distributions here differ from them. Slices that differ within an example are `[N, T]`, with −100 at positions that are
not scored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fft

from halflife.tasks.base import IGNORED, TASKS, Task, TaskBatch, constant_slices, distinct


@TASKS.add("selective_copy")
@dataclass(frozen=True, kw_only=True)
class SelectiveCopy(Task):
    """Selective copying: n tokens among blanks, a copy token, n blanks → the tokens, in their order.

    Tokens are uniform and independent, and can repeat. Each of the last n positions is a blank whose label is one
    token. The answers are not part of the inputs.

    Args:
        vocab_size: V. V − 1 is the copy token, V − 2 the blank, and lower ids are the tokens.
        length: T ≥ 2n + 1.
        num_tokens: n. MAD uses 16 of 14 tokens at T 256, and up to 96 at V 128 and T 1024.

    Here all places before the copy token are equally likely. MAD's generator draws places from NumPy's global state,
    whatever its seed. It puts no blank behind the last token, which therefore always precedes the copy token.

    Chance is 1/(V − 2). Naming the most frequent token everywhere is right for its mean share of the n tokens.
    Slices: `num_tokens`; `length`; `order`, `[N, T]`, the number of tokens before the queried one; `gap`, `[N, T]`, the
    positions between a token and its answer.
    """

    vocab_size: int = 16
    length: int = 256
    num_tokens: int = 16

    name = "selective_copy"

    def __post_init__(self) -> None:
        if self.vocab_size < 3:
            raise ValueError(f"vocab_size must be 3 or more, for a token, blank and copy; got {self.vocab_size}")
        if self.num_tokens < 1 or self.length < 2 * self.num_tokens + 1:
            raise ValueError(f"{self.num_tokens} tokens need 1 ≤ n and a length of at least 2n + 1; got {self.length}")

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 2)

    @property
    def shortcut_accuracy(self) -> float:
        return expected_mode(self.num_tokens, self.vocab_size - 2) / self.num_tokens

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        n, copy = self.num_tokens, self.length - self.num_tokens - 1  # position of the copy token
        tokens = torch.randint(self.vocab_size - 2, (num_examples, n), generator=draw)
        places = distinct(num_examples, n, 0, copy, draw).sort(1).values
        inputs = torch.full((num_examples, self.length), self.vocab_size - 2).scatter_(1, places, tokens)
        inputs[:, copy] = self.vocab_size - 1
        order = torch.arange(n).expand_as(tokens)
        labels, order, gap = (_at_end(inputs, of) for of in (tokens, order, copy + order - places))
        sizes = constant_slices(num_examples, num_tokens=n, length=self.length)
        return TaskBatch(inputs, labels, {**sizes, "order": order, "gap": gap})


@TASKS.add("noisy_recall")
@dataclass(frozen=True, kw_only=True)
class NoisyRecall(Task):
    """Noisy in-context recall: repeated pairs `k v` with noise between them; at a repeated key → its value.

    A sequence has T/2 motifs of two tokens. A motif is either noise, which is two meaningless ids, or a pair `k v`.
    The key of a pair is uniform among K keys, and a key always has the same value. The last motif is a pair with a
    repeated key, and all repeated keys are equally likely. Every repeated key is scored at its position; its value
    follows.

    Args:
        vocab_size: V. The last `noise_vocab_size` ids are noise. Of the ids below them, the lower half are keys and the
            upper half values.
        length: T, even.
        num_pairs: K, the number of different keys, and of different values, of a sequence.
        noise: share of motifs that are noise, in [0, 1), to the nearest motif. MAD uses 0.2, 0.4, 0.6, 0.8.
        noise_vocab_size: number of ids that are noise.

    MAD uses T 128 to 1024 and K 8, 16, 32, 64 with V 32, 48, 80, 144, so that every key id can occur. Its generator
    differs in four ways. In training every next token is a label, noise included; here the labels are always those
    above, which MAD uses in tests. The number of noise motifs is random; here it is exact, and at least K + 1 pairs
    must fit. Two keys can have the same value; here values are different. The last value is left out of the inputs,
    which have T − 1 tokens.

    Chance is one over the number of values. Naming any value seen so far scores one over the pairs seen so far. The
    number of scored positions differs between examples, and an accuracy gives each position equal weight. Slices:
    `num_pairs`; `length`; `gap`, `[N, T]`, the number of tokens between the last occurrence of the value and the key.
    """

    vocab_size: int = 32
    length: int = 256
    num_pairs: int = 8
    noise: float = 0.2
    noise_vocab_size: int = 16

    name = "noisy_recall"
    tiers: ClassVar = {str(percent): {"noise": percent / 100} for percent in (20, 40, 60, 80)}

    def __post_init__(self) -> None:
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise is a share of the motifs, in [0, 1); got {self.noise}")
        if self.noise_vocab_size < 1:
            raise ValueError(f"noise_vocab_size must be 1 or more; got {self.noise_vocab_size}")
        keys = max(0, (self.vocab_size - self.noise_vocab_size) // 2)
        if not 1 <= self.num_pairs <= keys:
            raise ValueError(
                f"num_pairs must lie between 1 and the {keys} keys of vocab_size {self.vocab_size} with "
                f"{self.noise_vocab_size} ids of noise; got {self.num_pairs}"
            )
        if self.length % 2:
            raise ValueError(f"length must be even, motifs of two tokens; got {self.length}")
        if self.num_motifs < self.num_pairs + 1:
            raise ValueError(
                f"{self.num_pairs} pairs and a query need {self.num_pairs + 1} motifs that are not noise; length "
                f"{self.length} with noise {self.noise} has {self.num_motifs}"
            )

    @property
    def num_motifs(self) -> int:
        """Number of motifs that are pairs."""
        return self.length // 2 - round(self.noise * (self.length // 2))

    @property
    def ranges(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """First id, and one more than the last, of the keys, the values and the noise."""
        noise = self.vocab_size - self.noise_vocab_size
        return (0, noise // 2), (noise // 2, noise), (noise, self.vocab_size)

    @property
    def chance(self) -> float:
        low, high = self.ranges[1]
        return 1 / (high - low)

    @property
    def shortcut_accuracy(self) -> float:
        k = self.num_pairs
        seen = [1.0, *[0.0] * (k - 1)]  # after the first pair: probabilities that 1, 2, …, K keys have occurred
        right = scored = 0.0
        for _ in range(self.num_motifs - 2):  # each key that has occurred is drawn with probability 1/K
            right += 1 / k
            scored += sum(p * m for m, p in enumerate(seen, 1)) / k
            seen = [p * m / k + (seen[m - 2] if m > 1 else 0.0) * (k - m + 1) / k for m, p in enumerate(seen, 1)]
        return (right + sum(p / m for m, p in enumerate(seen, 1))) / (scored + 1)

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        of_keys, of_values, of_noise = self.ranges
        keys = distinct(num_examples, self.num_pairs, *of_keys, draw)
        values = distinct(num_examples, self.num_pairs, *of_values, draw)
        which, previous = self._pairs(num_examples, draw)
        last = self.length // 2 - 1
        places = distinct(num_examples, self.num_motifs - 1, 0, last, draw).sort(1).values
        at = 2 * F.pad(places, (0, 1), value=last)
        answers = values.gather(1, which)
        inputs = torch.randint(*of_noise, (num_examples, self.length), generator=draw)
        inputs.scatter_(1, at, keys.gather(1, which)).scatter_(1, at + 1, answers)
        gaps = at - at.gather(1, previous.clamp(min=0)) - 2
        labels, gap = (
            torch.full_like(inputs, IGNORED).scatter_(1, at, torch.where(previous < 0, IGNORED, found))
            for found in (answers, gaps)
        )
        sizes = constant_slices(num_examples, num_pairs=self.num_pairs, length=self.length)
        return TaskBatch(inputs, labels, {**sizes, "gap": gap})

    def _pairs(self, num_examples: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw the key of each pair, from 0 to K − 1, and find the previous pair with it or −1; both `[N, P]`."""
        which = torch.randint(self.num_pairs, (num_examples, self.num_motifs), generator=draw)
        race = torch.rand(num_examples, self.num_motifs - 1, generator=draw)
        # Each key that has occurred has one first pair, so all these keys are equally likely.
        first = previous_occurrence(which)[:, :-1] < 0
        which[:, -1:] = which.gather(1, torch.where(first, race, -1.0).argmax(1, keepdim=True))
        return which, previous_occurrence(which)


def previous_occurrence(ids: Tensor) -> Tensor:
    """Return for each of the ids `[N, P]` the position of its previous occurrence in the row, or −1: `[N, P]`."""
    ordered, order = ids.sort(dim=1, stable=True)
    before = torch.full_like(ids, -1)
    before[:, 1:] = torch.where(ordered[:, 1:] == ordered[:, :-1], order[:, :-1], -1)
    return torch.empty_like(ids).scatter_(1, order, before)


def expected_mode(draws: int, kinds: int) -> float:
    """Return the mean count of the most frequent of `kinds` kinds among uniform independent draws.

    The mean is Σ_m (1 − P(all counts ≤ m)). The counts are distributed as independent Poisson numbers given their sum.
    So P(all counts ≤ m) is the coefficient of x^draws in the power `kinds` of the Poisson generating polynomial
    truncated at degree m, divided by P(sum = draws).
    """
    j = torch.arange(draws + 1, dtype=torch.float64)
    rate = torch.tensor(draws / kinds, dtype=torch.float64)
    poisson = (j * rate.log() - rate - torch.lgamma(j + 1)).exp()
    cut = torch.where(j <= j[:-1].unsqueeze(1), poisson, 0.0)  # one row for each m below `draws`

    def times(left: Tensor, right: Tensor) -> Tensor:
        size = 2 * len(j)  # large enough that no term wraps around
        return fft.irfft(fft.rfft(left, size) * fft.rfft(right, size), size)[:, : len(j)]

    total = math.exp(draws * math.log(draws) - draws - math.lgamma(draws + 1))
    return draws - (reduce(times, [cut] * kinds)[:, draws] / total).sum().item()


def _at_end(inputs: Tensor, numbers: Tensor) -> Tensor:
    """Put `numbers` `[N, n]` at the last positions and −100 at the others: `[N, T]`."""
    return F.pad(numbers, (inputs.shape[1] - numbers.shape[1], 0), value=IGNORED)
