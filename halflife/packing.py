"""Where the sequences of a batch lie: one in each row, or all packed into one row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class Packing:
    """The sequences of tokens `[B, T]`: B rows of T tokens, or N sequences packed along T in a single row.

    A model makes it once in a forward pass and passes it down in the place of `cu_seqlens`. The boundaries are then
    checked once. They are read from their device once, by an implementation that needs them as numbers. A packing that
    was made on the host and is then sent `to` a device knows the numbers, so nothing waits for that device.

    Attributes:
        batch, length: B and T.
        cu_seqlens: boundaries `[N + 1]` of packed sequences, from 0 to T, or None for rows.
        num_sequences: N, which is B for rows.
        kept: what layers share, such as positions: computed by the first layer.
    """

    def __init__(self, batch: int, length: int, cu_seqlens: Tensor | None = None, longest: int | None = None) -> None:
        self.batch, self.length, self.cu_seqlens = batch, length, cu_seqlens
        self.num_sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self._bounds: list[int] | None = None
        self._longest = longest
        self._sequence: Tensor | None = None
        self.kept: dict[Any, Any] = {}

    @classmethod
    def of(cls, packed: Any, batch: int, length: int) -> Packing:
        """Return the packing of tokens `[batch, length]` from boundaries `[N + 1]`, None (rows) or a `Packing`.

        A `Packing` has been checked before, and it is returned itself.

        Raises:
            TypeError: `packed` is no tensor of integers, None or `Packing`.
            ValueError: the boundaries do not rise from 0 to `length`, or `batch` is not 1; or the `Packing` is one of
                other tokens. An accelerator, and compiled code, assert the first of these where they run.
        """
        if isinstance(packed, Packing):
            if (packed.batch, packed.length) != (batch, length):
                raise ValueError(f"this {packed} is not for tokens [{batch}, {length}]")
            return packed
        if packed is None:
            return cls(batch, length)
        if batch != 1:
            raise ValueError(f"packed input (cu_seqlens) has batch size 1, one row of all tokens; got {batch}")
        check_integers("cu_seqlens", packed)
        if packed.ndim != 1 or packed.numel() < 1:
            raise ValueError("cu_seqlens must be integers [N + 1]: the cumulative lengths, starting with 0")
        if packed.dtype not in (torch.int32, torch.int64):  # in which torch has no operation, or products overflow
            packed = packed.long()
        packing = cls(batch, length, packed)
        if packed.device.type != "cpu" or torch.compiler.is_compiling():  # no host waits, and a graph has no values
            right = (packed[0] == 0) & (packed[-1] == length) & (packed.diff() >= 0).all()
            torch.ops.aten._assert_async.msg(right, "cu_seqlens must rise from 0 to T")
            return packing
        bounds = packing.bounds
        if bounds[0] != 0 or bounds[-1] != length or any(b < a for a, b in pairwise(bounds)):
            raise ValueError(f"cu_seqlens must rise from 0 to T = {length}; got {bounds}")
        return packing

    def to(self, device: torch.device | str | int, non_blocking: bool = True) -> Packing:
        """This packing with its boundaries on `device`, as accelerate asks for."""
        if self.cu_seqlens is None or self.cu_seqlens.device == torch.device(device):
            return self
        return self._with(self.cu_seqlens.to(device, non_blocking=non_blocking))

    def pin_memory(self, *device: Any) -> Packing:
        """This packing with its boundaries in pinned memory, as a `DataLoader` asks for."""
        assert self.cu_seqlens is not None
        return self._with(self.cu_seqlens.pin_memory(*device))

    def _with(self, cu_seqlens: Tensor) -> Packing:
        same = Packing(self.batch, self.length, cu_seqlens, self._longest)
        same._bounds = self._bounds
        return same

    def __repr__(self) -> str:
        if self.cu_seqlens is None:
            return f"Packing of {self.batch} rows of {self.length} tokens"
        return f"Packing of {self.num_sequences} sequences in {self.length} tokens"

    @property
    def is_known(self) -> bool:
        """Whether the host knows the lengths of the sequences, so that it can have them as numbers without a wait."""
        return self.cu_seqlens is None or self._bounds is not None

    @property
    def bounds(self) -> list[int]:
        """The boundaries of packed sequences as numbers, which are read from the device at the first use."""
        if self._bounds is None:
            assert self.cu_seqlens is not None, "rows have no boundaries"
            self._bounds = self.cu_seqlens.tolist()
        return self._bounds

    @property
    def counts(self) -> list[int]:
        """The number of tokens of each sequence, as numbers."""
        if self.cu_seqlens is None:
            return [self.length] * self.batch
        return [b - a for a, b in pairwise(self.bounds)]

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence, 0 where there is none."""
        if self._longest is None:
            self._longest = self.length if self.cu_seqlens is None else max(self.counts, default=0)
        return self._longest

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """Yield `(rows of the state, tokens)` of each independent part: all rows together, or one packed sequence."""
        if self.cu_seqlens is None:
            yield slice(None), slice(0, self.length)
            return
        for row, (start, stop) in enumerate(pairwise(self.bounds)):
            yield slice(row, row + 1), slice(start, stop)

    def lengths(self, device: torch.device) -> Tensor:
        """The number of tokens of each sequence: `[N]`."""
        return self.ends(None, device)

    @property
    def sequence(self) -> Tensor:
        """The sequence to which each packed token belongs: `[T]`."""
        if self._sequence is None:
            assert self.cu_seqlens is not None, "rows are not packed"
            numbers = torch.arange(self.num_sequences, device=self.cu_seqlens.device)
            self._sequence = numbers.repeat_interleave(self.cu_seqlens.diff(), output_size=self.length)
        return self._sequence

    def positions(self, start: Tensor | None, device: torch.device) -> Tensor:
        """The positions of the tokens, from 1, `[T]` or `[B, T]`; each packed sequence has its own positions.

        They continue from `start [N]`, the number of tokens that each sequence has seen (None: 0).
        """
        known = self.kept.get(device)
        if known is not None and known[0] is start:
            return known[1]
        count = torch.arange(1, self.length + 1, device=device)
        if self.cu_seqlens is not None:
            offset = -self.cu_seqlens[:-1] if start is None else start - self.cu_seqlens[:-1]
            count = (count + offset[self.sequence]).unsqueeze(0)
        elif start is not None:
            count = count + start.unsqueeze(1)
        self.kept[device] = start, count
        return count

    def ends(self, start: Tensor | None, device: torch.device) -> Tensor:
        """The number of tokens `[N]` that each sequence has seen after these, where it had seen `start [N]` before.

        Layers with one tensor `start` get one tensor, so that they go on sharing.
        """
        known = self.kept.get("ends")
        if known is not None and known[0] is start and known[1].device == device:
            return known[1]
        if self.cu_seqlens is None:
            ends = torch.full((self.batch,), self.length, device=device)
        else:
            ends = self.cu_seqlens.diff()
        ends = ends if start is None else ends + start
        self.kept["ends"] = start, ends
        return ends

    def delay(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the entry before each entry of `x [B, T, …]`, and the last entry of each sequence `[N, …]`.

        `first [N, …]` (None: zeros) stands before the first entry of each sequence. For an empty sequence it is also
        the last entry.
        """
        first = x.new_zeros(self.num_sequences, *x.shape[2:]) if first is None else first.to(x.dtype)
        if self.cu_seqlens is None:
            joined = torch.cat([first.unsqueeze(1), x], 1)
            return joined[:, :-1], joined[:, -1]
        token = torch.arange(self.length, device=x.device)
        row = self.length + torch.arange(len(first), device=x.device)  # the row of `first` in `joined` below
        before = torch.where(token == self.cu_seqlens[self.sequence], row[self.sequence], token - 1)
        last = torch.where(self.cu_seqlens.diff() > 0, self.cu_seqlens[1:] - 1, row)
        joined = torch.cat([x[0], first])
        return joined.index_select(0, before).unsqueeze(0), joined.index_select(0, last)

    def repeated(self, times: int) -> Packing:
        """The packing of tokens that stand for `times` tokens each."""
        cu_seqlens = None if self.cu_seqlens is None else times * self.cu_seqlens
        return Packing(self.batch, times * self.length, cu_seqlens)


def check_integers(name: str, x: Any) -> None:
    """Check that `x` is a tensor of integers.

    Raises:
        TypeError: it is no tensor.
        ValueError: its dtype is no integer dtype.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of integers; got {type(x).__name__}")
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"{name} must be integers; got {x.dtype}")
