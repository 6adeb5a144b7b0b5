"""MQAR: values of its definition (docs/tasks.md), determinism in (settings, seed), solvability, bad settings."""

import re
from pathlib import Path

import pytest
import torch
from helpers import assert_raises, cases

from halflife import tasks
from halflife.tasks import IGNORED, TASKS, stream_seed
from halflife.tasks.base import distinct, median_lag

ROOT = Path(__file__).parents[1]
SMALL = {"vocab_size": 64, "length": 40, "num_pairs": 6}


def solve(inputs, pairs):
    """Answer by the definition, one token at a time: the value that follows the key among the pairs."""
    answers = torch.full_like(inputs, IGNORED)
    for row, out in zip(inputs.tolist(), answers, strict=True):
        bound = {row[2 * i]: row[2 * i + 1] for i in range(pairs)}
        for t in range(2 * pairs, len(row)):
            if row[t] in bound:
                out[t] = bound[row[t]]
    return answers


@pytest.mark.parametrize("name", TASKS)
def test_pure_function_of_settings_and_seed(name):
    task = tasks.build(name)
    torch.manual_seed(1)
    a = task.generate(8, seed=5)
    torch.manual_seed(2)
    b, other = task.generate(8, seed=5), task.generate(8, seed=6)
    assert torch.equal(a.inputs, b.inputs)
    assert torch.equal(a.labels, b.labels)
    assert not torch.equal(a.inputs, other.inputs)
    assert a.inputs.shape == a.labels.shape == (8, task.length)
    assert a.inputs.dtype == a.labels.dtype == torch.int64
    assert all(len(numbers) == 8 for numbers in a.slices.values())
    assert 0 <= a.inputs.min() <= a.inputs.max() < task.vocab_size


@pytest.mark.parametrize("name", TASKS)
def test_splits_share_no_example(name):
    task = tasks.build(name)
    batches = [task.generate(200, stream_seed(split, 0)).inputs for split in tasks.base.SPLITS]
    assert len(torch.cat(batches).unique(dim=0)) == 600


@pytest.mark.parametrize("name", TASKS)
def test_no_examples_and_too_few(name):
    assert len(tasks.build(name).generate(0, seed=0)) == 0
    assert_raises(ValueError, "num_examples", tasks.build(name).generate, -1, seed=0)


def test_mqar_a_solver_from_the_definition_is_always_right():
    batch = tasks.build("mqar", **SMALL).generate(200, seed=0)
    assert torch.equal(solve(batch.inputs, 6), batch.labels)
    assert (batch.labels != IGNORED).sum(1).eq(6).all()


def test_mqar_layout():
    task = tasks.build("mqar", **SMALL)
    batch = task.generate(500, seed=0)
    keys, values = batch.inputs[:, 0:12:2], batch.inputs[:, 1:12:2]
    low, high = task.key_range
    assert low == 8
    assert high == 32
    assert ((keys >= low) & (keys < high)).all()
    assert (values >= high).all()
    for row in (*keys, *values):
        assert len(row.unique()) == 6
    queries = batch.labels != IGNORED
    assert not queries[:, :12].any()
    assert not queries[:, 13::2].any()  # queries are at even slots
    rest = torch.where(queries, low - 1, batch.inputs)[:, 12:]
    assert (rest < low).all()  # all other tokens are fillers: no key and no value occurs again
    assert rest.unique().tolist() == list(range(low))


@pytest.mark.parametrize("power", [0.01, 0])
def test_mqar_slots_follow_the_power_law(power):
    task = tasks.build("mqar", vocab_size=64, length=24, num_pairs=2, power=power)
    asked = (task.generate(20_000, seed=0).labels != IGNORED)[:, 4::2].float().mean(0)
    # Exact inclusion probabilities of two draws without replacement with p ∝ i^(a−1).
    p = torch.arange(1, 11).double().pow(power - 1)
    p = p / p.sum()
    expected = p + (p * (p / (1 - p)).sum() - p * p / (1 - p))
    assert (asked - expected).abs().max() < 4 * (0.25 / 20_000) ** 0.5


def test_mqar_every_slot_is_taken_at_a_quarter():
    batch = tasks.build("mqar", vocab_size=64, length=32, num_pairs=8).generate(50, seed=0)
    assert (batch.labels[:, 16::2] != IGNORED).all()


