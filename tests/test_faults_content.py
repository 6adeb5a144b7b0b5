"""Content that changed after it was written, or that nobody of us wrote."""

import json

import pytest
import torch
from helpers import assert_raises, cases

from halflife import preset
from halflife.data.corpus import Corpus, CorpusConfig
from halflife.files import write_json
from halflife.models import LanguageModel, checkpoint
from halflife.models.convert import convert
from halflife.models.session import Session
from halflife.models.tensor_file import Checkpoint, read_tensors, write_tensors


def model(**options):
    torch.manual_seed(0)
    config = preset("mamba2", hidden_size=16, num_layers=1, num_heads=2, vocab_size=31, **options)
    return LanguageModel(config).eval()


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("at", [-1, -300, -1000])
def test_a_flipped_bit_in_weights_is_seen(tmp_path, at):
    checkpoint.save(model(), tmp_path)
    flip(tmp_path / "model.safetensors", at)
    assert_raises(ValueError, r"model\.safetensors is damaged: .* Copy it again", checkpoint.load, tmp_path)


def test_every_flipped_bit_in_a_session_is_seen(tmp_path):
    session = Session(model()).feed([1, 2, 3])
    path = session.save(tmp_path / "a.session")
    size, expected = path.stat().st_size, session.next_logits
    draw = torch.Generator().manual_seed(0)
    for at in {8, 20, 40, *torch.randint(8, size, (40,), generator=draw).tolist()}:
        flip(path, at)
        other = Session(session.model).feed([5])
        before = (other.state, other.position, other.next_logits)
        try:
            other.load(path)
        except ValueError:
            assert (other.state, other.position, other.next_logits) == before  # nothing of the file is left in it
        else:  # the bit was in the name of the checksum
            assert torch.equal(other.next_logits, expected)
        flip(path, at)
    assert torch.equal(Session(session.model).load(path).next_logits, expected)


@cases(
    "about, tensors",
    ({"position": "-5"}, {}),
    ({"position": "x"}, {}),
    ({"position": "4"}, {}),
    ({}, {"0.position": torch.tensor([-5])}),
    ({}, {"0.memory": torch.ones(1, 2, 3, 4)}),
    ({}, {"0.memory": torch.ones(2)}),
    ({}, {"1.memory": torch.ones(1, 2, 128, 16)}),
    ({}, {"last": torch.tensor([31])}),
    ({}, {"9.memory": torch.ones(1)}),
    ({}, {"memory": torch.ones(1)}),
    ({}, {"logits": torch.ones(3)}),
)
def test_a_session_that_cannot_be_is_refused(tmp_path, about, tensors):
    session = Session(model()).feed([1, 2, 3])
    path = session.save(tmp_path / "a.session")
    read, written = read_tensors(path)
    write_tensors(path, {**read, **tensors}, {**written, **about})
    assert_raises(ValueError, "holds no state of a session", Session(session.model).load, path)


def test_equal_content_has_equal_bytes(tmp_path):
    expected = checkpoint.save(model(), tmp_path / "x").joinpath("model.safetensors").read_bytes()
    for i in range(8):  # the order of the strings in the header would differ in one of two files
        assert checkpoint.save(model(), tmp_path / str(i)).joinpath("model.safetensors").read_bytes() == expected


@cases(
    "layers, message",
    (10**6, "num_layers must be at most 1,000; got 1,000,000"),
    (700, r"model\.safetensors is of another model: it has 1 layers, and config.json describes 700"),
)
def test_layers_that_the_weights_do_not_have_are_refused_before_they_are_built(tmp_path, refused, layers, message):
    checkpoint.save(model(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"]["num_layers"] = layers
    write_json(tmp_path / "config.json", config)
    assert_raises(ValueError, message, checkpoint.load, tmp_path)
    for arguments in (["generate", "abc"], ["eval", "--text", __file__], ["spectrum", "--text", __file__]):
        assert "layers" in refused(arguments[0], str(tmp_path), *arguments[1:])


def test_the_model_of_a_task_reads_no_text(tmp_path, refused):
    """A vocabulary of 256 is bytes, unless the folder is of a run on a task."""
    config = preset("mamba2", hidden_size=16, num_layers=1, num_heads=2, vocab_size=256)
    checkpoint.save(LanguageModel(config), tmp_path)
    write_json(tmp_path / "run.json", {"model": config.to_dict(), "stages": []})
    for arguments in (["generate", "abc"], ["eval", "--text", __file__]):
        assert "was trained on a task" in refused(arguments[0], str(tmp_path), *arguments[1:])


def test_files_without_a_checksum_are_read(tmp_path):
    from safetensors.torch import load_file, save_file

    expected = model()
    checkpoint.save(expected, tmp_path)
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors", {"format": "pt"})
    found = checkpoint.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", 3])
def test_shards_lie_in_their_folder(tmp_path, shard):
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": shard}})
    assert_raises(ValueError, "which is no file of its folder", Checkpoint, tmp_path)


def test_a_conversion_that_was_killed_is_done_again(tmp_path):
    checkpoint.save(model(mlp="none"), tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "target", to="transformers")
    (tmp_path / "target" / "config.json").unlink()
    convert(tmp_path / "source", tmp_path / "target", to="transformers")
    assert (tmp_path / "target" / "config.json").exists()
    with pytest.raises(FileExistsError):
        convert(tmp_path / "source", tmp_path / "target", to="transformers")


@pytest.mark.parametrize("weights", [(), (0.5, 0.5)])
def test_a_run_reads_the_files_that_it_began_with(tmp_path, weights):
    """A file that is added later does not change the text, and a removed one is named."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        for i in range(6):
            (folder / f"{i}.txt").write_text(f"document {i} of {folder.name} " * 20)
    config = CorpusConfig(
        sources=tuple(folders), weights=weights, context=8, cache_dir=tmp_path / "cache", fractions=(0.1, 0.0)
    )
    first = Corpus.open(config, show=False)
    saved = json.loads(json.dumps(first.config.to_dict()))
    (folders[0] / "later.txt").write_text("later " * 99)
    again = Corpus.open(CorpusConfig.from_dict(saved), show=False)
    assert again.digest == first.digest != Corpus.open(config, show=False).digest
    assert Corpus.open(CorpusConfig.from_dict({**saved, "files": []}), show=False).digest != first.digest
    (folders[1] / "0.txt").unlink()
    assert_raises(FileNotFoundError, r"0\.txt", Corpus.open, CorpusConfig.from_dict(saved), show=False)
