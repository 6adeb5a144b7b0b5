"""Commands under faults: one line, a documented exit code, and work that can go on."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import tiny

from halflife.cli import main
from halflife.experiments import compare as comparison
from halflife.runs import sweep
from halflife.runs.folder import read
from halflife.runs.sweep import Cell, Job, RunsFailed, _select_rate

SMALL = {
    "hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 128, "train_length": 8, "pairs": (2,), "steps": 4,
    "batch_size": 4, "test_examples": 8, "validation_examples": 8, "save_every": 2, "validate_every": 2,
}  # fmt: skip


def create(folder, models=("mamba2", "llama"), **options):
    return comparison.create_comparison(models, settings=SMALL, output=folder, **options)


def failing(monkeypatch, *, name, error):
    """Lets the runs of one model raise an error."""
    run_one = sweep.run_one

    def sometimes(run, folder, **options):
        if name in options["name"]:
            raise error
        return run_one(run, folder, **options)

    monkeypatch.setattr(sweep, "run_one", sometimes)


def command(*arguments):
    """The exit code of a command; what it printed is left to capsys."""
    try:
        main(list(arguments))
    except SystemExit as stop:
        return stop.code
    return 0


# ------------------------------------------------------------------------------------------------ comparisons


def test_a_model_that_raises_leaves_the_others_alone(tmp_path, monkeypatch, capsys):
    folder = create(tmp_path / "x")
    with monkeypatch.context() as patch:
        failing(patch, name="mamba2", error=RuntimeError("the moon is full"))
        assert command("compare", "--resume", str(folder), "--quiet") == 3
    out, error = capsys.readouterr()
    assert "halflife: mamba2 lr 0.01 seed 0 failed: RuntimeError: the moon is full\n" in error
    assert "llama" in out
    assert (folder / "report.html").exists()
    assert {score.model for score in read(folder).scores} == {"llama"}
    (folder / "versions.json").unlink()  # killed before it was written
    assert command("compare", "--resume", str(folder), "--quiet") == 0
    assert {score.model for score in read(folder).scores} == {"mamba2", "llama"}
    assert json.loads((folder / "versions.json").read_text())["torch"]


def test_a_full_disk_ends_the_comparison_at_once(tmp_path, monkeypatch, capsys):
    folder = create(tmp_path / "x")
    failing(monkeypatch, name="", error=OSError(28, "No space left on device", "x/weights"))
    assert command("compare", "--resume", str(folder), "--quiet") == 2
    assert capsys.readouterr().err == (
        "halflife: x/weights: No space left on device; make room on the disk; a run then continues with --resume\n"
    )


def test_a_model_that_diverges_is_not_selected(tmp_path, monkeypatch, capsys):
    from halflife.training import callbacks

    def diverged(model, step):
        raise callbacks.Diverged("a weight is not finite after step 4")

    folder = create(tmp_path / "x", ["mamba2"])
    monkeypatch.setattr(callbacks, "check_weights", diverged)
    assert command("compare", "--resume", str(folder), "--quiet") == 3
    out, error = capsys.readouterr()
    assert "every run of mamba2 diverged" in error
    assert "diverged" in out
    assert not any(score.selected for score in read(folder).scores)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({0.1: [1.0, math.nan], 0.2: [0.2, 0.3]}, 0.2),
        ({0.1: [0.9, math.nan], 0.2: [math.nan, 0.3]}, 0.1),
        ({0.1: [math.nan], 0.2: [math.nan]}, None),
    ],
)
def test_the_rate_with_the_fewest_divergences_is_selected(values, expected):
    results = {Cell("m", lr, seed): {"validation": x} for lr, own in values.items() for seed, x in enumerate(own)}
    jobs = {cell: Job(tiny(), Path(cell.folder), cell.title) for cell in results}
    assert _select_rate("m", jobs, results) == expected


def test_similar_learning_rates_have_folders_of_their_own(tmp_path):
    rates = (0.0123456789, 0.0123456788, 0.01)
    folders = [Cell("mamba2", rate, 0).folder for rate in rates]
    assert folders == ["mamba2/lr0.0123456789-seed0", "mamba2/lr0.0123456788-seed0", "mamba2/lr0.01-seed0"]
    old = tmp_path / "mamba2" / "lr0.0123457-seed0"  # as earlier versions named it
    old.mkdir(parents=True)
    (old / "run.json").write_text(json.dumps({"learning_rate": rates[0]}))
    places = [sweep._place(tmp_path, Cell("mamba2", rate, 0)) for rate in rates]
    assert places == [old, *(tmp_path / folder for folder in folders[1:])]


def test_nothing_that_ended_is_an_error(tmp_path, monkeypatch):
    folder = create(tmp_path / "x", ["mamba2"])
    failing(monkeypatch, name="", error=ValueError("the moon is full"))
    with pytest.raises(RunsFailed, match=r"mamba2 lr 0.01 seed 0 failed: the moon is full"):
        comparison.run_comparison(folder, show=False)


# ------------------------------------------------------------------------------------------------ exit codes


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (PermissionError(13, "Permission denied", "a/b"), 2, "a/b: Permission denied; change its permissions"),
        (NotADirectoryError(20, "Not a directory", "a/b"), 2, "a file stands where a folder is needed"),
        (OSError(36, "File name too long", "a" * 300), 2, "choose a shorter name"),
        (OSError("a line\nand another"), 2, "a line and another"),
        (MemoryError(), 2, "there is not enough memory; choose a smaller model"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 800 bytes."),
            2,
            "800 bytes more",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_the_machine_refuses_is_one_line(error, code, message, monkeypatch, capsys):
    def refuse(*_):
        raise error

    monkeypatch.setattr("halflife.cli.read_command", refuse)
    assert command("list") == code
    text = capsys.readouterr().err
    assert text.startswith("halflife: ")
    assert message in text
    assert len(text.splitlines()) == 1


def test_an_error_of_ours_stays_a_traceback(monkeypatch):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("halflife.cli.read_command", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["list"])


def shell(line, cwd, **environment):
    """Run a line of bash in which `halflife` is this version."""
    line = line.replace("halflife", f"{sys.executable} -W ignore -m halflife.cli")
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=cwd, env={**os.environ, **environment}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    done = shell("halflife list | head -1; echo ${PIPESTATUS[0]}", tmp_path)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_training_goes_on_without_the_reader_of_its_bar(tmp_path):
    (tmp_path / "text.txt").write_text("the state forgets slowly. " * 300)
    arguments = "--tokens 1K --context 32 --batch-size 4 --hidden-size 16 --num-layers 1 --held-out 0.1"
    line = f"halflife train mamba2 --data text.txt {arguments} --output out | head -1; echo ${{PIPESTATUS[0]}}"
    done = shell(line, tmp_path, HALFLIFE_CACHE=str(tmp_path / "cache"))
    assert done.stdout.splitlines()[-1] == "0", done.stderr
    assert (tmp_path / "out" / "result.json").exists()


def test_a_terminal_of_ascii_shows_everything(tmp_path):
    done = shell("halflife list", tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
