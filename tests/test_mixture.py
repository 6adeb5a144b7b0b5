"""Mixtures of sources: the shares of rows are counted, and a batch is a pure function of its step."""

import json
import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from corpora import text
from helpers import assert_raises, cases

from halflife.data.batches import TokenFiles
from halflife.data.corpus import Corpus, CorpusConfig
from halflife.data.mixture import PERIOD_ROWS, Concatenated, MixedBatches, MixedFiles, read_weights, shares
from halflife.lab.experiments import train
from halflife.models import LanguageModel
from halflife.runs.language_run import documents, evaluate
from halflife.tasks import IGNORED

SIZES = (40, 90, 200)  # tokens of the sources; token i of source s is 1000 s + i
CONTEXT = 8


@pytest.fixture
def files(tmp_path):
    return [numbered(tmp_path / str(i), 1000 * i, size) for i, size in enumerate(SIZES)]


def numbered(folder, first, size):
    folder.mkdir()
    np.arange(first, first + size, dtype=np.uint16).tofile(folder / "train.tokens")
    np.arange(0, size + 1, 5, dtype=np.int64).tofile(folder / "train.offsets")
    return TokenFiles(folder, "train", "uint16")


def rows_of(batches, steps=None):
    return torch.cat([batches[i]["input_ids"].view(-1, CONTEXT) for i in range(steps or len(batches))]).tolist()


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (5, 3, 2), (1, 1, 1), (0.001, 0.499, 0.5)])
@pytest.mark.parametrize("mode", ["packed", "concatenated"])
def test_each_source_gives_its_share_of_the_rows(files, weights, mode):
    batches = MixedBatches(MixedFiles(files, weights), 4, CONTEXT, mode=mode, steps=PERIOD_ROWS // 4)
    rows = rows_of(batches)
    assert len(rows) == PERIOD_ROWS
    expected = shares(weights)
    assert abs(expected / PERIOD_ROWS - np.array(weights) / sum(weights)).max() < 1 / PERIOD_ROWS
    assert [Counter(row[0] // 1000 for row in rows)[i] for i in range(3)] == expected.tolist()
    for n in (10, 50, 333):  # the shares hold early, too
        first = Counter(row[0] // 1000 for row in rows[:n])
        assert all(abs(first[i] - n * expected[i] / PERIOD_ROWS) <= 2 for i in range(3))
    assert all(row == list(range(row[0], row[0] + CONTEXT)) for row in rows)  # a row has tokens of one source


def test_a_source_gives_every_row_before_it_begins_again(files):
    rows = rows_of(MixedBatches(MixedFiles(files, (1, 1, 2)), 2, CONTEXT, steps=60))
    for source, size in enumerate(SIZES):
        given = [row[0] for row in rows if row[0] // 1000 == source]
        count = size // CONTEXT
        epochs = [given[i : i + count] for i in range(0, len(given) - count + 1, count)]
        assert all(len(set(epoch)) == count for epoch in epochs)
        if len(epochs) > 1:
            assert epochs[0] != epochs[1]  # in another order


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_share_a_batch_and_batches_are_functions_of_their_step(files, world_size):
    mixed = MixedFiles(files, (2, 1, 1))
    whole = MixedBatches(mixed, 4, CONTEXT, seed=3, mode="concatenated", steps=9)
    parts = [MixedBatches(mixed, 4, CONTEXT, 3, "concatenated", rank, world_size, 9) for rank in range(world_size)]
    for step in (8, 0, 5):
        again = torch.cat([pickle.loads(pickle.dumps(part))[step]["input_ids"] for part in parts])
        assert torch.equal(again, whole[step]["input_ids"])
    other = MixedBatches(mixed, 4, CONTEXT, seed=4, mode="concatenated", steps=9)
    assert rows_of(other) != rows_of(whole)


def test_packed_documents_of_a_mixture_do_not_see_each_other(files):
    """Every fifth token ends a document, so it has no label and a sequence ends after it."""
    for batch in MixedBatches(MixedFiles(files, (1, 1, 1)), 3, CONTEXT, steps=20):
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        last = ids % 1000 % 5 == 4
        assert torch.equal(labels == IGNORED, last)
        assert torch.equal(labels[~last], ids[~last] + 1)
        bounds = set(batch["cu_seqlens"].tolist())
        assert bounds == {*range(0, 25, CONTEXT), *(torch.nonzero(last).flatten() + 1).tolist()}


def test_concatenated_arrays_are_sliced_like_one():
    arrays = [np.arange(5), np.arange(0), np.arange(5, 12)]
    whole, joined = np.arange(12), Concatenated(arrays)
    assert len(joined) == 12
    for a in range(-13, 14):
        for b in range(-13, 14):
            assert joined[a:b].tolist() == whole[a:b].tolist()


@cases(
    "given, expected",
    (["a.txt", "b.txt"], (("a.txt", "b.txt"), ())),
    (["a.txt=0.7", "b/*.txt=0.3"], (("a.txt", "b/*.txt"), (0.7, 0.3))),
    (["hf:a/b:c@main=2", "x=y.txt=1e-1"], (("hf:a/b:c@main", "x=y.txt"), (2.0, 0.1))),
    (["x=y.txt"], (("x=y.txt",), ())),
)
def test_weights_of_sources(given, expected):
    assert read_weights(given) == expected


def test_a_file_whose_name_ends_like_a_weight(tmp_path):
    (tmp_path / "lr=0.1").write_text("x")
    assert read_weights([str(tmp_path / "lr=0.1")]) == ((str(tmp_path / "lr=0.1"),), ())


@cases(
    "given, message",
    (["a=0.5", "b"], "every source or to none"),
    (["a=0", "b=1"], "positive"),
    (["a=-1", "b=inf"], "positive"),
)
def test_weights_without_meaning(given, message):
    assert_raises(ValueError, message, read_weights, given)


@pytest.fixture
def mixture(tmp_path):
    """Documents without "Z" weigh 3, those with it 1."""
    for name, mark, count in (("a", "", 60), ("b", "Z", 30)):
        lines = [json.dumps({"text": mark + text(i)}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    return CorpusConfig(
        sources=sources, weights=(3, 1), context=8, fractions=(0.2, 0.1), cache_dir=tmp_path / "cache", tokens=100
    )


def test_a_mixture_is_a_corpus(mixture):
    corpus = Corpus.open(mixture, show=False)
    alone = [CorpusConfig(**{**vars(mixture), "sources": (s,), "weights": ()}) for s in mixture.sources]
    parts = [Corpus.open(config, show=False) for config in alone]
    for name in ("train", "validation", "test"):
        split, pieces = corpus.split(name), [part.split(name) for part in parts]
        assert split.tokens == sum(piece.tokens for piece in pieces)
        assert split.documents == sum(piece.documents for piece in pieces)
        assert split.bytes == split.tokens  # of a tokenizer of bytes
    assert corpus.tokens == sum(part.tokens for part in parts)
    assert Corpus.open(CorpusConfig.from_dict(corpus.config.to_dict()), False).digest == corpus.digest
    assert corpus.digest not in [part.digest for part in parts]
    other = CorpusConfig(**{**vars(mixture), "weights": (1, 1)})
    assert Corpus.open(other, False).digest != corpus.digest


@pytest.mark.parametrize("weights", [(1, 1e-5, 1e-5), (998.5, 0.6, 0.5, 0.4), (1, 1, 1)])
def test_no_source_is_left_out(weights):
    assert shares(weights).sum() == PERIOD_ROWS
    assert shares(weights).min() >= 1


def test_no_row_is_longer_than_the_longest_part(mixture):
    """The parts of a split are two pieces of text, and no row crosses from one to the other."""
    corpus = Corpus.open(mixture, show=False)
    split = corpus.split("test")
    assert CONTEXT < split.longest < split.tokens
    config = train.configure(
        "mamba2", corpus, tokens=8, batch_size=1, learning_rate=1e-2, test_split="test",
        sizes={"hidden_size": 16, "num_layers": 1, "num_heads": 2},
    )  # fmt: skip
    model = LanguageModel(config.model)
    found = evaluate(model, corpus, replace(config, context=split.longest))
    assert [row["length"] for row in found["lengths"]] == [split.longest]
    with pytest.raises(ValueError, match="hold out a larger share"):
        evaluate(model, corpus, replace(config, context=split.longest + 1))


def test_documents_of_a_mixture_are_measured_by_weight(mixture):
    split = Corpus.open(mixture, show=False).split("train")
    found = [bytes(document.tolist()) for document in documents(split, 400)]
    marked = sum(len(document) for document in found if document.startswith(b"Z"))
    assert marked == 100
    assert sum(map(len, found)) == 400


def test_a_file_in_two_sources_is_named(mixture, tmp_path):
    """Each source holds out documents of its own: one that is held out by the first may be trained on by the second."""
    config = replace(mixture, sources=(mixture.sources[0], tmp_path / "*.jsonl"))
    with pytest.warns(UserWarning, match=r"a\.jsonl is in several sources; what one holds out, another may train on"):
        Corpus.open(config, show=False)


def test_a_source_that_is_too_small_is_named(mixture, tmp_path):
    config = CorpusConfig(**{**vars(mixture), "context": 1000})
    assert_raises(ValueError, r"b\.jsonl has fewer than 1000 training tokens", Corpus.open, config, show=False)
    assert_raises(ValueError, "2 sources have 1 weights", CorpusConfig, **{**vars(mixture), "weights": (1,)})
