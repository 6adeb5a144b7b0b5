"""`halflife push`: which files leave the machine, what is refused, and the calls of the Hub's client."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest

from halflife.cli import main
from halflife.runs.share import divide_files

FIXTURE = Path(__file__).parent / "fixtures/language"
PRIVATE = ("run.json", "versions.json", "samples.txt", "report.html", "track.json", "mlflow.db", "wandb/run/x.png")


@pytest.fixture
def folder(tmp_path):
    folder = Path(shutil.copytree(FIXTURE, tmp_path / "my-model"))
    others = ("tokenizer.json", "README.md", "figures/timescales.png", "checkpoints/checkpoint-8/model.safetensors")
    for name in (*PRIVATE[3:], ".lock", *others):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_the_model_its_card_and_its_numbers_are_shared_and_nothing_else(folder, capsys):
    main(["push", str(folder), "me/my-model", "--dry-run"])
    out = capsys.readouterr().out
    shared, others = divide_files(folder)
    assert set(shared) == {
        "README.md", "config.json", "model.safetensors", "tokenizer.json", "metrics.jsonl", "result.json",
        "figures/timescales.png", *(f"figures/{file.name}" for file in (FIXTURE / "figures").glob("*.[ps][nv]g")),
    }  # fmt: skip
    assert {"checkpoints/", "wandb/", "run.json", "samples.txt", "mlflow.db"} <= set(others)
    listed = out.partition("in all")[0]
    assert f"{(folder / 'model.safetensors').stat().st_size:,} bytes" in listed
    assert not any(name in listed for name in PRIVATE)
    assert "nothing was uploaded" in out
    assert "private" in out


@pytest.mark.parametrize(("options", "private"), [((), True), (("--public",), False)])
def test_the_listed_files_are_uploaded_in_one_commit(folder, monkeypatch, capsys, options, private):
    calls = []

    class Hub:
        def create_repo(self, name, **options):
            calls.append((name, options))
            return f"https://hub/{name}"

        def upload_folder(self, **options):
            calls.append(options)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    main(["push", str(folder), "me/my-model", *options])
    assert "uploaded to https://hub/me/my-model" in capsys.readouterr().out
    assert calls[0] == ("me/my-model", {"private": private, "exist_ok": True})
    assert calls[1]["allow_patterns"] == divide_files(folder)[0]
    assert calls[1]["repo_id"] == "me/my-model"


def test_a_hub_that_is_not_reached_gives_one_line(folder, refused):
    assert "the Hub did not take me/my-model" in refused("push", str(folder), "me/my-model")  # tests are offline


def test_what_is_no_finished_model_is_refused(folder, refused, tmp_path):
    assert "owner/name" in refused("push", str(folder), "my-model", "--dry-run")
    assert "the Hub allows no repository" in refused("push", str(folder), "me/my model", "--dry-run")
    assert "is a checkpoint" in refused("push", str(folder / "checkpoints/checkpoint-8"), "me/x", "--dry-run")
    assert "there is no folder" in refused("push", str(tmp_path / "nowhere"), "me/x", "--dry-run")
    assert "holds no model" in refused("push", str(tmp_path), "me/x", "--dry-run")
    (tmp_path / "config.json").write_text('{"models": ["mamba2"]}')
    assert "is a comparison" in refused("push", str(tmp_path), "me/x", "--dry-run")
    (folder / "result.json").unlink()
    assert "has not ended" in refused("push", str(folder), "me/x", "--dry-run")
