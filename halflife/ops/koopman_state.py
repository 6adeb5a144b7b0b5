"""What spectral Koopman attention remembers: its sums, the chunk that is not full yet, and how chunks are laid out.

A state is a dict of tensors, one row a sequence: `gram [N, H, R, R]`, `transition [N, H, R, R]`,
`values [N, H, P, R]`, `last [N, H, R]` (the last key) and `norm [N, H]` (the largest squared norm of a key): the
2r² + Pr + r + 1 numbers a head that are committed; and the tokens since the last full chunk, `pending_keys
[N, S − 1, H, R]`, `pending_values [N, S − 1, H, P]`, of which `pending [N]` are set.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from halflife.ops.recurrent import compute_dtype

KoopmanState = dict[str, Tensor]


class Sums(NamedTuple):
    """The statistics of some tokens: G, M, C and the largest squared norm, `[n, H, …]`."""

    gram: Tensor
    transition: Tensor
    values: Tensor
    norm: Tensor

    def after(self, state: KoopmanState) -> Sums:
        """These tokens and those that the state has committed."""
        own = (state[name] for name in self._fields)
        return Sums(
            *(
                torch.maximum(a, b) if name == "norm" else b + a
                for name, a, b in zip(self._fields, self, own, strict=True)
            )
        )

    def state(self, last: Tensor, before: KoopmanState, commit: bool = False) -> KoopmanState:
        """A state that has committed these; the pending tokens are those of `before`, or none if they are in."""
        new = {**dict(zip(self._fields, self, strict=True)), "last": last}
        kept = {name: before[name] for name in ("pending_keys", "pending_values", "pending")}
        return {**new, **({name: torch.zeros_like(x) for name, x in kept.items()} if commit else kept)}


def blank(k: Tensor, v: Tensor, sequences: int, chunk_size: int) -> KoopmanState:
    """The state before the first token."""
    heads, rank, width = k.shape[2], k.shape[3], v.shape[3]
    shapes = {
        "gram": (heads, rank, rank), "transition": (heads, rank, rank), "values": (heads, width, rank),
        "last": (heads, rank), "norm": (heads,), "pending_keys": (chunk_size - 1, heads, rank),
        "pending_values": (chunk_size - 1, heads, width),
    }  # fmt: skip
    state = {name: k.new_zeros(sequences, *shape, dtype=compute_dtype(k)) for name, shape in shapes.items()}
    return {**state, "pending": torch.zeros(sequences, dtype=torch.long, device=k.device)}


def checked(
    state: KoopmanState | None, tokens: tuple[Tensor, ...], cu_seqlens: Tensor | None, chunk_size: int
) -> KoopmanState:
    """The state in the compute dtype, a blank one for None.

    Raises:
        ValueError: a state of another op, number of sequences, head size or chunk size.
    """
    _, k, v = tokens
    sequences = k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    expected = blank(k, v, sequences, chunk_size)
    if state is None:
        return expected
    for name, x in expected.items():
        if name not in state or state[name].shape != x.shape:
            found = tuple(state[name].shape) if name in state else "nothing"
            raise ValueError(f"initial_state[{name!r}] must be {tuple(x.shape)}; got {found}")
    dtype = compute_dtype(k)
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in state.items()}


def sums(k: Tensor, v: Tensor, before: Tensor) -> Sums:
    """Statistics along axis 1 of `k, before [n, S, H, R]`, `v [n, S, H, P]`."""
    keys = k.permute(0, 2, 3, 1)
    rows = k.transpose(1, 2)
    norm = k.square().sum(-1)
    return Sums(
        keys @ rows, keys @ before.transpose(1, 2), v.permute(0, 2, 3, 1) @ rows,
        norm.amax(1) if k.shape[1] else norm.new_zeros(k.shape[0], k.shape[2]),
    )  # fmt: skip


def previous(k: Tensor, last: Tensor) -> Tensor:
    """The key before each of `k [N, T, H, R]`."""
    return torch.cat([last.unsqueeze(1), k], 1)[:, :-1]


def with_pending(k: Tensor, v: Tensor, mask: Tensor | None, state: KoopmanState) -> tuple[Tensor, Tensor]:
    """All tokens that are not committed, those pending first; rows must have equally many pending."""
    if mask is not None:
        k = k * mask[..., None, None].to(k.dtype)
    counts = state["pending"]
    pending = int(counts.max()) if len(counts) else 0
    if (counts != pending).any():
        raise ValueError("this mode takes states whose sequences have equally many tokens since their last chunk")
    return torch.cat([state["pending_keys"][:, :pending], k], 1), torch.cat(
        [state["pending_values"][:, :pending], v], 1
    )


class Layout:
    """Sequences as chunks `[n, S, H, …]`, one after the other, each sequence in chunks of its own.

    Args:
        k: keys `[B, T, H, R]`; state: with the pending tokens that come first; chunk_size: S.
    """

    def __init__(self, k: Tensor, state: KoopmanState, chunk_size: int, cu_seqlens: Tensor | None) -> None:
        self.size, self.shape, device = chunk_size, k.shape[:2], k.device
        batch, length = self.shape
        new = [length] * batch if cu_seqlens is None else cu_seqlens.diff().tolist()
        self.pending = state["pending"].tolist()
        self.total = [a + b for a, b in zip(self.pending, new, strict=True)]
        # One chunk at least, so that every sequence has an entering state to start from.
        self.chunks = [max(1, -(-tokens // chunk_size)) for tokens in self.total]
        self.starts = [0, *accumulate(self.chunks)]
        slots = [
            torch.arange(count, device=device) + start * chunk_size + waiting
            for count, start, waiting in zip(new, self.starts, self.pending, strict=False)
        ]
        empty = torch.zeros(0, dtype=torch.long, device=device)
        self.slots = torch.cat([*slots, empty])
        self.waiting = torch.cat(
            [torch.arange(n, device=device) + s * chunk_size for n, s in zip(self.pending, self.starts, strict=False)]
            + [empty]
        )

    def place(self, x: Tensor, pending: Tensor | None = None) -> Tensor:
        """`[B, T, …]` → `[n, S, …]`, zeros where there is no token."""
        flat = x.new_zeros(self.starts[-1] * self.size, *x.shape[2:]).index_copy(0, self.slots, x.flatten(0, 1))
        if pending is not None:
            rows = [row[:count] for row, count in zip(pending, self.pending, strict=True)]
            flat = flat.index_copy(0, self.waiting, torch.cat([*rows, x.new_zeros(0, *x.shape[2:])]))
        return flat.unflatten(0, (self.starts[-1], self.size))

    def take(self, y: Tensor) -> Tensor:
        """The inverse of `place`: `[n, S, …]` → `[B, T, …]`."""
        return y.flatten(0, 1).index_select(0, self.slots).unflatten(0, self.shape)

    def before(self, keys: Tensor, last: Tensor) -> Tensor:
        """The key before each of `keys [n, S, H, R]`, from the chunk before or the state."""
        flat = keys.flatten(0, 1)
        shifted = torch.cat([flat[:1], flat[:-1]])
        first = torch.tensor([start * self.size for start in self.starts[:-1]], device=keys.device, dtype=torch.long)
        return shifted.index_copy(0, first, last).unflatten(0, keys.shape[:2])

    def run(self, chunks: Sums, state: KoopmanState) -> tuple[Sums, Sums]:
        """Running sums: those entering each chunk `[n, …]`, those after each sequence's last full chunk `[N, …]`."""
        entering, leaving = [], []
        for name, x in zip(Sums._fields, chunks, strict=True):
            rows = x.split(self.chunks)
            upto = [
                torch.cummax(torch.cat([first[None], row]), 0).values if name == "norm"
                else torch.cat([first[None], row]).cumsum(0)
                for first, row in zip(state[name], rows, strict=True)
            ]  # fmt: skip
            entering.append(torch.cat([row[:-1] for row in upto]) if upto else x)
            full = [row[tokens // self.size] for row, tokens in zip(upto, self.total, strict=True)]
            leaving.append(torch.stack(full) if full else state[name])
        return Sums(*entering), Sums(*leaving)

    def longest(self, keys: Tensor, state: KoopmanState) -> Tensor:
        """The largest squared norm of each chunk's whole sequence, the future included: `[n, H]`."""
        norms = keys.square().sum(-1).amax(1).split(self.chunks)
        whole = [
            torch.maximum(row.amax(0), first).expand(len(row), -1)
            for row, first in zip(norms, state["norm"], strict=True)
        ]
        return torch.cat(whole) if whole else keys.new_zeros(0, keys.shape[2])

    def final(self, leaving: Sums, keys: Tensor, values: Tensor, state: KoopmanState) -> KoopmanState:
        """The state after the last token."""
        flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
        new = leaving.state(state["last"], state)
        rows: dict[str, list[Tensor]] = {"last": [], "pending_keys": [], "pending_values": []}
        for i, tokens in enumerate(self.total):
            start, whole = self.starts[i] * self.size, tokens // self.size * self.size
            rows["last"].append(flat_keys[start + whole - 1] if whole else state["last"][i])
            for name, x in (("pending_keys", flat_keys), ("pending_values", flat_values)):
                left = x[start + whole : start + tokens]
                rows[name].append(torch.cat([left, torch.zeros_like(state[name][i, len(left) :])]))
        new |= {name: torch.stack(x) for name, x in rows.items() if x}
        left = [tokens % self.size for tokens in self.total]
        return {**new, "pending": torch.tensor(left, dtype=torch.long, device=keys.device)}


# ------------------------------------------------------------------------------------- token by token


def factorise(state: KoopmanState, ridge: float, cholesky: Callable[[Tensor], Tensor]) -> Tensor:
    """The Cholesky factor of `G / m² + ε I`, `[N, H, R, R]`."""
    gram = state["gram"]
    unit = torch.where(state["norm"] > 0, state["norm"], 1.0)[..., None, None]
    return cholesky(gram / unit + ridge * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))


def add_token(
    k: Tensor, v: Tensor, state: KoopmanState, factor: Tensor, ridge: float, cholesky: Callable[[Tensor], Tensor]
) -> KoopmanState:
    """The state after one more token `k [N, H, R]`, `v [N, H, P]`, with its factor.

    The factor follows by a rank-one update; where the largest norm grows, the unit changes and it is made anew.
    """
    size = k.square().sum(-1)
    grown = size > state["norm"]
    new = {
        **state,
        "gram": state["gram"] + k.unsqueeze(-1) * k.unsqueeze(-2),
        "transition": state["transition"] + k.unsqueeze(-1) * state["last"].unsqueeze(-2),
        "values": state["values"] + v.unsqueeze(-1) * k.unsqueeze(-2),
        "last": k,
        "norm": torch.maximum(size, state["norm"]),
    }
    if grown.all():
        return {**new, "factor": factorise(new, ridge, cholesky)}
    unit = torch.where(new["norm"] > 0, new["norm"], 1.0)
    updated = rank_one(factor, k / unit.sqrt().unsqueeze(-1))
    if grown.any():
        updated = torch.where(grown[..., None, None], factorise(new, ridge, cholesky), updated)
    return {**new, "factor": updated}


def rank_one(factor: Tensor, z: Tensor) -> Tensor:
    """The Cholesky factor of `L Lᵀ + z zᵀ`, `[…, R, R]` and `[…, R]`, in O(r²) without a loop over columns.

    With `w = L⁻¹ z`, `L Lᵀ + z zᵀ = L (I + w wᵀ) Lᵀ`, and `I + w wᵀ` has the factor with diagonal
    `√(s_j / s_{j−1})` and entries `w_i w_j / √(s_j s_{j−1})` below, `s_j = 1 + Σ_{i ≤ j} w_i²`: column j of the product
    is L's column times the diagonal plus a multiple of `Σ_{i > j} w_i L_i`, a running sum over columns.
    """
    w = torch.linalg.solve_triangular(factor, z.unsqueeze(-1), upper=False).squeeze(-1)
    after = 1 + w.square().cumsum(-1)
    before = after - w.square()
    scaled = factor * w.unsqueeze(-2)
    later = scaled.sum(-1, keepdim=True) - scaled.cumsum(-1)
    diagonal, below = (after / before).sqrt(), w / (after * before).sqrt()
    return (factor * diagonal.unsqueeze(-2) + later * below.unsqueeze(-2)).tril()
