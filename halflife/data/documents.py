"""Documents of text from files, folders and data sets of the Hugging Face Hub.

| name               | documents                                                                       |
|--------------------|---------------------------------------------------------------------------------|
| `.jsonl`           | one per line: the string in `field` of the JSON object                          |
| `.parquet`         | one per row: the string in column `field` (needs pyarrow)                       |
| anything else      | the file; a folder gives its `.txt`, `.md`, `.jsonl` and `.parquet` files, but  |
|                    | leaves out the folders of runs                                                  |
| `hf:owner/name`    | one per row of a data set of the hub (needs datasets, see `halflife.data.hub`)  |
| `python:`          | one per source file of Python's standard library, which every machine has       |

Files may be compressed: `.txt.gz`, `.jsonl.gz`. A long document is read in pieces, so that memory does not grow with
it. One line of a `.jsonl` file and one row of a `.parquet` file must fit into memory.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from halflife.extras import missing
from halflife.files import CONFIG_JSON, RUN_JSON, VERSIONS_JSON, opened

PIECE = 1 << 20  # bytes; longer documents are tokenised in pieces
LINE = 1 << 30  # bytes; a longer line means that the file is not JSON lines
PYTHON = "python:"  # the source that names Python's standard library
SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")  # the files that are read from a folder


class Piece(NamedTuple):
    """Some bytes of a document. `last` marks the last piece of the document."""

    data: bytes
    last: bool


def documents(sources: Sequence[str | Path], field: str = "text") -> Iterator[bytes]:
    """The whole documents of all sources, in the order of `find`, without empty ones.

    Raises:
        FileNotFoundError, ValueError: a source is missing, empty, truncated or binary, or has no `field`; the message
            names the file, and the line if there is one.
        ImportError: a source needs a package that is not installed.
    """
    for path in find(sources, field):
        document: list[bytes] = []
        for data, last in pieces(path, field):
            document.append(data)
            if last:
                yield b"".join(document)
                document = []


def find(sources: Sequence[str | Path], field: str = "text", cache: Path | None = None) -> list[Path]:
    """The files of `sources` in order, without duplicates. The files of a glob or folder are sorted.

    Data sets of the hub are downloaded into `cache`; their column `field` is kept.
    """
    if not sources:
        raise ValueError("a corpus needs at least one source")
    files: dict[Path, Path] = {}
    for source in sources:
        for path in _files(source, field, cache):
            files.setdefault(path.resolve(), path)
    return list(files.values())


def is_name(source: str | Path) -> bool:
    """Whether a source is a name (`hf:…`, `python:`) and not a path."""
    return str(source).startswith(("hf:", PYTHON))


def standard_library() -> list[Path]:
    """The source files of Python's standard library without its tests (11 MB in Python 3.11)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = (path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))
    return sorted(path for path in files if path.stat().st_size)


def _files(source: str | Path, field: str, cache: Path | None) -> list[Path]:
    if str(source) == PYTHON:
        return standard_library()
    if str(source).startswith("hf:"):
        from halflife.data.hub import fetch

        return [fetch(str(source), field, cache)]
    if not str(source).strip():
        raise ValueError('a source has the name ""; name a file, a folder or a glob')
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(p for p in _below(path) if kind(p) in SUFFIXES)
        if not files:
            raise FileNotFoundError(f"the folder {path} has no {', '.join(SUFFIXES)} file (.gz or not)")
        return files
    if path.exists():
        if not path.is_file():
            raise ValueError(f"{path} is a pipe or a device; a corpus is read twice, so write the text into a file")
        return [path]
    if not glob.has_magic(str(path)):
        raise FileNotFoundError(f"there is no file {path}")
    files = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
    if not files:
        raise FileNotFoundError(f"no file matches {path}")
    return files


def _below(root: Path) -> Iterator[Path]:
    """The files in and below a folder, linked ones too. Hidden ones are left out, and so are the folders of runs."""

    def refuse(error: OSError) -> None:
        raise error

    seen: set[str] = set()  # a link may lead to a folder above
    for name, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        folder, real = Path(name), os.path.realpath(name)
        is_run = RUN_JSON in files or {VERSIONS_JSON, CONFIG_JSON} <= {*files}
        if real in seen or (folder != root and is_run):
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        yield from (folder / each for each in files if not each.startswith(".") and (folder / each).is_file())


def kind(path: Path) -> str:
    """The suffix that determines the format of a file: lower case, without `.gz`."""
    path = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return path.suffix.lower()


