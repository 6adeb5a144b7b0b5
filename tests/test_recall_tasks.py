"""Recall over 128 token ids: solvers by the definitions, scores of simple guessers, layouts, sizes, seeds."""

from collections import Counter

import pytest
import torch
from helpers import near_level

from halflife import tasks
from halflife.tasks import IGNORED
from halflife.tasks.layout import BOS, CALL, FILLERS, KEYS, QUERY, RESULT, SEP, SYS, VALUES, draw_index, scatter

NAMES = ("sysprompt", "tooltrace", "niah", "multihop", "commonword")

# The smallest sizes, fully packed sizes, usual sizes.
SIZES = {
    "sysprompt": [(7, 1), (16, 5), (21, 8), (64, 4), (69, 32)],
    "tooltrace": [(8, 1), (16, 2), (18, 3), (28, 5), (43, 8), (64, 4), (163, 32)],
    "niah": [(4, 1), (18, 8), (64, 4), (66, 32)],
    "multihop": [(6, 1), (16, 3), (34, 8), (64, 4), (66, 16)],
    "commonword": [(7, 1), (11, 3), (21, 8), (64, 4), (67, 31)],
}
CASES = [(name, {"length": t, "num_pairs": kv}) for name, sizes in SIZES.items() for t, kv in sizes] + [
    ("niah", {"length": t, "num_pairs": kv, "hard": True}) for t, kv in [(8, 1), (50, 8), (64, 4), (98, 16)]
]
CASES += [("commonword", {"length": t, "num_pairs": 3, "repeats": f}) for t, f in [(6, 1), (16, 3), (51, 10)]]
each_case = pytest.mark.parametrize(("name", "config"), CASES, ids=lambda x: str(x).replace(" ", ""))
each_name = pytest.mark.parametrize("name", NAMES)


def within(ids, bounds):
    return (ids >= bounds[0]) & (ids < bounds[1])


def is_value(token):
    return VALUES[0] <= token < VALUES[1]


def pairs_of(tokens, first):
    """Return each (position, next token) at which `first` directly precedes a value."""
    return [(i, tokens[i + 1]) for i in range(len(tokens) - 1) if tokens[i] == first and is_value(tokens[i + 1])]


def calls_of(tokens):
    """Return (position, agent, tool, value) of each `CALL agent tool RES v`."""
    starts = [i for i in range(len(tokens) - 4) if tokens[i] == CALL]
    assert all(tokens[i + 3] == RESULT for i in starts)
    return [(i, tokens[i + 1], tokens[i + 2], tokens[i + 4]) for i in starts]


def solve_sysprompt(tokens):
    prompt = tokens[2 : tokens.index(SEP)]
    (answer,) = [value for key, value in zip(prompt[::2], prompt[1::2], strict=True) if key == tokens[-1]]
    return answer


def solve_tooltrace(tokens):
    (answer,) = [value for _, agent, tool, value in calls_of(tokens) if [agent, tool] == tokens[-2:]]
    return answer


def solve_niah(tokens):
    ((_, answer),) = pairs_of(tokens[:-2], tokens[-1])
    return answer


def solve_multihop(tokens):
    context, key = tokens[:-2], tokens[-1]
    (between,) = [context[i + 1] for i in range(len(context) - 1) if context[i] == key]
    ((_, answer),) = pairs_of(context, between)
    return answer


def solve_commonword(tokens):
    (first, most), *others = Counter(token for token in tokens if is_value(token)).most_common()
    assert all(count * 2 == most for _, count in others)  # one word is the most common
    return first


def guess_sysprompt(tokens):
    return tokens[3]


def guess_tooltrace(tokens):
    """Guess the first result, of a call that shares both of its names if there is one."""
    calls = calls_of(tokens)
    agents, tools = Counter(call[1] for call in calls), Counter(call[2] for call in calls)
    both = [call for call in calls if agents[call[1]] > 1 and tools[call[2]] > 1]
    return (both if len(calls) > 3 else calls)[0][3]


def guess_niah(tokens):
    return next(tokens[i + 1] for i, key in enumerate(tokens) if KEYS[0] <= key < KEYS[1] and is_value(tokens[i + 1]))


def guess_multihop(tokens):
    return next(token for token in tokens if is_value(token))


def guess_commonword(tokens):
    return [token for token in tokens if is_value(token)][-1]


def rows(batch):
    return zip(batch.inputs.tolist(), batch.labels[:, -1].tolist(), strict=True)


@each_case
def test_a_solver_from_the_definition_is_always_right(name, config):
    batch = tasks.build(name, **config).generate(300, seed=0)
    assert batch.inputs.shape == (300, config["length"])
    assert all(globals()[f"solve_{name}"](tokens) == answer for tokens, answer in rows(batch))
    assert (batch.labels[:, :-1] == IGNORED).all()
    assert within(batch.labels[:, -1], VALUES).all()


@each_name
def test_the_longest_are_solved_too(name):
    batch = tasks.build(name, length=4096, num_pairs=8).generate(20, seed=0)
    assert all(globals()[f"solve_{name}"](tokens) == answer for tokens, answer in rows(batch))


