"""Batches of a tokenised split. A batch is a function of its step, so only a memory map of the tokens is held."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from halflife.registry import check_choice
from halflife.tasks import IGNORED, stream_seed

MODES = ("packed", "concatenated", "continued")
FEISTEL_ROUNDS = 8  # of the Feistel network in `permuted`


class TokenFiles:
    """The tokens of a split and the offsets of its documents, memory-mapped at the first access.

    `folder` is that of the cache, see `halflife.data.store`. With `documents`, only as many first ones are meant.
    """

    def __init__(self, folder: Path, split: str, dtype: str, documents: int | None = None) -> None:
        self.folder, self.split, self.dtype, self.documents = folder, split, dtype, documents

    @cached_property
    def tokens(self) -> np.ndarray:
        """`[tokens]`, unsigned integers."""
        tokens = self._map("tokens", self.dtype)
        return tokens if self.documents is None else tokens[: int(self.offsets[-1])]

    @cached_property
    def offsets(self) -> np.ndarray:
        """`[documents + 1]`, int64: the start of each document, and the end of the last one."""
        return self._map("offsets", "int64")[: None if self.documents is None else self.documents + 1]

    def _map(self, name: str, dtype: str) -> np.ndarray:
        path = self.folder / f"{self.split}.{name}"
        empty = not path.stat().st_size  # which cannot be mapped
        return np.empty(0, dtype=dtype) if empty else np.memmap(path, dtype=dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        """The state without the memory maps; a worker process opens its own."""
        return {name: getattr(self, name) for name in ("folder", "split", "dtype", "documents")}


class Batches(Dataset[dict[str, Tensor]]):
    """Batches of rows of `context` tokens. Item i is the batch of step i, a pure function of the settings and i.

    An epoch cuts the tokens of the split into rows and reads each row once, in an order that depends on the seed and
    the epoch. Tokens that do not fill a batch are left out; they differ between epochs. The label of a token is the
    next token, also at the end of a row.

    - "packed": `input_ids` and `labels` `[1, batch_size·context]`, and `cu_seqlens` `[N + 1]`, int32. A sequence starts
      at each row and at each document, so that no state, convolution or position crosses these boundaries. The last
      token of a document has no label (−100).
    - "concatenated": `input_ids` and `labels` `[batch_size, context]`. Documents follow each other without a boundary,
      and the first token of a document is predicted from the document before.
    - "continued": the same, and row b of a step goes on where row b of the step before ended. An epoch reads
      `batch_size` streams from their beginnings. `part` holds the number of the rank, `world_size`, and whether the
      rows are the first ones of an epoch (int64).

    Args:
        files: the token files of the split.
        batch_size: rows of a batch, over all ranks.
        context: tokens of a row.
        seed: determines the order of the rows.
        mode: "packed", "concatenated" or "continued".
        rank, world_size: the part of each batch that is returned. The parts of all ranks, in order, form the batch.
        steps: number of batches; None for one epoch.
    """

    def __init__(
        self, files: TokenFiles, batch_size: int, context: int, seed: int = 0, mode: str = "packed",
        rank: int = 0, world_size: int = 1, steps: int | None = None,
    ) -> None:  # fmt: skip
        check_choice("mode", mode, MODES)
        for name, value in (("batch_size", batch_size), ("context", context), ("world_size", world_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}); got {rank}")
        if batch_size % world_size:
            raise ValueError(f"batch_size {batch_size} cannot be shared equally by {world_size} processes")
        if steps is not None and steps < 0:
            raise ValueError(f"steps must be 0 or more; got {steps}")
        self.files, self.batch_size, self.context, self.seed, self.mode = files, batch_size, context, seed, mode
        self.rank, self.world_size = rank, world_size
        self.total = len(files.tokens)
        self.rows = self.total // context
        self.steps_per_epoch = self.rows // batch_size
        if not self.steps_per_epoch:
            raise ValueError(
                f"the {files.split} split has {self.total} tokens, fewer than a batch of {batch_size} x {context}"
            )
        self.steps = self.steps_per_epoch if steps is None else steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        starts = self.starts(step)
        ids, labels = self._rows(starts)
        if self.mode != "packed":
            rows = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
            begins = int(step % self.steps_per_epoch == 0)
            part = {"part": torch.tensor([self.rank, self.world_size, begins])} if self.mode == "continued" else {}
            return rows | part
        bounds = self._mask_boundaries(starts, labels)
        return {
            "input_ids": torch.from_numpy(ids).view(1, -1),
            "labels": torch.from_numpy(labels).view(1, -1),
            "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
        }

    def starts(self, step: int) -> np.ndarray:
        """The offsets of this rank's rows among the tokens: `[batch_size / world_size]`."""
        epoch, turn = divmod(step, self.steps_per_epoch)
        key = stream_seed(self.files.split, self.seed, epoch)
        share = self.batch_size // self.world_size
        index = turn * self.batch_size + self.rank * share + np.arange(share)
        shift = key % (self.total % self.context + 1)  # so that the tokens after the last row are read in other epochs
        if self.mode == "continued":
            streams = self.rank * share + np.arange(share)
            return shift + (streams * self.steps_per_epoch + turn) * self.context
        return shift + permuted(index, self.rows, key) * self.context

    def _rows(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and labels `[rows, context]`, int64."""
        tokens, context = self.files.tokens, self.context
        ids = np.empty((len(starts), context + 1), dtype=np.int64)
        for row, start in enumerate(starts.tolist()):
            span = tokens[start : start + context + 1]
            ids[row, : len(span)] = span
            ids[row, len(span) :] = IGNORED  # the last token of the split has no next token
        return ids[:, :-1].copy(), ids[:, 1:].copy()  # without copies, the two would share memory

    def _mask_boundaries(self, starts: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Remove the labels that cross documents, in place; return the boundaries of the sequences, `[N + 1]`."""
        offsets, context, bounds = self.files.offsets, self.context, []
        first, last = (np.searchsorted(offsets, starts + n, side="right") for n in (0, context))
        for row, start in enumerate(starts.tolist()):
            ends = np.asarray(offsets[first[row] : last[row]]) - start  # ends of documents, in (0, context]
            labels[row, ends - 1] = IGNORED
            bounds.append(np.concatenate([[0], ends[ends < context]]) + row * context)
        return np.concatenate([*bounds, [labels.size]])


def permuted(index: np.ndarray, count: int, key: int) -> np.ndarray:
    """Apply the pseudo-random permutation `key` of range(count) to indices `[n]`, without storing the permutation.

    A Feistel network permutes the numbers of 2n bits, with the smallest n that covers `count`. It is applied again
    until the value is inside the range, on average fewer than four times (Black & Rogaway 2002).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = _splitmix(np.uint64(key) + np.arange(1, FEISTEL_ROUNDS + 1, dtype=np.uint64))
    values = index.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> shift, values[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_splitmix(right + round_key) & mask)
        values[outside] = (left << shift) | right
        outside = values >= count
    return values.astype(np.int64)


def _splitmix(x: np.ndarray) -> np.ndarray:
    """The mixing function of SplitMix64 on `[n]` uint64 (Steele, Lea & Flood 2014)."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
