"""Which tokens of a sequence a process has: pieces in the order of the ranks, of lengths that differ by 1 at most."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Piece(NamedTuple):
    """The piece of rank `rank` of `size`."""

    rank: int
    size: int

    def bounds(self, length: int) -> tuple[int, int]:
        """The first of `length` tokens that the piece has, and the one behind its last."""
        return self.rank * length // self.size, (self.rank + 1) * length // self.size

    def of(self, x: Tensor, dim: int = 1) -> Tensor:
        """The piece of a tensor with all tokens along `dim`, such as ids, or labels that are shifted already."""
        start, stop = self.bounds(x.shape[dim])
        return x.narrow(dim, start, stop - start)

    def boundaries(self, cu_seqlens: Tensor) -> Tensor:
        """The boundaries of packed sequences in the piece, `[N + 1]` → `[n + 1]`.

        The first sequence continues the last one of the piece before, and is empty where another begins with the piece.
        """
        start, stop = self.bounds(int(cu_seqlens[-1]))
        inside = cu_seqlens[(cu_seqlens >= start) & (cu_seqlens < stop)] - start
        begin, end = cu_seqlens.new_tensor([0]), cu_seqlens.new_tensor([stop - start])
        return torch.cat([*([begin] if self.rank else []), inside, end])


class Pieces(Dataset[dict[str, Tensor]]):
    """Micro-batches in pieces: item i is the piece i mod N of micro-batch i // N.

    Processes that take turns through the items so have the pieces of one micro-batch side by side.
    """

    def __init__(self, data: Dataset[dict[str, Tensor]], size: int) -> None:
        self.data, self.size = data, size

    def __len__(self) -> int:
        return self.size * len(self.data)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        number, rank = divmod(item, self.size)
        piece, batch = Piece(rank, self.size), self.data[number]
        return {n: piece.boundaries(x) if n == "cu_seqlens" else piece.of(x) for n, x in batch.items()}
