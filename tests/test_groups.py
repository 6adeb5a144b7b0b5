"""Words in groups: group axioms, products by hand and by tuples, scores of simple guessers, sizes, seeds."""

import dataclasses
from collections import Counter
from itertools import permutations
from math import lcm

import pytest
import torch
from helpers import assert_raises, near_level

from halflife import tasks
from halflife.tasks.groups import GROUPS, multiplication_table, running_product, word_letters

SIZES = {"s5": 120, "s3": 6, "a5": 60, "z60": 60, "z2": 2}
each_group = pytest.mark.parametrize("group", GROUPS)


def cycles(images):
    left, found = set(range(len(images))), []
    while left:
        start = at = min(left)
        size = 0
        while at in left:
            left.remove(at)
            at, size = images[at], size + 1
        found.append(size)
        assert at == start
    return found


def elements(group):
    """Return the elements of the ids: remainders, or permutations as tuples of images in lexicographic order."""
    if group[0] == "z":
        return list(range(SIZES[group]))
    every = sorted(permutations(range(int(group[1]))))
    # A cycle of c elements is a product of c - 1 transpositions.
    return [p for p in every if group[0] == "s" or sum(c - 1 for c in cycles(p)) % 2 == 0]


def multiply(group, a, b):
    """Compute ab by its definition, first a and then b."""
    return (a + b) % SIZES[group] if group[0] == "z" else tuple(b[a[i]] for i in range(len(a)))


def solve(group, words):
    meant, product, answers = elements(group), elements(group)[0], []
    for word in words:
        product = multiply(group, product, meant[word])
        answers.append(meant.index(product))
    return answers


@each_group
def test_a_table_is_that_of_the_definition(group):
    meant = elements(group)
    assert len(meant) == SIZES[group]
    expected = [[meant.index(multiply(group, a, b)) for b in meant] for a in meant]
    assert multiplication_table(group).tolist() == expected


@each_group
def test_a_table_is_a_group(group):
    table = multiplication_table(group)
    ids = torch.arange(SIZES[group])
    assert torch.equal(table[0], ids)  # 0 is the identity on both sides
    assert torch.equal(table[:, 0], ids)
    # The product is associative: (ab)c = a(bc) for all triples.
    assert torch.equal(table[table], table[ids.view(-1, 1, 1), table])
    inverse = (table == 0).long().argmax(1)
    assert ((table == 0).sum(1) == 1).all()
    assert (table[ids, inverse] == 0).all()
    assert (table[inverse, ids] == 0).all()
    commutes = torch.equal(table, table.T)
    assert commutes == (group[0] == "z")


@each_group
def test_orders_of_elements(group):
    table, found = multiplication_table(group), Counter()
    for x in range(SIZES[group]):
        power, order = x, 1
        while power:
            power, order = int(table[power, x]), order + 1
        found[order] += 1
    known = {  # orders of elements from textbooks
        "s3": {1: 1, 2: 3, 3: 2},
        "s5": {1: 1, 2: 25, 3: 20, 4: 30, 5: 24, 6: 20},
        "a5": {1: 1, 2: 15, 3: 20, 5: 24},
        "z2": {1: 1, 2: 1},
        "z60": {1: 1, 2: 1, 3: 2, 4: 2, 5: 4, 6: 2, 10: 4, 12: 4, 15: 8, 20: 8, 30: 8, 60: 16},
    }
    assert found == known[group]
    if group[0] != "z":
        assert found == Counter(lcm(*cycles(p)) for p in elements(group))


def test_s3_by_hand():
    # In lexicographic order 0 = 012, 1 = 021, 2 = 102, 3 = 120, 4 = 201, 5 = 210. First 1 and then 2 maps 0, 1, 2 to
    # 0, 2, 1 and then to 1, 2, 0, which is 3. First 2 and then 1 maps them to 1, 0, 2 and then to 2, 0, 1, which is 4.
    # 3 is a cycle, so 3 · 3 = 4 and 3 · 3 · 3 = 0. 5 is a swap, so 5 · 5 = 0. First 5 and then 3 gives 0, 2, 1: 1.
    words = torch.tensor([[1, 2, 0, 3, 4], [2, 1, 3, 5, 5], [3, 3, 3, 5, 3]])
    expected = [[1, 3, 3, 4, 3], [2, 4, 0, 5, 0], [3, 4, 0, 5, 1]]
    assert running_product(words, multiplication_table("s3")).tolist() == expected


@each_group
@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 129])
def test_a_solver_from_the_definition_is_always_right(group, length):
    batch = tasks.build("s5", group=group, length=length).generate(20, seed=0)
    assert batch.inputs.shape == (20, length)
    for words, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        assert solve(group, words) == labels


@each_group
def test_the_other_order_of_composition_is_wrong_where_it_differs(group):
    batch = tasks.build("s5", group=group).generate(500, seed=0)
    other = running_product(batch.inputs, multiplication_table(group).T.contiguous())
    assert torch.equal(other[:, 0], batch.labels[:, 0])
    assert torch.equal(other, batch.labels) == (group[0] == "z")


