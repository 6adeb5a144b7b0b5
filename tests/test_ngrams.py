"""The n-gram of benchmarks/language.py: the published formulas in exact fractions, degenerate texts."""

import math
import random
from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest
from helpers import cases
from ngrams import KneserNey, discounts, kneser_ney_bits_per_byte

ORDERS = (1, 2, 5, 7)
WORDS = b"the cat sat on the mat, the dog sat on the log; that cat, that dog. ".split(b" ")
# Four times the measured error relative to the fractions, 2.2e-15.
TOLERANCE = 9e-15


def words(seed, documents=12):
    """Make documents of words and of letters; some are empty or shorter than an n-gram, some have bytes 0 and 255."""
    rng = random.Random(seed)
    texts = [b" ".join(rng.choices(WORDS, k=rng.randrange(41))) for _ in range(documents)]
    texts.append(bytes(rng.choices(range(100, 120), weights=[2.0**-i for i in range(20)], k=1000)))
    return [*texts, b"", b"a", b"\0\xff\0", b"\0\0\0\0\0\0\0\0"]


class Textbook:
    """Interpolated modified Kneser-Ney of Chen & Goodman (1999), in dicts and fractions; "^" starts a document."""

    def __init__(self, documents, order):
        self.order = order
        self.counts = [Counter() for _ in range(order + 1)]
        before = [defaultdict(set) for _ in range(order + 1)]
        for document in documents:
            tokens = ["^"] * (order - 1) + list(document)
            for end in range(order, len(tokens) + 1):
                self.counts[order][tuple(tokens[end - order : end])] += 1
                for n in range(1, order):
                    before[n][tuple(tokens[end - n : end])].add(tokens[end - n - 1])
        for n in range(1, order):
            self.counts[n] = Counter({gram: len(symbols) for gram, symbols in before[n].items()})
        self.followers = [defaultdict(list) for _ in range(order + 1)]
        for n, counts in enumerate(self.counts):
            for gram, count in counts.items():
                self.followers[n][gram[:-1]].append(count)
        self.discounts = [self.estimate(Counter(counts.values())) for counts in self.counts]

    @staticmethod
    def estimate(n):
        found = [Fraction(0), Fraction(1, 2), Fraction(1, 2), Fraction(1, 2)]
        for k in (1, 2, 3):
            usable = min(n[1], n[k], n[k + 1]) > 0
            d = k - (k + 1) * Fraction(n[1], n[1] + 2 * n[2]) * Fraction(n[k + 1], n[k]) if usable else Fraction(0)
            found[k:] = [d if d > 0 else found[k]] * (4 - k)
        return found

    def probability(self, context, byte, n=None):
        n = self.order if n is None else n
        if n == 0:
            return Fraction(1, 256)
        context = (("^",) * self.order + tuple(context))[-(n - 1) :] if n > 1 else ()
        lower = self.probability(context[1:], byte, n - 1)
        followers = self.followers[n][context]
        if not followers:
            return lower
        taken = [self.discounts[n][min(count, 3)] for count in followers]
        count = self.counts[n][(*context, byte)]
        own = count - self.discounts[n][min(count, 3)]
        return (own + sum(taken) * lower) / sum(followers)


@pytest.mark.parametrize("order", ORDERS)
def test_follows_the_textbook(order):
    train, test = words(0), [*words(2, documents=3), b"never seen: \x80"]
    model, textbook = KneserNey(order).fit(train), Textbook(train, order)
    found = [float(textbook.probability(text[:i], byte)) for text in test for i, byte in enumerate(text)]
    bits = -sum(map(math.log2, found)) / len(found)
    assert kneser_ney_bits_per_byte(train, test, order) == pytest.approx(bits, rel=TOLERANCE)
    for context in (b"", b"t", b"the cat", b"zzzzzzz", b"\0\0"):
        expected = [float(textbook.probability(context, byte)) for byte in range(256)]
        np.testing.assert_allclose(model.distribution(context), expected, rtol=TOLERANCE)


def test_the_textbook_was_asked_about_estimated_discounts():
    """The test above thus compares estimated discounts, not the fallback. Single bytes are too few to estimate them."""
    for found in Textbook(words(0), 5).discounts[2:]:
        assert len({Fraction(1, 2), *found[1:]}) == 4


def test_an_example_by_hand():
    """One document "ab" has the bigrams ^a and ab. No bigram occurs twice, so every discount is ½."""
    model = KneserNey(2).fit([b"ab"])
    unigram = (1 - 0.5) / 2 + 0.5 / 256  # "a" follows ^, and "b" follows "a": one kind each of two
    assert model.distribution(b"")[ord("a")] == 0.5 + 0.5 * unigram
    assert model.distribution(b"")[ord("b")] == 0.5 * unigram
    assert model.distribution(b"z")[ord("z")] == 0.5 / 256


@pytest.mark.parametrize("train", [[], [b""], [b"", b""]])
@pytest.mark.parametrize("order", ORDERS)
def test_without_training_text_every_byte_costs_eight_bits(train, order):
    assert kneser_ney_bits_per_byte(train, [b"abc", b"", b"\0\xff"], order) == 8


@cases(
    "kinds, expected",
    ((8, 4, 2, 1), (0.5, 1.25, 2.0)),  # Y = 8/16: 1 − 2·½·½, 2 − 3·½·½, 3 − 4·½·½
    ((8, 4, 2, 0), (0.5, 1.25, 1.25)),
    ((8, 4, 0, 3), (0.5, 0.5, 0.5)),
    ((8, 0, 5, 3), (0.5, 0.5, 3 - 4 * 3 / 5)),  # Y = 1
    ((0, 4, 2, 1), (0.5, 0.5, 0.5)),  # Y = 0: the formula would discount the whole count
    ((8, 1, 9, 1), (0.8, 0.8, 3 - 4 * 0.8 / 9)),  # D₂ would be negative
    ((0, 0, 0, 0), (0.5, 0.5, 0.5)),
)
def test_discounts_and_what_stands_in_for_them(kinds, expected):
    counts = np.repeat([1, 2, 3, 4, 90], [*kinds, 7])
    assert discounts(counts) == pytest.approx(expected, rel=1e-15)
