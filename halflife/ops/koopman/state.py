"""The state of spectral Koopman attention: the sums of all full chunks, and the tokens of the chunk that is not full.

Users, sessions and checkpoints see a state as a dict of tensors with one row a sequence:

| name | shape | meaning |
|---|---|---|
| `gram`, `transition`, `values` | `[N, H, R, R]`, `[N, H, R, R]`, `[N, H, P, R]` | the sums G, M and C |
| `norm` | `[N, H]` | m²: the largest squared norm of a key, or tr G under `normalization="trace"` |
| `last` | `[N, H, R]` | the last key of the full chunks |
| `pending_keys`, `pending_values` | `[N, S − 1, H, R]`, `[N, S − 1, H, P]` | tokens since the last full chunk of S |
| `pending` | `[N]` | how many of these there are |
| `pending_decays` | `[N, S − 1, H, 1 or R]` | log-decays of the pending tokens, in calls with g only |
| `inverse` | `[N, H, R, R]` | L⁻ᵀ of the operator, after single tokens under `refresh="token"` only |

The first five hold 2r² + Pr + r + 1 numbers per head. `inverse` follows from them; it saves the next token that work.
Keys and values are stored times √β.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halflife.ops.arguments import may_branch
from halflife.ops.koopman.decays import SumDecay, Weighted, sum_decay, weigh_tokens
from halflife.ops.slow_decay import split_decay
from halflife.packing import Packing
from halflife.precision import compute_dtype

KoopmanState = dict[str, Tensor]


class Sums(NamedTuple):
    """The sums over some tokens."""

    gram: Tensor  # `G = Σ z zᵀ`, `[n, H, R, R]`
    transition: Tensor  # `M = Σ z_t z_{t−1}ᵀ`, `[n, H, R, R]`
    values: Tensor  # `C = Σ v zᵀ`, `[n, H, P, R]`
    norm: Tensor  # m², the largest squared norm of a key or the trace of G, `[n, H]`

    def after(self, earlier: Sums, decay: SumDecay | None = None) -> Sums:
        """The sums over these tokens and earlier ones, which decay by `decay`."""
        logs = (None, None, None) if decay is None else (decay.matrix, decay.matrix, decay.values)
        gram, transition, values = (decay_and_add(*parts) for parts in zip(earlier[:3], logs, self[:3], strict=True))
        norm = earlier.norm if decay is None else decay.norm.exp() * earlier.norm
        return Sums(gram, transition, values, torch.maximum(self.norm, norm))

    def normalized(self, normalization: str, frozen: Tensor) -> Sums:
        """These sums with the m² of a normalisation: `frozen` under "paper", tr G under "trace", else the largest."""
        if normalization == "trace":
            return self._replace(norm=self.gram.diagonal(dim1=-2, dim2=-1).sum(-1))
        return self._replace(norm=frozen) if normalization == "paper" else self


def decay_and_add(x: Tensor, g: Tensor | None, update: Tensor) -> Tensor:
    """Compute `e^g ⊙ x + update` without the drift of a slow decay (see `ops.slow_decay`)."""
    if g is None:
        return x + update
    kept, change = split_decay(g)
    return torch.addcmul(torch.addcmul(update, change, x), kept, x)


class KoopmanMemory(NamedTuple):
    """A state with typed fields; the table of the module describes them."""

    sums: Sums
    last: Tensor
    pending_keys: Tensor
    pending_values: Tensor
    pending: Tensor
    inverse: Tensor | None = None
    pending_decays: Tensor | None = None

    def to_state(self) -> KoopmanState:
        """The state as users see it."""
        entries = {**self.sums._asdict(), **{name: getattr(self, name) for name in self._fields[1:]}}
        return {name: x for name, x in entries.items() if x is not None}

    @classmethod
    def from_state(cls, state: KoopmanState) -> KoopmanMemory:
        """The inverse of `to_state`."""
        return cls(
            Sums(*(state[name] for name in Sums._fields)),
            **{name: state.get(name) for name in cls._fields[1:]},  # type: ignore[arg-type]
        )

    def without_pending(self, sums: Sums, last: Tensor) -> KoopmanMemory:
        """This memory with other sums and another last key, and without pending tokens."""
        waiting = {name: getattr(self, name) for name in self._fields if name.startswith("pending")}
        empty = {name: None if x is None else torch.zeros_like(x) for name, x in waiting.items()}
        return self._replace(sums=sums, last=last, inverse=None, **empty)


COMMITTED = (*Sums._fields, "last")  # the entries of a state that describe its full chunks


def blank(k: Tensor, v: Tensor, sequences: int, chunk_size: int, decays: int = 0) -> KoopmanMemory:
    """The memory before the first token; `decays` is the number of log-decays per head, 0 without decay.

    On an accelerator, where each launch counts, one number stands for all zeros.
    """
    shapes, dtype = _shapes(k, v, sequences, chunk_size, decays), compute_dtype(k)
    pending = k.new_zeros(shapes.pop("pending"), dtype=torch.long)
    if may_branch(k.device):
        zeros = {name: k.new_zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    else:
        zero = k.new_zeros((), dtype=dtype)
        zeros = {name: zero.expand(shape) for name, shape in shapes.items()}
    return KoopmanMemory.from_state({**zeros, "pending": pending})


def _shapes(k: Tensor, v: Tensor, sequences: int, chunk_size: int, decays: int) -> dict[str, tuple[int, ...]]:
    heads, rank, width = k.shape[2], k.shape[3], v.shape[3]
    shapes = {
        "gram": (heads, rank, rank), "transition": (heads, rank, rank), "values": (heads, width, rank),
        "last": (heads, rank), "norm": (heads,), "pending_keys": (chunk_size - 1, heads, rank),
        "pending_values": (chunk_size - 1, heads, width), "pending": (),
    }  # fmt: skip
    if decays:
        shapes["pending_decays"] = (chunk_size - 1, heads, decays)
    return {name: (sequences, *shape) for name, shape in shapes.items()}


def memory_after(
    sums: Sums, timelines: tuple[Tensor, Tensor, Tensor | None], first: Tensor, total: Tensor, memory: KoopmanMemory
) -> KoopmanMemory:
    """The memory after the timelines of keys, values and decays `[rows, n S, H, …]`, with the sums of all full chunks.

    A sequence has `total [N]` tokens, from the place `first [N]` in all rows together on.
    """
    keys, values, decays = (None if x is None else x.flatten(0, 1) for x in timelines)
    assert keys is not None
    size = memory.pending_keys.shape[1] + 1
    whole = total // size * size
    newest = keys.index_select(0, (first + whole - 1).clamp(min=0))
    last = torch.where((whole > 0)[:, None, None], newest, memory.last)
    slots, left = torch.arange(size - 1, device=keys.device), total - whole
    used = slots < left[:, None]
    at = torch.where(used, (first + whole)[:, None] + slots, 0)
    waiting = [None if x is None else torch.where(used[..., None, None], x[at], 0.0) for x in (keys, values, decays)]
    return KoopmanMemory(sums, last, waiting[0], waiting[1], left, pending_decays=waiting[2])  # type: ignore[arg-type]


def initial_memory(
    state: KoopmanState | None, k: Tensor, v: Tensor, sequences: int, chunk_size: int, decays: int = 0
) -> KoopmanMemory:
    """A user's state as a memory in the compute dtype; None means a blank one.

    A state without decays can be continued with decays. Its pending tokens then have the log-decay 0.
    """
    if state is None:
        return blank(k, v, sequences, chunk_size, decays)
    if not decays and "pending_decays" in state:
        raise ValueError("initial_state comes from calls with decays, so this call needs g")
    if decays and "pending_decays" not in state:
        state = {**state, "pending_decays": blank(k, v, sequences, chunk_size, decays).to_state()["pending_decays"]}
    for name, shape in _shapes(k, v, sequences, chunk_size, decays).items():
        if name not in state or state[name].shape != shape:
            got = tuple(state[name].shape) if name in state else "nothing"
            raise ValueError(f"initial_state[{name!r}] must be {shape}; got {got}")
    dtype = compute_dtype(k)
    return KoopmanMemory.from_state(
        {name: x.to(dtype) if x.is_floating_point() else x.long() for name, x in state.items()}
    )


def convert_state(state: KoopmanState, chunk_size: int, normalization: str = "causal") -> KoopmanState:
    """Return a state for operators of `chunk_size` tokens (1 for `refresh="token"`), from one for any other number.

    `normalization` is that of the op. If the numbers differ, pending tokens enter the sums, and a chunk begins.
    """
    if state["pending_keys"].shape[1] == chunk_size - 1:
        return state
    memory = KoopmanMemory.from_state(state)
    keys, values, counts, g = memory.pending_keys, memory.pending_values, memory.pending, memory.pending_decays
    # Slots behind the pending tokens hold zeros, which change no sum.
    sums = sums_after(memory, keys, values, g, normalization)
    index = (counts - 1).clamp(min=0).view(-1, 1, 1, 1).expand(-1, 1, *keys.shape[2:])
    newest = keys.gather(1, index)[:, 0] if keys.shape[1] else memory.last
    last = torch.where((counts > 0)[:, None, None], newest, memory.last)
    waiting = {name: x for name, x in state.items() if name.startswith("pending_")}
    empty = {name: x.new_zeros(len(x), chunk_size - 1, *x.shape[2:]) for name, x in waiting.items()}
    return memory._replace(sums=sums, last=last, inverse=None, pending=torch.zeros_like(counts), **empty).to_state()


def freeze_norm(memory: KoopmanMemory, k: Tensor, packing: Packing) -> KoopmanMemory:
    """Set m² of the sequences that have none yet to the largest squared norm of their keys `k [B, T, H, R]`."""
    if may_branch(k.device) and (memory.sums.norm > 0).all():
        return memory  # the same tensors, for `cached_inverse_factor`
    norms, known = k.square().sum(-1), memory.sums.norm
    if packing.cu_seqlens is None:
        first = norms.amax(1) if k.shape[1] else torch.zeros_like(known)
    else:
        of_token = packing.to(k.device).sequence.unsqueeze(1).expand(-1, k.shape[2])
        first = torch.zeros_like(known).scatter_reduce(0, of_token, norms[0], "amax")
    return memory._replace(sums=memory.sums._replace(norm=torch.where(known > 0, known, first)))


def sum_tokens(tokens: Weighted) -> Sums:
    """Sum along axis 1 of keys and the keys before them `[n, S, H, R]`, and of values `[n, S, H, P]`."""
    k, norms = tokens.keys, tokens.norms
    keys = k.permute(0, 2, 3, 1)
    rows = k.transpose(1, 2)
    return Sums(
        keys @ rows, keys @ tokens.previous.transpose(1, 2), tokens.values.permute(0, 2, 3, 1) @ rows,
        norms.amax(1) if k.shape[1] else norms.new_zeros(k.shape[0], k.shape[2]),
    )  # fmt: skip


def sums_after(memory: KoopmanMemory, k: Tensor, v: Tensor, g: Tensor | None, normalization: str) -> Sums:
    """The sums of a memory and of the tokens `k [N, S, H, R]`, `v [N, S, H, P]`, `g [N, S, H, 1 or R]` after it."""
    tokens = weigh_tokens(k, previous_keys(k, memory.last), v, g, 1)
    return sum_tokens(tokens).after(memory.sums, tokens.decay).normalized(normalization, memory.sums.norm)


def previous_keys(k: Tensor, last: Tensor) -> Tensor:
    """The key before each of `k [N, T, H, R]`; before the first one stands `last [N, H, R]`."""
    return torch.cat([last.unsqueeze(1), k], 1)[:, :-1]


def mask_keys(k: Tensor, mask: Tensor | None) -> Tensor:
    """Set keys `[B, T, H, R]` to 0 where `mask [B, T]` is 0; a zero key changes no sum."""
    return k if mask is None else torch.where(mask.bool()[..., None, None], k, 0.0)


def with_pending(k: Tensor, v: Tensor, g: Tensor | None, memory: KoopmanMemory) -> tuple[Tensor, Tensor, Tensor | None]:
    """Put the pending tokens, of equal number, before `k [N, T, H, R]`, `v [N, T, H, P]` and `g [N, T, H, 1 or R]`."""
    counts = memory.pending
    pending = int(counts.max()) if len(counts) else 0
    if (counts != pending).any():
        raise ValueError("this mode takes states whose sequences have equally many tokens since their last chunk")
    keys, values = memory.pending_keys[:, :pending], memory.pending_values[:, :pending]
    if memory.pending_decays is not None and g is not None:
        g = torch.cat([memory.pending_decays[:, :pending], g], 1)
    return torch.cat([keys, k], 1), torch.cat([values, v], 1), g


def add_pending(k: Tensor, v: Tensor, g: Tensor | None, memory: KoopmanMemory) -> KoopmanMemory:
    """Add one pending token, `k [N, H, R]`, `v [N, H, P]` and `g [N, H, 1 or R]`. There must be room for it."""
    at = torch.arange(len(k), device=k.device), memory.pending
    decays = memory.pending_decays
    return memory._replace(
        pending_keys=memory.pending_keys.index_put(at, k),
        pending_values=memory.pending_values.index_put(at, v),
        pending=memory.pending + 1,
        pending_decays=decays if decays is None or g is None else decays.index_put(at, g),
    )


def add_to_sums(k: Tensor, v: Tensor, g: Tensor | None, memory: KoopmanMemory) -> KoopmanMemory:
    """Add one token to the sums, `k [N, H, R]`, `v [N, H, P]` and `g [N, H, 1 or R]`."""
    sums, key, row, norm = memory.sums, k.unsqueeze(-1), k.unsqueeze(-2), k.square().sum(-1)
    if g is None:
        added = Sums(
            torch.addcmul(sums.gram, key, row),
            torch.addcmul(sums.transition, key, memory.last.unsqueeze(-2)),
            torch.addcmul(sums.values, v.unsqueeze(-1), row),
            torch.maximum(norm, sums.norm),
        )
    else:
        last = (memory.last * (g / 2).exp()).unsqueeze(-2)
        decay = sum_decay(g, g.amax(-1, keepdim=True))
        added = Sums(key * row, key * last, v.unsqueeze(-1) * row, norm).after(sums, decay)
    return memory._replace(sums=added, last=k)