def test_running_product_keeps_its_input_and_takes_no_rows():
    words = torch.tensor([[3, 1, 2]])
    running_product(words, multiplication_table("s3"))
    assert words.tolist() == [[3, 1, 2]]
    assert running_product(words[:0], multiplication_table("s3")).shape == (0, 3)


@each_group
def test_words_and_products_are_uniform_and_use_every_id(group):
    task, count = tasks.build("s5", group=group, length=4), 24_000
    batch, size = task.generate(count, seed=0), SIZES[group]
    assert task.vocab_size == size
    for ids in (*batch.inputs.T, *batch.labels.T):
        shares = torch.bincount(ids, minlength=size) / count
        assert len(shares) == size
        assert (shares - 1 / size).abs().max() < 5 * (1 / size / count) ** 0.5


@each_group
@pytest.mark.parametrize("length", [1, 5, 16])
def test_levels_are_those_of_real_guessers(group, length):
    task, count = tasks.build("s5", group=group, length=length), 6000
    batch = task.generate(count, seed=1)
    assert task.chance == 1 / SIZES[group]
    uniform = torch.randint(SIZES[group], batch.labels.shape, generator=torch.Generator().manual_seed(0))
    assert near_level((uniform == batch.labels).float().mean().item(), task.chance, count * length)
    named = batch.inputs == batch.labels  # the last token
    assert named[:, 0].all()
    assert all(near_level(n, task.chance, count) for n in named[:, 1:].float().mean(0).tolist())
    # At the first position the guess is always right.
    assert abs(named.float().mean().item() - task.shortcut_accuracy) <= 4 * (task.chance / (count * length)) ** 0.5


def test_swaps_are_the_transpositions_and_reach_the_whole_group():
    task = tasks.build("s5", words="swaps", length=24)
    batch = task.generate(4000, seed=1)
    meant = elements("s5")
    assert all(sorted(cycles(meant[i])) == [1, 1, 1, 2] for i in batch.inputs.unique().tolist())
    assert len(batch.inputs.unique()) == 10
    assert batch.labels[0].tolist() == solve("s5", batch.inputs[0].tolist())
    even = {i for i, p in enumerate(meant) if sum(c - 1 for c in cycles(p)) % 2 == 0}
    for t in range(24):
        assert all((i in even) == (t % 2 == 1) for i in batch.labels[:, t].tolist())
    assert len(batch.labels[:, -2:].unique()) == 120
    assert_raises(ValueError, "no swaps words", tasks.build, "s5", group="a5", words="swaps")
    assert_raises(ValueError, "all, swaps", tasks.build, "s5", words="some")


def test_mixed_words_are_transpositions_with_one_letter_of_eight_from_all():
    task = tasks.build("s5", words="mixed", length=16)
    letters = task.generate(4096, 0).inputs
    swaps = word_letters("s5", "swaps")
    share = torch.isin(letters, swaps).double().mean().item()
    assert share == pytest.approx(7 / 8 + 10 / 120 / 8, abs=0.005)
    assert len(letters.unique()) == 120
    assert task.chance == 1 / 120


def test_the_guess_at_swaps_is_that_of_a_real_guesser():
    """After one swap the product is one of ten swaps; after two it is the identity with probability 1/10."""
    assert tasks.build("s5", words="swaps", length=2).shortcut_accuracy == pytest.approx((1 + 1 / 10) / 2)
    assert tasks.build("s5", words="swaps", length=3).shortcut_accuracy == pytest.approx((1 + 1 / 10 + 1 / 10) / 3)
    task = tasks.build("s5", words="swaps", length=12)
    batch = task.generate(20000, seed=2)
    named = batch.inputs == batch.labels
    # The last token is the product if the product before it was the identity.
    assert near_level(named[:, 2].double().mean().item(), 1 / 10, 20000)
    assert task.chance == 1 / 60


def test_guess_by_hand():
    assert tasks.build("s5").shortcut_accuracy == pytest.approx((1 + 15 / 120) / 16)
    assert tasks.build("s5", length=1).shortcut_accuracy == 1
    assert tasks.build("s5", group="z2", length=2).shortcut_accuracy == 3 / 4


def test_slices_tell_positions():
    batch = tasks.build("s5", group="a5", length=7).generate(3, seed=0)
    assert batch.slices["length"].tolist() == [7] * 3
    assert batch.slices["position"].tolist() == [list(range(7))] * 3
    right = torch.zeros(3, 7).index_fill_(1, torch.tensor([0, 2]), 1)
    by_position = [right[batch.slices["position"] == t].mean().item() for t in range(7)]
    assert by_position == [1, 0, 1, 0, 0, 0, 0]


@each_group
def test_a_tier_is_a_group(group):
    task = tasks.build("s5", **tasks.TASKS["s5"].tiers[group])
    assert (task.group, task.vocab_size, task.length) == (group, SIZES[group], 16)


def test_long_words():
    task = tasks.build("s5", length=4096)
    batch = task.generate(2, seed=0)
    assert solve("s5", batch.inputs[1].tolist()) == batch.labels[1].tolist()


def test_vocabulary_can_be_said_and_a_task_replaced():
    task = tasks.build("s5", vocab_size=60, group="z60")
    assert dataclasses.replace(task, group="a5", length=3).vocab_size == 60
