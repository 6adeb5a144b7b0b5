"""A baseline for language models of bytes: an n-gram with Kneser-Ney smoothing.

The n-gram is the interpolated, modified Kneser-Ney model (Chen & Goodman 1999, eq. 27). With h′ for h without its
oldest byte,

    p_n(w | h) = (c(hw) − D(c(hw))) / c(h·) + Σ_w D(c(hw)) / c(h·) · p_{n−1}(w | h′),      p_0 = 1/256

At the highest order n, c is the number of occurrences. At lower orders, c(hw) is the number of different symbols that
precede hw. After an unseen context h, the prediction is that of h′. Every distribution over the 256 bytes sums to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SYMBOLS = 257  # number of symbols: 0 is the start of a document, 1 + b is byte b
MAX_ORDER = 7  # an n-gram is coded as a number of n digits, and 257⁸ exceeds 63 bits
DISCOUNT = 0.5  # discount if the text is too small to estimate one


def kneser_ney_bits_per_byte(train: Sequence[bytes], test: Sequence[bytes], order: int = 5) -> float:
    """Return the cross-entropy of a Kneser-Ney n-gram in bits per byte; it is 8 without training text.

    This needs about 50 bytes of memory for a byte of training text, and at worst (noise, order 7) 250.

    Args:
        train: documents whose n-grams are counted.
        test: documents to predict, each independently of the others.
        order: n, 1 to 7: the predicted byte and the n − 1 bytes before it.

    """
    size = sum(map(len, test))
    probabilities = KneserNey(order).fit(train).probabilities(_ngrams(test, order))
    return -float(np.log2(probabilities).sum()) / size


class KneserNey:
    """A Kneser-Ney n-gram over bytes. Before `fit`, and without training text, all bytes are equally likely.

    n − 1 start symbols precede every document, so no context reaches into another document. Start symbols are part of
    contexts, so the model learns how documents begin; they are never predicted.

    Args:
        order: n, 1 to 7.
    """

    def __init__(self, order: int = 5) -> None:
        assert order in range(1, MAX_ORDER + 1)
        self.order = order
        self._levels: list[_Level] = []  # orders 1, 2, …, n

    def fit(self, documents: Sequence[bytes]) -> KneserNey:
        """Count the n-grams of the documents; this replaces earlier counts."""
        grams, counts = np.unique(_ngrams(documents, self.order), return_counts=True)
        self._levels = [_make_level(grams, counts)]
        for length in range(self.order - 1, 0, -1):
            # Each different longer n-gram counts once, at any frequency.
            grams, counts = np.unique(grams % SYMBOLS**length, return_counts=True)
            self._levels.insert(0, _make_level(grams, counts))
        return self

    def distribution(self, context: bytes) -> np.ndarray:
        """Return p of every byte after `context`, the first bytes of a document: `[256]`, float64."""
        return self.probabilities(_ngrams([context + b"\0"], self.order)[-1] + np.arange(256))

    def probabilities(self, grams: np.ndarray) -> np.ndarray:
        """Return p `[N]`, float64, of the last byte of n-grams `[N]`, int64, as numbers to the base `SYMBOLS`."""
        probability = np.full(len(grams), 1 / 256)
        for length, level in enumerate(self._levels, start=1):
            suffix = grams % SYMBOLS**length
            probability = level.discounted.at(suffix) + level.backoff.at(suffix // SYMBOLS) * probability
        return probability


@dataclass(frozen=True)
class _Table:
    """A function of integers: sorted `keys [N]`, their `values [N]`, and the value `missing` of every other key."""

    keys: np.ndarray
    values: np.ndarray
    missing: float

    def at(self, keys: np.ndarray) -> np.ndarray:
        """Return the values of these keys, `[Q]`."""
        if not len(self.keys):
            return np.full(len(keys), self.missing)
        index = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where(self.keys[index] == keys, self.values[index], self.missing)


@dataclass(frozen=True)
class _Level:
    """The counts of one order."""

    discounted: _Table  # n-gram → its discounted share among the n-grams with the same context
    backoff: _Table  # context → weight of the next lower order


def _make_level(grams: np.ndarray, counts: np.ndarray) -> _Level:
    """Make one order from its different n-grams, sorted, `[G]`, and their counts `[G]`."""
    discount = np.array([0.0, *discounts(counts)])[counts.clip(max=3)]
    contexts, starts, kinds = np.unique(grams // SYMBOLS, return_index=True, return_counts=True)
    total = np.add.reduceat(counts, starts)
    discounted = _Table(grams, (counts - discount) / total.repeat(kinds), 0.0)
    return _Level(discounted, _Table(contexts, np.add.reduceat(discount, starts) / total, 1.0))


def discounts(counts: np.ndarray) -> tuple[float, float, float]:
    """Return the discounts D₁, D₂ and D₃ of counts of 1, of 2, and of at least 3 (Chen & Goodman 1999, eq. 26).

    With n_k for the number of n-grams of count k, D_k = k − (k + 1) Y n_{k+1} / n_k and Y = n₁ / (n₁ + 2 n₂).

    In a small text n₁, n_k or n_{k+1} can be zero, and D_k can be 0 or less, which would leave no weight for the lower
    order. Then D_k = D_{k−1}, with D₀ = `DISCOUNT`. (One discount for all counts is the unmodified Kneser-Ney model.)
    """
    n = np.bincount(counts.clip(max=5), minlength=6).tolist()
    y = n[1] / max(1, n[1] + 2 * n[2])
    result = [DISCOUNT]
    for k in (1, 2, 3):
        estimate = k - (k + 1) * y * n[k + 1] / n[k] if y and n[k] and n[k + 1] else 0.0
        result.append(estimate if estimate > 0 else result[-1])
    return result[1], result[2], result[3]


def _ngrams(documents: Sequence[bytes], order: int) -> np.ndarray:
    """Return the n-gram that ends at each byte, as a number with the oldest symbol first: `[bytes]`, int64."""
    start = bytes(order - 1)
    text = np.frombuffer(b"".join(start + document for document in documents), np.uint8)
    lengths = [length for document in documents for length in (order - 1, len(document))]
    is_byte = np.repeat(np.tile([False, True], len(documents)), lengths)
    symbols = np.where(is_byte, text.astype(np.int64) + 1, 0)
    grams = symbols.copy()
    for age in range(1, order):
        grams[age:] += symbols[:-age] * SYMBOLS**age
    return grams[is_byte]
