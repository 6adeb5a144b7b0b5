"""Streams of a data set of the hub: rows are counted, appended to, resumed, and split in the same way every time."""

import itertools
import json
import shutil

import pytest
from corpora import text
from helpers import assert_raises
from test_hub import COMMIT, data_set, write_lines  # noqa: F401 (a fixture)

from halflife.data import hub, store, stream
from halflife.data.corpus import Corpus, CorpusConfig

ROWS = 300


@pytest.fixture
def rows(data_set, monkeypatch):  # noqa: F811
    """The data set with 300 rows in two files, chunks of about ten rows, and a list of the rows that were read."""
    documents = [text(i) for i in range(ROWS)]
    write_lines(data_set / "en0.jsonl", [{"text": t} for t in documents[:120]])
    write_lines(data_set / "en1.jsonl", [{"text": t} for t in documents[120:]])
    monkeypatch.setattr(stream, "CHUNK", 512)
    read = []
    texts = hub.texts

    def counted(*arguments):
        for row, state in texts(*arguments):
            read.append(row)
            yield row, state

    monkeypatch.setattr(hub, "texts", counted)
    return data_set, documents, read


def opened(place, tmp_path, tokens, **settings):
    settings = {"context": 8, "fractions": (0.1, 0.05), "cache_dir": tmp_path / "cache", **settings}
    return Corpus.open(CorpusConfig(sources=(f"hf:{place}",), tokens=tokens, **settings), show=False)


def documents_of(corpus, split):
    files = corpus.split(split).files
    return [bytes(files.tokens[a:b].tolist()).decode() for a, b in itertools.pairwise(files.offsets)]


def whole(corpus):
    return {name: documents_of(corpus, name) for name in ("train", "validation", "test")}


def test_the_download_stops_when_there_are_enough_tokens(rows, tmp_path):
    place, documents, read = rows
    corpus = opened(place, tmp_path, 3000)
    split = corpus.split("train")
    assert 3000 <= split.tokens < 3000 + 512 + 100  # a chunk, whose last row may be long
    used = sum(len(found) for found in whole(corpus).values())
    assert used < ROWS // 2
    assert read == documents[: len(read)]
    assert used <= len(read) <= used + 5 * 12  # some chunks are tokenised ahead
    assert sorted(itertools.chain(*whole(corpus).values())) == sorted(documents[:used])  # each row once
    assert all(whole(corpus).values())  # no split is empty
    assert (corpus.documents, corpus.bytes, corpus.tokens) == (used, *[len("".join(documents[:used]).encode())] * 2)


def test_more_tokens_append_and_fewer_read_nothing(rows, tmp_path):
    place, documents, read = rows
    few = opened(place, tmp_path, 2000)
    first, digest = whole(few), few.digest
    begun = sum(map(len, first.values()))
    read.clear()
    more = opened(place, tmp_path, 6000)
    assert more.folder == few.folder
    assert read == documents[begun : begun + len(read)]  # nothing is read a second time
    for name, found in whole(more).items():
        assert found[: len(first[name])] == first[name]
    read.clear()
    again = opened(place, tmp_path, 2000)
    assert (whole(again), again.digest, read) == (first, digest, [])
    assert more.digest != digest


def test_a_cache_that_has_enough_is_not_written(rows, tmp_path, monkeypatch):
    """It may be read-only, as one that several users share."""
    expected = whole(opened(rows[0], tmp_path, 2000))
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "cache").rglob("*"))
    monkeypatch.setattr(stream, "locked", pytest.fail)
    assert whole(opened(rows[0], tmp_path, 2000)) == expected
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "cache").rglob("*")) == before


def test_the_whole_data_set_if_it_has_too_few_tokens(rows, tmp_path):
    place, documents, _ = rows
    corpus = opened(place, tmp_path, 10**9)
    assert sorted(itertools.chain(*whole(corpus).values())) == sorted(documents)
    assert opened(place, tmp_path, 10**10).digest == corpus.digest


