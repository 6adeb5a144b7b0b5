"""Folders that version 0.1.0 wrote still open: results, models, reports, and the resumption of finished runs."""

import json
import math
import shutil
from pathlib import Path

import pytest

from halflife.experiments import compare
from halflife.experiments import train as language
from halflife.files import CONFIG_JSON, RUN_JSON
from halflife.models import checkpoint
from halflife.models.load import load_any
from halflife.report.redraw import write_report
from halflife.runs.folder import Comparison, FolderKind, LanguageRun, folder_kind, read_any, read_result
from halflife.training.config import ExecutionConfig

FIXTURES = Path(__file__).parent / "fixtures" / "version_0_1"
MODELS = ["mamba2", "gated_deltanet+gate_rank"]


@pytest.fixture
def comparison(tmp_path):
    return shutil.copytree(FIXTURES / "comparison", tmp_path / "comparison")


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Copy the language run, and put its text where its `run.json` expects it."""
    monkeypatch.setenv("HALFLIFE_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(FIXTURES / "language", tmp_path / "language")
    saved = json.loads((folder / RUN_JSON).read_text())
    saved["data"]["sources"] = [str(FIXTURES / "notes.jsonl")]
    (folder / RUN_JSON).write_text(json.dumps(saved))
    return folder


def cell(folder, model):
    return folder / model / "lr0.01-seed0"


def test_each_folder_has_its_kind(comparison, trained, tmp_path):
    assert folder_kind(comparison) is FolderKind.COMPARISON
    assert folder_kind(trained) is FolderKind.LANGUAGE_RUN
    assert folder_kind(cell(comparison, "mamba2")) is FolderKind.TASK_RUN
    checkpoint.save(checkpoint.load(trained), tmp_path / "model")
    assert folder_kind(tmp_path / "model") is FolderKind.MODEL
    config = json.loads((comparison / CONFIG_JSON).read_text())
    (comparison / CONFIG_JSON).write_text(json.dumps({**config, "experiment": "decay-design"}))
    assert folder_kind(comparison) is FolderKind.GRID
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        folder_kind(tmp_path / "nothing")


def test_a_comparison_is_read(comparison):
    run = read_any(comparison)
    assert isinstance(run, Comparison)
    assert run.models == MODELS
    assert len(run.scores) == 2 * (1 + 4 + 4)
    first = run.scores[0]
    assert (first.state_size, first.shortcut_accuracy, first.chance) == (248, 0.5, 1 / 64)
    assert math.isnan(first.loss)
    assert [training.curve("loss")[0] for training in run.trainings] == [[4], [4]]
    tests = read_result(cell(comparison, "mamba2"))["tests"]
    assert [test["shortcut_accuracy"] for test in tests if test["test"] == "in_distribution"] == [0.5]


def test_a_language_run_is_read(trained):
    run = read_any(trained)
    assert isinstance(run, LanguageRun)
    assert (run.model, run.train_length) == ("mamba2+post", 32)
    assert run.result["state_size"] > 0
    assert "state_floats" not in run.result


@pytest.mark.parametrize("place", ["language", *(f"comparison/{model}/lr0.01-seed0" for model in MODELS)])
def test_models_are_loaded(place):
    expected = read_result(FIXTURES / place)
    model = checkpoint.load(FIXTURES / place)
    assert model.num_parameters() == expected["parameters"]
    assert load_any(FIXTURES / place) is not None


def test_reports_are_written(comparison, trained):
    for folder in (comparison, trained):
        assert write_report(folder).stat().st_size > 10_000


def test_a_finished_comparison_is_resumed(comparison):
    before = read_any(comparison)
    weights = cell(comparison, "mamba2") / "model.safetensors"
    written = weights.stat().st_mtime_ns
    rows = compare.run_comparison(comparison, show=False)
    assert weights.stat().st_mtime_ns == written  # nothing was trained
    assert [row["accuracy"] for row in rows] == [score.accuracy for score in before.scores]
    after = read_any(comparison)
    assert [score.shortcut_accuracy for score in after.scores] == [score.shortcut_accuracy for score in before.scores]


def test_a_finished_language_run_is_resumed(trained):
    config = language.load_config(trained)
    result = language.run_language(config, trained, execution=ExecutionConfig(show=False), samples=("the state",))
    assert result == read_result(trained)
    assert (trained / "report.html").exists()
