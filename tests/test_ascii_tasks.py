"""Tasks in text: solvers from the definitions, scores of simple guessers, formats, sizes, seeds."""

import re
from collections import Counter

import pytest
import torch
from helpers import near_level

from halflife import tasks
from halflife.tasks import IGNORED, TASKS
from halflife.tasks.economy import NOISE
from halflife.tasks.text import render, table

NAMES = ("toolcalling", "economy", "amnesia")
TIERS = [(name, tier) for name in NAMES for tier in TASKS[name].tiers]
CASES = [(name, TASKS[name].tiers[tier]) for name, tier in TIERS]
CASES += [  # the smallest sizes, and sizes that the paper does not use
    ("toolcalling", {"length": 17, "min_calls": 1, "max_calls": 1}),
    ("toolcalling", {"length": 2312, "min_calls": 250, "max_calls": 256}),
    ("economy", {"length": 8, "num_agents": 2, "min_steps": 0, "max_steps": 0}),
    ("economy", {"length": 65, "num_agents": 26, "min_steps": 0, "max_steps": 3, "max_gap": 6}),
    ("economy", {"length": 1033, "num_agents": 2, "min_steps": 60, "max_steps": 60, "min_gap": 5, "max_gap": 5}),
    ("amnesia", {"length": 7, "num_variables": 1, "min_gap": 0, "max_gap": 0}),
    ("amnesia", {"length": 53, "num_variables": 10, "min_gap": 0, "max_gap": 10, "kind": "recall"}),
]
GRAMMAR = {
    "toolcalling": r"(A[0-9a-f]:T[0-9a-f]>\d\d;)+\?A[0-9a-f]:T[0-9a-f]=",
    "economy": rf"([A-Z]:(mine [123] (gold|wood)|trade [123] (gold|wood) [A-Z]|build);)*[{re.escape(NOISE)}]*"
    r"\?[A-Z]\.(gold|wood)=",
    "amnesia": r"([A-Z]=\d;)+((\d\+\d=\d;)*\.{0,5}|(~[A-Z]=\d;)*\.{0,4})\?[A-Z]=",
}
each_case = pytest.mark.parametrize(("name", "config"), CASES, ids=lambda x: str(x).replace(" ", ""))


def examples(batch):
    """Return (text up to its last '=', answer of the labels) from inputs and labels."""
    for tokens, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        text = bytes(tokens).rstrip(b"\0").decode("ascii")
        assert "\0" not in text
        text = text[: text.rindex("=") + 1]
        scored = [i for i, label in enumerate(labels) if label != IGNORED]
        assert scored == list(range(len(text) - 1, len(text) - 1 + len(scored)))
        answer = bytes(labels[i] for i in scored).decode("ascii")
        assert bytes(tokens[len(text) :]) == answer[:-1].encode().ljust(len(tokens) - len(text), b"\0")
        yield text, answer


def solve_toolcalling(text):
    history, asked = text[:-1].split("?")
    (answer,) = [call.split(">")[1] for call in history.split(";") if call.split(">")[0] == asked]
    return answer


