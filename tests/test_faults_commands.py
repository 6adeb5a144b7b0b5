"""Commands under faults: one line, a documented exit code, and work that can go on."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from corpora import write_texts
from helpers import assert_raises, cases
from tiny_runs import SMALL, tiny

from halflife import Session, preset
from halflife.cli import main
from halflife.cli.options import resumable
from halflife.data import store
from halflife.data.documents import find
from halflife.files import writable, write_text
from halflife.lab.experiments import compare as comparison
from halflife.models import LanguageModel, checkpoint
from halflife.runs import sweep
from halflife.runs.folder import read
from halflife.runs.interrupts import signals_noted
from halflife.runs.sweep import Cell, Job, RunsFailed, _select_rate
from halflife.training.fit import StoppedBySignal


def create(folder, models=("mamba2", "llama"), **options):
    settings = {**SMALL, "steps": 4, "validate_every": 2}
    return comparison.create_comparison(models, settings=settings, output=folder, **options)


def failing(monkeypatch, *, name, error):
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


@pytest.mark.slow
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


def test_a_full_disk_ends_the_comparison_at_once(tmp_path, monkeypatch, refused):
    folder = create(tmp_path / "x")
    failing(monkeypatch, name="", error=OSError(28, "No space left on device", "x/weights"))
    assert refused("compare", "--resume", str(folder), "--quiet") == (
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


@cases(
    "values, expected",
    ({0.1: [1.0, math.nan], 0.2: [0.2, 0.3]}, 0.2),
    ({0.1: [0.9, math.nan], 0.2: [math.nan, 0.3]}, 0.1),
    ({0.1: [math.nan], 0.2: [math.nan]}, None),
    ({0.1: [0.5, 0.9, 0.9], 0.2: [0.6]}, 0.2),  # seed 0 alone ran at both
    ({0.1: [math.nan, 0.9], 0.2: [0.1]}, 0.2),
)
def test_the_best_rate_of_the_seeds_that_ran_at_all_with_the_fewest_divergences(values, expected):
    results = {Cell("m", lr, seed): {"validation": x} for lr, own in values.items() for seed, x in enumerate(own)}
    jobs = {cell: Job(tiny(), Path(cell.folder), cell.title) for cell in results}
    assert _select_rate("m", jobs, results) == expected


@pytest.mark.parametrize(("soonest", "expected"), [(0.2, 0.2), (None, 0.1)])  # without logs, the first rate
def test_of_rates_with_the_same_validation_the_one_that_learned_soonest_is_selected(soonest, expected, tmp_path):
    cells = [Cell("m", rate, 0) for rate in (0.1, 0.2, 0.3)]
    jobs = {cell: Job(tiny(), tmp_path / cell.folder, cell.title) for cell in cells}
    results = {cell: {"validation": 0.9 if cell.learning_rate == 0.3 else 1.0} for cell in cells}
    for cell in cells if soonest else ():
        values = (1.0 if cell.learning_rate >= soonest else 0.5, results[cell]["validation"])
        lines = [json.dumps({"step": step, "validation_accuracy": x}) for step, x in enumerate(values)]
        write_text(jobs[cell].folder / "metrics.jsonl", "\n".join(lines) + "\n")
    assert _select_rate("m", jobs, results) == expected


def test_similar_learning_rates_have_folders_of_their_own():
    rates = (0.0123456789, 0.0123456788, 0.01)
    folders = [Cell("mamba2", rate, 0).folder for rate in rates]
    assert folders == ["mamba2/lr0.0123456789-seed0", "mamba2/lr0.0123456788-seed0", "mamba2/lr0.01-seed0"]


def test_nothing_that_ended_is_an_error(tmp_path, monkeypatch):
    folder = create(tmp_path / "x", ["mamba2"])
    failing(monkeypatch, name="", error=ValueError("the moon is full"))
    with pytest.raises(RunsFailed, match=r"mamba2 lr 0.01 seed 0 failed: the moon is full"):
        comparison.run_comparison(folder, show=False)


@cases(
    "error, code, message",
    (PermissionError(13, "Permission denied", "a/b"), 2, "a/b: Permission denied; change its permissions"),
    (NotADirectoryError(20, "Not a directory", "a/b"), 2, "a file stands where a folder is needed"),
    (OSError(36, "File name too long", "a" * 300), 2, "choose a shorter name"),
    (OSError("a line\nand another"), 2, "a line and another"),
    (MemoryError(), 2, "there is not enough memory; choose a smaller model"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 800 bytes."), 2, "800 bytes more"),
    (KeyboardInterrupt(), 130, "interrupted"),
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
    assert_raises(RuntimeError, "a bug", main, ["list"])


def shell(line, cwd, **environment):
    """Run a line of bash in which `halflife` is this version."""
    line = line.replace("halflife", f"{sys.executable} -W ignore -m halflife.cli")
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=cwd, env={**os.environ, **environment}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip


def test_a_reader_that_goes_away_sees_no_message(tmp_path):
    done = shell("halflife list | head -1; echo ${PIPESTATUS[0]}", tmp_path)
    assert done.stdout.splitlines()[-1] == "141"
    assert done.stderr == ""


@pytest.mark.slow
def test_training_goes_on_without_the_reader_of_its_bar(tmp_path):
    (tmp_path / "text.txt").write_text("the state forgets slowly. " * 300)
    arguments = "--tokens 1K --context 32 --batch-size 4 --hidden-size 16 --num-layers 1 --held-out 0.1"
    line = f"halflife train mamba2 --data text.txt {arguments} --output out | head -1; echo ${{PIPESTATUS[0]}}"
    done = shell(line, tmp_path, HALFLIFE_CACHE=str(tmp_path / "cache"))
    assert done.stdout.splitlines()[-1] == "0", done.stderr
    assert (tmp_path / "out" / "result.json").exists()


@pytest.mark.slow
def test_a_terminal_of_ascii_shows_everything(tmp_path):
    done = shell("halflife list", tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


@cases(
    "options, message",
    (["--clip", "nan"], "clip must be positive; got nan"),
    (["--clip", "0"], "clip must be positive"),
    (["--weight-decay", "nan"], "weight_decay must be 0 or more"),
    (["--weight-decay", "-3"], "weight_decay must be 0 or more; got -3.0"),
    (["--warmup", "5"], "warmup must be a share"),
    (["--warmup", "nan"], "warmup must be a share of the steps between 0 and 1; got nan"),
    (
        ["--schedule", "wsd", "--warmup", "0.5", "--decay", "0.75", "--tokens", "2048"],
        "their sum is at most 1; got 0.5 and 0.75",
    ),
    (["--set", "training.betas=[0.9, 1.0]"], "betas must be two numbers"),
    (["--seed", "-1"], "seed must lie between 0"),
    (["--num-heads", "0"], "num_heads must be at least 1; got 0"),
    (["--tokens", "99999999999999999"], "steps must be at least 1 and at most 1,000,000,000"),
    (["--fsdp"], "torchrun"),
    (["--data", ""], "name a file, a folder or a glob"),
    (["--data", "pipe"], "pipe is a pipe or a device"),
    (["--output", ""], "is not empty; choose another folder"),
    (["--output", "text"], "is not empty; choose another folder"),
    (["--output", "text/0.txt"], "0.txt"),
)
def test_bad_settings_are_refused_before_anything_is_written(place, options, message, refused):
    before = sorted(place.rglob("*"))
    assert message in refused("train", *TRAIN, *options)
    assert sorted(path for path in place.rglob("*") if "cache" not in path.parts) == before
    assert not any(path.name == ".lock" for path in place.rglob("*"))


def test_a_full_disk_while_a_text_is_tokenised_names_the_folder(place, monkeypatch, refused):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.Writer, "add", full)
    error = refused("train", *TRAIN)
    assert str(place / "cache" / "corpora") in error
    assert "No space left on device; make room on the disk" in error


TRAIN = [
    "mamba2", "--data", "text", "--tokens", "256", "--context", "16", "--batch-size", "4", "--hidden-size", "16",
    "--num-layers", "1", "--num-heads", "2", "--held-out", "0.1", "--output", "out", "--quiet",
]  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, with 20 documents in `text` and a named pipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HALFLIFE_CACHE", str(tmp_path / "cache"))
    write_texts(tmp_path / "text", "document {i} forgets slowly. " * 8)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def test_a_stray_rank_is_refused(place, monkeypatch, refused):
    for rank, message in (("1", "RANK=1"), ("first", "RANK='first'")):
        monkeypatch.setenv("RANK", rank)
        assert message in refused("train", *TRAIN)


def test_a_run_does_not_read_other_runs(place):
    (place / "text" / "run").mkdir()
    (place / "text" / "run" / "run.json").write_text("{}")
    (place / "text" / "run" / "samples.txt").write_text("text of a model")
    (place / "text" / "a-comparison").mkdir()
    for name in ("config.json", "versions.json", "summary.md"):
        (place / "text" / "a-comparison" / name).write_text("{}")
    assert [path.name for path in find(["text"])] == sorted(f"{i}.txt" for i in range(20))


def test_a_folder_that_cannot_be_read_is_an_error(place, monkeypatch):
    scandir = os.scandir

    def refuse(path):
        if Path(path).name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    (place / "text" / "secret").mkdir()
    monkeypatch.setattr(os, "scandir", refuse)
    assert_raises(PermissionError, "secret", find, ["text"])


@cases(
    "changes, message",
    ({"of_tomorrow": 1}, "does not know: of_tomorrow"),
    ({"digest": None}, "has no digest"),
    ({"steps": "many"}, "steps in .*run.json must be a whole number; got 'many'"),
    ({"data": {"sources": []}}, "is damaged: a setting has a value that cannot be"),
    ({"model": []}, "damaged"),
    ({"clip": -1.0}, "clip must be positive"),
)
def test_an_edited_run_is_refused_by_name(place, changes, message, refused):
    fixture = Path(__file__).parent / "fixtures" / "language" / "run.json"
    written = {**json.loads(fixture.read_text()), **changes}
    (place / "out").mkdir()
    (place / "out" / "run.json").write_text(json.dumps({k: v for k, v in written.items() if v is not None}))
    before = sorted(place.rglob("*"))
    assert re.search(message, refused("train", "--resume", "out"))
    assert sorted(place.rglob("*")) == before


def test_a_run_is_no_comparison_that_is_damaged(tmp_path):
    write_text(tmp_path / "config.json", '{"format": 1}')
    language = "a language run; `halflife train --resume` continues one"
    for run, said in (('{"context": 8}', language), ("{}", "a task run")):
        write_text(tmp_path / "run.json", run)
        assert_raises(ValueError, f"holds no comparison, but {said}", comparison.Comparison.load, tmp_path)


def test_a_command_that_is_refused_leaves_no_versions(place, refused):
    """The corrected command then finds an empty folder, and `versions.json` names the command that trained."""
    assert "fewer than a context of 1000" in refused("train", *TRAIN, "--context", "1000", "--batch-size", "1")
    assert "batch_size must be at least 1; got 0" in refused("train", *TRAIN, "--batch-size", "0")
    assert {path.name for path in (place / "out").iterdir()} <= {".lock"}


def test_a_hint_to_resume_is_given_where_there_is_something_to_resume(place, monkeypatch, capsys):
    from halflife.lab.experiments import train

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run_language", interrupt)
    assert command("train", *TRAIN) == 130
    assert "nothing was written yet" in capsys.readouterr().err
    (place / "out").mkdir()
    (place / "out" / "run.json").write_text("{}")
    with pytest.raises(SystemExit) as stop, resumable("halflife train --resume out", place / "out" / "run.json"):
        interrupt()
    assert stop.value.code == 130
    assert "resume with: halflife train --resume out" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop, resumable("halflife train --resume out", place / "out" / "run.json"):
        raise StoppedBySignal("stopped after step 3 of 12", signal.SIGTERM)
    assert stop.value.code == 128 + signal.SIGTERM
    assert "stopped after step 3 of 12; resume with: halflife train --resume out" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit), resumable("halflife train --resume out", place / "out" / "run.json"):
        interrupt()
    assert not capsys.readouterr().err


def test_signals_are_noted_until_they_are_asked_for():
    with signals_noted() as check:
        check()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StoppedBySignal) as stopped:
            check()
    assert stopped.value.number == signal.SIGTERM
    with signals_noted() as check:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
        with pytest.raises(KeyboardInterrupt):  # the user asks again
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_hint_to_resume_repeats_how_the_run_was_done(place, monkeypatch, capsys):
    """A run with --fsdp cannot be resumed without it, or without torchrun."""
    from halflife.lab.experiments import train

    def interrupt(config, folder, **_):
        (folder / "run.json").write_text("{}")
        raise KeyboardInterrupt

    (place / "out").mkdir()
    monkeypatch.setattr(train, "run_language", interrupt)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert command("train", *TRAIN, "--fsdp", "--recompute", "norms", "op", "--prompts", "a b") == 130
    hint = "torchrun --nproc-per-node 1 -m halflife.cli train --resume out --recompute norms op --fsdp --prompts 'a b'"
    assert f"resume with: {hint}\n" in capsys.readouterr().err


@cases(
    "work, arguments",
    ("halflife.evaluation.harness.evaluate", ["eval", "model", "--tasks", "piqa"]),
    ("halflife.analysis.survey.measure_models", ["spectrum", "model"]),
    ("halflife.analysis.forecast.survey.measure_forecasts", ["forecast", "model"]),
    ("halflife.analysis.diagnosis.diagnose", ["diagnose", "model"]),
    ("halflife.evaluation.throughput.measure_steps", ["throughput"]),
    ("halflife.data.tokenizers.train_tokenizer", ["tokenizer", "text"]),
)
def test_work_whose_result_could_not_be_written_does_not_begin(work, arguments, place, monkeypatch, refused):
    checkpoint.save(LanguageModel(preset("mamba2", hidden_size=16, num_layers=1, num_heads=2, vocab_size=256)), "model")
    monkeypatch.setattr(work, pytest.fail)
    assert "a file stands where a folder is needed" in refused(*arguments, "--output", "text/0.txt/a")


def test_a_folder_without_results_is_removed(tmp_path):
    (tmp_path / "there").mkdir()
    for folder in ("there", "new/below"):
        with pytest.raises(KeyError), writable(tmp_path / folder):
            raise KeyError
    with writable(tmp_path / "full"):
        (tmp_path / "full" / "x").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"there", "full"}


@cases(
    "arguments, message",
    (["spectrum", "x", "--device", "tpu"], "there is no device 'tpu' here"),
    (["generate", "x", "text", "--device", "meta"], "there is no device 'meta' here"),
    (["theory", "--channels", "1000000"], "--channels may be at most 256; got 1,000,000"),
    (["theory", "--lengths", "1e3", "1e99"], "--lengths may be at most"),
    (["compare", "mamba2", "--seeds", "1000000000"], "at most 10,000"),
    (["compare", "mamba2", "--num-heads", "0"], "num_heads must be at least 1; got 0"),
    (["compare", "mamba2", "--seeds", "2", "--only-seeds", "1", "7"], "there is no seed 7 to run"),
    (["compare", "mamba2", "--task", "niah", "--lengths", "99999999999"], "at most 16,777,216 tokens"),
    (["compare", "mamba2", "--test-examples", "99999999999"], "between 1 and 10,000,000"),
    (["compare", "mamba2", "--task", "niah", "--test-tokens", "0"], "test_tokens must be at least 1; got 0"),
)
def test_what_would_never_end_is_refused(arguments, message, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*arguments)
    assert not [*tmp_path.iterdir()]


def test_a_model_that_diverged_has_no_text_and_no_scores(place, refused):
    model = LanguageModel(preset("mamba2", hidden_size=16, num_layers=1, num_heads=2, vocab_size=256))
    checkpoint.save(model, "sound")
    assert "temperature" in refused("generate", "sound", "abc", "--temperature", "nan")
    model.norm.weight.data[3] = math.nan
    checkpoint.save(model, "model")
    (place / "a.txt").write_text("some text")
    for arguments in (
        ["generate", "model", "abc"], ["eval", "model", "--tasks", "niah_single_1", "--lengths", "600"],
        ["look", "model", "--text", "a.txt"], ["train", "--from", "model", "--data", "text", "--tokens", "64"],
    ):  # fmt: skip
        said = refused(*arguments)
        assert "the model in " in said
        assert "model has diverged: norm.weight holds numbers that are not finite" in said
    session = Session(model.eval()).feed("abc")
    assert_raises(ValueError, "the logits of the model are not finite", next, session.sample(1, temperature=0))


def test_a_folder_with_the_temporary_file_of_a_killed_process_is_new(tmp_path):
    """The process was killed while it wrote the first file."""
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / ".config.json.0123456789ab.tmp").write_text("{")
    assert create(folder) == folder
    (tmp_path / "y").mkdir()
    (tmp_path / "y/.config").write_text("mine")
    assert_raises(FileExistsError, "not empty", create, tmp_path / "y")