@each_case
def test_levels_are_those_of_real_guessers(name, config):
    task, count = tasks.build(name, **config), 4000
    batch = task.generate(count, seed=1)
    guessed = sum(globals()[f"guess_{name}"](tokens) == answer for tokens, answer in rows(batch)) / count
    assert near_level(guessed, task.shortcut_accuracy, count)
    assert task.chance == (1 / (config["num_pairs"] + 1) if name == "commonword" else 1 / 32)
    uniform = torch.randint(*VALUES, (count,)).tolist()
    if name == "commonword":  # one of the words of the context
        seen = [sorted({token for token in tokens if is_value(token)}) for tokens in batch.inputs.tolist()]
        which = torch.randint(config["num_pairs"] + 1, (count,)).tolist()
        uniform = [words[i] for words, i in zip(seen, which, strict=True)]
    right = sum(u == answer for u, answer in zip(uniform, batch.labels[:, -1].tolist(), strict=True)) / count
    assert near_level(right, task.chance, count)


@pytest.mark.parametrize("pairs", range(1, 9))
def test_guesses_by_number_of_pairs(pairs):
    levels = {name: tasks.build(name, length=256, num_pairs=pairs).shortcut_accuracy for name in NAMES}
    assert levels.pop("commonword") == 2 / (pairs + 2)
    assert levels.pop("tooltrace") == (1 / 4 if pairs == 5 else 1 / pairs)
    assert set(levels.values()) == {1 / pairs}


@each_case
def test_fillers_are_no_keys_and_no_values(name, config):
    task = tasks.build(name, **config)
    inputs, pairs = task.generate(200, seed=0).inputs, config["num_pairs"]
    hard, f = config.get("hard", False), config.get("repeats", 2)
    keys, values, special = {
        "sysprompt": (pairs + 1, pairs, 4),
        "tooltrace": (2 * pairs + 2, pairs, 2 * pairs + 1),
        "niah": (pairs * (1 + hard) + 1, pairs * (1 + hard), 1),
        "multihop": (3 * pairs + 1, pairs, 1),
        "commonword": (0, f * (pairs + 2), 1),
    }[name]
    assert (within(inputs, KEYS).sum(1) == keys).all()
    assert (within(inputs, VALUES).sum(1) == values).all()
    assert ((inputs < KEYS[0]).sum(1) == special).all()
    assert (within(inputs, FILLERS).sum(1) == config["length"] - keys - values - special).all()


@each_name
def test_all_fillers_occur_and_differ_by_row_and_seed(name):
    task = tasks.build(name, length=256)
    one, other = task.generate(50, seed=0).inputs, task.generate(50, seed=1).inputs
    assert one[within(one, FILLERS)].unique().tolist() == list(range(*FILLERS))
    assert (one != other).any(1).all()
    assert len(one.unique(dim=0)) == 50


@each_case
def test_slices_say_where_the_answer_stands(name, config):
    task = tasks.build(name, **config)
    batch = task.generate(200, seed=0)
    found = {key: numbers.tolist() for key, numbers in batch.slices.items()}
    assert found["num_pairs"] == [config["num_pairs"]] * 200
    assert found["length"] == [config["length"]] * 200
    for i, (tokens, answer) in enumerate(rows(batch)):
        query = len(tokens) - 1 - tokens[::-1].index(QUERY)
        at = query - 1 - found["gap"][i]
        assert tokens[at] == answer
        assert answer not in tokens[at + 1 :]
        if name == "sysprompt":
            assert found["depth"][i] == tokens[2::2].index(tokens[-1])
        elif name == "tooltrace":
            assert found["depth"][i] == [call[0] for call in calls_of(tokens)].index(at - 4)
        elif name == "niah":
            bound = [j for j in range(1, query) if is_value(tokens[j]) and KEYS[0] <= tokens[j - 1] < KEYS[1]]
            assert found["depth"][i] == bound.index(at)
        elif name == "multihop":
            assert found["forward"][i] == (tokens.index(tokens[-1]) < at)


@pytest.mark.parametrize("name", ["sysprompt", "tooltrace", "niah"])
def test_every_depth_is_asked_alike(name):
    depth = tasks.build(name, length=64, num_pairs=8).generate(8000, seed=0).slices["depth"]
    assert all(near_level(n / 8000, 1 / 8, 8000) for n in torch.bincount(depth, minlength=8).tolist())


def test_multihop_links_stand_in_either_order():
    forward = tasks.build("multihop", length=64).generate(8000, seed=0).slices["forward"].float().mean().item()
    assert near_level(forward, 1 / 2, 8000)


def test_sysprompt_layout():
    inputs = tasks.build("sysprompt", length=20, num_pairs=3).generate(100, seed=0).inputs
    assert (inputs[:, :2] == torch.tensor([BOS, SYS])).all()
    assert within(inputs[:, 2:8:2], KEYS).all()
    assert within(inputs[:, 3:9:2], VALUES).all()
    assert (inputs[:, 8] == SEP).all()
    assert within(inputs[:, 9:18], FILLERS).all()
    assert (inputs[:, 18] == QUERY).all()


