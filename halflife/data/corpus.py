"""A corpus: documents that are tokenised once, cached, split by document, and cut into batches.

    corpus = Corpus.open(CorpusConfig(sources=("notes/", "logs/*.jsonl.gz"), tokenizer="bytes"))
    batches = corpus.split("train").batches(batch_size=8, steps=1000)
    model(batches[0]["input_ids"], cu_seqlens=batches[0]["cu_seqlens"])

A second `open` of files with the same content and the same tokenizer re-uses the cached tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from halflife.data import splits, store
from halflife.data.batches import MODES, Batches, TokenFiles
from halflife.data.cache import cache_folder
from halflife.data.documents import PYTHON, find, is_name
from halflife.data.hub import HubSource, commit_of
from halflife.data.mixture import PERIOD_ROWS, MixedBatches, MixedFiles, shares
from halflife.data.paths import absolute_tokenizer
from halflife.data.progress import byte_progress, token_progress
from halflife.data.splits import SplitSettings
from halflife.data.stream import Stream
from halflife.data.tokenizers import Tokenizer, load_tokenizer
from halflife.registry import check_choice
from halflife.tasks.base import SPLITS


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """The text, its tokenizer, and how it is cut into batches."""

    # files, folders, globs, or data sets of the Hugging Face Hub (see `halflife.data.documents`)
    sources: tuple[str | Path, ...]
    tokenizer: str = "bytes"  # "bytes", "bytes+eos", or one of Hugging Face by name or folder
    context: int = 1024  # tokens of a row
    # "packed" (no state crosses from one document into the next), "concatenated" or "continued" (each row goes on where
    # a row of the step before ended)
    mode: str = "packed"
    field: str = "text"  # the field of the text in records of `.jsonl`, `.parquet` and data sets of the hub
    # shares of the documents that are held out for validation and for the test
    fractions: tuple[float, float] = (0.01, 0.0)
    # whether bytes that are not UTF-8 are an error for tokenizers of characters; otherwise a warning counts them
    strict: bool = False
    cache_dir: Path | None = None  # folder of the cached tokens; None for `$HALFLIFE_CACHE`, or `~/.cache/halflife`
    seed: int = 0  # determines the order of batches
    # training tokens that are wanted. Of a data set of the hub only as much is read; files are read whole. None reads
    # data sets whole, too.
    tokens: int | None = None
    # the share of each source among the training rows (they need not sum to 1). Without weights the sources are one
    # text.
    weights: tuple[float, ...] = ()
    # for each source its files, as `Corpus.open` found them; none for `hf:` and `python:`. A run saves them, so that a
    # file which is added to a folder later does not change its text. Without them they are looked for.
    files: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.sources, (str, Path)):
            raise ValueError(f"sources must be a tuple: ({str(self.sources)!r},), not {str(self.sources)!r}")
        if not self.sources:
            raise ValueError("a corpus needs at least one source")
        if self.weights and len(self.weights) != len(self.sources):
            raise ValueError(f"{len(self.sources)} sources have {len(self.weights)} weights")
        if self.files and len(self.files) != len(self.sources):
            raise ValueError(f"{len(self.sources)} sources have {len(self.files)} lists of files")
        if self.context < 1:
            raise ValueError(f"context must be at least 1; got {self.context}")
        check_choice("mode", self.mode, MODES)
        if self.mode == "continued" and self.weights:
            raise ValueError("rows that continue each other (--carry-state) cannot come from sources with weights")
        if not (all(fraction >= 0 for fraction in self.fractions) and sum(self.fractions) < 1):
            raise ValueError(f"fractions must be 0 or more and leave some for training; got {self.fractions}")

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them. Paths of files are absolute, so that they are valid in every folder."""
        sources = [str(s) if is_name(s) else str(Path(s).absolute()) for s in self.sources]
        cache = None if self.cache_dir is None else str(Path(self.cache_dir).absolute())
        lists = {"sources": sources, "fractions": list(self.fractions), "weights": list(self.weights)}
        lists["files"] = [list(own) for own in self.files]
        return {**asdict(self), **lists, "tokenizer": absolute_tokenizer(self.tokenizer), "cache_dir": cache}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CorpusConfig:
        """The inverse of `to_dict`."""
        cache = None if data["cache_dir"] is None else Path(data["cache_dir"])
        tuples = {name: tuple(data[name]) for name in ("sources", "fractions", "weights") if name in data}
        tuples["files"] = tuple(map(tuple, data.get("files", ())))
        return cls(**{**data, **tuples, "cache_dir": cache})

    def pinned(self) -> tuple[CorpusConfig, list[Path]]:
        """This configuration with the files of every source, and all of these files without duplicates."""
        known = self.files or ((),) * len(self.sources)
        found = [
            list(map(Path, own)) or find([source], self.field, self.cache_dir)
            for source, own in zip(self.sources, known, strict=True)
        ]
        unique: dict[Path, Path] = {}
        for path in (path for own in found for path in own):
            unique.setdefault(path.resolve(), path)
        files = tuple(
            () if is_name(source) else tuple(str(path.absolute()) for path in own)
            for source, own in zip(self.sources, found, strict=True)
        )
        return replace(self, files=files), list(unique.values())


