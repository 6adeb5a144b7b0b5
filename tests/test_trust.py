"""Runs of somebody else: what they may make this machine read, and that this user's own runs need no confirmation."""

import json
import shutil
import stat
from pathlib import Path

import pytest
from helpers import assert_raises, cases
from test_faults_commands import TRAIN, command, place  # noqa: F401 (a fixture)

from halflife import extensions
from halflife.data import trust
from halflife.files import read_json, write_json
from halflife.lab.experiments.compare import Comparison
from halflife.lab.experiments.train import load_config

FIXTURE = Path(__file__).parent / "fixtures" / "language" / "run.json"


@pytest.fixture
def own_key(tmp_path, monkeypatch):
    """A key of this test, which is not there yet."""
    monkeypatch.setenv(trust.VARIABLE, str(tmp_path / "keys" / "key"))
    return tmp_path / "keys" / "key"


def saved_run(folder, **data):
    """The `run.json` of a run in a folder, which names a text."""
    saved = json.loads(FIXTURE.read_text())
    saved["data"] |= data
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", saved)
    return saved


def test_the_key_is_random_and_of_the_user_alone(own_key):
    first = trust.sign({"a": [1.5, None], "b": (2, {3: float("nan")})})
    assert stat.S_IMODE(own_key.stat().st_mode) == 0o600
    assert [path.name for path in own_key.parent.iterdir()] == ["key"]
    assert trust.sign(first) == first
    write_json(own_key.parent / "x.json", first)
    assert trust.sign(read_json(own_key.parent / "x.json"))["signature"] == first["signature"]
    own_key.unlink()
    assert trust.sign(first)["signature"] != first["signature"]


def test_a_key_that_cannot_be_made_stops_no_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(trust.VARIABLE, str(tmp_path / "file" / "key"))
    assert trust.sign({"a": 1}) == {"a": 1}


@cases(
    "data, named",
    ({"sources": ["../secret.txt"]}, "/secret.txt"),
    ({"sources": ["notes.txt"], "files": [["../../secret.txt"]]}, "/secret.txt"),
    ({"sources": ["link.txt"]}, "/link.txt"),
    ({"sources": ["linked"]}, "/linked/secret.txt"),
    ({"sources": ["hf:owner/name"]}, "hf:owner/name"),
    ({"sources": ["notes.txt"], "tokenizer": "owner/name"}, "the tokenizer owner/name"),
    ({"sources": ["/home/.ssh/id"]}, "/home/.ssh/id"),
)
def test_a_foreign_run_reads_nothing_elsewhere(tmp_path, monkeypatch, data, named):
    here, run = tmp_path / "here", tmp_path / "there" / "run"
    here.mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "secret.txt").write_text("secret")
    saved_run(run, **data)
    (run / "link.txt").symlink_to(tmp_path / "there" / "secret.txt")
    (run / "linked").mkdir()
    (run / "linked" / "secret.txt").symlink_to(tmp_path / "there" / "secret.txt")
    monkeypatch.chdir(here)
    with pytest.raises(ValueError, match="was not written with your key") as error:
        load_config(run)
    assert named in str(error.value)
    assert "give --trust-data" in str(error.value)
    trust.confirm(run / "run.json")
    assert load_config(run).data["cache_dir"] is None
    changed = read_json(run / "run.json")
    changed["learning_rate"] = 0.5
    write_json(run / "run.json", changed)
    assert_raises(ValueError, "was not written with your key", load_config, run)


def test_a_foreign_run_reads_its_own_text_and_that_of_the_current_folder(tmp_path, monkeypatch):
    """A run without a signature does not choose the folder of the cache."""
    run = tmp_path / "run"
    saved_run(run, sources=["notes.txt", "../texts"], cache_dir="/elsewhere")
    (run / "notes.txt").write_text("notes")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    assert load_config(run).data["cache_dir"] is None
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "a.txt").write_text("a")
    saved_run(run, sources=["../.hidden/a.txt"])
    assert_raises(ValueError, "--trust-data", load_config, run)


def test_a_foreign_run_imports_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(extensions.VARIABLE, "")
    saved = saved_run(tmp_path, sources=["notes.txt"])
    write_json(tmp_path / "run.json", {**saved, "imports": ["this"]})
    assert_raises(ValueError, "the module this", load_config, tmp_path)
    config = {"experiment": "mqar", "models": ["mamba2"], "settings": {}, "imports": ["this"]}
    (tmp_path / "comparison").mkdir()
    write_json(tmp_path / "comparison" / "config.json", config)
    assert_raises(ValueError, "the module this", Comparison.load, tmp_path / "comparison")


def test_a_foreign_comparison_reads_no_text_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = tmp_path / "there" / "run"
    folder.mkdir(parents=True)
    config = {"experiment": "decay-design", "models": ["vector/gla"], "settings": {"text": ["../../secret.txt"]}}
    write_json(folder / "config.json", config)
    monkeypatch.setattr("halflife.lab.experiments.base.ExperimentSettings.from_dict", from_text)
    assert_raises(ValueError, r"/secret\.txt. If you want this, give --trust-data", Comparison.load, folder)


def from_text(settings):
    from types import SimpleNamespace

    return SimpleNamespace(text=tuple(settings["text"]), tokenizer="bytes")


@pytest.mark.slow
def test_own_runs_are_resumed_and_foreign_ones_with_consent(place, tmp_path_factory, monkeypatch, capsys):  # noqa: F811
    """A run of one's own needs no option, from any folder. With the key of somebody else it needs one, once."""
    assert command("train", *TRAIN) == 0
    here = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(here)
    folder = str(place / "out")
    assert command("train", "--resume", folder, "--quiet") == 0
    assert read_json(place / "out" / "run.json")["signature"] not in (place / "out" / "report.html").read_text()
    monkeypatch.setenv(trust.VARIABLE, str(here / "key"))
    assert command("train", "--resume", folder, "--quiet") == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "give --trust-data" in error
    assert command("train", "--resume", folder, "--trust-data", "--quiet") == 0
    assert command("train", "--resume", folder, "--quiet") == 0
    capsys.readouterr()
    assert command("train", *TRAIN, "--trust-data") == 2
    assert "belongs to --resume" in capsys.readouterr().err
    shutil.rmtree(place / "out")


def test_weights_elsewhere_are_named(own_key, tmp_path):
    """A run of somebody else may start from weights in its own folder, and not from those of another place."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("text")
    saved = saved_run(tmp_path / "run", sources=["notes.txt"])
    for start, known in ((tmp_path / "run" / "old", True), (tmp_path / "other", False)):
        write_json(tmp_path / "run" / "run.json", {**saved, "start": str(start), "start_digest": "0"})
        if known:
            assert load_config(tmp_path / "run").start == str(start)
        else:
            with pytest.raises(ValueError, match=f"would read {start}. If you want this, give --trust-data"):
                load_config(tmp_path / "run")
