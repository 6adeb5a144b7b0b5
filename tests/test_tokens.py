"""Tokenizers of bytes and of Hugging Face, with one protocol."""

import types

import huggingface_hub
import numpy as np
import pytest
import torch
from helpers import assert_raises

from halflife.cli import main
from halflife.data.tokenizers import (
    KINDS,
    ByteTokenizer,
    HuggingFaceTokenizer,
    check_ids,
    check_vocabulary,
    load_tokenizer,
    read_ids,
    train_tokenizer,
    unit_of,
)  # fmt: skip
from halflife.models.text import TextStream

BYTES = 256
TEXT = "λ = e^(−Δ·a), naïve 🙂 <|end|> text\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a tiny byte-level BPE tokenizer. Id 0 is <|end|>, then come the bytes and the merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the state forgets what it cannot hold; "] * 5, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("end", [False, True])
def test_bytes_are_their_ids(end):
    tokenizer = ByteTokenizer(end)
    ids = tokenizer.encode(TEXT)
    assert ids.tolist() == list(TEXT.encode())
    assert np.array_equal(ids, tokenizer.encode(TEXT.encode()))
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode(b"\xff\x00").tolist() == [255, 0]
    assert tokenizer.decode([255, 65]) == "\ufffdA"
    assert len(tokenizer.encode("")) == 0
    assert (tokenizer.vocab_size, tokenizer.eos) == ((257, 256) if end else (256, None))


def test_ids_beyond_the_bytes_are_no_text():
    assert ByteTokenizer(True).decode([104, 105, 256]) == "hi"
    assert_raises(ValueError, "at least 0; got -1", ByteTokenizer().decode, [-1])
    assert ByteTokenizer().decode([104, 256, 105]) == "h\ufffdi"
    assert ByteTokenizer(True).decode([104, 256, 105, 31_999]) == "hi\ufffd"


def test_characters_appear_when_they_are_whole():
    stream = TextStream(ByteTokenizer(True).decode)
    found = [stream.push([i]) for i in "a🙂é".encode()]
    assert found == ["a", "", "", "", "🙂", "", "é"]
    assert stream.push([256]) == ""
    assert stream.push("🙂".encode()[:2]) == ""
    assert stream.push([], final=True) == "\ufffd"


def test_a_tokenizer_of_hugging_face(saved):
    """The ids are those of the `tokenizers` library."""
    from tokenizers import Tokenizer

    tokenizer = load_tokenizer(saved)
    below = Tokenizer.from_file(str(saved / "tokenizer.json"))
    text = TEXT.replace("<|end|>", "")
    assert tokenizer.encode(text).tolist() == below.encode(text).ids
    assert (tokenizer.eos, tokenizer.vocab_size) == (0, below.get_vocab_size())
    assert tokenizer.decode([*tokenizer.encode(text).tolist(), 0]) == text
    assert tokenizer.encode_batch([]) == []
    batch = tokenizer.encode_batch(["the state", b"it"])
    assert [ids.tolist() for ids in batch] == [below.encode("the state").ids, below.encode("it").ids]