class Split:
    """One split of a corpus.

    Attributes:
        tokens, documents: their numbers.
        bytes: size of the text before tokenisation.
        files: memory maps of the tokens.
    """

    kind: type[Batches] = Batches

    def __init__(self, files: TokenFiles, counts: dict[str, Any], config: CorpusConfig) -> None:
        self.files, self.config = files, config
        self.tokens: int = counts["tokens"]
        self.bytes: int = counts["bytes"]
        self.documents: int = counts["documents"]

    @property
    def longest(self) -> int:
        """The tokens of the longest row that `batches` can give."""
        return self.tokens

    def batches(
        self, batch_size: int, context: int | None = None, seed: int | None = None, mode: str | None = None,
        rank: int = 0, world_size: int = 1, steps: int | None = None,
    ) -> Batches:  # fmt: skip
        """The split as a data set whose item i is the batch of step i, see `Batches`; None is the configured value."""
        config = self.config
        return self.kind(
            self.files, batch_size, config.context if context is None else context,
            config.seed if seed is None else seed, config.mode if mode is None else mode, rank, world_size, steps,
        )  # fmt: skip

    def document_files(self, limit: int) -> list[tuple[TokenFiles, int]]:
        """The files whose first documents stand for the split, and how many tokens to read of each: `limit` in all."""
        return [(self.files, limit)]


class MixedSplit(Split):
    """One split of several corpora. Its `bytes` are those of as many tokens, mixed by the weights."""

    kind = MixedBatches

    def __init__(self, parts: Sequence[Split], weights: Sequence[float], config: CorpusConfig) -> None:
        sizes = [sum(getattr(part, name) for part in parts) for name in ("tokens", "documents")]
        used = [(part, weight) for part, weight in zip(parts, weights, strict=True) if part.tokens]
        total = sum(weight for _, weight in used)
        ratio = sum(weight / total * part.bytes / part.tokens for part, weight in used)
        counts = {"tokens": sizes[0], "documents": sizes[1], "bytes": round(ratio * sizes[0])}
        super().__init__(MixedFiles([part.files for part in parts], weights), counts, config)
        self._parts = used

    @property
    def longest(self) -> int:
        return max((part.tokens for part, _ in self._parts), default=0)

    def document_files(self, limit: int) -> list[tuple[TokenFiles, int]]:
        total = sum(weight for _, weight in self._parts)
        return [(part.files, round(limit * weight / total)) for part, weight in self._parts]


