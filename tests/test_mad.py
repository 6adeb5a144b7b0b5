"""Selective copying and noisy recall: solvers, scores of simple guessers, distributions, sizes, seeds."""

from collections import Counter
from itertools import product

import pytest
import torch
from helpers import near_level

from halflife import tasks
from halflife.tasks import IGNORED, TASKS
from halflife.tasks.mad import expected_mode, previous_occurrence

NAMES = ("selective_copy", "noisy_recall")
CASES = [  # the smallest sizes, MAD's sizes, usual sizes
    ("selective_copy", {"vocab_size": 3, "length": 3, "num_tokens": 1}),
    ("selective_copy", {"vocab_size": 4, "length": 11, "num_tokens": 5}),
    ("selective_copy", {"vocab_size": 16, "length": 40, "num_tokens": 4}),
    ("selective_copy", {"vocab_size": 16, "length": 256, "num_tokens": 16}),
    ("selective_copy", {"vocab_size": 128, "length": 256, "num_tokens": 96}),
    ("noisy_recall", {"vocab_size": 3, "noise_vocab_size": 1, "length": 4, "num_pairs": 1, "noise": 0.0}),
    ("noisy_recall", {"vocab_size": 8, "noise_vocab_size": 1, "length": 8, "num_pairs": 3, "noise": 0.0}),
    ("noisy_recall", {"vocab_size": 32, "length": 24, "num_pairs": 2, "noise": 0.75}),
    ("noisy_recall", {"vocab_size": 32, "length": 64, "num_pairs": 5, "noise": 0.4}),
    ("noisy_recall", {"vocab_size": 32, "length": 128, "num_pairs": 8, "noise": 0.8}),
    ("noisy_recall", {"vocab_size": 144, "length": 256, "num_pairs": 64, "noise": 0.2}),
]
each_case = pytest.mark.parametrize(("name", "config"), CASES, ids=lambda x: str(x).replace(" ", ""))
each_name = pytest.mark.parametrize("name", NAMES)


def solve_selective_copy(tokens, config):
    """Return the answer at each position from the inputs alone: the tokens in their order, after the copy token."""
    copy, blank = config["vocab_size"] - 1, config["vocab_size"] - 2
    end = tokens.index(copy)
    content = [token for token in tokens[:end] if token != blank]
    assert len(content) == config["num_tokens"]
    assert tokens[end + 1 :] == [blank] * len(content)
    return [IGNORED] * (end + 1) + content


def solve_noisy_recall(tokens, config):
    noise = config["vocab_size"] - config.get("noise_vocab_size", 16)
    bound, answers = {}, []
    for first, second in zip(tokens[::2], tokens[1::2], strict=True):
        assert (first >= noise) == (second >= noise)
        answers += [bound.get(first, IGNORED), IGNORED]
        if first < noise:
            assert first < noise // 2 <= second
            assert bound.setdefault(first, second) == second
    assert len(set(bound.values())) == len(bound)
    return answers


def examples(batch):
    return zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True)


def small(name):
    return {"length": 24, "num_tokens": 3} if name == "selective_copy" else {"length": 24, "num_pairs": 3}


@each_case
def test_a_solver_from_the_definition_is_always_right(name, config):
    batch = tasks.build(name, **config).generate(150, seed=0)
    assert batch.inputs.shape == (150, config["length"])
    for tokens, labels in examples(batch):
        assert globals()[f"solve_{name}"](tokens, config) == labels


@each_name
def test_the_longest_are_solved_too(name):
    task = tasks.build(name, length=4096)
    config = {"vocab_size": task.vocab_size, "num_tokens": 16}
    for tokens, labels in examples(task.generate(4, seed=0)):
        assert globals()[f"solve_{name}"](tokens, config) == labels


