"""Trackers: what wandb, trackio, MLflow and TensorBoard have stored after a run, read back with their own libraries."""

import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from matplotlib.figure import Figure
from tiny_runs import tiny
from transformers import TrainerCallback, TrainerState

from halflife import preset
from halflife.extras import EXTRAS, install
from halflife.files import flatten
from halflife.models import LanguageModel
from halflife.report.tracking import observe_decays
from halflife.training import trackers
from halflife.training.config import TRACKERS, ExecutionConfig
from halflife.training.trackers import run_name, tracker_environment

TRAIN = ["mamba2+post+gate_rank", "--held-out", "0.15", "--tokens", "3072", "--context", "32", "--batch-size", "4"]
SIZES = ["--hidden-size", "16", "--num-layers", "2", "--num-heads", "2", "--lr", "1e-2", "--quiet"]
EVERY = ["--validate-every", "8", "--save-every", "8", "--data", "text.txt", "--output", "out"]
COMPARE = ["mamba2", "llama", "--lr", "1e-2", "--steps", "4", "--batch-size", "4", "--hidden-size", "16"]
TINY_TASK = ["--num-layers", "1", "--num-heads", "2", "--vocab-size", "128", "--train-length", "8", "--pairs", "2"]
COMMAND = """
import os, signal, sys
from halflife.training.callbacks import Metrics
step, end = Metrics.on_step_end, int(sys.argv.pop(1))
def stopped(self, args, state, control, **kwargs):
    step(self, args, state, control, **kwargs)
    if state.global_step == end:
        os.kill(os.getpid(), signal.SIGTERM)
Metrics.on_step_end = stopped
from halflife.cli import main
main()
"""


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_named_before_a_folder_is_made(name, refused, monkeypatch, tmp_path):
    """The commands ask whether a package is there with `find_spec`, and import it later."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == name else real(package))
    monkeypatch.chdir(tmp_path)
    error = f"halflife: --track {name} needs {name}: {install(name)}\n"
    assert refused("compare", "mamba2", "--track", name) == error
    assert refused("train", "mamba2", "--data", "nothing.txt", "--track", name) == error
    assert not list(tmp_path.iterdir())
    assert EXTRAS[name] == name


def test_an_unknown_tracker_is_answered_with_the_known_ones(refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    error = refused("compare", "mamba2", "--track", "tensorbord")
    assert "tensorbord" in error
    assert "tensorboard" in error
    assert not list(tmp_path.iterdir())


def test_the_environment_has_defaults_that_the_user_overrides_and_that_go_away(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    sweep = tmp_path / "sweep"
    execution = ExecutionConfig(sweep=sweep)
    cell = sweep / "mamba2" / "lr0.01-seed0"
    before = dict(os.environ)
    with tracker_environment(cell, execution):
        assert os.environ["WANDB_PROJECT"] == "mine"
        assert os.environ["WANDB_RUN_GROUP"] == "sweep"
        assert os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{sweep}/mlflow.db"
    assert dict(os.environ) == before
    assert run_name(cell, execution) == "sweep/mamba2/lr0.01-seed0"
    assert run_name(sweep, ExecutionConfig()) == "sweep"


class Callback(TrainerCallback):
    """In the place of the Trainer's callback for a tracker: keeps what it gets."""

    def __init__(self):
        self.lines, self.ends = [], 0

    def on_log(self, args, state, control, logs):
        self.lines.append(logs)

    def on_train_end(self, args, state, control):
        self.ends += 1


