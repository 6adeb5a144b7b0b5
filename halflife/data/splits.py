"""The first pass over a corpus. It checks the text and assigns each document to a split, and writes nothing."""

from __future__ import annotations

import hashlib
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halflife.data import documents
from halflife.data.documents import Piece
from halflife.data.tokenizers import Tokenizer
from halflife.tasks.base import SPLITS

Advance = Callable[[int], None]  # advances a progress bar by a number of bytes


@dataclass(frozen=True)
class SplitSettings:
    """The settings that the tokens of a corpus depend on; see `CorpusConfig`."""

    tokenizer: Tokenizer
    field: str
    fractions: tuple[float, float]
    strict: bool


@dataclass(frozen=True)
class Plan:
    """The result of the first pass."""

    splits: np.ndarray  # the split of each document as an index of `SPLITS`: `[documents]`, uint8
    size: int  # bytes of all documents
    cuts: tuple[int, ...]  # bytes at which new splits start, if the corpus is a single document
    replaced: int  # byte sequences that are not UTF-8, which a tokenizer of characters loses


def scan(files: Sequence[Path], settings: SplitSettings, advance: Advance) -> Plan:
    """Read all documents once, check them, and assign each to a split; raises as `documents`."""
    keys, total, replaced = array("Q"), 0, 0
    for path in files:
        content, before = hashlib.sha256(), replaced
        for data, last in documents.pieces(path, settings.field):
            content.update(data)
            total += len(data)
            replaced += _invalid(data) if settings.tokenizer.reads_text else 0
            advance(len(data))
            if last:
                keys.append(int.from_bytes(content.digest()[:8], "big"))
                content = hashlib.sha256()
        if replaced > before and settings.strict:
            raise ValueError(f"{path} has {replaced - before} sequences of bytes that are not UTF-8")
    if replaced:
        warnings.warn(f"{replaced} sequences of bytes are not UTF-8; each becomes U+FFFD", stacklevel=2)
    if len(keys) == 1 and any(settings.fractions):
        warnings.warn("the corpus is one document, so its end is held out instead of whole documents", stacklevel=2)
        splits, cuts = _cuts(total, settings.fractions)
        return Plan(splits, total, cuts, replaced)
    return Plan(assign(np.frombuffer(keys, dtype=np.uint64), settings.fractions), total, (), replaced)


def _invalid(data: bytes) -> int:
    """The number of byte sequences that are not UTF-8."""
    try:
        data.decode("utf-8")
        return 0
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace").count("\ufffd") - data.count("\ufffd".encode())


def assign(keys: np.ndarray, fractions: tuple[float, float]) -> np.ndarray:
    """Assign each document to a split by a hash of its content: indices of `SPLITS`, `[documents]`, uint8.

    The hashes `keys [documents]` are uniform over 64 bits. The smallest are for validation, the next ones for the test,
    by the shares in `fractions`. A split with a positive share has at least one hash.
    """
    distinct = np.unique(keys)
    validation, test = (int(fraction > 0) for fraction in fractions)
    count = len(distinct)
    if count < 1 + validation + test:
        raise ValueError(
            f"{len(keys)} documents, {count} of them distinct, are too few for {1 + validation + test} splits; "
            "set the fraction of a split to 0 to do without it"
        )
    below = [int(np.searchsorted(distinct, np.uint64(int(f * 2**64)))) for f in np.cumsum(fractions)]
    first = min(max(below[0], validation), count - 1 - test)
    second = min(max(below[1], first + test), count - 1)
    rank = np.searchsorted(distinct, keys)
    names = np.where(rank < first, "validation", np.where(rank < second, "test", "train"))
    return np.select([names == name for name in SPLITS], list(range(len(SPLITS)))).astype(np.uint8)


def _cuts(size: int, fractions: tuple[float, float]) -> tuple[np.ndarray, tuple[int, ...]]:
    """The splits of a single document in order, and the bytes at which the second and the third start."""
    held = [(name, max(1, round(f * size))) for name, f in zip(SPLITS[1:], fractions, strict=True) if f]
    train = size - sum(length for _, length in held)
    # `divided` may move a cut by up to three bytes, to the next character.
    if train < 8 or any(length < 8 for _, length in held):
        raise ValueError(f"the corpus is one document of {size} bytes, too few for {1 + len(held)} splits")
    cuts = (train, train + held[0][1])[: len(held)]
    return np.array([0, *(SPLITS.index(name) for name, _ in held)], dtype=np.uint8), cuts


def divided(pieces: Iterator[Piece], cuts: Sequence[int]) -> Iterator[Piece]:
    """Divide one document into several. A new one starts at each of `cuts`, or at the next character."""
    position, left = 0, list(cuts)
    for data, last in pieces:
        while left and left[0] < position + len(data):
            cut = max(left[0] - position, 0)
            while cut < len(data) and data[cut] & 0xC0 == 0x80 and cut < left[0] - position + 3:
                cut += 1
            if cut == len(data):
                break  # the character ends with the piece, so the cut falls before the next piece
            yield Piece(data[:cut], True)
            position, data = position + cut, data[cut:]
            left.pop(0)
        position += len(data)
        yield Piece(data, last)
