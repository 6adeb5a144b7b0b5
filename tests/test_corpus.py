"""A corpus: splits, the cache of its tokens, tokenizers, configuration."""

import gzip
import itertools
import json
import math
import multiprocessing
import shutil
import tracemalloc

import numpy as np
import pytest
from corpora import open_corpus, text
from helpers import assert_raises, cases

from halflife.data import documents, splits, store
from halflife.data.corpus import Corpus, CorpusConfig, bits_per_byte
from halflife.data.documents import Piece
from halflife.data.tokenizers import load_tokenizer


def tokens_of(corpus):
    return {name: corpus.split(name).files.tokens.tolist() for name in ("train", "validation", "test")}


def test_every_document_is_in_one_split(folder, tmp_path):
    corpus = open_corpus(folder, tmp_path)
    found = []
    for name in ("train", "validation", "test"):
        split = corpus.split(name)
        offsets, tokens = split.files.offsets, split.files.tokens
        parts = [bytes(tokens[a:b].tolist()) for a, b in itertools.pairwise(offsets)]
        assert (len(parts), sum(map(len, parts)), len(tokens)) == (split.documents, split.bytes, split.tokens)
        assert parts
        found += parts
    assert sorted(found) == sorted(text(i).encode() for i in range(40))
    assert (corpus.documents, corpus.bytes, corpus.tokens) == (40, len(b"".join(found)), len(b"".join(found)))


def test_splits_by_the_hash():
    keys = np.random.default_rng(0).integers(0, 2**64, 10_000, dtype=np.uint64)
    keys[5000:] = keys[:5000]  # every document occurs twice
    found = splits.assign(keys, (0.1, 0.05))
    assert np.array_equal(found[:5000], found[5000:])
    # Counts are binomial over 5000 documents: 0.1 ± 0.0042 and 0.05 ± 0.0031. Four standard deviations are allowed.
    assert abs((found == 1).mean() - 0.1) < 0.017
    assert abs((found == 2).mean() - 0.05) < 0.0125
    some = splits.assign(keys[:1000], (0.1, 0.05))
    assert np.array_equal(some, found[:1000])  # other documents change nothing


@pytest.mark.parametrize("keys", [[5, 9, 7], [2**64 - 1, 2**64 - 2, 2**64 - 3], [0, 2**63, 2**64 - 1]])
@pytest.mark.parametrize("fractions", [(0.01, 0.0), (0.01, 0.01), (0.5, 0.4), (0.0, 0.9), (0.0, 0.0)])
def test_no_split_is_empty(keys, fractions):
    found = splits.assign(np.array(keys, dtype=np.uint64), fractions).tolist()
    wanted = {0} | {i + 1 for i, fraction in enumerate(fractions) if fraction}
    assert set(found) == wanted


def test_too_few_documents_and_unknown_splits(tmp_path, folder):
    (tmp_path / "a.jsonl").write_text('{"text": "same"}\n' * 3)
    with pytest.raises(ValueError, match="3 documents, 1 of them distinct, are too few for 2 splits"):
        open_corpus(tmp_path / "a.jsonl", tmp_path, fractions=(0.01, 0.0))
    assert open_corpus(tmp_path / "a.jsonl", tmp_path, fractions=(0.0, 0.0)).split("train").documents == 3
    with pytest.raises(ValueError, match=r"unknown split 'valid'. Did you mean 'validation'"):
        open_corpus(folder, tmp_path).split("valid")


def test_one_document_is_cut_at_its_end(tmp_path, monkeypatch):
    whole = ("λ🙂" * 100).encode()
    (tmp_path / "a.txt").write_bytes(whole)
    monkeypatch.setattr(documents, "PIECE", 64)
    with pytest.warns(UserWarning, match="the corpus is one document"):
        corpus = open_corpus(tmp_path / "a.txt", tmp_path)
    found = [bytes(tokens) for tokens in tokens_of(corpus).values()]
    assert b"".join(found) == whole
    # The limits are 420, 120 and 60 bytes. A cut moves up to three bytes, so that no character is cut.
    for part, size in zip(found, (420, 120, 60), strict=True):
        part.decode()
        assert abs(len(part) - size) <= 3
    (tmp_path / "b.txt").write_text("short")
    one, few = "the corpus is one document", "one document of 5 bytes, too few for 3 splits"
    with pytest.warns(UserWarning, match=one), pytest.raises(ValueError, match=few):
        open_corpus(tmp_path / "b.txt", tmp_path)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 99])
