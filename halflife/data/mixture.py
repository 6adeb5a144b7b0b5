"""Sources that are mixed by weight: which source each row of a batch comes from, and which of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np

from halflife.data.batches import Batches, TokenFiles, permuted
from halflife.tasks import stream_seed

PERIOD_ROWS = 1000  # rows after which each source has given its share, rounded to a thousandth


def read_weights(sources: Sequence[str]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Divide `source=weight` into sources and positive weights, which all or none of the sources have."""
    names, weights = [], []
    for source in sources:
        name, sign, weight = str(source).rpartition("=")
        if sign and not Path(source).exists():
            with suppress(ValueError):  # the sign belongs to a name
                weights.append(float(weight))
                names.append(name)
    if not weights:
        return tuple(map(str, sources)), ()
    if len(weights) < len(sources):
        raise ValueError(f"give a weight to every source or to none; got {' '.join(map(str, sources))}")
    if any(not 0 < weight < float("inf") for weight in weights):
        raise ValueError(f"weights must be positive; got {', '.join(f'{weight:g}' for weight in weights)}")
    return tuple(names), tuple(weights)


def shares(weights: Sequence[float]) -> np.ndarray:
    """The rows of each source among `PERIOD_ROWS` rows, at least 1: `[sources]`, int64."""
    if len(weights) > PERIOD_ROWS:
        raise ValueError(f"at most {PERIOD_ROWS} sources can be mixed; got {len(weights)}")
    exact = np.asarray(weights) / np.sum(weights) * PERIOD_ROWS
    rows = np.maximum(1, np.floor(exact).astype(np.int64))
    while (missing := PERIOD_ROWS - rows.sum()) != 0:  # the largest remainders take what rounding has left
        sign = np.sign(missing)
        rows[np.argmax(np.where((sign > 0) | (rows > 1), (exact - rows) * sign, -np.inf))] += sign
    return rows


class Concatenated:
    """Arrays one after the other, without a copy: `len`, and slices of step 1."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.starts = np.cumsum([0, *(len(array) for array in arrays)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        first, last, _ = span.indices(len(self))
        parts = [
            array[max(first - start, 0) : max(last - start, 0)]
            for array, start in zip(self.arrays, self.starts[:-1].tolist(), strict=True)
        ]
        return np.concatenate(parts)


class MixedFiles(TokenFiles):
    """The token files of one split of several corpora, one after the other."""

    def __init__(self, parts: Sequence[TokenFiles], weights: Sequence[float]) -> None:
        super().__init__(parts[0].folder, parts[0].split, parts[0].dtype)
        self.parts, self.weights = tuple(parts), tuple(weights)

    @cached_property
    def tokens(self) -> Concatenated:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Concatenated([part.tokens for part in self.parts])

    @cached_property
    def offsets(self) -> np.ndarray:
        starts = self.tokens.starts[:-1].tolist()
        ends = [np.asarray(part.offsets[1:]) + start for part, start in zip(self.parts, starts, strict=True)]
        return np.concatenate([np.zeros(1, dtype=np.int64), *ends])

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "parts": self.parts, "weights": self.weights}


class MixedBatches(Batches):
    """Batches whose rows come from several sources. Of any `PERIOD_ROWS` rows in order, each source has its share.

    A source that has given all of its rows begins again, in another order. A source without a whole row of `context`
    tokens gives none, and the others share its weight.
    """

    files: MixedFiles

    @cached_property
    def _sources(self) -> tuple[np.ndarray, np.ndarray]:
        """The source of each row of a period, and how many rows of this source precede it: `[PERIOD_ROWS]` each."""
        weights = [
            weight if len(part.tokens) >= self.context else 0.0
            for part, weight in zip(self.files.parts, self.files.weights, strict=True)
        ]
        used = np.flatnonzero(weights)
        self._counts = np.zeros(len(weights), dtype=np.int64)
        self._counts[used] = shares([weights[i] for i in used])
        sources = np.repeat(np.arange(len(weights)), self._counts)
        before = np.concatenate([np.arange(count) for count in self._counts])
        order = np.argsort((before + 0.5) / self._counts[sources], kind="stable")  # evenly spread
        return sources[order], before[order]

    def starts(self, step: int) -> np.ndarray:
        sources, before = self._sources
        share = self.batch_size // self.world_size
        cycles, places = np.divmod(step * self.batch_size + self.rank * share + np.arange(share), PERIOD_ROWS)
        rows = cycles * self._counts[sources[places]] + before[places]
        pairs = zip(sources[places].tolist(), rows.tolist(), strict=True)
        return np.array([self._start(source, row) for source, row in pairs], dtype=np.int64)

    def _start(self, source: int, row: int) -> int:
        """The offset, among the tokens of all sources, of the row that source gives as its `row`-th."""
        total = len(self.files.parts[source].tokens)
        epoch, index = divmod(row, total // self.context)
        key = stream_seed(self.files.split, self.seed, epoch * len(self.files.parts) + source)
        shift = key % (total % self.context + 1)
        place = permuted(np.array([index]), total // self.context, key)[0]
        return int(self.files.tokens.starts[source]) + shift + int(place) * self.context