@pytest.mark.parametrize("stop", [1, 30, 100, 250])
@pytest.mark.parametrize("junk", [b"", b'{"rows": 7'])
def test_an_interruption_goes_on_to_the_same_tokens(rows, tmp_path, monkeypatch, stop, junk):
    """A killed process may also leave tokens without their record, and half a record."""
    place, documents, read = rows
    expected = opened(place, tmp_path / "other", 10**9)
    counted = hub.texts

    def interrupted(*arguments):
        yield from itertools.islice(counted(*arguments), stop)
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "texts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened(place, tmp_path, 10**9)
    (folder,) = (path for path in (tmp_path / "cache" / "streams").iterdir() if path.is_dir())
    records = (folder / "records.jsonl").read_bytes()
    done = max([0, *(json.loads(line)["rows"] for line in records.splitlines())])
    assert done <= stop < done + 5 * 12 + 12
    for name, left in (("train.tokens", b"x" * 99), ("train.offsets", b"y" * 5), ("records.jsonl", junk)):
        with (folder / name).open("ab") as file:
            file.write(left)
    read.clear()
    monkeypatch.setattr(hub, "texts", counted)
    corpus = opened(place, tmp_path, 10**9)
    assert whole(corpus) == whole(expected)
    assert corpus.digest == expected.digest
    assert read == documents[done:]


def test_the_cache_depends_on_what_the_tokens_depend_on(rows, tmp_path):
    place, *_ = rows
    folders = {
        opened(place, tmp_path, 500, **settings).folder
        for settings in ({}, {"tokenizer": "bytes+eos"}, {"fractions": (0.2, 0.0)}, {"context": 16}, {"seed": 3})
    }
    assert len(folders) == 3


def test_the_configuration_of_the_corpus_names_the_commit(rows, tmp_path):
    place, *_ = rows
    corpus = opened(place, tmp_path, 500)
    assert corpus.config.sources == (f"hf:{place}@{COMMIT}::train",)
    again = Corpus.open(CorpusConfig.from_dict(json.loads(json.dumps(corpus.config.to_dict()))), show=False)
    assert again.digest == corpus.digest


def test_a_stream_and_files_give_the_same_training_tokens(rows, tmp_path):
    place, documents, _ = rows
    write_lines(tmp_path / "all.jsonl", [{"text": t} for t in documents])
    files = Corpus.open(
        CorpusConfig(sources=(tmp_path / "all.jsonl",), fractions=(0.1, 0.05), cache_dir=tmp_path / "cache"), show=False
    )
    assert whole(files) == whole(opened(place, tmp_path, 10**9))


def test_a_damaged_or_full_cache_is_one_line(rows, tmp_path, monkeypatch):
    place, *_ = rows
    folder = opened(place, tmp_path, 2000).folder
    full = shutil._ntuple_diskusage(10, 10, 0)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: full)
        assert_raises(ValueError, r"more tokens need .* GB left$", opened, place, tmp_path, 10**9)
    (folder / "train.tokens").write_bytes(b"")
    assert_raises(ValueError, r"damaged .* delete it", opened, place, tmp_path, 2000)


def test_a_stream_beside_other_sources_needs_weights(tmp_path):
    config = CorpusConfig(sources=("hf:a/b", "x.txt"), tokens=10, cache_dir=tmp_path)
    assert_raises(ValueError, "give each a weight", Corpus.open, config, show=False)


def test_an_estimate_is_printed_first(rows, tmp_path, capsys):
    place, *_ = rows
    config = CorpusConfig(sources=(f"hf:{place}",), tokens=3000, context=8, cache_dir=tmp_path / "cache")
    Corpus.open(config, show=True)
    out = " ".join(capsys.readouterr().out.split())
    assert "3,000 training tokens are about 0 MB of text (1.00 bytes a token)" in out
    Corpus.open(config, show=True)
    assert not capsys.readouterr().out.strip()  # nothing is read


def test_dtype_of_a_stream(rows, tmp_path):
    place, *_ = rows
    corpus = opened(place, tmp_path, 500, tokenizer="bytes+eos")
    assert corpus.split("train").files.tokens.dtype == store.dtype_of(257)
    assert (corpus.split("train").files.tokens == 256).sum() == corpus.split("train").documents
