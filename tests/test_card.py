"""The model card that a trained language model has in its folder."""

import shutil
from pathlib import Path

import pytest
import yaml

from halflife.files import read_json, write_json
from halflife.models import LanguageModel, checkpoint, preset
from halflife.report.card import write_card
from halflife.runs.folder import read_language

FIXTURE = Path(__file__).parent / "fixtures/language"


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(FIXTURE, tmp_path / "my-model"))


def card_of(folder):
    path = write_card(read_language(folder))
    _, head, text = path.read_text().split("---\n", 2)
    return yaml.safe_load(head), text


def change(folder, **data):
    run = read_json(folder / "run.json")
    write_json(folder / "run.json", {**run, "data": {**run["data"], **data}})


def test_a_card_has_results_settings_data_and_how_to_load(folder):
    change(folder, sources=["/home/me/secret/notes.txt", "hf:owner/name@abc:en:train"], weights=[0.7, 0.3])
    result, run = read_json(folder / "result.json"), read_json(folder / "run.json")
    head, text = card_of(folder)
    assert head["library_name"] == "halflife"
    assert head["datasets"] == ["owner/name"]
    assert run["model"]["name"] in head["tags"]
    for expected in (
        f"{result['parameters']:,} parameters", f"{result['bits_per_byte']:.4f} bits per byte",
        f"| {result['lengths'][0]['length']:,} | {result['lengths'][0]['perplexity']:.3f} |",
        f"| learning_rate | {run['learning_rate']} |", "- `notes.txt`, weight 0.7", "import halflife.hf",
        'from_pretrained("my-model")', "halflife generate my-model", "`AutoTokenizer.from_pretrained` and `pipeline`",
        "are the bytes of the text in UTF-8",
    ):  # fmt: skip
        assert expected in text
    assert "/home/me" not in text
    assert str(folder) not in text
    change(folder, tokenizer="../words")
    assert "Tokenizer `words`." in card_of(folder)[1]


def test_a_card_shows_the_decays(folder):
    _, text = card_of(folder)
    assert "(figures/timescales.png)" in text
    assert (folder / "figures/timescales.png").stat().st_size > 1000


def test_a_model_without_decays_has_a_card_without_their_figure(folder):
    run = read_json(folder / "run.json")
    config = preset("llama", hidden_size=16, num_layers=1, vocab_size=run["model"]["vocab_size"])
    write_json(folder / "run.json", {**run, "model": config.to_dict()})
    checkpoint.save(LanguageModel(config), folder)
    _, text = card_of(folder)
    assert text.startswith("\n# llama, ")
    assert "timescales" not in text


def test_a_run_without_a_trained_model_has_no_card(folder):
    result = read_json(folder / "result.json")
    write_json(folder / "result.json", {**result, "diverged": "at step 3"})
    assert write_card(read_language(folder)) is None
    (folder / "result.json").unlink()
    assert write_card(read_language(folder)) is None
    assert not (folder / "README.md").exists()
