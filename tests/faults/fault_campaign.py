"""Every row of `table.py`: spoil a run, let it go on, and compare."""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal

import actions
import pytest
import torch
from processes import limited, trial
from table import EVENTS, TABLE
from tiny_runs import after_step, comparable, interrupt_after, run, tiny

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
def whole(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    run(tiny(), folder)
    return folder


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory):
    """A run that was interrupted after step 9, with the checkpoints of the steps 4 and 8."""
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 9)
        with contextlib.suppress(KeyboardInterrupt):
            run(tiny(), folder)
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"document {i} " * 20)
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


def finish(processes, function, *arguments):
    process = processes.Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


AGAIN = ("model.safetensors", "session", "tokens")
SPOILED = [row for row in TABLE if row[0] not in ("kill", "signal", "small_files") and row[1] not in AGAIN]


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
    name, step = row[1]
    with pytest.MonkeyPatch.context() as patch:
        after_step(patch, step, lambda: os.kill(os.getpid(), getattr(signal, name)))
        with pytest.raises(StoppedBySignal):
            run(tiny(), tmp_path)
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
