"""Every row of `table.py`: spoil a run, let it go on, and compare."""

import csv
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import actions
import psutil
import pytest
import torch
from corpora import write_texts
from processes import compare, limited, trial, trial_of_comparison
from table import EVENTS, EVENTS_OF_COMPARISON, TABLE
from tiny_runs import after_step, comparable, run, tiny

from halflife.data.corpus import Corpus, CorpusConfig
from halflife.models import checkpoint
from halflife.models.session import Session
from halflife.training.fit import StoppedBySignal

ACCEPTED = (ValueError, OSError)


@pytest.fixture(scope="session")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny_runs"])
    return context


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_texts(folder, "document {i} " * 20)
    return Corpus.open(CorpusConfig(sources=(folder,), cache_dir=folder / "cache", fractions=(0.1, 0.0)), show=False)


def identity(row):
    return f"{row[0]}-{row[1]}"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("row", [row for row in TABLE if row[0] == "kill"], ids=identity)
def test_killed(row, processes, whole, tmp_path):
    finish(processes, trial, tmp_path, row[1])
    run(tiny(), tmp_path)
    assert comparable(tmp_path) == comparable(whole)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in whole.iterdir()}


def test_the_table_has_every_event(processes, tmp_path):
    finish(processes, trial, tmp_path / "run", None, tmp_path / "count")
    assert EVENTS - 25 <= int((tmp_path / "count").read_text()) <= EVENTS
    finish(processes, trial_of_comparison, tmp_path / "comparison", None, tmp_path / "count")
    assert EVENTS_OF_COMPARISON - 40 <= int((tmp_path / "count").read_text()) <= EVENTS_OF_COMPARISON


@pytest.fixture(scope="session")
def duration(processes, tmp_path_factory):
    """Seconds of a run in a process of its own."""
    start = time.monotonic()
    finish(processes, trial, tmp_path_factory.mktemp("duration") / "run")
    return time.monotonic() - start


@pytest.mark.parametrize("row", [row for row in TABLE if row[0] == "moment"], ids=identity)
def test_killed_at_a_moment(row, processes, duration, whole, tmp_path):
    for attempt in (1, 1.3, 1.6):
        process = processes.Process(target=trial, args=(tmp_path / "run",))
        process.start()
        process.join(row[1] * attempt * duration)
        process.kill()
        process.join()
    run(tiny(), tmp_path / "run")
    assert comparable(tmp_path / "run") == comparable(whole)


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """An uninterrupted comparison."""
    folder = tmp_path_factory.mktemp("compared") / "x"
    compare(folder)
    return folder


def scores(folder):
    """What a comparison has measured, and its weights."""
    weights = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("model.safetensors")}
    with (folder / "results.csv").open() as file:
        rows = [{name: x for name, x in row.items() if name != "tokens_per_second"} for row in csv.DictReader(file)]
    return rows, weights


@pytest.mark.parametrize("row", [row for row in TABLE if row[0] == "kill of compare"], ids=identity)
def test_killed_comparison(row, processes, compared, tmp_path):
    finish(processes, trial_of_comparison, tmp_path / "x", row[1])
    actions.past(tmp_path / "x")  # temporary files of a minute ago are removed; younger ones may be in use
    compare(tmp_path / "x")
    assert scores(tmp_path / "x") == scores(compared)
    names = [sorted(str(path.relative_to(each)) for path in each.rglob("*")) for each in (tmp_path / "x", compared)]
    assert names[0] == names[1]


