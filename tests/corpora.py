"""Documents and corpora for the tests on text."""

import gzip
import json

from halflife.data.corpus import Corpus, CorpusConfig

WORDS = ("state", "decay", "forgets", "λ", "holds", "gate", "🙂", "writes")


def text(i):
    """Return document i, whose words depend on i. No two documents are equal."""
    return " ".join(WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(3 + i % 11)) + f" {i}"


def write_texts(folder, words, count=20):
    """Write documents `0.txt`, `1.txt`, … into a folder, of `words` with the number in the place of `{i}`."""
    folder.mkdir(exist_ok=True)
    for i in range(count):
        (folder / f"{i}.txt").write_text(words.format(i=i))
    return folder


def write_documents(place):
    """Write forty documents into a new folder, in three kinds of files."""
    (place / "deep").mkdir(parents=True)
    (place / "b.txt").write_text(text(0))
    (place / "deep/a.md.gz").write_bytes(gzip.compress(text(1).encode()))
    lines = [json.dumps({"text": text(i), "id": i}) for i in range(2, 40)]
    (place / "deep/c.jsonl").write_text("\n".join(lines[:20]) + "\n\n" + "\n".join(lines[20:]))
    (place / "ignored.py").write_text("no text")
    (place / ".hidden.txt").write_text("no text")
    return place


def open_corpus(source, tmp_path, **settings):
    settings = {"cache_dir": tmp_path / "cache", "context": 8, "fractions": (0.2, 0.1), **settings}
    return Corpus.open(CorpusConfig(sources=(source,), **settings), show=False)