def test_a_cut_may_fall_anywhere(size):
    """A new document starts at the next character, for pieces of any `size` (in characters)."""
    characters = "aλ🙂bλ" * 3
    whole = characters.encode()
    parts = [characters[i : i + size].encode() for i in range(0, len(characters), size)]
    for cuts in ((8, 16), (9, 17), (10, 18), (11, 19), (12, 20)):
        found = [b""]
        for data, last in splits.divided((Piece(part, part is parts[-1]) for part in parts), cuts):
            found[-1] += data
            found += [b""] if last else []
        starts = [next(i for i in range(cut, 99) if whole[i] & 0xC0 != 0x80) for cut in cuts]
        assert found == [whole[: starts[0]], whole[starts[0] : starts[1]], whole[starts[1] :], b""]


def test_the_second_time_nothing_is_tokenised(folder, tmp_path, monkeypatch):
    first = open_corpus(folder, tmp_path)
    monkeypatch.setattr(store, "write", lambda *_: pytest.fail("tokenised again"))
    again = open_corpus(folder, tmp_path)
    assert again.digest == first.digest
    assert tokens_of(again) == tokens_of(first)
    folder.rename(tmp_path / "moved")
    assert open_corpus(tmp_path / "moved", tmp_path).digest == first.digest
    monkeypatch.setenv("HALFLIFE_CACHE", str(tmp_path / "cache"))
    assert open_corpus(tmp_path / "moved", tmp_path, cache_dir=None).folder == first.folder


def test_the_digest_follows_content_and_settings(folder, tmp_path):
    digests = [open_corpus(folder, tmp_path).digest]
    for settings in ({"tokenizer": "bytes+eos"}, {"fractions": (0.2, 0.2)}, {"strict": True}):
        digests.append(open_corpus(folder, tmp_path, **settings).digest)
    (folder / "b.txt").write_text(text(0)[:-1] + "!")
    digests.append(open_corpus(folder, tmp_path).digest)
    (folder / "b.txt").rename(folder / "b.md")
    digests.append(open_corpus(folder, tmp_path).digest)
    assert len(set(digests)) == len(digests)
    assert open_corpus(folder, tmp_path, context=9, mode="concatenated", seed=3).digest == digests[-1]


def damage_index(folder):
    index = json.loads((folder / "index.json").read_text())
    index["splits"]["train"]["bytes"] += 1
    (folder / "index.json").write_text(json.dumps(index))


def cut(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])


def change_offsets(folder):
    data = (folder / "train.offsets").read_bytes()
    (folder / "train.offsets").write_bytes(data[:8] + b"\1" + data[9:])


@cases(
    "damage, message",
    (damage_index, "its index has another checksum"),
    (lambda folder: cut(folder, "index.json"), ""),
    (lambda folder: (folder / "index.json").write_text("{"), "truncated or no JSON"),
    (lambda folder: (folder / "index.json").unlink(), "index.json"),
    (lambda folder: cut(folder, "train.tokens"), r"train.tokens has \d+ bytes, not \d+"),
    (lambda folder: (folder / "test.tokens").unlink(), "test.tokens"),
    (change_offsets, "train.offsets has another checksum"),
)
def test_a_damaged_cache_is_made_again(folder, tmp_path, damage, message):
    corpus = open_corpus(folder, tmp_path)
    expected = tokens_of(corpus)
    damage(corpus.folder)
    if message:
        with pytest.warns(UserWarning, match=f"is damaged.*{message}.*made again"):
            corpus = open_corpus(folder, tmp_path)
    else:  # JSON without its last line break is complete
        corpus = open_corpus(folder, tmp_path)
    assert tokens_of(corpus) == expected
    assert tokens_of(open_corpus(folder, tmp_path)) == expected