def play(text):
    moves = re.findall(r"([A-Z]):(\w+)(?: (\d) (gold|wood)(?: ([A-Z]))?)?;", text)
    has = Counter({(agent, good): 5 for agent in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" for good in ("gold", "wood")})
    rejected = 0
    for agent, move, number, good, partner in moves:
        n, other = int(number or 1), {"gold": "wood", "wood": "gold", "": ""}[good]
        after = has.copy()
        if move == "mine":
            after[agent, good] += n
        elif move == "trade":
            after[agent, good] -= n
            after[partner, good] += n
            after[partner, other] -= n
            after[agent, other] += n
        else:
            after[agent, "gold"] -= 1
            after[agent, "wood"] -= 1
        valid = min(after.values()) >= 0 and max(after.values()) <= 9
        has, rejected = (after, rejected) if valid else (has, rejected + 1)
    return has, rejected


def solve_economy(text):
    agent, good = text[text.index("?") + 1 : -1].split(".")
    return str(play(text)[0][agent, good])


def solve_amnesia(text):
    (answer,) = re.findall(rf"(?<!~){text[-2]}=(\d);", text)
    return answer


def guess_toolcalling(text):
    return text[text.index("?") - 3 : text.index("?") - 1]  # the last result


def guess_amnesia(text):
    return text[2]


@each_case
def test_a_solver_from_the_definition_is_always_right(name, config):
    batch = tasks.build(name, **config).generate(150, seed=0)
    assert batch.inputs.shape == (150, config["length"])
    size = 2 if name == "toolcalling" else 1
    for text, answer in examples(batch):
        assert re.fullmatch(GRAMMAR[name], text)
        assert len(answer) == size
        assert globals()[f"solve_{name}"](text) == answer


@each_case
def test_slices_count_what_stands_in_the_text(name, config):
    batch = tasks.build(name, **config).generate(150, seed=0)
    slices = {key: numbers.tolist() for key, numbers in batch.slices.items()}
    for i, (text, answer) in enumerate(examples(batch)):
        found = {key: numbers[i] for key, numbers in slices.items()}
        assert found.pop("length") == len(text) + len(answer) - 1
        query = text.index("?")
        if name == "toolcalling":
            at = text.index(text[query + 1 : -1] + ">")
            assert found == {"num_calls": text.count(";"), "depth": at // 9, "gap": query - (at + 8)}
            assert config["min_calls"] <= found["num_calls"] <= config["max_calls"]
        elif name == "economy":
            gap = query - text.rfind(";") - 1
            assert found == {"num_steps": text.count(";"), "num_rejected": play(text)[1], "gap": gap}
            assert config["min_steps"] <= found["num_steps"] <= config["max_steps"]
            assert config.get("min_gap", 0) <= gap <= config.get("max_gap", 0)
        else:
            size, depth = config["num_variables"], text.index(text[-2]) // 4
            decoys, gap = text.count(f"~{text[-2]}"), query - 4 * size
            assert found == {"num_variables": size, "depth": depth, "decoys": decoys, "gap": gap}
            assert config["min_gap"] <= gap <= config["max_gap"]


@each_case
def test_levels_are_those_of_real_guessers(name, config):
    if name == "economy" and config["length"] == 2108:
        config = {**config, "length": 2508, "max_gap": 0, "min_gap": 0}  # the gap does not affect scores
    task, count = tasks.build(name, **config), 1500
    batch = task.generate(count, seed=1)
    found = list(examples(batch))
    answers = [answer for _, answer in found]
    if name == "economy":
        common = Counter(answers[:500]).most_common(1)[0][0]  # estimated on some examples, tested on others
        rest = answers[500:]
        # Two counts may be nearly equally common.
        assert near_level(rest.count(common) / len(rest), task.shortcut_accuracy, len(rest) / 2)
    else:
        guessed = sum(globals()[f"guess_{name}"](text) == answer for text, answer in found)
        assert near_level(guessed / count, task.shortcut_accuracy, count)
    size = len(answers[0])
    assert task.chance == 10**-size
    uniform = torch.randint(10**size, (count,)).tolist()
    right = sum(f"{u:0{size}}" == answer for u, answer in zip(uniform, answers, strict=True)) / count
    assert near_level(right, task.chance, count)


def test_guess_levels():
    def level(name, tier):
        return tasks.build(name, **TASKS[name].tiers[tier]).shortcut_accuracy

    assert level("toolcalling", "easy") == pytest.approx(sum(1 / n for n in range(10, 31)) / 21)
    assert level("toolcalling", "hard") == pytest.approx(
        (sum(1 / n for n in range(60, 101)) + sum(2 / n for n in range(101, 121))) / 61
    )
    assert level("economy", "easy") == pytest.approx(0.149, abs=0.004)
    assert level("economy", "hard") == pytest.approx(0.118, abs=0.004)
    assert level("amnesia", "cot_hard") == 1 / 4
    assert level("amnesia", "recall_hard") == 1 / 6
    assert tasks.build("economy", num_agents=2, min_steps=0, max_steps=0).shortcut_accuracy == 1


@pytest.mark.parametrize(("name", "tier"), TIERS)
def test_tiers_reach_both_ends_of_their_ranges(name, tier):
    task = tasks.build(name, **TASKS[name].tiers[tier])
    batch = task.generate(4000, seed=0)
    for what, low, high in (("num_calls", "min_calls", "max_calls"), ("num_steps", "min_steps", "max_steps"),
                            ("gap", "min_gap", "max_gap")):  # fmt: skip
        if hasattr(task, low):
            numbers = batch.slices[what]
            assert (numbers.min(), numbers.max()) == (getattr(task, low), getattr(task, high))
            share = torch.bincount(numbers - numbers.min()) / 4000
            assert (share - 1 / len(share)).abs().max() < 5 * (1 / len(share) / 4000) ** 0.5
    assert batch.slices["length"].max() <= task.shortest == task.length


def test_toolcalling_pairs_are_called_once_and_results_spread():
    task = tasks.build("toolcalling", length=2312, min_calls=150, max_calls=256)
    for text, _ in examples(task.generate(50, seed=0)):
        calls = [call.split(">") for call in text[: text.index("?")].split(";")[:-1]]
        assert len({name for name, _ in calls}) == len(calls)
        count = Counter(result for _, result in calls)
        assert max(count.values()) == -(-len(calls) // 100)
        assert count[calls[-1][1]] == max(count.values())  # the guesser answers with the result of the last call
        assert len(count) == 100


def test_toolcalling_asks_any_call():
    slices = tasks.build("toolcalling", min_calls=10, max_calls=10).generate(5000, seed=0).slices
    assert all(near_level(n / 5000, 1 / 10, 5000) for n in torch.bincount(slices["depth"], minlength=10).tolist())


def test_economy_rejects_some_moves_of_every_kind_that_can_fail():
    rejected, made = Counter(), Counter()
    for text, _ in examples(tasks.build("economy", **TASKS["economy"].tiers["hard"]).generate(60, seed=0)):
        moves = text[: text.rindex(";")].split(";")
        before = 0
        for i, move in enumerate(moves):
            now = play(";".join(moves[: i + 1]) + ";")[1]
            kind = move.split(":")[1].split()[0]
            made[kind], rejected[kind], before = made[kind] + 1, rejected[kind] + now - before, now
    total = sum(made.values())
    assert all(near_level(n / total, 1 / 3, total) for n in made.values())
    assert all(0.05 < rejected[kind] / made[kind] < 0.6 for kind in ("mine", "trade", "build"))


def test_economy_ignoring_the_rejections_fails():
    """A solver that accepts every move must be wrong, because the task is about rejected moves."""
    count = right = 0
    for text, answer in examples(tasks.build("economy", **TASKS["economy"].tiers["hard"]).generate(300, seed=0)):
        agent, good = text[text.index("?") + 1 : -1].split(".")
        has = 5
        for who, move, number, what, partner in re.findall(r"([A-Z]):(\w+)(?: (\d) (\w+)(?: ([A-Z]))?)?;", text):
            n = int(number or 1)
            if move == "build":
                has -= who == agent
            elif move == "mine":
                has += n * ((who, what) == (agent, good))
            else:
                sign = -1 if what == good else 1
                has += n * sign * (who == agent) - n * sign * (partner == agent)
        count, right = count + 1, right + (str(has) == answer)
    assert right / count < 0.5


def test_amnesia_decoys_have_names_of_variables_and_never_their_digits():
    asked = 0
    for text, _ in examples(tasks.build("amnesia", **TASKS["amnesia"].tiers["recall_hard"]).generate(300, seed=0)):
        bound = dict(re.findall(r"(?<!~)([A-Z])=(\d);", text))
        decoys = re.findall(r"~([A-Z])=(\d);", text)
        assert len(bound) == len(set(bound.values())) == 6
        assert decoys
        assert all(digit != bound[name] for name, digit in decoys)
        asked += text[-2] in {name for name, _ in decoys}
    assert asked > 270  # 16 decoys or more among 6 names


def test_amnesia_scratch_steps_are_sums_without_the_carry():
    for text, _ in examples(tasks.build("amnesia", **TASKS["amnesia"].tiers["cot_hard"]).generate(50, seed=0)):
        steps = re.findall(r"(\d)\+(\d)=(\d);", text)
        assert len(steps) >= 150 // 6
        assert all((int(a) + int(b) - int(c)) % 10 == 0 for a, b, c in steps)


def test_render_closes_gaps_and_shifts_the_answer():
    parts = [table("ab", "c")[torch.tensor([[0, 1], [1, 1]])], torch.tensor([[0], [ord("!")]])]
    batch = render(parts, table("12", "34"), 7)
    assert batch.inputs.tolist() == [[97, 98, 99, 49, 0, 0, 0], [99, 99, 33, 51, 0, 0, 0]]
    assert batch.labels.tolist() == [[-100, -100, 49, 50, -100, -100, -100], [-100, -100, 51, 52, -100, -100, -100]]
    assert batch.slices["length"].tolist() == [4, 4]
    # A label is the next character, as in any language model.
    assert torch.equal(batch.inputs[:, 3], batch.labels[:, 2])
