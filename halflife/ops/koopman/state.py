"""The state of spectral Koopman attention: the sums of all full chunks, and the tokens of the chunk that is not full.

Users, sessions and checkpoints see a state as a dict of tensors with one row a sequence:

| name | shape | meaning |
|---|---|---|
| `gram`, `transition`, `values` | `[N, H, R, R]`, `[N, H, R, R]`, `[N, H, P, R]` | the sums G, M and C |
| `norm` | `[N, H]` | m²: the largest squared norm of a key, or tr G under `normalization="trace"` |
| `last` | `[N, H, R]` | the last key of the full chunks |
| `pending_keys`, `pending_values` | `[N, S − 1, H, R]`, `[N, S − 1, H, P]` | tokens since the last full chunk of S |
| `pending` | `[N]` | how many of these there are |
| `inverse` | `[N, H, R, R]` | L⁻ᵀ of the operator, after single tokens under `refresh="token"` only |

The first five hold 2r² + Pr + r + 1 numbers a head. `inverse` follows from them; it saves the next token that work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halflife.precision import compute_dtype

KoopmanState = dict[str, Tensor]


class Sums(NamedTuple):
    """The sums over some tokens.

    Attributes:
        gram: `G = Σ z zᵀ`, `[n, H, R, R]`.
        transition: `M = Σ z_t z_{t−1}ᵀ`, `[n, H, R, R]`.
        values: `C = Σ v zᵀ`, `[n, H, P, R]`.
        norm: m², the largest squared norm of a key or the trace of G, `[n, H]`.
    """

    gram: Tensor
    transition: Tensor
    values: Tensor
    norm: Tensor

    def after(self, earlier: Sums) -> Sums:
        """The sums over these tokens and earlier ones."""
        return Sums(
            earlier.gram + self.gram,
            earlier.transition + self.transition,
            earlier.values + self.values,
            torch.maximum(self.norm, earlier.norm),
        )

    def normalized(self, normalization: str, frozen: Tensor) -> Sums:
        """These sums with the m² of a normalisation: `frozen` under "paper", tr G under "trace", else the largest."""
        if normalization == "trace":
            return self._replace(norm=self.gram.diagonal(dim1=-2, dim2=-1).sum(-1))
        return self._replace(norm=frozen) if normalization == "paper" else self


class KoopmanMemory(NamedTuple):
    """A state with typed fields; the table of the module describes them."""

    sums: Sums
    last: Tensor
    pending_keys: Tensor
    pending_values: Tensor
    pending: Tensor
    inverse: Tensor | None = None

    def to_state(self) -> KoopmanState:
        """The state as users see it."""
        sums, *_, inverse = self
        state = {**sums._asdict(), **{name: getattr(self, name) for name in self._fields[1:-1]}}
        return state if inverse is None else {**state, "inverse": inverse}

    @classmethod
    def from_state(cls, state: KoopmanState) -> KoopmanMemory:
        """The inverse of `to_state`."""
        return cls(
            Sums(*(state[name] for name in Sums._fields)),
            *(state[name] for name in cls._fields[1:-1]),
            inverse=state.get("inverse"),
        )

    def full_chunks(self, sums: Sums, last: Tensor) -> KoopmanMemory:
        """This memory with other sums and another last key; the pending tokens stay."""
        return KoopmanMemory(sums, last, *self[2:-1])

    def without_pending(self) -> KoopmanMemory:
        """This memory without pending tokens."""
        return KoopmanMemory(*self[:2], *(torch.zeros_like(x) for x in self[2:-1]))


COMMITTED = (*Sums._fields, "last")  # the entries of a state that describe its full chunks


def blank(k: Tensor, v: Tensor, sequences: int, chunk_size: int) -> KoopmanMemory:
    """The memory before the first token."""
    shapes, dtype = _shapes(k, v, sequences, chunk_size), compute_dtype(k)
    return KoopmanMemory.from_state(
        {name: k.new_zeros(shape, dtype=torch.long if name == "pending" else dtype) for name, shape in shapes.items()}
    )


def _shapes(k: Tensor, v: Tensor, sequences: int, chunk_size: int) -> dict[str, tuple[int, ...]]:
    heads, rank, width = k.shape[2], k.shape[3], v.shape[3]
    shapes = {
        "gram": (heads, rank, rank), "transition": (heads, rank, rank), "values": (heads, width, rank),
        "last": (heads, rank), "norm": (heads,), "pending_keys": (chunk_size - 1, heads, rank),
        "pending_values": (chunk_size - 1, heads, width), "pending": (),
    }  # fmt: skip
    return {name: (sequences, *shape) for name, shape in shapes.items()}


def initial_memory(state: KoopmanState | None, k: Tensor, v: Tensor, sequences: int, chunk_size: int) -> KoopmanMemory:
    """A user's state as a memory in the compute dtype; None means a blank one.

    Raises:
        ValueError: the state is of another op, number of sequences, head size or chunk size.
    """
    if state is None:
        return blank(k, v, sequences, chunk_size)
    for name, shape in _shapes(k, v, sequences, chunk_size).items():
        if name not in state or state[name].shape != shape:
            got = tuple(state[name].shape) if name in state else "nothing"
            raise ValueError(f"initial_state[{name!r}] must be {shape}; got {got}")
    dtype = compute_dtype(k)
    return KoopmanMemory.from_state({name: x.to(dtype) if x.is_floating_point() else x for name, x in state.items()})


def convert_state(state: KoopmanState, chunk_size: int, normalization: str = "causal") -> KoopmanState:
    """Return a state for operators of `chunk_size` tokens (1 for `refresh="token"`), from one for any other number.

    `normalization` is that of the op. If the numbers differ, the tokens that wait for their chunk enter the sums, and
    the next token begins a chunk.
    """
    if state["pending_keys"].shape[1] == chunk_size - 1:
        return state
    memory = KoopmanMemory.from_state(state)
    keys, values, counts = memory.pending_keys, memory.pending_values, memory.pending
    # Slots behind the pending tokens hold zeros, which change no sum.
    sums = sum_tokens(keys, values, previous_keys(keys, memory.last)).after(memory.sums)
    sums = sums.normalized(normalization, memory.sums.norm)
    index = (counts - 1).clamp(min=0).view(-1, 1, 1, 1).expand(-1, 1, *keys.shape[2:])
    newest = keys.gather(1, index)[:, 0] if keys.shape[1] else memory.last
    last = torch.where((counts > 0)[:, None, None], newest, memory.last)
    slots = [x.new_zeros(x.shape[0], chunk_size - 1, *x.shape[2:]) for x in (keys, values)]
    return KoopmanMemory(sums, last, slots[0], slots[1], torch.zeros_like(counts)).to_state()


def freeze_norm(memory: KoopmanMemory, k: Tensor, cu_seqlens: Tensor | None) -> KoopmanMemory:
    """Set m² of the sequences that have none yet to the largest squared norm of their keys `k [B, T, H, R]`."""
    if not torch.compiler.is_exporting() and (memory.sums.norm > 0).all():
        return memory  # the same tensors, for `cached_inverse_factor`
    norms = k.square().sum(-1)
    pieces = norms.unbind(0) if cu_seqlens is None else norms[0].split(cu_seqlens.diff().tolist())
    largest = [piece.amax(0) if len(piece) else piece.new_zeros(piece.shape[1]) for piece in pieces]
    first = torch.stack(largest) if largest else memory.sums.norm
    known = memory.sums.norm
    return memory._replace(sums=memory.sums._replace(norm=torch.where(known > 0, known, first)))


# ---------------------------------------------------------------------------------------------- many tokens


def sum_tokens(k: Tensor, v: Tensor, previous: Tensor) -> Sums:
    """Sum along axis 1 of keys and the keys before them `[n, S, H, R]`, and of values `[n, S, H, P]`."""
    keys = k.permute(0, 2, 3, 1)
    rows = k.transpose(1, 2)
    norm = k.square().sum(-1)
    return Sums(
        keys @ rows, keys @ previous.transpose(1, 2), v.permute(0, 2, 3, 1) @ rows,
        norm.amax(1) if k.shape[1] else norm.new_zeros(k.shape[0], k.shape[2]),
    )  # fmt: skip


def previous_keys(k: Tensor, last: Tensor) -> Tensor:
    """The key before each of `k [N, T, H, R]`; before the first one stands `last [N, H, R]`."""
    return torch.cat([last.unsqueeze(1), k], 1)[:, :-1]


def mask_keys(k: Tensor, mask: Tensor | None) -> Tensor:
    """Set keys `[B, T, H, R]` to 0 where `mask [B, T]` is 0; a zero key changes no sum."""
    return k if mask is None else torch.where(mask.bool()[..., None, None], k, 0.0)


def with_pending(k: Tensor, v: Tensor, memory: KoopmanMemory) -> tuple[Tensor, Tensor]:
    """Put the pending keys and values before `k [N, T, H, R]` and `v [N, T, H, P]`.

    Raises:
        ValueError: the sequences have different numbers of pending tokens.
    """
    counts = memory.pending
    pending = int(counts.max()) if len(counts) else 0
    if (counts != pending).any():
        raise ValueError("this mode takes states whose sequences have equally many tokens since their last chunk")
    keys, values = memory.pending_keys[:, :pending], memory.pending_values[:, :pending]
    return torch.cat([keys, k], 1), torch.cat([values, v], 1)


# ------------------------------------------------------------------------------------------- a single token


def add_pending(k: Tensor, v: Tensor, memory: KoopmanMemory) -> KoopmanMemory:
    """Add one pending token, `k [N, H, R]` and `v [N, H, P]`. There must be room for it."""
    at = torch.arange(len(k), device=k.device), memory.pending
    return memory._replace(
        pending_keys=memory.pending_keys.index_put(at, k),
        pending_values=memory.pending_values.index_put(at, v),
        pending=memory.pending + 1,
    )


def add_to_sums(k: Tensor, v: Tensor, memory: KoopmanMemory) -> KoopmanMemory:
    """Add one token to the sums, `k [N, H, R]` and `v [N, H, P]`."""
    sums, key, row = memory.sums, k.unsqueeze(-1), k.unsqueeze(-2)
    return memory._replace(
        sums=Sums(
            torch.addcmul(sums.gram, key, row),
            torch.addcmul(sums.transition, key, memory.last.unsqueeze(-2)),
            torch.addcmul(sums.values, v.unsqueeze(-1), row),
            torch.maximum(k.square().sum(-1), sums.norm),
        ),
        last=k,
    )