@pytest.mark.parametrize("row", [row for row in TABLE if row[0] == "kill of fsdp"], ids=identity)
def test_killed_shards(row, tmp_path):
    (tmp_path / "notes.txt").write_text("".join(f"line {i} of the notes\n" for i in range(4000)))
    words = ["mamba2", "--data", str(tmp_path / "notes.txt"), "--tokens", "15360", "--context", "64"]
    words += [
        "--batch-size",
        "4",
        "--hidden-size",
        "16",
        "--num-layers",
        "1",
        "--num-heads",
        "2",
        "--save-every",
        "4",
        "--quiet",
    ]

    def torchrun(count, folder, *others):
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command = [sys.executable, *start, "-m", "halflife.cli", "train", *others]
        return subprocess.Popen(command, env={**os.environ, "HALFLIFE_CACHE": str(tmp_path / "cache")})

    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert torchrun(1, whole, *words, "--output", str(whole), "--fsdp").wait() == 0
    process = torchrun(2, folder, *words, "--output", str(folder), "--fsdp")
    while process.poll() is None and len([*folder.glob("checkpoints/checkpoint-*/complete.json")]) <= row[1]:
        time.sleep(0.05)
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.wait()
    assert not (folder / "result.json").exists()
    assert torchrun(1, folder, "--resume", str(folder), "--fsdp", "--quiet").wait() == 0
    found, wanted = (json.loads((each / "result.json").read_text()) for each in (folder, whole))
    assert found["bits_per_byte"] == pytest.approx(wanted["bits_per_byte"], rel=1e-5)


def finish(processes, function, *arguments):
    process = processes.Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


AGAIN = ("model.safetensors", "session", "tokens")
OTHERS = ("kill", "moment", "kill of compare", "kill of fsdp", "signal", "small_files")
SPOILED = [row for row in TABLE if row[0] not in OTHERS and row[1] not in AGAIN]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("row", SPOILED, ids=identity)
def test_spoiled(row, interrupted, whole, tmp_path):
    fault, where, expected = row
    folder = shutil.copytree(interrupted, tmp_path / "run")
    for path in actions.each(folder, where) if where else [folder]:
        getattr(actions, fault)(path)
    *messages, numbers = expected.split(" or ") if "same" in expected else (expected, None)
    error = attempt(folder)
    if error is not None:
        assert messages, error
        assert re.search(messages[0], str(error))
        return
    assert numbers is not None, "the fault was not seen"
    found, wanted = comparable(folder), comparable(whole)
    if numbers == "same result":
        assert (found[0], found[2], found[3]) == (wanted[0], wanted[2], wanted[3])
        assert len(found[1]) <= len(wanted[1])
    else:
        assert found == wanted


def attempt(folder):
    """Let the run in `folder` go on; the error that ended it, or None."""
    try:
        run(tiny(), folder)
    except ACCEPTED as error:
        return error


@pytest.mark.parametrize("row", [row for row in TABLE if row[0] == "small_files"], ids=identity)
def test_small_files(row, processes, whole, tmp_path):
    assert finish(processes, limited, tmp_path / "run", row[1]) == 5
    run(tiny(), tmp_path / "run")
    assert comparable(tmp_path / "run") == comparable(whole)


@pytest.mark.parametrize("row", [row for row in TABLE if row[0] == "signal"], ids=identity)
def test_signals(row, whole, tmp_path):
    number, step = getattr(signal, row[1][0]), row[1][1]
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, and stays so in a run
    try:
        with pytest.MonkeyPatch.context() as patch:
            after_step(patch, step, lambda: os.kill(os.getpid(), number))
            with pytest.raises(StoppedBySignal):
                run(tiny(), tmp_path)
    finally:
        signal.signal(number, before)
    run(tiny(), tmp_path)
    assert comparable(tmp_path) == comparable(whole)


@pytest.mark.parametrize("row", [row for row in TABLE if row[1] in AGAIN], ids=identity)
def test_read_again(row, whole, corpus, tmp_path):
    fault, where, expected = row
    if where == "tokens":
        folder = shutil.copytree(corpus.folder.parents[1], tmp_path / "cache")
        getattr(actions, fault)(folder / "corpora" / corpus.digest / "train.tokens")
        config = CorpusConfig(sources=corpus.config.sources, cache_dir=folder, fractions=(0.1, 0.0))
        with pytest.warns(UserWarning, match="made again"):
            again = Corpus.open(config, show=False)
        assert again.split("train").files.tokens.tobytes() == corpus.split("train").files.tokens.tobytes()
        return
    folder = shutil.copytree(whole, tmp_path / "run")
    model = checkpoint.load(folder).eval()
    path, session = folder / where, Session(model).feed(torch.arange(9))
    if where == "session":
        session.save(path)
    getattr(actions, fault)(path)
    with pytest.raises(ACCEPTED, match=expected.split(" or ")[0]):
        Session(model).load(path) if where == "session" else checkpoint.load(folder)