def test_the_cache_of_another_corpus_is_found_out(folder, tmp_path):
    other = open_corpus(folder, tmp_path, tokenizer="bytes+eos")
    corpus = open_corpus(folder, tmp_path)
    for file in other.folder.iterdir():
        (corpus.folder / file.name).write_bytes(file.read_bytes())
    with pytest.warns(UserWarning, match="it belongs to another corpus"):
        assert tokens_of(open_corpus(folder, tmp_path)) == tokens_of(corpus)


def test_a_killed_process_leaves_nothing_that_counts(folder, tmp_path, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.Writer, "finish", kill)
    with pytest.raises(KeyboardInterrupt):
        open_corpus(folder, tmp_path)
    monkeypatch.undo()
    corpora = tmp_path / "cache/corpora"
    assert all(path.suffix == ".lock" for path in corpora.iterdir())
    corpus = open_corpus(folder, tmp_path / "other")
    left = corpora / f".{corpus.digest}.12345"  # a file that kill -9 leaves
    left.mkdir()
    assert tokens_of(open_corpus(folder, tmp_path)) == tokens_of(corpus)
    assert not left.exists()


def open_and_send(folder, tmp_path, results):
    results.put(tokens_of(open_corpus(folder, tmp_path)))


def test_two_processes_at_once(folder, tmp_path, monkeypatch):
    context = multiprocessing.get_context("fork")
    count, results, write = context.Value("i", 0), context.Queue(), store.write

    def counted(*arguments):
        with count.get_lock():
            count.value += 1
        return write(*arguments)

    monkeypatch.setattr(store, "write", counted)
    processes = [context.Process(target=open_and_send, args=(folder, tmp_path, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert count.value == 1
    assert found[0] == found[1] == found[2] == tokens_of(open_corpus(folder, tmp_path))


def test_files_that_change_meanwhile(folder, tmp_path, monkeypatch):
    scan = splits.scan

    def slow(*arguments):
        plan = scan(*arguments)
        (folder / "b.txt").write_text("something else")
        return plan

    monkeypatch.setattr(splits, "scan", slow)
    assert_raises(ValueError, "changed while they were read", open_corpus, folder, tmp_path)


def read_with_peak(tmp_path, name, size):
    """Return the bytes of memory that a corpus of one line of this size needs."""
    packed, record = name.endswith(".gz"), ".jsonl" in name
    with gzip.open(tmp_path / name, "wb", 1) if packed else (tmp_path / name).open("wb") as file:
        file.write(b'{"text": "' if record else b"")
        for i in range(size >> 16):
            file.write(bytes([97 + i % 26]) * (1 << 16))
        file.write(b'"}\n' if record else b"")
    tracemalloc.start()
    try:
        with pytest.warns(UserWarning, match="one document"):
            corpus = open_corpus(tmp_path / name, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert corpus.bytes == size
    shutil.rmtree(corpus.folder)
    (tmp_path / name).unlink()
    return peak


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_long_line_takes_little_memory(tmp_path, monkeypatch, name):
    """Measured: 0.80 MiB of memory for 4 MiB of text in pieces of 32 KiB."""
    for module, constant in ((documents, "PIECE"), (store, "TOKENISE_BYTES"), (store, "HASH_BYTES")):
        monkeypatch.setattr(module, constant, 1 << 15)
    assert read_with_peak(tmp_path, name, 1 << 22) < 4 * 0.80 * (1 << 20)


def test_ends_of_documents(folder, tmp_path):
    corpus = open_corpus(folder, tmp_path, tokenizer="bytes+eos")
    assert corpus.split("train").files.tokens.dtype == np.uint16
    assert corpus.tokens == corpus.bytes + corpus.documents
    for name, tokens in tokens_of(corpus).items():
        ends = (corpus.split(name).files.offsets[1:] - 1).tolist()
        assert [i for i, token in enumerate(tokens) if token == 256] == ends


@pytest.fixture
def words(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<?>": 0, "one": 1, "two": 2, "three": 3, "<end>": 300}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<?>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(tmp_path / "words")
    return tmp_path / "words"


def test_a_tokenizer_of_hugging_face(words, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("one two", "three", " ", "two")))
    settings = {"tokenizer": str(words), "fractions": (0.0, 0.0)}
    for batch in (1, 1 << 20):
        monkeypatch.setattr(store, "TOKENISE_BYTES", batch)
        corpus = open_corpus(tmp_path / "a.jsonl", tmp_path / str(batch), **settings)
        train = corpus.split("train")
        assert train.files.tokens.dtype == np.uint16
        assert train.files.tokens.tolist() == [1, 2, 300, 3, 300, 300, 2, 300]
        assert train.files.offsets.tolist() == [0, 3, 5, 6, 8]
        assert train.bytes == 16


def write_as(name, folder, data):
    if name.endswith(".jsonl"):
        data = b'{"text": "' + data + b'"}'
    if name.endswith(".parquet"):
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        column = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([data]).buffers())
        parquet.write_table(pyarrow.table({"text": column}), folder / name)
    else:
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_text_that_is_no_utf8(words, tmp_path, name):
    """The bytes tokenizer keeps all bytes. A tokenizer of characters counts, replaces or refuses invalid ones."""
    place = tmp_path / "text"
    place.mkdir()
    data = "one \ufffd two".encode() + b" \xff \xfe\xfe"
    write_as(name, place, data)
    (place / "b.txt").write_bytes(b"two")
    settings = {"tokenizer": str(words), "fractions": (0.0, 0.0)}
    with pytest.warns(UserWarning, match="^3 sequences of bytes are not UTF-8"):
        corpus = open_corpus(place, tmp_path, **settings)
    assert corpus.split("train").files.tokens.tolist() == [1, 0, 2, 0, 0, 300, 2, 300]
    with pytest.raises(ValueError, match=rf"{name} has 3 sequences of bytes that are not UTF-8"):
        open_corpus(place, tmp_path, strict=True, **settings)
    for strict in (False, True):
        corpus = open_corpus(place, tmp_path, strict=strict, fractions=(0.0, 0.0))
        assert bytes(corpus.split("train").files.tokens.tolist()) == data + b"two"


def test_the_largest_id_says_which_models_a_tokenizer_fits(words):
    """Return five words, the last of which has id 300."""
    assert load_tokenizer(words, 301).vocab_size == 301
    assert_raises(ValueError, "has 301 ids, more than the model's vocab_size 300", load_tokenizer, words, 300)


def test_bits_per_byte():
    """A uniform guess among 256 bytes costs eight bits. With two bytes per token, a byte costs half of its bits."""
    assert bits_per_byte(math.log(256), 10, 10) == pytest.approx(8)
    assert bits_per_byte(math.log(2), 10, 20) == pytest.approx(0.5)
    assert_raises(ValueError, "at least one byte", bits_per_byte, 1.0, 0, 0)


@cases(
    "settings, message",
    ({"sources": ()}, "at least one source"),
    ({"context": 0}, "context must be at least 1"),
    ({"mode": "rows"}, "unknown mode 'rows'"),
    ({"fractions": (0.5, 0.5)}, "leave some for training"),
    ({"fractions": (-0.1, 0.5)}, "fractions must be 0 or more"),
)
def test_configurations_that_make_no_sense(settings, message):
    assert_raises(ValueError, message, CorpusConfig, **{"sources": ("a.txt",), **settings})


def test_a_bar_of_progress(folder, tmp_path, capsys):
    settings = CorpusConfig(sources=(folder,), cache_dir=tmp_path, fractions=(0.2, 0.0))
    assert Corpus.open(settings).digest == Corpus.open(settings, show=False).digest
    assert "Error" not in capsys.readouterr().err