def pieces(path: Path, field: str = "text", limit: int | None = None) -> Iterator[Piece]:
    """The documents of one file, each in pieces of at most `limit` bytes (None for `PIECE`).

    A document is cut before white space if possible, otherwise between characters of UTF-8. The cuts depend on its
    bytes and `limit` only.

    Raises:
        FileNotFoundError, ValueError, ImportError: as `documents`.
    """
    limit = PIECE if limit is None else limit
    if kind(path) == ".json":
        raise ValueError(f"{path} is JSON; a corpus reads JSON lines, one object per line, in a file named .jsonl")
    if (reader := {".jsonl": _jsonl, ".parquet": _parquet}.get(kind(path))) is None:
        yield from _text(path, limit)
        return
    empty = True
    for document in reader(path, field):
        yield from cut_document(document, limit)
        empty = empty and not document
    if empty:
        raise ValueError(f"{path} is empty: none of its documents has text")


def cut_document(document: bytes, limit: int) -> Iterator[Piece]:
    """Yield the pieces of at most `limit` bytes of one document, as `pieces` does; an empty document has none."""
    start = 0
    while len(document) - start > limit:
        cut = start + _cut(document[start : start + limit + 1], limit)
        yield Piece(document[start:cut], False)
        start = cut
    if document:
        yield Piece(document[start:], True)


def _refuse_binary(path: Path, data: bytes) -> None:
    if b"\0" in data:
        raise ValueError(f"{path} is binary or UTF-16 (it has NUL bytes); a corpus must be UTF-8 text")


def _text(path: Path, limit: int) -> Iterator[Piece]:
    held = b""
    with opened(path) as file:
        while chunk := file.read(limit):
            _refuse_binary(path, chunk)
            held += chunk
            while len(held) > limit:
                cut = _cut(held, limit)
                yield Piece(held[:cut], False)
                held = held[cut:]
    if not held:
        raise ValueError(f"{path} is empty")
    yield Piece(held, True)


def _cut(data: bytes, limit: int) -> int:
    """The place to cut `data`, up to `limit`: the last white space in its second half, or the start of a character."""
    space = max(data.rfind(b" ", limit // 2, limit), data.rfind(b"\n", limit // 2, limit))
    if space > 0:
        return space
    starts = (i for i in range(limit, max(limit - 4, 0), -1) if data[i] & 0xC0 != 0x80)
    return next(starts, limit)


def _jsonl(path: Path, field: str) -> Iterator[bytes]:
    number = 0
    with opened(path) as file:
        while line := file.readline(LINE):
            number += 1
            _refuse_binary(path, line)
            if len(line) == LINE:
                raise ValueError(f"{path}:{number} is longer than {LINE:,} bytes, so the file is not JSON lines")
            if line.strip():
                yield _field(line, field, f"{path}:{number}")
    if not number:
        raise ValueError(f"{path} is empty")


def _field(line: bytes, field: str, place: str) -> bytes:
    try:
        record = json.loads(line.decode("utf-8-sig", "surrogateescape"))
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    except RecursionError:
        raise ValueError(f"{place} is nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place} is {type(record).__name__}, not a JSON object")
    if field not in record:
        raise ValueError(f"{place} has no field {field!r}; its fields are {', '.join(map(str, record)) or 'none'}")
    return encoded(record[field], f"{place}: {field!r}")


def encoded(text: object, place: str) -> bytes:
    """The text of a record as bytes.

    Raises:
        ValueError: `text` is not a string; the message begins with `place`.
    """
    if not isinstance(text, str):
        raise ValueError(f"{place} is {type(text).__name__}, not a string")
    try:
        return text.encode("utf-8", "surrogateescape")  # restores bytes that were not UTF-8
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")  # JSON can contain half a surrogate pair, which is not UTF-8


def _parquet(path: Path, field: str) -> Iterator[bytes]:
    try:
        import pyarrow  # pyright: ignore
        import pyarrow.parquet as parquet  # pyright: ignore
    except ImportError as error:
        raise missing(str(path), "pyarrow") from error
    row = 0
    with opened(path) as file:
        try:
            table = parquet.ParquetFile(file)
            if field not in table.schema_arrow.names:
                raise ValueError(
                    f"{path} has no column {field!r}; its columns are {', '.join(table.schema_arrow.names)}"
                )
            for batch in table.iter_batches(batch_size=64, columns=[field]):
                column = batch.column(0)
                strings = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
                # Cast to bytes: pyarrow cannot make strings of bytes that are not UTF-8.
                for text in (column.cast(pyarrow.large_binary()) if strings else column).to_pylist():
                    row += 1
                    yield text if strings and text is not None else encoded(text, f"{path}, row {row}: {field!r}")
        except (pyarrow.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} is truncated or not parquet: {reason}") from error
