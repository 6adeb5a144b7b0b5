"""The memory lens of one model on one text: the half-life of every head, and all numbers of chosen heads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halflife.analysis.foreign.model import ForeignModel
from halflife.analysis.look.foreign import observe_foreign
from halflife.analysis.look.observe import Place, Take, observe
from halflife.analysis.look.readings import Reading
from halflife.analysis.readable import Progress, Readable, ignore

FOLLOWED = 64  # writes whose fading gives the half-life of a head
MOST_CURSORS = 256  # positions at which what is left is computed, unless more are asked for


@dataclass(frozen=True)
class Head:
    """One head of a model, and how long it remembers this text."""

    place: Place  # the layer
    head: int  # its index, from 0
    kind: str  # the op, as "delta_rule", or "attention"
    # tokens after which half of a write is left, the median over writes of the first half of the text. It is infinite
    # if it lies beyond the other half. Of several documents, these are the halves of each.
    half_life: float
    beyond: int  # the tokens beyond which a half-life lies that is infinite
    kept: float  # the mean share of these writes that is left at the end of the text
    stored: tuple[int, int]  # the bytes that the head stores of a text, and those that it stores for each token

    def __str__(self) -> str:
        return f"{self.place}, head {self.head}"


@dataclass(frozen=True)
class Measured:
    """An array with what it means."""

    values: np.ndarray  # the numbers
    name: str  # what they are
    unit: str  # their unit; "1" for numbers without one
    axes: tuple[str, ...]  # what each axis is

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype) if copy else np.asarray(self.values, dtype=dtype)

    def __repr__(self) -> str:
        sizes = " × ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.values.shape, strict=True))
        unit = "" if self.unit == "1" else f" in {self.unit}"
        ends = f", {self.values.min():.3g} to {self.values.max():.3g}" if self.values.size else ""
        return f"{self.name}{unit}: {sizes}{ends}"


@dataclass(frozen=True)
class HeadLens:
    """All numbers of one head."""

    head: Head  # the head
    cursors: np.ndarray  # the positions at which what is left is known, `[C]`
    left: Measured  # the share of each token's write that is left after each cursor, `[C, T]`; 0 before it is written
    # the share that the decay alone would have left, `[C, T]`. Less is left where other tokens overwrote it.
    faded: Measured
    weights: Measured  # the weight with which token t reads the value of token j, `[t, j]` of `[T, T]`
    sizes: Measured  # the norm of each token's value, `[T]`
    resets: np.ndarray | None  # the tokens at which the head resets, or None if it has no resets

    def shares(self) -> np.ndarray:
        """The share of each earlier token in what a token reads, `|w| ‖v‖` over the sum of all: `[T, T]`."""
        parts = np.abs(self.weights.values) * self.sizes.values
        return parts / np.maximum(parts.sum(1, keepdims=True), 1e-30)


@dataclass(frozen=True)
class Lens:
    """What a model remembers of one text."""

    model: Readable  # the model, which reads the text again when the numbers of a head are asked for
    ids: Tensor  # the tokens, `[T]`
    documents: tuple[int, ...]  # the number of tokens of each document; a model begins each without memory
    heads: tuple[Head, ...]  # all heads that are read
    refused: dict[Place, str]  # the reason why a layer is not shown, by its place

    def find(self, layer: int, head: int, part: str = "") -> Head:
        """The head with these numbers; a ValueError if there is none."""
        for one in self.heads:
            if (one.place, one.head) == (Place(layer, part), head):
                return one
        reason = self.refused.get(Place(layer, part))
        raise ValueError(f"{Place(layer, part)}, head {head} is not shown: {reason or 'the model has no such head'}")

    def __getitem__(self, key: tuple[int, int]) -> HeadLens:
        return next(self.details([self.find(*key)]))

    def ranked(self) -> list[Head]:
        """All heads, the slowest first."""
        return sorted(self.heads, key=lambda one: (-one.half_life, -one.kept))

    def details(self, heads: Sequence[Head], cursors: int = MOST_CURSORS) -> Iterator[HeadLens]:
        """Read the text again, and yield the numbers of heads, layer by layer, also at the ends of documents.

        One head at a time needs memory for two matrices of T × T.
        """
        wanted: dict[Place, list[Head]] = {}
        for head in heads:
            wanted.setdefault(head.place, []).append(head)
        readings: dict[Place, list[Reading]] = {place: [] for place in wanted}

        def keep(place: Place, reading: Reading) -> None:
            if place in wanted:
                readings[place].append(reading.of([one.head for one in wanted[place]]))

        for ids in self.ids.split(self.documents):
            _observe(self.model, ids, keep)
        ends = np.cumsum(self.documents) - 1
        at = np.union1d(grid(len(self.ids), cursors), ends)
        for place in sorted(wanted):
            for index, head in enumerate(wanted[place]):
                yield _detail(head, [one.of([index]) for one in readings[place]], at)


def look(model: Readable, ids: Tensor, *, documents: Sequence[int] | None = None, progress: Progress = ignore) -> Lens:
    """Let a model read a text, and measure how long each of its heads remembers it.

    Args:
        model: a language model of halflife, or one of transformers (`foreign.load_for_lens`).
        ids: the tokens, `[T]` or `[1, T]`.
        documents: the number of tokens of each document in the text. None is a single one.
        progress: is called with 1 for each layer of each document that is read.
    """
    ids = ids.reshape(-1).cpu()
    lengths = (len(ids),) if documents is None else tuple(documents)
    if not len(ids) or sum(lengths) != len(ids) or min(lengths) < 1:
        raise ValueError(f"documents of {lengths} tokens do not make up a text of {len(ids)}")
    found: dict[Place, list[tuple[Tensor, Tensor, Tensor]]] = {}
    kinds: dict[Place, tuple[str, tuple[int, int]]] = {}
    refused: dict[Place, str] = {}

    def measure(place: Place, reading: Reading) -> None:
        if not reading.sizes.isfinite().all():
            refused[place] = "its values are no numbers, as after a training that diverged"
            return
        kinds[place] = reading.kind, reading.stored
        lives, kept = fading(reading)
        found.setdefault(place, []).append((lives, torch.where(lives.isinf(), reading.tokens // 2, lives), kept))
        progress(1)

    for part in ids.split(lengths):
        refused |= _observe(model, part, measure)
    if not found:
        raise ValueError(f"no layer can be shown: {'; '.join(f'{k}: {v}' for k, v in refused.items())}")
    heads = []
    for place, parts in sorted(found.items()):
        lives, least, kept = (torch.cat(columns, 1) for columns in zip(*parts, strict=True))
        kind, stored = kinds[place]
        columns = lives.median(1).values, least.median(1).values.int(), kept.mean(1)
        for h, (life, beyond, left) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            heads.append(Head(place, h, kind, life, beyond, left, stored))
    return Lens(model, ids, lengths, tuple(heads), refused)


def _observe(model: Readable, ids: Tensor, take: Take) -> dict[Place, str]:
    if isinstance(model, ForeignModel):
        return observe_foreign(model, ids, take)
    return observe(model, ids, take)


def grid(tokens: int, most: int) -> np.ndarray:
    """At most `most` positions, evenly spread from the first to the last of `tokens`."""
    return np.unique(np.linspace(0, tokens - 1, min(tokens, most)).round().astype(int))


def fading(reading: Reading) -> tuple[Tensor, Tensor]:
    """The half-lives of some writes of each head `[H, n]`, in tokens, and the shares left at the end `[H, n]`.

    Between two cursors, the logarithm of what is left is interpolated.
    """
    tokens = reading.tokens
    columns = torch.from_numpy(grid(max(1, tokens // 2), FOLLOWED))
    cursors = torch.from_numpy(grid(tokens, MOST_CURSORS))
    left = reading.left(*(x.to(reading.sizes.device) for x in (columns, cursors))).double().cpu()
    return half_lives(left, cursors.unsqueeze(-1) - columns), left[:, -1]


def half_lives(left: Tensor, age: Tensor) -> Tensor:
    """The age at which half of each write is left, `[H, n]`, or infinity.

    Args:
        left: what is left of n writes at ascending cursors, `[H, C, n]`. All of a write is left at age 0.
        age: the age of each write at each cursor, `[C, n]`.
    """
    after = (age > 0) & (left < 0.5)
    first = after.byte().argmax(1, keepdim=True)
    before = (first - 1).clamp(min=0)
    ages = age.double().expand_as(left)
    known = ages.gather(1, before) > 0
    start = torch.where(known, ages.gather(1, before), 0.0)
    high = torch.where(known, left.gather(1, before), 1.0).log()
    low = left.gather(1, first).clamp(min=1e-30).log()
    share = (high + math.log(2)) / (high - low)
    lives = start + (ages.gather(1, first) - start) * share
    return torch.where(after.any(1, keepdim=True), lives, math.inf).squeeze(1)


@torch.no_grad()
def _detail(head: Head, readings: Sequence[Reading], cursors: np.ndarray) -> HeadLens:
    """The numbers of one head, whose documents are blocks on the diagonal."""
    tokens = sum(one.tokens for one in readings)
    weights = np.zeros((tokens, tokens), dtype=np.float32)
    left, faded = np.zeros((2, len(cursors), tokens), dtype=np.float32)
    sizes, resets, first = [], [], 0
    for one in readings:
        last = first + one.tokens
        weights[first:last, first:last] = one.weights()[0].cpu().numpy()
        rows = np.flatnonzero((cursors >= first) & (cursors < last))
        at = torch.from_numpy(cursors[rows] - first).to(one.sizes.device)
        columns = torch.arange(one.tokens, device=one.sizes.device)
        if len(rows):
            left[rows, first:last] = one.left(columns, at)[0].cpu().numpy()
            faded[rows, first:last] = one.faded(columns, at)[0].cpu().numpy()
        sizes.append(one.sizes[0].float().cpu().numpy())
        resets.append(np.zeros(one.tokens, bool) if one.resets is None else one.resets[0].cpu().numpy())
        first = last
    axes = ("cursor", "token")
    return HeadLens(
        head, cursors, Measured(left, "share of the write that is left", "1", axes),
        Measured(faded, "share that the decay alone would leave", "1", axes),
        Measured(weights, "weight of what is read", "1", ("token that reads", "token that is read")),
        Measured(np.concatenate(sizes), "norm of the value", "1", ("token",)),
        np.concatenate(resets) if readings[0].resets is not None else None,
    )  # fmt: skip
