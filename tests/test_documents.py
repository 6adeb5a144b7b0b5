"""Documents of files, and errors for damaged files."""

import gzip
import re
import sys

import pytest
from corpora import open_corpus, text
from helpers import assert_raises, cases

from halflife.data import documents
from halflife.data.documents import find, pieces
from halflife.extras import install


def test_documents_of_a_folder_in_their_order(folder):
    expected = [text(i).encode() for i in range(40)]
    assert list(documents.documents([folder])) == expected
    assert list(documents.documents([folder / "b.txt", str(folder / "**/*.md.gz"), folder])) == expected
    assert list(documents.documents([folder / "deep/*"])) == expected[1:]
    assert list(documents.documents([folder / "ignored.py"])) == [b"no text"]  # a pattern that names the file reads it


def test_linked_folders_are_read_once(tmp_path):
    """As by a glob. One leads to the folder itself, and two to one place."""
    for name in ("data", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    for name, goal in (("itself", "."), ("one", "../there"), ("two", "../there")):
        (tmp_path / "data" / name).symlink_to(goal)
    assert find([tmp_path / "data"]) == [tmp_path / "data" / "a.txt", tmp_path / "data" / "one" / "a.txt"]


def test_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('\ufeff{"body": "x", "text": "y"}\r\n{"body": ""}\r\n{"body": "\\ud800"}')
    assert list(documents.documents([tmp_path], "body")) == [b"x", b"\xed\xa0\x80"]


@cases(
    "name, data, message",
    ("a.txt", b"", "a.txt is empty"),
    ("a.txt.gz", gzip.compress(b"", mtime=0), "a.txt.gz is empty"),
    ("a.txt.gz", gzip.compress(b"x" * 9999, mtime=0)[:25], "a.txt.gz is truncated or not gzip"),
    ("a.txt.gz", gzip.compress(b"x" * 9999, mtime=0)[:-8], "a.txt.gz is truncated or not gzip"),  # all but the checksum
    ("a.txt.gz", b"plain text", "a.txt.gz is truncated or not gzip"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-4], "a.jsonl.gz is truncated or not gzip"),
    ("a.txt", b"text\0more", r"a.txt is binary or UTF-16 \(it has NUL bytes\)"),
    ("a.md", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a.md is binary"),
    ("a.txt", b"x" * documents.PIECE + b"\0", "a.txt is binary"),
    ("a.txt", "text".encode("utf-16"), "a.txt is binary or UTF-16"),
    ("a.jsonl", b"\0", "a.jsonl is binary"),
    ("a.jsonl", b"", "a.jsonl is empty"),
    ("a.jsonl", b'{"text": ""}\n', "a.jsonl is empty"),
    ("a.jsonl", b'{"text": "x"}\n\n{"text": "x"', "a.jsonl:3 is not JSON"),
    ("a.jsonl", b"[1]", "a.jsonl:1 is list, not a JSON object"),
    ("a.jsonl", b'{"text": "x"}\n{"id": 1, "body": ""}', "a.jsonl:2 has no field 'text'; its fields are id, body$"),
    ("a.jsonl", b'{"text": null}', "a.jsonl:1: 'text' is NoneType, not a string"),
    ("a.json", b"[]", "a.json is JSON; a corpus reads JSON lines"),
)
def test_bad_files_are_clear_errors_before_anything_is_written(tmp_path, name, data, message):
    (tmp_path / "0.txt").write_text("a good one before it")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        open_corpus(tmp_path / "*.*", tmp_path)
    assert "\n" not in str(error.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_sources_that_are_not_there(tmp_path):
    (tmp_path / "empty").mkdir()
    for source, message in (
        (tmp_path / "no.txt", "there is no file .*no.txt"),
        (str(tmp_path / "*.txt"), r"no file matches .*\*.txt"),
        (tmp_path / "empty", "the folder .*empty has no .txt, .md"),
    ):
        assert_raises(FileNotFoundError, message, find, [source])
    assert_raises(ValueError, "at least one source", find, [])


@pytest.mark.parametrize("limit", [8, 9, 64])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_long_documents_come_in_pieces(tmp_path, name, limit):
    whole = ("🙂" * 7 + " word\n" * 5 + "λx" * 9).encode() + b"\x80" * 20
    data = b'{"text": "' + whole.replace(b"\n", rb"\n") + b'"}' if "jsonl" in name else whole
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    found = list(pieces(tmp_path / name, limit=limit))
    assert b"".join(piece.data for piece in found) == whole
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
    assert all(0 < len(piece.data) <= limit for piece in found)
    for piece in found:
        (piece.data.rstrip(b"\x80") if b"\x80\x80" in piece.data else piece.data).decode()  # no character is cut


def test_parquet_without_pyarrow_names_the_package(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=re.escape(f"a.parquet needs pyarrow: {install('train')}")):
        open_corpus(tmp_path / "a.parquet", tmp_path)


def write_parquet(path, column, **others):
    """Write a parquet file whose column `text` is `column`."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": column, **others}), path)


def test_parquet(tmp_path):
    rows = [text(i) for i in range(150)]
    write_parquet(tmp_path / "a.parquet", rows, id=list(range(150)))
    assert list(documents.documents([tmp_path])) == [row.encode() for row in rows]
    with pytest.raises(ValueError, match="has no column 'body'; its columns are text, id"):
        list(documents.documents([tmp_path], "body"))
    assert_raises(ValueError, "row 1: 'id' is int, not a string", list, documents.documents([tmp_path], "id"))


def test_strings_of_parquet(tmp_path):
    """Strings may have any of pyarrow's types. pyarrow also writes invalid UTF-8, which it cannot read back."""
    pyarrow = pytest.importorskip("pyarrow")
    rows = pyarrow.array(["λ", "", "x"])
    for column in (rows, rows.cast("large_string"), rows.dictionary_encode()):
        write_parquet(tmp_path / "a.parquet", column)
        assert list(documents.documents([tmp_path])) == ["λ".encode(), b"x"]
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"a\xff", b"b"]).buffers())
    write_parquet(tmp_path / "a.parquet", broken)
    assert list(documents.documents([tmp_path])) == [b"a\xff", b"b"]


@cases(
    "damage",
    lambda data: b"",
    lambda data: data[:300],
    lambda data: data[:-1],
    lambda data: b"text" * 99,
    lambda data: data[:40] + bytes(60) + data[100:],  # the footer is intact
)
def test_damaged_parquet(tmp_path, damage):
    write_parquet(tmp_path / "a.parquet", [text(i) for i in range(150)])
    (tmp_path / "a.parquet").write_bytes(damage((tmp_path / "a.parquet").read_bytes()))
    with pytest.raises(ValueError, match=r"a.parquet is truncated or not parquet") as error:
        open_corpus(tmp_path / "a.parquet", tmp_path)
    assert "\n" not in str(error.value)


def test_parquet_without_text(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["", ""])
    with pytest.raises(ValueError, match=r"a.parquet is empty: none of its documents has text"):
        list(documents.documents([tmp_path]))
    write_parquet(tmp_path / "a.parquet", ["x", None])
    with pytest.raises(ValueError, match=r"a.parquet, row 2: 'text' is NoneType, not a string"):
        list(documents.documents([tmp_path]))