def test_libraries_get_settings_series_and_figures_and_a_resumed_run_has_its_names(tmp_path, monkeypatch):
    """Stand-ins are in the place of the libraries. The slow tests read what the real ones have stored."""
    libraries = {name: mock.MagicMock() for name in ("wandb", "trackio", "mlflow")}
    wandb, trackio, mlflow = libraries.values()
    wandb.run = mlflow.get_experiment_by_name.return_value = None
    for name, library in libraries.items():
        monkeypatch.setitem(sys.modules, name, library)
    kinds = {name: type(name, (Callback,), {}) for name in libraries}
    monkeypatch.setattr(trackers, "CALLBACKS", kinds)
    monkeypatch.setattr("halflife.training.config.require", lambda *_: None)
    callbacks, figure = [kind() for kind in kinds.values()], Figure()
    execution = ExecutionConfig(track=(*libraries,), observe=lambda model: ({"scale": 3.0}, {"spectrum": figure}))
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=callbacks))
    tracking = trackers.Tracking(trainer, tiny(), tmp_path, execution)
    with tracking.open(0):
        wandb.run, mlflow.active_run.return_value.info.run_id = SimpleNamespace(id="a"), "b"
        tracking.on_train_begin(None, TrainerState(), None, model=SimpleNamespace(model=LanguageModel(tiny().model)))
        tracking.report({"step": 4, "loss": 1.0, "validation_loss": 2.0, "gates": {"layer0": 0.5}})
    mlflow.create_experiment.assert_called_once_with("halflife", artifact_location=(tmp_path / "mlartifacts").as_uri())
    settings = flatten(tiny().to_dict(), "/")
    mlflow.log_params.assert_called_once_with(settings)
    mlflow.log_figure.assert_called_once_with(figure, "spectrum/step0000000.png")
    for library in (wandb, trackio):
        library.config.update.assert_called_once_with(settings, allow_val_change=True)
        library.log.assert_called_once_with({"spectrum": library.Image.return_value, "train/global_step": 0})
        assert library.Image.call_args.args[0].shape == (480, 640, 3)
    for callback in callbacks:
        assert callback.lines == [{"scale": 3.0}, {"step": 4.0, "eval_loss": 2.0, "gates/layer0": 0.5}]
    assert [callback.ends for callback in callbacks] == [0, 1, 1]
    wandb.finish.assert_called_once_with()
    with tracker_environment(tmp_path, execution):
        assert (os.environ["WANDB_RUN_ID"], os.environ["MLFLOW_RUN_ID"]) == ("a", "b")


def test_decays_are_observed_by_layer_and_a_model_without_decay_has_none():
    values, figures = observe_decays(LanguageModel(tiny().model))
    low, middle, high = (values[f"timescales/layer0/{name}"] for name in ("shortest", "median", "longest"))
    assert 0 < low <= middle <= high
    assert list(figures) == ["decay_spectrum"]
    llama = preset("llama", hidden_size=16, num_layers=1, vocab_size=64, num_heads=2)
    assert observe_decays(LanguageModel(llama)) == ({}, {})


def halflife(folder, *arguments, end=0, code=0):
    """Run a command in `folder`. Its process gets SIGTERM after the step `end`."""
    environment = {
        **os.environ, "HALFLIFE_CACHE": str(folder / "cache"), "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_MODE": "offline", "PYTHONPATH": str(Path(__file__).parent.parent),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(end), *arguments], cwd=folder, env=environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """The folder of a run that was stopped by a signal and resumed, with all trackers."""
    for name in TRACKERS:
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "text.txt").write_text("".join(f"the state of line {i} is {i * i % 97}\n" for i in range(3000)))
    halflife(folder, "train", *TRAIN, *SIZES, *EVERY, "--track", *TRACKERS, end=13, code=128 + signal.SIGTERM)
    halflife(folder, "train", "--resume", "out", "--track", *TRACKERS, "--quiet")
    return folder


@pytest.fixture(scope="module")
def expected(tracked):
    """Name of a series → its values by step, from metrics.jsonl; validations have the names of the Trainer."""
    series = {}
    for line in map(json.loads, (tracked / "out" / "metrics.jsonl").read_text().splitlines()):
        step = line.pop("step")
        for name, value in flatten(line, "/").items():
            series.setdefault(name.replace("validation_", "eval_"), {})[step] = value
    assert {"loss", "eval_loss", "tokens_per_second", "mfu"} < series.keys()
    assert any(name.startswith("gates/") for name in series)
    assert list(series["eval_loss"]) == [8, 16, 24]
    return series


def prefixed(name):
    return f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"


def assert_equal(found, expected):
    """Series in the two places are equal at every step, and the time-scales are there at the validations."""
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-5), name
    for layer in (0, 1):
        assert set(found[f"timescales/layer{layer}/longest"]) >= {0, 8, 16, 24}


