"""Data sets of the Hugging Face hub: their names, reading one with `datasets`, model cards, and what is shared."""

import json
import re
import shutil
import socket
import sys
import time
import types
from pathlib import Path

import pytest
import yaml
from corpora import text
from helpers import assert_raises, cases

from halflife.data import documents, hub
from halflife.data.documents import find
from halflife.extras import install
from halflife.files import read_json, write_json
from halflife.models import LanguageModel, checkpoint, preset
from halflife.report.card import write_card
from halflife.runs.folder import read_language

COMMIT = "0123456789" * 4


@cases(
    "source, expected",
    ("hf:a/b", ("a/b", None, None, "train", None)),
    ("hf:a/b@main", ("a/b", "main", None, "train", None)),
    ("hf:a/b:en.x", ("a/b", None, "en.x", "train", None)),
    ("hf:a/b@v1:en:test[:50]", ("a/b", "v1", "en", "test", 50)),
    ("hf:a/b::validation", ("a/b", None, None, "validation", None)),
)
def test_names_of_data_sets(source, expected):
    assert hub.HubSource.parse(source) == hub.HubSource(*expected)


@pytest.mark.parametrize("source", ["hf:", "hf:a b", "hf:a/b:c:train[5:]", "hf:a/b:c:train[:0]"])
def test_names_that_are_none(source):
    assert_raises(ValueError, r"is not a data set of the hub|asks for zero rows", hub.HubSource.parse, source)


CARD = """---
configs:
- config_name: en
  default: true
  data_files:
  - {split: train, path: en*.jsonl}
  - {split: test, path: test.jsonl}
- config_name: holes
  data_files: holes.jsonl
- config_name: broken
  data_files: broken.jsonl
---
"""


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    """A folder with the files of a data set's repository, which replaces the hub and has a commit."""
    datasets, huggingface_hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    found = types.SimpleNamespace(sha=COMMIT)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: found)
    place = tmp_path / "owner"
    place.mkdir()
    (place / "README.md").write_text(CARD)
    write_lines(place / "en0.jsonl", [{"text": text(i), "id": i} for i in range(6)])
    write_lines(place / "en1.jsonl", [{"text": text(i), "id": i} for i in range(6, 9)])
    write_lines(place / "test.jsonl", [{"text": text(9), "id": 9}])
    write_lines(place / "holes.jsonl", [{"text": "x"}, {"text": None}])
    (place / "broken.jsonl").write_text('{"text": "x"}\n{"text": \n')
    return place


@cases(
    "suffix, expected",
    ("", range(9)),
    (f"@{COMMIT}", range(9)),
    (":en", range(9)),
    (":en:train[:4]", range(4)),
    ("::train[:7]", range(7)),
    (":en:test", [9]),
)
def test_documents_of_a_data_set(data_set, tmp_path, suffix, expected):
    (path,) = find([f"hf:{data_set}{suffix}"], "text", tmp_path)
    assert list(documents.documents([path])) == [text(i).encode() for i in expected]


def test_a_data_set_is_read_once(data_set, tmp_path, monkeypatch):
    source = f"hf:{data_set}@{COMMIT}"
    first = find([source], "text", tmp_path)
    data_set.rename(tmp_path / "gone")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert find([source], "text", tmp_path) == first
    assert find([f"hf:{data_set}"], "text", tmp_path) == first  # the newest commit, which is this one


@cases(
    "suffix, field, message",
    ("", "body", "there is no column 'body'; the columns are text, id"),
    ("", "id", "row 1: 'id' is int, not a string"),
    (":holes", "text", "row 2: 'text' is NoneType, not a string"),
    (":de", "text", "BuilderConfig 'de' not found. Available: .*'en', 'holes', 'broken'"),
    (":en:valid", "text", "Bad split: valid. Available splits: .*'train', 'test'"),
    (":broken", "text", "JSON parse error"),
)
def test_what_a_data_set_has_not_is_a_one_line_error(data_set, tmp_path, suffix, field, message):
    with pytest.raises(ValueError, match=f"^hf:{data_set}: {message}") as error:
        find([f"hf:{data_set}{suffix}"], field, tmp_path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("downloads/*.jsonl"))