class Corpus:
    """A tokenised corpus, returned by `open`.

    Attributes:
        digest: SHA-256 of the text, the tokenizer and the splits.
        tokens, bytes, documents: their numbers over all splits.
    """

    def __init__(
        self, config: CorpusConfig, tokenizer: Tokenizer, digest: str, splits: dict[str, Split], folder: Path
    ) -> None:
        self.config, self.tokenizer, self.digest, self.folder = config, tokenizer, digest, folder
        self._splits = splits
        self.tokens, self.bytes, self.documents = (
            sum(getattr(split, name) for split in self._splits.values()) for name in ("tokens", "bytes", "documents")
        )

    @classmethod
    def open(cls, config: CorpusConfig, show: bool = True) -> Corpus:
        """Open the corpus of a configuration, and tokenise it if the cache does not hold it.

        The text is read twice. The first pass checks it and assigns the documents to splits, so that every error
        about the text is raised before anything is written. `show` allows progress bars.

        Raises:
            FileNotFoundError, ValueError, ImportError, ConnectionError: a source or the tokenizer cannot be read; the
                message names it.
        """
        if config.weights:
            return cls._mix(config, show)
        tokenizer = load_tokenizer(config.tokenizer)
        settings = SplitSettings(tokenizer, config.field, config.fractions, config.strict)
        if config.tokens is not None and any(str(source).startswith("hf:") for source in config.sources):
            return cls._from_stream(config, tokenizer, settings, config.tokens, show)
        config, files = config.pinned()
        with byte_progress("hashing", sum(path.stat().st_size for path in files), show) as advance:
            digest = store.digest(files, settings, advance)

        def make(folder: Path) -> dict[str, Any]:
            with byte_progress("reading", None, show) as advance:  # the unpacked size is unknown
                plan = splits.scan(files, settings, advance)
            folder.mkdir(parents=True)
            with byte_progress("tokenising", plan.size, show) as advance:
                counts = store.write(files, settings, plan, folder, advance)
            dtype = str(store.dtype_of(tokenizer.vocab_size))
            return {"format": store.FORMAT, "digest": digest, "tokenizer": tokenizer.name, "dtype": dtype,
                    "replaced": plan.replaced, "splits": counts}  # fmt: skip

        folder = cache_folder(config.cache_dir) / "corpora" / digest
        return cls._from_folder(folder, store.build(folder, digest, make), config, tokenizer)

    @classmethod
    def unread(cls, config: CorpusConfig, any_tokenizer: bool = False) -> Corpus:
        """A corpus without splits, to configure a run. No text is read, and nothing is downloaded or written.

        With `any_tokenizer`, another tokenizer takes the place of one that is not on this machine.

        Raises:
            FileNotFoundError: a file does not exist, or the tokenizer is not on this machine.
        """
        find([source for source in config.sources if not str(source).startswith("hf:")] or [PYTHON])
        try:
            tokenizer = load_tokenizer(config.tokenizer, local=True)
        except FileNotFoundError:
            if not any_tokenizer:
                raise
            tokenizer = load_tokenizer("bytes")
        return cls(config, tokenizer, "", {}, Path())

    @classmethod
    def _from_folder(cls, folder: Path, index: dict[str, Any], config: CorpusConfig, tokenizer: Tokenizer) -> Corpus:
        found = {
            name: Split(TokenFiles(folder, name, index["dtype"], counts["documents"]), counts, config)
            for name, counts in index["splits"].items()
        }
        return cls(config, tokenizer, index["digest"], found, folder)

    @classmethod
    def _mix(cls, config: CorpusConfig, show: bool) -> Corpus:
        parts: list[Corpus] = []
        known = config.files or ((),) * len(config.sources)
        for source, own, share in zip(config.sources, known, shares(config.weights) / PERIOD_ROWS, strict=True):
            tokens = None if config.tokens is None else math.ceil(config.tokens * share) + config.context
            one = replace(config, sources=(source,), files=(own,) if own else (), weights=(), tokens=tokens)
            part = Corpus.open(one, show)
            if part.split("train").tokens < config.context:
                raise ValueError(f"{source} has fewer than {config.context} training tokens, which are one row")
            parts.append(part)
        _warn_of_shared_files(parts)
        config = replace(
            config, sources=tuple(part.config.sources[0] for part in parts),
            files=tuple(part.config.files[0] if part.config.files else () for part in parts),
        )  # fmt: skip
        digest = hashlib.sha256(json.dumps([[part.digest for part in parts], config.weights]).encode()).hexdigest()
        mixed: dict[str, Split] = {
            name: MixedSplit([part.split(name) for part in parts], config.weights, config) for name in SPLITS
        }
        return cls(config, parts[0].tokenizer, digest, mixed, parts[0].folder)

    @classmethod
    def _from_stream(
        cls, config: CorpusConfig, tokenizer: Tokenizer, settings: SplitSettings, tokens: int, show: bool
    ) -> Corpus:
        """Open the first rows of a data set of the hub. The configuration of the corpus names the commit."""
        if len(config.sources) != 1:
            raise ValueError("a data set of the hub stands beside other sources; give each a weight: SOURCE=0.5")
        source = HubSource.parse(str(config.sources[0]))
        stream = Stream(source, commit_of(source), settings, config.cache_dir)
        with token_progress(stream, show) as report:
            index = stream.index(tokens, config.context, report)
        pinned = replace(config, sources=(source.at(stream.commit),))
        return cls._from_folder(stream.folder, index, pinned, tokenizer)

    def split(self, name: str) -> Split:
        """The split "train", "validation" or "test"."""
        check_choice("split", name, SPLITS)
        return self._splits[name]


def _warn_of_shared_files(parts: Sequence[Corpus]) -> None:
    found = Counter(Path(file).resolve() for part in parts for own in part.config.files for file in own)
    if shared := [path for path, count in found.items() if count > 1]:
        warnings.warn(f"{shared[0]} is in several sources; what one holds out, another may train on", stacklevel=2)


def bits_per_byte(loss_nats: float, tokens: int, bytes: int) -> float:
    """A mean cross-entropy per token, in nats, as bits per byte of the text, which compare across tokenizers."""
    if bytes < 1:
        raise ValueError(f"bits per byte need at least one byte; got {bytes}")
    return loss_nats * tokens / (bytes * math.log(2))
