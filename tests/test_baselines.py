"""gzip and Kneser-Ney: the published formulas in exact fractions, the purpose of the smoothing, degenerate texts."""

import gzip
import math
import random
import sysconfig
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_raises, cases

from halflife.evaluation.baselines import KneserNey, discounts, gzip_bits_per_byte, kneser_ney_bits_per_byte

ORDERS = (1, 2, 3, 5, 7)
WORDS = b"the cat sat on the mat, the dog sat on the log; that cat, that dog. ".split(b" ")
# Tolerances are four times the measured errors: 2.2e-15 relative to the fractions, 2.2e-16 of a sum of 256.
TOLERANCE, SUM_TOLERANCE = 9e-15, 9e-16


def words(seed, documents=12):
    """Make documents of words and of letters; some are empty or shorter than an n-gram, some have bytes 0 and 255."""
    rng = random.Random(seed)
    texts = [b" ".join(rng.choices(WORDS, k=rng.randrange(41))) for _ in range(documents)]
    texts.append(bytes(rng.choices(range(100, 120), weights=[2.0**-i for i in range(20)], k=1000)))
    return [*texts, b"", b"a", b"\0\xff\0", b"\0\0\0\0\0\0\0\0"]


def source(*names):
    return [(Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_bytes() for name in names]


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
@pytest.mark.parametrize("seed", [0, 1])
def test_follows_the_textbook(order, seed):
    train, test = words(seed), [*words(seed + 2, documents=3), b"never seen: \x80"]
    model, textbook = KneserNey(order).fit(train), Textbook(train, order)
    for document in test:
        expected = [float(textbook.probability(document[:i], byte)) for i, byte in enumerate(document)]
        np.testing.assert_allclose(np.exp(model.log_probabilities(document)), expected, rtol=TOLERANCE)
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("train", [words(0), [b"ab"], [bytes(range(256))], []], ids=["words", "ab", "bytes", "none"])
def test_every_distribution_sums_to_one(order, train):
    model = KneserNey(order).fit(train)
    for context in (b"", b"t", b"the ", b"on the mat", b"\0", b"\0" * 9, b"zzzzzzzz", b"zzzz the", b"\xff"):
        probabilities = model.distribution(context)
        assert probabilities.shape == (256,)
        assert probabilities.min() > 0
        assert abs(math.fsum(probabilities) - 1) < SUM_TOLERANCE


def test_a_byte_counts_for_the_contexts_it_completes():
    """Kneser-Ney counts contexts: "u" is the most frequent byte but only follows "q"; "a" follows many bytes."""
    model = KneserNey(2).fit([b"qu" * 100 + b"bacadafagahaja"])
    unknown = model.distribution(b"z")
    assert unknown[ord("a")] > 3 * unknown[ord("u")]
    assert model.distribution(b"q")[ord("u")] > 0.9


def test_contexts_do_not_cross_documents():
    model = KneserNey(2).fit([b"ab", b"cd"])
    np.testing.assert_array_equal(model.distribution(b"b"), model.distribution(b"z"))  # nothing follows "b"
    assert model.distribution(b"a")[ord("b")] > 2 * model.distribution(b"z")[ord("b")]
    assert model.distribution(b"")[ord("c")] > model.distribution(b"z")[ord("c")]  # learns how documents start
    other = KneserNey(2).fit([b"cd", b"", b"ab"])
    np.testing.assert_array_equal(other.log_probabilities(b"abcd"), model.log_probabilities(b"abcd"))


@pytest.mark.parametrize("order", ORDERS)
def test_bits_are_those_of_the_documents(order):
    train, test = words(0), words(5)
    model = KneserNey(order).fit(train)
    nats = sum(model.log_probabilities(document).sum() for document in test)
    expected = -nats / math.log(2) / len(b"".join(test))
    assert kneser_ney_bits_per_byte(train, test, order) == pytest.approx(expected, rel=SUM_TOLERANCE)


def test_longer_contexts_predict_source_code_better():
    train, test = source("argparse", "ast", "heapq", "random", "tempfile"), source("statistics", "bisect")
    bits = [kneser_ney_bits_per_byte(train, test, order) for order in (1, 2, 3, 5)]
    assert all(longer < shorter - 0.2 for shorter, longer in zip([8.0, *bits], bits, strict=False))


def test_noise_has_eight_bits():
    """Noise cannot be predicted, and a good smoothing loses little on it (here 0.07 bits after 1 MB)."""
    noise = random.Random(0).randbytes(1_000_000)
    assert 8 <= kneser_ney_bits_per_byte([noise], [random.Random(1).randbytes(20_000)]) < 8.1


def test_order_1_is_the_frequency_of_bytes():
    """The counts are 8 and 4 of 12, less ½ each; every byte gets 1/256 of the removed weight."""
    probabilities = KneserNey(1).fit([b"aab" * 4]).distribution(b"anything")
    share = 2 * 0.5 / 12 / 256
    expected = {ord("a"): 7.5 / 12 + share, ord("b"): 3.5 / 12 + share}
    np.testing.assert_allclose(probabilities, [expected.get(b, share) for b in range(256)], rtol=TOLERANCE)


@pytest.mark.parametrize("train", [[], [b""], [b"", b""]])
@pytest.mark.parametrize("order", ORDERS)
def test_without_training_text_every_byte_costs_eight_bits(train, order):
    assert kneser_ney_bits_per_byte(train, [b"abc", b"", b"\0\xff"], order) == 8
    assert KneserNey(order).log_probabilities(b"").shape == (0,)


def test_fit_forgets_what_was_counted_before():
    model = KneserNey(3).fit([b"abc"]).fit([b"xyz"])
    np.testing.assert_array_equal(model.distribution(b"x"), KneserNey(3).fit([b"xyz"]).distribution(b"x"))


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


def test_gzip_is_counted_whole():
    documents = source("bisect", "heapq")
    size = sum(map(len, documents))
    whole = gzip_bits_per_byte(documents)
    assert whole == 8 * len(gzip.compress(b"".join(documents), 9)) / size
    alone = gzip_bits_per_byte(documents, separately=True)
    assert alone == 8 * sum(len(gzip.compress(document, 9)) for document in documents) / size
    assert whole < alone < gzip_bits_per_byte(documents, 1, separately=True)


def test_gzip_by_hand():
    """Stored text has 10 bytes of header, 5 of the block, and 8 of checksum and length."""
    assert gzip_bits_per_byte([b"a" * 60, b"b" * 40], 0) == 8 * 123 / 100
    assert gzip_bits_per_byte([b"a" * 60, b"b" * 40], 0, separately=True) == 8 * 146 / 100


def test_errors_name_the_choices():
    for order in (0, 8, -1):
        assert_raises(ValueError, f"the order of an n-gram is 1 to 7, not {order}", KneserNey, order)
    assert_raises(ValueError, "gzip has levels 0 to 9, not 10", gzip_bits_per_byte, [b"a"], 10)
    for nothing in ([], [b""]):
        assert_raises(ValueError, "at least one byte", gzip_bits_per_byte, nothing)
        assert_raises(ValueError, "at least one byte", kneser_ney_bits_per_byte, [b"abc"], nothing)
