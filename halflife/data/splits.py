"""Which document goes to which split: the first reading of a corpus, which decides and checks, and writes nothing."""

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

Advance = Callable[[int], None]  # is told how many bytes were done


@dataclass(frozen=True)
class Settings:
    """What the tokens depend on besides the files.

    Attributes:
        tokenizer: of the text.
        field: of records.
        fractions: of the documents, for validation and test.
        strict: whether text that is no UTF-8 is an error (for a tokenizer of characters).
    """

    tokenizer: Tokenizer
    field: str
    fractions: tuple[float, float]
    strict: bool


@dataclass(frozen=True)
class Plan:
    """What the first reading found.

    Attributes:
        splits: for each document its split, as a number of `SPLITS`: `[documents]`, uint8.
        size: bytes of all documents.
        cuts: where the only document of a corpus is cut: a split starts at each.
        replaced: sequences of bytes that are no UTF-8, and are lost to a tokenizer of characters.
    """

    splits: np.ndarray
    size: int
    cuts: tuple[int, ...]
    replaced: int


def scan(files: Sequence[Path], settings: Settings, advance: Advance) -> Plan:
    """Reads every document, and decides its split; nothing is written.

    Raises:
        FileNotFoundError, ValueError, ImportError: a file that cannot be read, or too few documents.
    """
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
            raise ValueError(f"{path} has {replaced - before} sequences of bytes that are no UTF-8")
    if replaced:
        warnings.warn(f"{replaced} sequences of bytes are no UTF-8; each becomes U+FFFD", stacklevel=2)
    if len(keys) == 1 and any(settings.fractions):
        warnings.warn("the corpus is one document: its end is held out, not documents of their own", stacklevel=2)
        splits, cuts = _cuts(total, settings.fractions)
        return Plan(splits, total, cuts, replaced)
    return Plan(assign(np.frombuffer(keys, dtype=np.uint64), settings.fractions), total, (), replaced)


def _invalid(data: bytes) -> int:
    """Sequences of bytes that are no UTF-8."""
    try:
        data.decode("utf-8")
        return 0
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace").count("\ufffd") - data.count("\ufffd".encode())


def assign(keys: np.ndarray, fractions: tuple[float, float]) -> np.ndarray:
    """The split of each document, by a hash of its content.

    Args:
        keys: hashes, uniform over 64 bits: `[documents]`, uint64.
        fractions: for validation and test. Those below the first are for validation, then come those for the test; a
            split that would have none gets the next hash. Documents with one content share their split.

    Returns:
        `[documents]`, uint8, numbers of `SPLITS`.

    Raises:
        ValueError: fewer distinct documents than splits.
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
    """The splits of one document in their order, and the bytes at which the second and the third start."""
    held = [(name, max(1, round(f * size))) for name, f in zip(SPLITS[1:], fractions, strict=True) if f]
    train = size - sum(length for _, length in held)
    # A cut may move by three bytes, to the next character.
    if train < 8 or any(length < 8 for _, length in held):
        raise ValueError(f"the corpus is one document of {size} bytes, too few for {1 + len(held)} splits")
    cuts = (train, train + held[0][1])[: len(held)]
    return np.array([0, *(SPLITS.index(name) for name, _ in held)], dtype=np.uint8), cuts


def divided(pieces: Iterator[Piece], cuts: Sequence[int]) -> Iterator[Piece]:
    """One document as several: a new one starts at each of `cuts`, or at the next character."""
    position, left = 0, list(cuts)
    for data, last in pieces:
        while left and left[0] < position + len(data):
            cut = max(left[0] - position, 0)
            while cut < len(data) and data[cut] & 0xC0 == 0x80 and cut < left[0] - position + 3:
                cut += 1
            if cut == len(data):
                break  # the character ends with the piece: the document is cut before the next
            yield Piece(data[:cut], True)
            position, data = position + cut, data[cut:]
            left.pop(0)
        position += len(data)
        yield Piece(data, last)