def test_text_makes_no_special_token_and_bytes_that_are_no_utf8_are_replaced(saved):
    tokenizer = load_tokenizer(saved)
    assert 0 in tokenizer.tokenizer("<|end|>")["input_ids"]  # as Hugging Face reads special tokens
    assert 0 not in tokenizer.encode(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    tokenizer = load_tokenizer(saved)
    assert tokenizer.decode(tokenizer.encode(b"a\xff\xfeb")) == "a\ufffd\ufffdb"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffd\ufffd\ufffdb"  # half a surrogate pair


def test_ids_beyond_a_tokenizer_of_hugging_face_have_no_text(saved):
    """One in Rust, and one in Python, whose `decode` raises an error for such an id."""
    from transformers import ByT5Tokenizer

    for tokenizer in (load_tokenizer(saved), HuggingFaceTokenizer(ByT5Tokenizer(), "byt5")):
        ids = tokenizer.encode("the state").tolist()
        assert tokenizer.decode([*ids, tokenizer.vocab_size, 5000, *ids]) == "the statethe state"


def test_the_fingerprint_follows_the_tokenizer(saved, tmp_path):
    tokenizer = load_tokenizer(saved)
    assert tokenizer.fingerprint() == load_tokenizer(str(saved)).fingerprint()
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert load_tokenizer(tmp_path).fingerprint() == tokenizer.fingerprint()  # in any folder
    changed = (saved / "tokenizer.json").read_text().replace('"use_regex": true', '"use_regex": false', 1)
    assert changed != (saved / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(changed)
    assert load_tokenizer(tmp_path).fingerprint() != tokenizer.fingerprint()
    assert ByteTokenizer(True).fingerprint() != ByteTokenizer().fingerprint()


def test_a_tokenizer_that_is_too_large_or_not_there(saved, tmp_path):
    size = load_tokenizer(saved, 1000).vocab_size
    assert_raises(ValueError, rf"{size} ids, more than the model's vocab_size 256", load_tokenizer, saved, 256)
    with pytest.raises(ValueError, match=r"'bytes\+eos' has 257 ids, more than the model's vocab_size 256"):
        load_tokenizer("bytes+eos", 256)
    check_vocabulary(ByteTokenizer(), 256)
    assert_raises(FileNotFoundError, r"there is no tokenizer '.*nothing'", load_tokenizer, tmp_path / "nothing")


def test_without_the_hub_a_name_is_refused_at_once(monkeypatch):
    """transformers would try five times, with pauses that add up to a minute."""
    asked = []

    def unreachable(self, name, revision, timeout):
        assert timeout <= 10
        asked.append((name, revision))
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    for name in ("some/name", "some/name@v2"):
        with pytest.raises(FileNotFoundError, match=f"no tokenizer '{name}'.*Name or service not known"):
            load_tokenizer(name)
    assert asked == [("some/name", None), ("some/name", "v2")]


def test_bytes_are_no_name_of_the_hub(tmp_path):
    """As in `spectrum --tokenizer bytes`."""
    (tmp_path / "text").write_bytes(b"abc")
    for name in (None, "bytes", "bytes+eos"):
        assert read_ids([tmp_path / "text"], name).tolist() == [97, 98, 99]
    assert [unit_of(name) for name in ("bytes", "bytes+eos", "gpt2")] == ["byte", "byte", "token"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_tokenizer_writes_every_text(kind, tmp_path, capsys):
    """Also characters that its texts do not have; frequent words are one token."""
    (tmp_path / "a.txt").write_text("the state forgets what it cannot hold;  " * 40)
    main(["tokenizer", str(tmp_path / "a.txt"), "--kind", kind, "--vocab-size", "300", "--output", f"{tmp_path}/out"])
    said = capsys.readouterr().out
    assert f"halflife train mamba2 --data {tmp_path}/a.txt --tokenizer {tmp_path}/out" in said
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.decode([tokenizer.eos]) == ""
    for text in (TEXT, "<|endoftext|> 漢字\n\n  a\t", " a ", "a▁b ▁", "a\r\n", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert f"{tokenizer.vocab_size:,} tokens" in said
    assert BYTES < tokenizer.vocab_size <= 300
    assert len(tokenizer.encode("the state forgets")) < 8
    assert train_tokenizer([tmp_path / "a.txt"], kind, 300).fingerprint() == tokenizer.fingerprint()


def test_tokenizers_that_cannot_be_trained(tmp_path, capsys):
    file = tmp_path / "a.txt"
    file.write_text("text")
    assert_raises(ValueError, "Choose from: byte-level, bpe", train_tokenizer, [file], "byte", 300)
    assert_raises(ValueError, "one more; got 256", train_tokenizer, [file], "bpe", 256)
    with pytest.raises(SystemExit) as stop:
        main(["tokenizer", str(file), "--output", str(tmp_path)])
    assert stop.value.code == 2
    assert "is not empty; choose another --output" in capsys.readouterr().err


def test_a_model_without_its_tokenizer_asks_for_it_in_its_folder():
    """`forecast` and `diagnose` have no option for it."""
    config = types.SimpleNamespace(name="mamba2", vocab_size=300)
    assert_raises(ValueError, "put its tokenizer into its folder", check_ids, config, torch.zeros(1, 2), None)
