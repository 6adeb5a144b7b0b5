"""JSON files with a value of another kind: every command that reads them works, or says in a sentence what is wrong."""

import copy
import json
import multiprocessing
import random
import shutil

import pytest
from processes import command, compare

WRONG = [None, True, -1, 0, 1.5, 10**400, "", "x", [], {}, [None], {"x": 1}, "[red]", [[]] * 3]
TRAINED = ["figures {0}", "generate {0} abc", "eval {0} --text notes.txt --output e", "train --resume {0} --quiet",
           "spectrum {0} --text notes.txt --output s", "forecast {0} --output f",
           "mask {0} --text notes.txt --output m.png"]  # fmt: skip
COMPARISON = ["figures {0}", "compare --resume {0} --quiet", "forecast {0} --output f", "spectrum {0} --output s"]
# Folder → the commands, and the files.
CASES = {
    "trained": (TRAINED, ["run.json", "config.json", "result.json", "versions.json", "metrics.jsonl"]),
    "compared": (COMPARISON, ["config.json", "versions.json", "mamba2/lr0.01-seed0/run.json",
                              "mamba2/lr0.01-seed0/result.json", "mamba2/lr0.01-seed0/spectrum.json",
                              "mamba2/lr0.01-seed0/config.json", "mamba2/lr0.01-seed0/metrics.jsonl"]),
}  # fmt: skip
TRIALS = 5  # for each file


@pytest.fixture(scope="module")
def pool():
    """A process without the checks of annotations that tests have, whose errors no user sees."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def place(tmp_path_factory, pool):
    """A folder with a text, a run of `train` and a comparison."""
    place = tmp_path_factory.mktemp("place")
    (place / "notes.txt").write_text("".join(f"line {i} of the notes\n" for i in range(300)))
    words = "--tokens 128 --context 16 --batch-size 2 --hidden-size 16 --num-layers 1 --num-heads 2 --quiet"
    line = ["train", "mamba2+gate_rank", "--data", "notes.txt", "--output", "trained", *words.split()]
    assert pool.apply(command, (line, place)) is None
    pool.apply(compare, (place / "compared", ("mamba2",)))
    return place


def places(data, path=()):
    """The keys that lead to every value of JSON data."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data[:3]) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def changed(data, path, value):
    """A copy of JSON data with another value at a place."""
    if not path:
        return value
    data = copy.deepcopy(data)
    part = data
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return data


def spoil(path, draw):
    """Change one value of a JSON file, or of the first line of a file of JSON lines. Returns what was done."""
    first, *others = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    data = json.loads(first)
    where, value = draw.choice(list(places(data))), draw.choice(WRONG)
    path.write_text("\n".join([json.dumps(changed(data, where, value)), *others]) + "\n")
    return f"{path.name} {'.'.join(map(str, where))} = {str(value)[:20]}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (_, names) in CASES.items() for name in names])
def test_a_wrong_value_is_no_traceback(place, pool, tmp_path, kind, name):
    draw = random.Random(f"{kind} {name}")
    failed = []
    for trial in range(TRIALS):
        here = tmp_path / str(trial)
        shutil.copytree(place, here)
        done = spoil(here / kind / name, draw)
        commands = CASES[kind][0]
        line = draw.choice(commands).format(kind)
        if reason := pool.apply(command, (line.split(), here)):
            failed.append(f"{done}: halflife {line}: {reason}")
        shutil.rmtree(here)
    assert not failed, "\n".join(failed)
