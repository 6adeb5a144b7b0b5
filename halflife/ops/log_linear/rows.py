"""A call of log-linear attention with one row a sequence, and the levels of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise

import torch
from torch import Tensor

from halflife.ops.call import Call
from halflife.ops.chunked.decays import FLOOR
from halflife.ops.chunked.groups import each_head
from halflife.ops.spec import define
from halflife.precision import wide

define(
    "log_linear_attention", q="B T G K", k="B T G K", v="B T H V", g="B T H", weights="B T H L",
    state={"states": "N H L-1 K V", "position": "int N"}, log_decays=["g"],
)  # fmt: skip


def levels(i: Tensor, j: Tensor, last: int) -> Tensor:
    """The number of bits of `i xor j`, at most `last`, for whole numbers from 0."""
    differences = i ^ j
    return torch.bucketize(differences, 2 ** torch.arange(last, device=differences.device), right=True)


@dataclass(frozen=True)
class Rows:
    """A call with one row per sequence. Rows of packed sequences are padded to the longest with tokens without effect.

    The tensors are `[N, H, T, …]` in the dtype of the states (q and k: `[N, G, T, K]`), with T the longest length.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    weights: Tensor
    states: Tensor  # before the first token, `[N, H, L − 1, K, V]`
    position: Tensor  # of the first token, `[N]`
    lengths: Tensor  # the number of tokens `[N]`
    chunk: int  # tokens per chunk, a power of two
    index: Tensor | None  # for packed input, the place of each token in the flattened rows
    fresh: bool  # whether all sequences start here, from states of zeros

    @classmethod
    def of(cls, call: Call) -> Rows:
        states, position = call.first_states()
        tensors = [x.to(states.dtype) for x in call.tensors.values()]
        packing, length, index = call.packing, call.sizes["T"], None
        batch, lengths = packing.num_sequences, torch.full_like(position, length)
        if packing.cu_seqlens is not None:
            bounds = packing.cu_seqlens.to(position)
            lengths, longest = bounds.diff(), packing.longest
            starts = torch.arange(batch, device=bounds.device) * longest - bounds[:-1]
            index = torch.arange(length, device=bounds.device) + starts[packing.sequence]
            empty = [x.new_zeros(batch * longest, *x.shape[2:]) for x in tensors]
            tensors = [
                out.index_copy(0, index, x[0]).unflatten(0, (batch, longest))
                for out, x in zip(empty, tensors, strict=True)
            ]
        chunk = 1 << (max(1, min(call.chunk_size, tensors[0].shape[1])) - 1).bit_length()
        q, k, v, g, weights = (x.transpose(1, 2) for x in tensors)
        return cls(q, k, v, g, weights, states, position, lengths, chunk, index, call.state is None)

    def flat(self, o: Tensor) -> Tensor:
        """Undo `of` for outputs: `[N, H, T, V]` → `[B, T, H, V]`."""
        o = o.transpose(1, 2)
        return o if self.index is None else o.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    @property
    def last(self) -> int:
        """The index of the last level."""
        return self.weights.shape[-1] - 1

    def steps(self) -> Tensor:
        """The positions of the tokens `[N, T]`."""
        return self.position.unsqueeze(-1) + torch.arange(self.q.shape[2], device=self.q.device)

    def bucket_levels(self, t: Tensor) -> Tensor:
        """The levels at positions `t [N, …]` of the tokens in the L − 1 initial states, `[N, …, L − 1]`."""
        level = torch.arange(1, self.last + 1, device=t.device)
        first = (self.position.unsqueeze(-1) >> level) << level  # the first token of each state
        first[:, -1] = 0  # the last one holds the rest
        first = first.view(len(first), *[1] * (t.ndim - 1), -1)
        return torch.maximum(levels(t.unsqueeze(-1), first, self.last), level)  # never below its own


def by_rows(
    function: Callable[[Rows], tuple[Tensor, Tensor]],
) -> Callable[[Call], tuple[Tensor, tuple[Tensor, Tensor]]]:
    """An implementation on a call from one on its rows, `function(rows) → (o [N, H, T, V], states)`."""

    @wraps(function)
    def run(call: Call) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows = Rows.of(call)
        o, states = function(rows) if rows.q.numel() else (rows.v, rows.states)
        return rows.flat(o).mul(call.output_scale), (states, rows.position + rows.lengths)

    return run


def final_states(call: Call) -> tuple[Tensor, Tensor]:
    """The states `[N, H, L − 1, K, V]` after sequences that start from none, and their lengths `[N]`.

    The tokens of a state lie side by side. Each one-bit of the length is a state of that many tokens.
    """
    heads, count, dtype = call.sizes["H"], call.sizes["L"] - 1, torch.float32
    found = []
    for _, tokens in call.packing.pieces():
        k, v, g = (call[name][:, tokens].to(dtype).transpose(1, 2) for name in ("k", "v", "g"))
        total = wide(g).clamp(min=FLOOR[dtype]).cumsum(-1)
        v = v * (total[..., -1:] - total).to(dtype).exp().unsqueeze(-1)
        states = [_written(k[:, :, span], v[:, :, span], heads) for span in _spans(k.shape[2], count)]
        found.append(torch.stack(states, 2))
    return torch.cat(found), call.packing.lengths(call.device).long()


def _spans(length: int, count: int) -> list[slice]:
    """The tokens of each of `count` states after `length` tokens; the last state has those of all higher ones too."""
    starts = [*((length >> level) << level for level in range(count)), 0]
    return [slice(start, stop) for stop, start in pairwise(starts)]


def _written(k: Tensor, v: Tensor, heads: int) -> Tensor:
    """`Σ k vᵀ` of a head, `[N, H, K, V]`: `k [N, G, C, K]`, `v [N, H, C, V]`."""
    return each_head(k, heads).mT @ v