@pytest.mark.parametrize("pairs", [*range(1, 10), 13, 21, 31, 32])
def test_tooltrace_neither_name_alone_decides(pairs):
    task = tasks.build("tooltrace", length=200, num_pairs=pairs)
    shared = []
    for tokens, answer in rows(task.generate(300, seed=0)):
        calls = [call[1:3] for call in calls_of(tokens)]
        assert len(set(calls)) == len(calls) == pairs
        assert len({call[3] for call in calls_of(tokens)}) == pairs
        assert all(16 <= agent < 32 <= tool < 48 for agent, tool in calls)
        agent, tool = tokens[-2:]
        shared.append((sum(a == agent for a, _ in calls) > 1, sum(t == tool for _, t in calls) > 1))
        assert answer in tokens
    if pairs >= 4:
        assert set(shared) == {(True, True)}
    elif pairs == 3:  # a path of three calls: each end has one unique name
        assert set(shared) == {(True, True), (True, False), (False, True)}
    elif pairs == 2:  # the two calls share one name
        assert set(shared) == {(True, False), (False, True)}


@pytest.mark.parametrize("pairs", [2, 3, 5, 8])
def test_tooltrace_who_reads_one_name_falls_short(pairs):
    batch = tasks.build("tooltrace", length=64, num_pairs=pairs).generate(2000, seed=0)
    for name in (0, 1):
        right = 0
        for tokens, answer in rows(batch):
            right += next(call[3] for call in calls_of(tokens) if call[1 + name] == tokens[-2 + name]) == answer
        assert right / 2000 < (0.8 if pairs < 4 else 0.6)


def test_niah_decoys_are_there_and_bind_nothing():
    pairs = 4
    inputs = tasks.build("niah", length=64, num_pairs=pairs, hard=True).generate(2000, seed=0).inputs
    context, asked = inputs[:, :-2], inputs[:, -1:]
    key, value = within(context, KEYS), within(context, VALUES)
    bound = key[:, :-1] & value[:, 1:]
    assert (bound.sum(1) == pairs).all()
    assert ((key.sum(1) == 2 * pairs) & (value.sum(1) == 2 * pairs)).all()
    for where in (key, value):  # all are different, so no decoy is a bound key or value
        ids = context[where].view(2000, 2 * pairs).sort(1).values
        assert (ids.diff(dim=1) > 0).all()
    assert ((context[:, :-1] == asked) & bound).any(1).all()
    before = key & (torch.arange(62) < 31)  # decoys occur everywhere among the pairs
    decoys = key[:, :-1] & ~bound
    assert near_level((decoys & before[:, :-1]).sum().item() / decoys.sum().item(), 1 / 2, 2000)


@pytest.mark.parametrize("guesser", ["after", "last", "first"])
def test_multihop_has_no_shortcut(guesser):
    count, right = 8000, 0
    for tokens, answer in rows(tasks.build("multihop", length=40, num_pairs=4).generate(count, seed=0)):
        values = [token for token in tokens if is_value(token)]
        behind = [token for token in tokens[tokens.index(tokens[-1]) : -2] if is_value(token)]
        right += {"after": (behind or values)[0], "last": values[-1], "first": values[0]}[guesser] == answer
    assert near_level(right / count, 1 / 4, count)


def test_multihop_links_are_two_disjoint_sets():
    for tokens, _ in rows(tasks.build("multihop", length=40, num_pairs=4).generate(200, seed=0)):
        count = Counter(token for token in tokens[:-2] if KEYS[0] <= token < KEYS[1])
        assert sorted(count.values()) == [1] * 4 + [2] * 4
        assert count[tokens[-1]] == 1


def test_scatter_places_all_ways_alike():
    draw = torch.Generator().manual_seed(0)
    inputs = torch.zeros(24_000, 7, dtype=torch.int64)
    blocks = torch.tensor([[[1, 2], [3, 4]]]).expand(24_000, 2, 2)
    starts = scatter(inputs, blocks, 6, draw)
    ways = Counter(map(tuple, inputs.tolist()))
    assert len(ways) == 12  # two of four items are the blocks, in either order
    assert all(near_level(n / 24_000, 1 / 12, 24_000) for n in ways.values())
    assert (inputs[:, 6] == 0).all()
    assert (inputs.gather(1, starts) == torch.tensor([1, 3])).all()
    assert (inputs.gather(1, starts + 1) == torch.tensor([2, 4])).all()


def test_pick_is_uniform_with_a_count_a_row():
    counts = torch.tensor([[1], [3]]).repeat(6000, 1)
    picked = draw_index(12_000, counts, torch.Generator().manual_seed(0)).view(-1, 2)
    assert (picked[:, 0] == 0).all()
    assert all(near_level(n / 6000, 1 / 3, 6000) for n in torch.bincount(picked[:, 1], minlength=3).tolist())
