"""Tokens of a corpus on disk: each document is tokenised once, written to its split, and memory-mapped.

The cache of a corpus is a folder. Its name is a digest of everything that the tokens depend on. It holds
`<split>.tokens` (flat, in the smallest unsigned integers that hold the vocabulary), `<split>.offsets` (int64, the start
of each document and the end), and `index.json` (counts and checksums). It is built in a temporary folder, which is
renamed when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from halflife.data import documents
from halflife.data.cache import locked
from halflife.data.documents import Piece
from halflife.data.splits import Advance, Plan, SplitSettings, divided
from halflife.data.tokenizers import Tokenizer, encode_ahead
from halflife.files import naming, read_json, sha256_of, write_json
from halflife.tasks.base import SPLITS

FORMAT = 1
COUNTS = ("tokens", "bytes", "documents")
HASH_BYTES = 1 << 20  # bytes hashed at a time
TOKENISE_BYTES = 1 << 20  # bytes tokenised at a time, in parallel where the tokenizer can


def digest(files: Sequence[Path], settings: SplitSettings, advance: Advance) -> str:
    """SHA-256 of the content of the files in order, their formats, and the settings, but not of their names."""
    digest = hashlib.sha256()
    own = (settings.tokenizer.fingerprint(), settings.field, settings.fractions, settings.strict)
    digest.update(json.dumps([FORMAT, documents.PIECE, *own]).encode())
    for path in files:
        content = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(HASH_BYTES):
                content.update(chunk)
                advance(len(chunk))
        packed = path.suffix.lower() == ".gz"
        digest.update(json.dumps([documents.kind(path), packed, content.hexdigest()]).encode())
    return digest.hexdigest()


class Writer:
    """Appends documents to the files of one split, which `stack` closes, and to the `counts` of what these hold."""

    def __init__(
        self, folder: Path, split: str, tokenizer: Tokenizer, stack: ExitStack, counts: dict[str, int] | None = None
    ) -> None:
        self.tokens, self.offsets = (
            stack.enter_context((folder / f"{split}.{name}").open("ab")) for name in ("tokens", "offsets")
        )
        self.checksum, self.token_checksum = hashlib.sha256(), hashlib.sha256()
        self.dtype, self.eos = dtype_of(tokenizer.vocab_size), tokenizer.eos
        self.counts = counts or dict.fromkeys(COUNTS, 0)
        self.begun = 0  # tokens of the current document
        if counts is None:
            self._offset()

    def add(self, ids: np.ndarray, piece: Piece) -> None:
        """Append the token ids `[T]` of a piece of a document; documents without tokens do not count."""
        if piece.last and self.eos is not None:
            ids = np.append(ids, self.eos)
        data = ids.astype(self.dtype).tobytes()
        self.tokens.write(data)
        self.token_checksum.update(data)
        self.counts["tokens"] += len(ids)
        self.counts["bytes"] += len(piece.data)
        self.begun += len(ids)
        if piece.last and self.begun:
            self.counts["documents"] += 1
            self._offset()
            self.begun = 0

    def _offset(self) -> None:
        data = np.int64(self.counts["tokens"]).tobytes()
        self.offsets.write(data)
        self.checksum.update(data)

    def finish(self) -> dict[str, Any]:
        """The counts of the split, and the checksums of its files, for the index."""
        return {**self.counts, "offsets": self.checksum.hexdigest(), "sha256": self.token_checksum.hexdigest()}


def dtype_of(vocab_size: int) -> np.dtype:
    """The smallest unsigned integer type that holds the ids."""
    return np.dtype("uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32")


def write(files: Sequence[Path], settings: SplitSettings, plan: Plan, folder: Path, advance: Advance) -> dict[str, Any]:
    """Tokenise the files into `folder` in the second pass; returns the entry of each split in the index."""
    tokenizer = settings.tokenizer
    stream = (piece for path in files for piece in documents.pieces(path, settings.field))
    stream = divided(stream, plan.cuts) if plan.cuts else stream
    document = 0
    with naming(folder), ExitStack() as stack:
        writers = [Writer(folder, split, tokenizer, stack) for split in SPLITS]
        for batch, encoded in encode_ahead(tokenizer, _batches(stream), lambda batch: [p.data for p in batch]):
            for piece, ids in zip(batch, encoded, strict=True):
                if document == len(plan.splits):
                    raise ValueError("the files changed while they were read")
                writers[plan.splits[document]].add(ids, piece)
                document += piece.last
            advance(sum(len(piece.data) for piece in batch))
        entries = {split: writer.finish() for split, writer in zip(SPLITS, writers, strict=True)}
    if document != len(plan.splits) or sum(counts["bytes"] for counts in entries.values()) != plan.size:
        raise ValueError("the files changed while they were read")
    return entries


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.data)
        if size >= TOKENISE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def build(folder: Path, key: str, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The index of the cache `folder` of the corpus with digest `key`. It is made if it is missing or damaged.

    `make` writes the files into a new folder and returns the index without its checksum.
    """
    reason = None
    if folder.exists():
        try:
            return read_index(folder, key)
        except (OSError, ValueError) as error:
            reason = error
    with locked(folder):
        with suppress(OSError, ValueError):
            return read_index(folder, key)  # another process may have made it
        if reason is not None:
            warnings.warn(f"the cache {folder} is damaged ({reason}) and is made again", stacklevel=2)
        for left in folder.parent.glob(f".{folder.name}.*"):  # of processes that were killed
            shutil.rmtree(left, ignore_errors=True)
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}")
        try:
            index = make(temporary)
            write_json(temporary / "index.json", {**index, "checksum": _checksum(index)})
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return read_index(folder, key)


def _checksum(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def read_index(folder: Path, key: str) -> dict[str, Any]:
    """Read the index of a cache, and check the index and the files by their sizes and checksums.

    Raises:
        OSError, ValueError: the cache is incomplete, damaged, or of another corpus.
    """
    index = read_json(folder / "index.json")
    if not isinstance(index, dict) or index.pop("checksum", None) != _checksum(index):
        raise ValueError("its index has another checksum")
    if (index.get("format"), index.get("digest")) != (FORMAT, key):
        raise ValueError("it belongs to another corpus")
    for split, found in index["splits"].items():
        size, stated = (folder / f"{split}.tokens").stat().st_size, found["tokens"] * np.dtype(index["dtype"]).itemsize
        if size != stated:
            raise ValueError(f"{split}.tokens has {size} bytes, not {stated}")
        for name, written in (("offsets", found["offsets"]), ("tokens", found["sha256"])):
            if _file_checksum(folder / f"{split}.{name}") != written:
                raise ValueError(f"{split}.{name} has another checksum")
    return index


def _file_checksum(path: Path) -> str:
    """SHA-256 of a file, computed once in a process for each version of the file."""
    status = path.stat()
    return _sha256(path, status.st_ino, status.st_size, status.st_mtime_ns)


@cache
def _sha256(path: Path, *version: int) -> str:
    return sha256_of(path)
