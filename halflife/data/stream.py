"""Tokens of a data set of the hub, which is read row by row until there are enough of them. No text is stored.

The cache of a stream is a folder. Its name is a digest of the revision, the tokenizer, the fields and the split
fractions, but not of the number of tokens: a later request for more tokens appends to it. It holds `<split>.tokens`,
`<split>.offsets` as in `halflife.data.store`, and `records.jsonl`. A record is written after each `CHUNK` of text. It
has the counts so far, and where the stream stands, so that an interrupted download continues there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from halflife.data import documents, hub
from halflife.data.cache import cache_folder, locked
from halflife.data.documents import Piece
from halflife.data.hub import HubSource
from halflife.data.splits import SplitSettings
from halflife.data.store import COUNTS, Writer, dtype_of
from halflife.data.tokenizers import encode_ahead
from halflife.files import naming
from halflife.tasks.base import SPLITS

FORMAT = 1
CHUNK = 1 << 20  # bytes of text between two records
RECORDS = "records.jsonl"
Report = Callable[[dict[str, Any], int], None]  # is told each record, and the training tokens that are wanted


class Chunk(NamedTuple):
    """Some rows of the stream."""

    pieces: list[tuple[Piece, int]]  # of the documents, each with its split as an index of `SPLITS`
    rows: int  # up to the end of the chunk, since the start of the stream
    state: dict[str, Any] | None  # where the stream goes on after the chunk; None after the last row


@dataclass(frozen=True)
class Stream:
    """The rows of a data set at a commit, and how they become tokens. `cache` is None for the default folder."""

    source: HubSource
    commit: str
    settings: SplitSettings
    cache: Path | None = None

    @property
    def key(self) -> str:
        """The digest that names the folder."""
        wanted, settings = self.source, self.settings
        parts = [
            FORMAT, documents.PIECE, CHUNK, wanted.name, self.commit, wanted.configuration, wanted.split, wanted.rows,
            settings.field, settings.tokenizer.fingerprint(), settings.fractions,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def folder(self) -> Path:
        return cache_folder(self.cache) / "streams" / self.key

    def index(self, tokens: int, held_out: int, report: Report) -> dict[str, Any]:
        """Read the stream until it has enough, and return the index of the first record that has.

        The index depends on what is wanted, and not on what earlier requests have read. Wanted are `tokens` of
        training, and `held_out` tokens of each other split with a positive fraction.

        Raises:
            ValueError, ImportError, ConnectionError: as `hub.texts`; the disk is too small, or the folder is damaged.
        """
        record = self._first_with(tokens, held_out)  # without a lock, which a cache that is read-only refuses
        if record is None:
            with locked(self.folder):  # another process may have read on meanwhile
                record = self._first_with(tokens, held_out) or self._extend(tokens, held_out, report)
        digest = hashlib.sha256(json.dumps([self.key, record["rows"]]).encode()).hexdigest()
        dtype = str(dtype_of(self.settings.tokenizer.vocab_size))
        return {"digest": digest, "dtype": dtype, "splits": record["splits"]}

    def _first_with(self, tokens: int, held_out: int) -> dict[str, Any] | None:
        return next((record for record in self.records() if self._enough(record, tokens, held_out)), None)

    def records(self) -> list[dict[str, Any]]:
        """The records so far. The files of a record are as long as it says; a last line that was cut short is none."""
        path, found = self.folder / RECORDS, []
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if line.endswith(b"\n"):
                found.append(json.loads(line))
        sizes = {path.name: path.stat().st_size for path in self.folder.iterdir()} if found else {}
        if found and any(sizes.get(name, 0) < size for name, size in self._sizes(found[-1]).items()):
            raise ValueError(f"the cache {self.folder} is damaged (a file is shorter than it was); delete it")
        return found

    def _enough(self, record: dict[str, Any], tokens: int, held_out: int) -> bool:
        held = dict(zip(SPLITS[1:], self.settings.fractions, strict=True))
        counts = {split: record["splits"][split]["tokens"] for split in SPLITS}
        return record["state"] is None or (
            counts["train"] >= tokens and all(counts[name] >= held_out for name, share in held.items() if share)
        )

    def _extend(self, tokens: int, held_out: int, report: Report) -> dict[str, Any]:
        """Append chunks until a record has enough, and return this record."""
        first = {"rows": 0, "state": None, "splits": {split: dict.fromkeys(COUNTS, 0) for split in SPLITS}}
        last = [first, *self.records()][-1]
        self._truncate(last)
        with ExitStack() as stack:
            tokenizer, counts = self.settings.tokenizer, last["splits"]
            writers = [Writer(self.folder, split, tokenizer, stack, dict(counts[split])) for split in SPLITS]
            records = stack.enter_context((self.folder / RECORDS).open("ab"))
            encoded = encode_ahead(
                tokenizer, self._chunks(last), lambda chunk: [piece.data for piece, _ in chunk.pieces]
            )
            for chunk, ids in encoded:
                with naming(self.folder):
                    last = self._append(writers, records, chunk, ids)
                report(last, tokens)
                if self._enough(last, tokens, held_out):
                    break
                self._check_disk(last, tokens)
            encoded.close()
        return last

    def _chunks(self, last: dict[str, Any]) -> Iterator[Chunk]:
        pieces, size, rows, position = [], 0, last["rows"], None
        for text, position in hub.texts(self.source, self.commit, self.settings.field, last["state"], rows):
            rows += 1
            document = documents.encoded(text, f"row {rows}")
            split = self._split(document)
            pieces += [(piece, split) for piece in documents.cut_document(document, documents.PIECE)]
            size += len(document)
            if size >= CHUNK:
                yield Chunk(pieces, rows, position())
                pieces, size = [], 0
        yield Chunk(pieces, rows, None)

    def _split(self, document: bytes) -> int:
        """The split of a document by a hash of its content, as an index of `SPLITS`. Other documents change nothing."""
        place = int.from_bytes(hashlib.sha256(document).digest()[:8], "big") / 2**64
        validation, test = self.settings.fractions
        return 1 if place < validation else 2 if place < validation + test else 0

    def _append(self, writers: list[Writer], records: Any, chunk: Chunk, ids: list[np.ndarray]) -> dict[str, Any]:
        """Write the tokens of a chunk and then its record, which makes them valid; return the record."""
        for (piece, split), new in zip(chunk.pieces, ids, strict=True):
            writers[split].add(new, piece)
        for writer in writers:
            writer.tokens.flush()
            writer.offsets.flush()
        counts = {split: dict(writer.counts) for split, writer in zip(SPLITS, writers, strict=True)}
        record = {"rows": chunk.rows, "state": chunk.state, "splits": counts}
        records.write(json.dumps(record).encode() + b"\n")
        records.flush()
        return record

    def _sizes(self, record: dict[str, Any]) -> dict[str, int]:
        """The bytes of each file up to a record. `<split>.offsets` begins with a 0."""
        item, sizes = dtype_of(self.settings.tokenizer.vocab_size).itemsize, {}
        for name, counts in record["splits"].items():
            sizes |= {f"{name}.tokens": counts["tokens"] * item, f"{name}.offsets": 8 * (counts["documents"] + 1)}
        return sizes

    def _truncate(self, record: dict[str, Any]) -> None:
        """Remove what a process wrote after its last record. A new stream gets its files, with the first offset."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, size in self._sizes(record).items():
            path = self.folder / name
            path.touch()
            os.truncate(path, size)  # which fills a new file with zeros, and the first offset is 0
        if (path := self.folder / RECORDS).exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def _check_disk(self, record: dict[str, Any], tokens: int) -> None:
        missing = tokens - record["splits"]["train"]["tokens"]
        needed = missing * dtype_of(self.settings.tokenizer.vocab_size).itemsize
        if needed > (free := shutil.disk_usage(self.folder).free):
            raise ValueError(
                f"{missing:,} more tokens need {needed / 1e9:.1f} GB, and {self.folder} has {free / 1e9:.1f} GB left"
            )