def test_mqar_of_long_values_that_are_held():
    """The label at every scored step is the token after this one among the pairs, and each token stands h times."""
    sizes = {"vocab_size": 64, "num_pairs": 3, "value_size": 4, "gap": 2}
    once = tasks.build("mqar", **sizes, length=44).generate(50, seed=0)
    held = tasks.build("mqar", **sizes, length=132, hold=3).generate(50, seed=0)
    assert torch.equal(held.inputs, once.inputs.repeat_interleave(3, 1))
    assert torch.equal(held.labels[:, 2::3], once.labels)
    assert (held.labels.unflatten(1, (-1, 3))[:, :, :2] == IGNORED).all()
    assert torch.equal(held.facts, once.facts.repeat_interleave(3, 1))
    assert once.facts.sum(1).eq(15).all()
    assert once.inputs[:, 15:17].lt(8).all()  # the gap
    for row, labels in zip(once.inputs.tolist(), once.labels.tolist(), strict=True):
        after = {row[i]: row[i + 1] for i in range(15) if i % 5 < 4}
        scored = [t for t, label in enumerate(labels) if label != IGNORED]
        assert len(scored) == 12
        assert [labels[t] for t in scored] == [after[row[t]] for t in scored]


@pytest.mark.parametrize("filler", ["disjoint", "zoology"])
def test_mqar_of_reassigned_keys_asks_for_the_last_value(filler):
    """A dictionary that reads the pairs in order. Every key has four values, and other keys stand between them."""
    task = tasks.build("mqar", vocab_size=128, length=60, num_pairs=5, updates=3, filler=filler)
    batch = task.generate(100, seed=0)
    apart = 0
    for row, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        bound, values, written = {}, {}, row[:40]
        for key, value in zip(written[::2], written[1::2], strict=True):
            bound[key] = value
            values.setdefault(key, []).append(value)
        assert [len(set(seen)) for seen in values.values()] == [4] * 5
        assert len(set(written[1::2])) == 20
        apart += written[:40:2] != written[:10:2] * 4
        asked = {row[t]: label for t, label in enumerate(labels) if label != IGNORED}
        assert asked == bound
        assert all(label == IGNORED for label in labels[:40])
    assert apart > 90  # pairs do not come in rounds of one order
    assert batch.facts.sum(1).eq(40).all()