def test_a_choice_of_configurations_is_on_one_line(data_set, tmp_path):
    (data_set / "README.md").write_text(CARD.replace("  default: true\n", ""))
    with pytest.raises(ValueError, match=r"Config name is missing.*'en', 'holes', 'broken'.*") as error:
        find([f"hf:{data_set}"], "text", tmp_path)
    assert "\n" not in str(error.value)


def test_a_data_set_that_is_not_there(data_set, tmp_path):
    with pytest.raises(ConnectionError, match=r"^cannot download hf:.*/none: Couldn't find"):
        find([f"hf:{data_set}/none"], "text", tmp_path)


def test_a_data_set_without_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=re.escape(f"hf:a/b needs datasets: {install('train')}")):
        find([f"hf:a/b@{COMMIT}"], "text", tmp_path)


@pytest.mark.parametrize("revision", ["", f"@{COMMIT}"])
@pytest.mark.parametrize("listens", [False, True])
def test_a_hub_that_does_not_answer(tmp_path, monkeypatch, listens, revision):
    """A connection that is refused or gets no answer gives one line soon; `datasets` itself tries for half a minute."""
    constants = pytest.importorskip("huggingface_hub.constants")
    pytest.importorskip("datasets")
    monkeypatch.setattr(hub, "HUB_SECONDS", 0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(ConnectionError, match=r"^cannot ask the hub about a/b \(.*hf:owner/name@commit$") as error:
            find([f"hf:a/b{revision}"], "text", tmp_path)
    assert time.monotonic() - start < 8  # measured seconds: 0.1 and 0.5
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.jsonl"))


FIXTURE = Path(__file__).parent / "fixtures/language"


@pytest.fixture
def folder_card(tmp_path):
    return Path(shutil.copytree(FIXTURE, tmp_path / "my-model"))


def card_of(folder_card):
    path = write_card(read_language(folder_card))
    _, head, text = path.read_text().split("---\n", 2)
    return yaml.safe_load(head), text


def change(folder_card, **data):
    run = read_json(folder_card / "run.json")
    write_json(folder_card / "run.json", {**run, "data": {**run["data"], **data}})


def test_a_card_has_results_settings_data_and_how_to_load(folder_card):
    change(folder_card, sources=["/home/me/secret/notes.txt", "hf:owner/name@abc:en:train"], weights=[0.7, 0.3])
    result, run = read_json(folder_card / "result.json"), read_json(folder_card / "run.json")
    head, text = card_of(folder_card)
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
    assert str(folder_card) not in text
    change(folder_card, tokenizer="../words")
    assert "Tokenizer `words`." in card_of(folder_card)[1]


def test_a_card_shows_the_decays(folder_card):
    _, text = card_of(folder_card)
    assert "(figures/timescales.png)" in text
    assert (folder_card / "figures/timescales.png").stat().st_size > 1000


def test_a_model_without_decays_has_a_card_without_their_figure(folder_card):
    run = read_json(folder_card / "run.json")
    config = preset("llama", hidden_size=16, num_layers=1, vocab_size=run["model"]["vocab_size"])
    write_json(folder_card / "run.json", {**run, "model": config.to_dict()})
    checkpoint.save(LanguageModel(config), folder_card)
    _, text = card_of(folder_card)
    assert text.startswith("\n# llama, ")
    assert "timescales" not in text


@pytest.mark.parametrize("name", ["llama", "mamba2"])
@pytest.mark.parametrize(
    ("damage", "message"), [(lambda x: x[:-1] + b"\1", "is damaged"), (lambda x: x[:-1], "truncated")]
)
def test_damaged_weights_are_no_model_without_decays(folder_card, name, damage, message):
    config = preset(name, hidden_size=16, num_layers=1, vocab_size=256)
    checkpoint.save(LanguageModel(config), folder_card)
    weights = folder_card / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    assert_raises(ValueError, rf"model\.safetensors .*{message}", card_of, folder_card)
    assert not (folder_card / "README.md").exists()


def test_a_run_without_a_trained_model_has_no_card(folder_card):
    result = read_json(folder_card / "result.json")
    write_json(folder_card / "result.json", {**result, "diverged": "at step 3"})
    assert write_card(read_language(folder_card)) is None
    (folder_card / "result.json").unlink()
    assert write_card(read_language(folder_card)) is None
    assert not (folder_card / "README.md").exists()