@pytest.mark.slow
def test_tensorboard_has_every_series_once_and_the_figures(tracked, expected):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked / "out" / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    assert [event.step for event in events.Images("decay_spectrum")] == [0, 8, 16, 24]
    scalars = {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}
    for name in expected:
        assert len(events.Scalars(prefixed(name))) == len(expected[name])  # the steps after the checkpoint are purged
    names = [*expected, *(f"timescales/layer{i}/longest" for i in (0, 1))]
    assert_equal({name: scalars[prefixed(name)] for name in names}, expected)


@pytest.mark.slow
def test_mlflow_has_one_run_with_settings_series_and_figures(tracked, expected):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tracked}/out/mlflow.db")
    experiment = client.get_experiment_by_name("halflife")
    (run,) = client.search_runs([experiment.experiment_id])  # resumed, not begun again
    assert run.info.status == "FINISHED"
    assert run.data.params["model/name"] == "mamba2+post+gate_rank"
    assert run.data.params["steps"] == "24"
    found = {
        name: {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }
    assert_equal(found, expected)
    figures = [file.path for file in client.list_artifacts(run.info.run_id, "decay_spectrum")]
    assert figures == [f"decay_spectrum/step{step:07d}.png" for step in (0, 8, 16, 24)]
    assert not (tracked / "mlruns").exists()


@pytest.mark.slow
def test_trackio_has_one_run_with_series_and_figures(tracked, expected):
    with sqlite3.connect(tracked / "trackio" / "halflife.db") as database:
        rows = database.execute("select run_name, metrics from metrics order by id").fetchall()
    assert {name for name, _ in rows} == {"out"}
    found, figures = {}, []
    for _, text in rows:
        line = json.loads(text)
        step = line.pop("train/global_step")
        figures += [step] if "decay_spectrum" in line else []
        for name, value in line.items():
            name = f"eval_{name[5:]}" if name.startswith("eval/") else name.removeprefix("train/")
            found.setdefault(name, {})[step] = value
    assert set(figures) == {0, 8, 16, 24}
    assert_equal(found, expected)


def wandb_records(data):
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # no header fits, so the block ends with zeros
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_has_one_run_in_two_parts_with_series_and_figures(tracked, expected):
    from wandb.proto.wandb_internal_pb2 import Record

    found, names, settings, figures = {}, set(), set(), []
    files = sorted((tracked / "out" / "wandb").glob("offline-run-*/*.wandb"))
    for data in (data for file in files for data in wandb_records(file.read_bytes())):
        record = Record()
        record.ParseFromString(data)
        names |= {record.run.run_id} - {""}
        settings |= {item.key for item in record.config.update}
        line = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if "train/global_step" in line:
            step = json.loads(line.pop("train/global_step"))
            figures += [step] if "decay_spectrum" in line else []
            for name, value in line.items():
                if name.startswith(("train/", "eval/")):
                    name = f"eval_{name[5:]}" if name.startswith("eval/") else name.removeprefix("train/")
                    found.setdefault(name, {})[step] = json.loads(value)
    assert len(files) == 2
    assert names == {json.loads((tracked / "out" / "track.json").read_text())["wandb"]}
    assert {"model/name", "steps"} < settings
    assert set(figures) == {0, 8, 16, 24}
    assert_equal(found, expected)


@pytest.mark.slow
def test_a_comparison_is_one_group_of_runs(tmp_path):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    halflife(tmp_path, "compare", *COMPARE, *TINY_TASK, "--output", "sweep", "--quiet", "--track", "mlflow")
    client = MlflowClient(f"sqlite:///{tmp_path}/sweep/mlflow.db")
    experiment = client.get_experiment_by_name("halflife")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in runs} == {f"sweep/{name}/lr0.01-seed0" for name in ("mamba2", "llama")}
    assert all(run.info.status == "FINISHED" and run.data.metrics["eval_accuracy"] >= 0 for run in runs)


@pytest.mark.slow
def test_a_tracked_run_gives_the_same_weights(tracked):
    halflife(tracked, "train", *TRAIN, *SIZES, *EVERY[:-1], "untracked")
    weights = [(tracked / name / "model.safetensors").read_bytes() for name in ("out", "untracked")]
    assert weights[0] == weights[1]
    assert torch.get_num_threads() == 1
