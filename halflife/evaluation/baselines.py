"""What a language model of bytes must beat: gzip, and an n-gram with Kneser-Ney smoothing.

The n-gram is interpolated, modified Kneser-Ney (Chen & Goodman 1999, eq. 27), with h′ = h without its oldest byte:

    p_n(w | h) = (c(hw) − D(c(hw))) / c(h·) + Σ_w D(c(hw)) / c(h·) · p_{n−1}(w | h′),      p_0 = 1/256

c counts at the highest order n, and at those below it counts the different symbols that stand before hw. A context that
was never seen leaves its prediction to h′. Every distribution over the 256 bytes sums to 1.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BASE = 257  # symbols: 0 stands before a document, 1 + b is byte b
MAX_ORDER = 7  # an n-gram is a number of n digits, and 257⁸ no longer fits 63 bits
FALLBACK = 0.5  # discount where the text is too small to estimate one


def gzip_bits_per_byte(documents: Sequence[bytes], level: int = 9, *, separately: bool = False) -> float:
    """Bits that gzip writes for a byte of text; it has no training text.

    Counted is all that `gzip` writes: header (10 bytes), deflated text, checksum and length (8 bytes).

    Args:
        documents: the text; empty documents are allowed.
        level: 0 (stored) to 9 (smallest).
        separately: one stream for each document (an empty one counts as well), instead of one for all, where a document
            profits from the last 32 KiB of those before it.

    Raises:
        ValueError: a level that gzip does not have, or no byte at all.
    """
    if level not in range(10):
        raise ValueError(f"gzip has levels 0 to 9, not {level}")
    size = _size(documents)
    streams = documents if separately else [b"".join(documents)]
    return 8 * sum(len(gzip.compress(stream, level)) for stream in streams) / size


def kneser_ney_bits_per_byte(train: Sequence[bytes], test: Sequence[bytes], order: int = 5) -> float:
    """Cross-entropy of a Kneser-Ney n-gram, in bits per byte of the test; 8 where there is no training text.

    Takes about 50 bytes of memory for a byte of training text, and at worst (noise, order 7) 250.

    Args:
        train: documents that are counted.
        test: documents that are predicted, each from its own bytes alone.
        order: n of the n-gram: the byte and n − 1 bytes before it, 1 to 7.

    Raises:
        ValueError: an order that is not there, or no byte in the test.
    """
    size = _size(test)
    probabilities = KneserNey(order).fit(train).probabilities(_ngrams(test, order))
    return -float(np.log2(probabilities).sum()) / size


class KneserNey:
    """An n-gram over bytes; before `fit`, and without training text, all bytes are equally likely.

    Before every document stand n − 1 start symbols, so that no context reaches into another document; they are
    contexts (the first bytes of documents are learnt as such) and are never predicted.

    Args:
        order: n, 1 to 7.

    Raises:
        ValueError: any other order.
    """

    def __init__(self, order: int = 5) -> None:
        if order not in range(1, MAX_ORDER + 1):
            raise ValueError(f"the order of an n-gram is 1 to {MAX_ORDER}, not {order}")
        self.order = order
        self._levels: list[_Level] = []  # of order 1, 2, …, n

    def fit(self, documents: Sequence[bytes]) -> KneserNey:
        """Counts the n-grams of the documents, and forgets what was counted before."""
        grams, counts = np.unique(_ngrams(documents, self.order), return_counts=True)
        self._levels = [_level(grams, counts)]
        for length in range(self.order - 1, 0, -1):
            # Each kind of longer n-gram counts once: what stands before, not how often.
            grams, counts = np.unique(grams % BASE**length, return_counts=True)
            self._levels.insert(0, _level(grams, counts))
        return self

    def log_probabilities(self, document: bytes) -> np.ndarray:
        """log p of each byte given those before it, in nats: `[bytes]`, float64."""
        return np.log(self.probabilities(_ngrams([document], self.order)))

    def distribution(self, context: bytes) -> np.ndarray:
        """p of every byte after a document's first bytes: `[256]`, float64."""
        return self.probabilities(_ngrams([context + b"\0"], self.order)[-1] + np.arange(256))

    def probabilities(self, grams: np.ndarray) -> np.ndarray:
        """p of the last byte of each n-gram (see `BASE`): `[N]`, int64, to `[N]`, float64."""
        probability = np.full(len(grams), 1 / 256)
        for length, level in enumerate(self._levels, start=1):
            suffix = grams % BASE**length
            probability = level.own.at(suffix) + level.lower.at(suffix // BASE) * probability
        return probability


# ---------------------------------------------------------------------------------------------- counts


@dataclass(frozen=True)
class _Table:
    """A function of integers: `keys [N]`, sorted, their `values [N]`, and the value of every other key."""

    keys: np.ndarray
    values: np.ndarray
    missing: float

    def at(self, keys: np.ndarray) -> np.ndarray:
        """The values of these keys, `[Q]`."""
        if not len(self.keys):
            return np.full(len(keys), self.missing)
        index = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where(self.keys[index] == keys, self.values[index], self.missing)


@dataclass(frozen=True)
class _Level:
    """One order: `own`, n-gram → its discounted share of the context; `lower`, context → the weight of order n − 1."""

    own: _Table
    lower: _Table


def _level(grams: np.ndarray, counts: np.ndarray) -> _Level:
    """From the different n-grams of one order, sorted, `[G]`, and their counts `[G]`."""
    discount = np.array([0.0, *discounts(counts)])[counts.clip(max=3)]
    contexts, starts, kinds = np.unique(grams // BASE, return_index=True, return_counts=True)
    total = np.add.reduceat(counts, starts)
    own = (counts - discount) / total.repeat(kinds)
    return _Level(_Table(grams, own, 0.0), _Table(contexts, np.add.reduceat(discount, starts) / total, 1.0))


def discounts(counts: np.ndarray) -> tuple[float, float, float]:
    """What is taken from counts of 1, of 2, and of 3 and more (Chen & Goodman 1999, eq. 26).

    With n_k n-grams of count k and Y = n₁ / (n₁ + 2 n₂): D_k = k − (k + 1) Y n_{k+1} / n_k. Where
    n₁, n_k or n_{k+1} is zero, as in a small text, or D_k is not positive (nothing would be left for the lower order),
    D_k is the discount before it, and D₁ is `FALLBACK`: one discount for all counts is Kneser-Ney unmodified.
    """
    n = np.bincount(counts.clip(max=5), minlength=6).tolist()
    y = n[1] / max(1, n[1] + 2 * n[2])
    found = [FALLBACK]
    for k in (1, 2, 3):
        estimate = k - (k + 1) * y * n[k + 1] / n[k] if y and n[k] and n[k + 1] else 0.0
        found.append(estimate if estimate > 0 else found[-1])
    return found[1], found[2], found[3]


def _ngrams(documents: Sequence[bytes], order: int) -> np.ndarray:
    """The n-gram that ends at each byte, as a number with the oldest symbol first: `[bytes]`, int64."""
    start = bytes(order - 1)
    text = np.frombuffer(b"".join(start + document for document in documents), np.uint8)
    lengths = [length for document in documents for length in (order - 1, len(document))]
    is_byte = np.repeat(np.tile([False, True], len(documents)), lengths)
    symbols = np.where(is_byte, text.astype(np.int64) + 1, 0)
    grams = symbols.copy()
    for age in range(1, order):
        grams[age:] += symbols[:-age] * BASE**age
    return grams[is_byte]


def _size(documents: Sequence[bytes]) -> int:
    """Bytes of all documents, at least one."""
    size = sum(len(document) for document in documents)
    if not size:
        raise ValueError("bits per byte need at least one byte of text")
    return size