@pytest.mark.parametrize("options", [{}, {"value_size": 2, "length": 64, "hold": 2}])
def test_mqar_without_updates_has_the_examples_of_earlier_seeds(options):
    """The generator of the first versions, written out: keys, values, fillers, then slots."""
    task = tasks.build("mqar", **{**SMALL, "num_pairs": 4, **options})
    size, hold, draw = task.value_size, task.hold, torch.Generator().manual_seed(7)
    keys = distinct(9, 4, *task.key_range, draw)
    values = distinct(9, 4 * size, *task.value_range, draw)
    inputs = torch.randint(*task.filler_range, (9, task.length // hold), generator=draw)
    pairs = torch.cat([keys.unsqueeze(2), values.unflatten(1, (4, size))], 2)
    inputs[:, : 4 * (1 + size)] = pairs.flatten(1)
    rate = torch.arange(1, task.num_slots + 1).pow(task.power - 1)
    race = torch.empty(9, task.num_slots).exponential_(generator=draw) / rate
    slots = race.argsort(1)[:, :4] if task.num_slots == 4 else race.topk(4, dim=1, largest=False).indices
    at = (task.first_slot + (size + 1) * slots).unsqueeze(2) + torch.arange(size)
    inputs.scatter_(1, at.flatten(1), pairs[:, :, :-1].flatten(1))
    assert torch.equal(task.generate(9, seed=7).inputs, inputs.repeat_interleave(hold, 1))


def test_mqar_without_fillers():
    task = tasks.build("mqar", vocab_size=64, length=18, num_pairs=2, value_size=4, spacing=0)
    batch = task.generate(50, seed=0)
    assert (batch.inputs >= task.key_range[0]).all()
    assert (batch.labels != IGNORED).sum(1).eq(8).all()


@pytest.mark.parametrize("options", [{}, {"gap": 7}, {"updates": 1}, {"hold": 3, "length": 144}, {"value_size": 2}])
def test_mqar_lags_are_those_of_its_samples(options):
    """A lag is the distance from the last place where the value of a question was written, as a search finds it."""
    task = tasks.build("mqar", **{**SMALL, "num_pairs": 5} | options)
    batch = task.generate(20, seed=0)
    for inputs, labels, lags in zip(batch.inputs, batch.labels, batch.slices["lag"], strict=True):
        pairs = inputs[: task.hold * task.num_written * (1 + task.value_size)]
        asked = (labels != IGNORED).nonzero().flatten().tolist()
        assert [t - lags[t].item() for t in asked] == [(pairs == labels[t]).nonzero().max().item() for t in asked]
        assert lags[labels == IGNORED].eq(0).all()


def test_lags_vary_as_the_page_of_tasks_says():
    """The medians of `persist` are those of docs/tasks.md. With a gap all lags lie within 4K of each other."""
    rows = re.findall(r"\| (\d+) pairs, T = (\d+) \| (.*) \|\n", (ROOT / "docs/tasks.md").read_text())
    for pairs, length, cells in [(int(k), int(t), cells.split("|")) for k, t, cells in rows]:
        for i, cell in enumerate(cells):
            sizes = {"vocab_size": 1024, "num_pairs": pairs, "length": length * 2**i}
            if cell.strip():
                assert median_lag(tasks.build("mqar", **sizes), 4096) == pytest.approx(int(cell), abs=2)
            held = tasks.build("mqar", **sizes, gap=sizes["length"] - 4 * pairs)
            batch = held.generate(256, seed=1)
            lags = batch.slices["lag"][batch.labels != IGNORED]
            assert held.gap < lags.min() <= lags.max() <= held.length - 3
            assert median_lag(held) == held.length - 2 * pairs - 1
    assert len(rows) == 2


def test_mqar_zoology_fillers_may_repeat_bound_keys():
    batch = tasks.build("mqar", **SMALL, filler="zoology").generate(500, seed=0)
    fillers = torch.where(batch.labels == IGNORED, batch.inputs, -1)[:, 12:]
    assert fillers.max() == 63
    keys = batch.inputs[:, 0:12:2]
    assert (fillers.unsqueeze(-1) == keys.unsqueeze(1)).any()


def test_mqar_levels_are_those_of_real_guessers():
    task = tasks.build("mqar", **SMALL)
    batch = task.generate(20_000, seed=0)
    scored = batch.labels != IGNORED
    answers = batch.labels[scored]
    uniform = torch.randint(32, 64, answers.shape)
    bound = batch.inputs[:, 1]  # always the first bound value
    assert abs((uniform == answers).float().mean().item() - task.chance) < 0.004
    assert (
        abs((bound.unsqueeze(1).expand_as(scored)[scored] == answers).float().mean().item() - task.shortcut_accuracy)
        < 0.004
    )


@pytest.mark.parametrize(("count", "low", "high"), [(3, 0, 20), (5, 2, 7), (40, 10, 300), (1, 0, 1)])
def test_distinct_draws_are_distinct_and_uniform(count, low, high):
    draw = torch.Generator().manual_seed(0)
    ids = distinct(4000, count, low, high, draw)
    assert ids.shape == (4000, count)
    assert all(len(row.unique()) == count for row in ids[:200])
    assert (ids.sort(1).values.diff(dim=1) > 0).all()
    for column in (ids[:, 0], ids[:, -1]):  # early and late draws have the same distribution
        shares = torch.bincount(column - low, minlength=high - low) / 4000
        expected = 1 / (high - low)
        assert (shares - expected).abs().max() <= 5 * (expected * (1 - expected) / 4000) ** 0.5
    assert low <= ids.min()
    assert ids.max() < high


def test_seeds_of_splits_are_disjoint():
    seeds = {split: {stream_seed(split, s, i) for s in range(5) for i in range(200)} for split in tasks.base.SPLITS}
    assert all(len(found) == 1000 for found in seeds.values())
    assert [{seed >> 60 for seed in found} for found in seeds.values()] == [{0}, {1}, {2}]
    assert len({seed % 2**32 for found in seeds.values() for seed in found}) == 3000  # what torch's generator reads
    assert_raises(ValueError, "train, validation, test", stream_seed, "dev", 0)


@cases(
    "name, config, message",
    ("mqar", {"num_pair": 4}, "Did you mean 'num_pairs'"),
    ("mqar", {"filler": "none"}, "disjoint, zoology"),
    ("mqar", {"length": 31, "num_pairs": 8}, "at least 4K"),
    ("mqar", {"num_pairs": 0}, "1 ≤ K"),
    ("mqar", {"vocab_size": 64, "length": 512, "num_pairs": 100}, "need 100 keys"),
    ("mqar", {"vocab_size": 7, "length": 4, "num_pairs": 1}, "need 1 fillers"),
    ("mqar", {"vocab_size": 64, "length": 512, "num_pairs": 9, "value_size": 4}, "need 36 values"),
    ("mqar", {"vocab_size": 64, "length": 512, "num_pairs": 9, "updates": 3}, "36 pairs need 36 values"),
    ("mqar", {"length": 64, "num_pairs": 8, "updates": 3}, "4K \\+ gap"),
    ("mqar", {"updates": -1}, "updates must be 0 or more"),
    ("mqar", {"hold": 0}, "hold must be 1 or more"),
    ("mqar", {"length": 35, "num_pairs": 2, "hold": 2}, "a multiple of hold"),
    ("sysprompt", {"length": 16, "num_pairs": 6}, "length of at least 17"),
    ("sysprompt", {"num_pairs": 33, "length": 512}, "between 1 and 32; got 33"),
    ("sysprompt", {"num_pairs": 0}, "between 1 and 32"),
    ("sysprompt", {"vocab_size": 256}, "128 token ids"),
    ("sysprompt", {"pairs": 3}, "num_pairs"),
    ("tooltrace", {"length": 42, "num_pairs": 8}, "length of at least 43"),
    ("niah", {"length": 17, "num_pairs": 8}, "length of at least 18"),
    ("niah", {"length": 49, "num_pairs": 8, "hard": True}, "length of at least 50"),
    ("niah", {"length": 512, "num_pairs": 17, "hard": True}, "between 1 and 16"),
    ("multihop", {"length": 17, "num_pairs": 4}, "length of at least 18"),
    ("multihop", {"length": 512, "num_pairs": 17}, "between 1 and 16"),
    ("commonword", {"length": 20, "num_pairs": 8}, "length of at least 21"),
    ("commonword", {"length": 512, "num_pairs": 32}, "between 1 and 31"),
    ("commonword", {"repeats": 0}, "repeats must be 1 or more"),
    ("toolcalling", {"length": 277}, "length of at least 278"),
    ("toolcalling", {"length": 4096, "max_calls": 257}, "1 ≤ min ≤ max ≤ 256"),
    ("toolcalling", {"min_calls": 20, "max_calls": 10}, "min 20, max 10"),
    ("toolcalling", {"min_calls": 0}, "1 ≤ min"),
    ("toolcalling", {"vocab_size": 256}, "128 token ids"),
    ("economy", {"length": 262}, "length of at least 263"),
    ("economy", {"num_agents": 1}, "between 2, for a trade, and 26"),
    ("economy", {"num_agents": 27}, "26; got 27"),
    ("economy", {"min_steps": -1}, "steps need 0 ≤ min ≤ max; got"),
    ("economy", {"min_gap": 5, "max_gap": 4}, "gaps need"),
    ("economy", {"agents": 4}, "num_agents"),
    ("amnesia", {"length": 48}, "length of at least 49"),
    ("amnesia", {"kind": "cott"}, "Did you mean 'cot'"),
    ("amnesia", {"num_variables": 11}, "between 1 and 10; got 11"),
    ("amnesia", {"min_gap": 40}, "gaps need 0 ≤ min ≤ max; got min 40, max 30"),
    ("s5", {"group": "s4"}, r"unknown group 's4'.* Choose from: s5, s3, a5, z60, z2$"),
    ("s5", {"length": 0}, "length must be 1 or more; got 0"),
    ("s5", {"vocab_size": 128}, "group s5 has 120 elements as token ids; got vocab_size 128"),
    ("s5", {"vocab_size": 120, "group": "a5"}, "group a5 has 60 elements"),
    ("s5", {"groups": "a5"}, "Did you mean 'group'"),
)
def test_bad_settings_say_what_would_fit(name, config, message):
    with pytest.raises(ValueError, match=message) as error:
        tasks.build(name, **config)
    assert "\n" not in str(error.value)


def test_unknown_task_lists_the_choices():
    assert_raises(ValueError, "mqar", tasks.build, "mqra")