@each_case
def test_levels_are_those_of_real_guessers(name, config):
    task, count = tasks.build(name, **config), 1500
    batch = task.generate(count, seed=1)
    if name == "selective_copy":
        answers = config["vocab_size"] - 2
        content = ([token for token in tokens if token < answers] for tokens in batch.inputs.tolist())
        guesses = [Counter(tokens).most_common(1)[0][0] for tokens in content]
    else:
        values = config["vocab_size"] - config.get("noise_vocab_size", 16)
        answers = values - values // 2
        guesses = [next(t for t in tokens if values // 2 <= t < values) for tokens in batch.inputs.tolist()]
    scored = batch.labels != IGNORED
    right = (batch.labels == torch.tensor(guesses).unsqueeze(1))[scored].float().mean().item()
    # The results of one guess depend on each other within an example, so an example counts as one draw.
    assert near_level(right, task.shortcut_accuracy, count)
    assert task.chance == 1 / answers
    draw = torch.Generator().manual_seed(0)
    low = 0 if name == "selective_copy" else task.ranges[1][0]
    uniform = torch.randint(low, low + answers, batch.labels.shape, generator=draw)
    assert near_level((uniform == batch.labels)[scored].float().mean().item(), task.chance, int(scored.sum()))


@each_name
def test_all_answers_are_asked_alike(name):
    task, count = tasks.build(name, **small(name)), 10_000
    labels = task.generate(count, seed=0).labels
    shares = torch.bincount(labels[labels != IGNORED]) / (labels != IGNORED).sum()
    shares = shares[shares > 0]
    assert len(shares) == round(1 / task.chance)
    assert all(near_level(share, task.chance, count) for share in shares.tolist())


def test_every_part_follows_the_seed():
    def parts(seed):
        copy = tasks.build("selective_copy").generate(20, seed).inputs
        recall = tasks.build("noisy_recall", noise=0.5).generate(20, seed).inputs
        noisy = recall >= 16
        yield (copy < 14).tolist()  # positions of the tokens
        yield copy[copy < 14].tolist()
        yield noisy.tolist()  # positions of the noise
        yield recall[noisy].tolist()
        yield recall[~noisy][::2].tolist()  # keys, values
        yield recall[~noisy][1::2].tolist()

    assert all(one != other for one, other in zip(parts(0), parts(1), strict=True))


@each_case
def test_slices_count_what_stands_in_the_inputs(name, config):
    batch = tasks.build(name, **config).generate(60, seed=0)
    found = {key: numbers.tolist() for key, numbers in batch.slices.items()}
    size = "num_tokens" if name == "selective_copy" else "num_pairs"
    assert found.pop("length") == [config["length"]] * 60
    assert found.pop(size) == [config[size]] * 60
    assert list(found) == (["order", "gap"] if name == "selective_copy" else ["gap"])
    for i, (tokens, labels) in enumerate(examples(batch)):
        blank, order = config["vocab_size"] - 2, 0
        places = [at for at, token in enumerate(tokens) if token < blank]
        for t, label in enumerate(labels):
            if label == IGNORED:
                assert all(numbers[i][t] == IGNORED for numbers in found.values())
                continue
            at = t - 1 - found["gap"][i][t]
            assert tokens[at] == label
            if name == "selective_copy":
                assert at == places[order] == places[found["order"][i][t]]
                order += 1
            else:
                assert tokens[at - 1] == tokens[t]
                assert label not in tokens[at + 1 : t]


def test_selective_copy_places_all_ways_alike():
    task, count = tasks.build("selective_copy", vocab_size=4, length=8, num_tokens=2), 24_000
    inputs = task.generate(count, seed=0).inputs
    ways = Counter(map(tuple, inputs[:, :5].tolist()))
    assert len(ways) == 40  # 2 of 5 places, 2 × 2 tokens
    assert all(near_level(n / count, 1 / 40, count) for n in ways.values())
    assert (inputs[:, 5] == 3).all()


def test_selective_copy_last_token_may_stand_anywhere():
    """The last token need not precede the copy token directly, as it always does in MAD's generator."""
    inputs = tasks.build("selective_copy").generate(2000, seed=0).inputs
    assert near_level((inputs[:, 238] < 14).float().mean().item(), 16 / 239, 2000)


def test_noisy_recall_pairs_are_drawn_with_replacement():
    task, count = tasks.build("noisy_recall", length=8, num_pairs=3, noise=0.0), 12_000
    keys = task.generate(count, seed=0).inputs[:, ::2]
    assert (keys < 8).all()
    patterns = Counter()
    for row in keys.tolist():
        patterns[tuple(row.index(key) for key in row)] += 1  # the order of first occurrences, for any keys
    expected = Counter()
    for row in product(range(3), repeat=3):
        for key in set(row):
            whole = [*row, key]
            expected[tuple(whole.index(k) for k in whole)] += 1 / 27 / len(set(row))
    assert set(patterns) == set(expected)
    assert all(near_level(n / count, expected[pattern], count) for pattern, n in patterns.items())


@pytest.mark.parametrize(("noise", "motifs"), [(0.0, 0), (0.2, 26), (0.4, 51), (0.6, 77), (0.8, 102)])
def test_noisy_recall_has_the_requested_share_of_noise(noise, motifs):
    inputs = tasks.build("noisy_recall", noise=noise).generate(300, seed=0).inputs
    noisy = inputs >= 16
    assert torch.equal(noisy[:, ::2], noisy[:, 1::2])
    assert (noisy[:, ::2].sum(1) == motifs).all()
    assert not noisy[:, -2:].any()
    if motifs:  # all other places are equally likely, and every id of noise occurs
        shares = noisy[:, :-2:2].float().mean(0)
        assert all(abs(share - motifs / 127) < 5 * (0.25 / 300) ** 0.5 for share in shares.tolist())
        assert inputs[noisy].unique().tolist() == list(range(16, 32))


def test_noisy_recall_ends_with_a_key_that_stood_before():
    for noise in (0.0, 0.5):
        batch = tasks.build("noisy_recall", length=40, num_pairs=8, noise=noise).generate(400, seed=0)
        assert (batch.labels[:, -2] != IGNORED).all()


@pytest.mark.parametrize("percent", [20, 40, 60, 80])
def test_a_tier_is_a_share_of_noise(percent):
    assert tasks.build("noisy_recall", **TASKS["noisy_recall"].tiers[str(percent)]).noise == percent / 100


def test_latest_by_hand():
    ids = torch.tensor([[5, 2, 5, 5, 2, 7], [1, 1, 1, 0, 0, 1]])
    assert previous_occurrence(ids).tolist() == [[-1, -1, 0, 2, 1, -1], [-1, 0, 1, -1, 3, 2]]
    assert previous_occurrence(ids[:, :1]).tolist() == [[-1], [-1]]


@pytest.mark.parametrize(("draws", "kinds"), [(1, 1), (1, 5), (7, 1), (2, 2), (3, 2), (5, 3), (4, 6)])
def test_expected_mode_by_counting_all_draws(draws, kinds):
    every = [max(Counter(row).values()) for row in product(range(kinds), repeat=draws)]
    # The tolerance is four times the measured error, 6.7e-16.
    assert expected_mode(draws, kinds) == pytest.approx(sum(every) / len(every), rel=2.7e-15)
