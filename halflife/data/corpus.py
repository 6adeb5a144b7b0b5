"""A corpus: documents, tokenised once and kept, split by document, and cut into batches.

    corpus = Corpus.open(CorpusConfig(sources=("notes/", "logs/*.jsonl.gz"), tokenizer="bytes"))
    batches = corpus.split("train").batches(batch_size=8, steps=1000)
    model(batches[0]["input_ids"], cu_seqlens=batches[0]["cu_seqlens"])

A second `open` of the same files (wherever they lie) with the same tokenizer finds the tokens of the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halflife.data import splits, store
from halflife.data.batches import MODES, Batches, TokenFiles
from halflife.data.cache import cache_folder
from halflife.data.documents import find, is_name
from halflife.data.splits import Advance, Settings
from halflife.data.tokenizers import Tokenizer, load_tokenizer
from halflife.registry import unknown
from halflife.tasks.base import SPLITS


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text, and how a model sees it.

    Attributes:
        sources: files, folders, globs, or data sets of the Hugging Face Hub (see `halflife.data.documents`).
        tokenizer: "bytes", "bytes+eos", or one of Hugging Face by name or folder.
        context: tokens of a row.
        mode: "packed" (documents never see each other) or "concatenated".
        field: of records in `.jsonl`, `.parquet` and data sets of the hub.
        fractions: of the documents that are held out, for validation and for the test.
        strict: whether text that is no UTF-8 is an error, for tokenizers of characters (else a warning counts it).
        cache_dir: where tokens are kept; None for `$HALFLIFE_CACHE`, or `~/.cache/halflife`.
        seed: of the order of batches.
    """

    sources: tuple[str | Path, ...]
    tokenizer: str = "bytes"
    context: int = 1024
    mode: str = "packed"
    field: str = "text"
    fractions: tuple[float, float] = (0.01, 0.0)
    strict: bool = False
    cache_dir: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.sources, (str, Path)):
            raise ValueError(f"sources are several: ({str(self.sources)!r},), not {str(self.sources)!r}")
        if not self.sources:
            raise ValueError("a corpus needs at least one source")
        if self.context < 1:
            raise ValueError(f"context must be at least 1; got {self.context}")
        if self.mode not in MODES:
            raise unknown("mode", self.mode, list(MODES))
        if not (all(fraction >= 0 for fraction in self.fractions) and sum(self.fractions) < 1):
            raise ValueError(f"fractions must be 0 or more and leave some for training; got {self.fractions}")

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them. Paths of files are absolute, so that they are valid in every folder."""
        sources = [str(s) if is_name(s) else str(Path(s).absolute()) for s in self.sources]
        cache = None if self.cache_dir is None else str(Path(self.cache_dir).absolute())
        return {**asdict(self), "sources": sources, "fractions": list(self.fractions), "cache_dir": cache}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CorpusConfig:
        """The inverse of `to_dict`."""
        cache = None if data["cache_dir"] is None else Path(data["cache_dir"])
        sources, fractions = tuple(data["sources"]), tuple(data["fractions"])
        return cls(**{**data, "sources": sources, "fractions": fractions, "cache_dir": cache})


class Split:
    """One split of a corpus.

    Attributes:
        tokens, bytes, documents: how many it has; the bytes are those of the text, before tokenisation.
        files: its memory maps.
    """

    def __init__(self, files: TokenFiles, counts: dict[str, Any], config: CorpusConfig) -> None:
        self.files, self.config = files, config
        self.tokens: int = counts["tokens"]
        self.bytes: int = counts["bytes"]
        self.documents: int = counts["documents"]

    def batches(
        self, batch_size: int, context: int | None = None, seed: int | None = None, mode: str | None = None,
        rank: int = 0, world_size: int = 1, steps: int | None = None,
    ) -> Batches:  # fmt: skip
        """The split as a data set whose item i is the batch of step i; see `Batches`. None: as configured."""
        config = self.config
        return Batches(
            self.files, batch_size, config.context if context is None else context,
            config.seed if seed is None else seed, config.mode if mode is None else mode, rank, world_size, steps,
        )  # fmt: skip


class Corpus:
    """Tokens of documents; made by `open`.

    Attributes:
        digest: SHA-256 of the text, the tokenizer and the splits.
        tokenizer: that made the tokens.
        tokens, bytes, documents: of all splits.
    """

    def __init__(self, folder: Path, index: dict[str, Any], config: CorpusConfig, tokenizer: Tokenizer) -> None:
        self.folder, self.config, self.tokenizer = folder, config, tokenizer
        self.digest: str = index["digest"]
        self._splits = {
            name: Split(TokenFiles(folder, name, index["dtype"]), counts, config)
            for name, counts in index["splits"].items()
        }
        self.tokens, self.bytes, self.documents = (
            sum(getattr(split, name) for split in self._splits.values()) for name in ("tokens", "bytes", "documents")
        )

    @classmethod
    def open(cls, config: CorpusConfig, show: bool = True) -> Corpus:
        """The corpus of this configuration, tokenised unless that was done before.

        Every error about the text comes before anything is written: it is read twice, first to check it and to share
        the documents out.

        Args:
            config: which text.
            show: whether to draw a progress bar.

        Raises:
            FileNotFoundError, ValueError, ImportError, ConnectionError: a source or the tokenizer cannot be read; the
                message names it.
        """
        tokenizer = load_tokenizer(config.tokenizer)
        settings = Settings(tokenizer, config.field, config.fractions, config.strict)
        files = find(config.sources, config.field, config.cache_dir)
        with _progress("hashing", sum(path.stat().st_size for path in files), show) as advance:
            digest = store.digest(files, settings, advance)

        def make(folder: Path) -> dict[str, Any]:
            with _progress("reading", None, show) as advance:  # unpacked, the size is not known
                plan = splits.scan(files, settings, advance)
            folder.mkdir(parents=True)
            with _progress("tokenising", plan.size, show) as advance:
                found = store.write(files, settings, plan, folder, advance)
            dtype = str(store.dtype_of(tokenizer.vocab_size))
            return {"format": store.FORMAT, "digest": digest, "tokenizer": tokenizer.name, "dtype": dtype,
                    "replaced": plan.replaced, "splits": found}  # fmt: skip

        folder = cache_folder(config.cache_dir) / "corpora" / digest
        return cls(folder, store.build(folder, digest, make), config, tokenizer)

    def split(self, name: str) -> Split:
        """ "train", "validation" or "test".

        Raises:
            ValueError: another name.
        """
        if name not in SPLITS:
            raise unknown("split", name, list(SPLITS))
        return self._splits[name]


@contextmanager
def _progress(name: str, size: int | None, show: bool) -> Iterator[Advance]:
    """A bar of bytes, with the time left; gives what is told how many were done."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(20), DownloadColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, transient=True, disable=not show) as progress:
        task = progress.add_task(name, total=size)
        yield lambda done: progress.advance(task, done)


def bits_per_byte(loss_nats: float, tokens: int, bytes: int) -> float:
    """A loss that does not depend on the tokenizer: bits for each byte of the text.

    Args:
        loss_nats: mean cross-entropy of a token.
        tokens, bytes: how many the text has (a split's `tokens` and `bytes`).

    Raises:
        ValueError: no bytes.
    """
    if bytes < 1:
        raise ValueError(f"bits per byte need at least one byte; got {bytes}")
    return loss_nats * tokens / (bytes * math.log(2))
