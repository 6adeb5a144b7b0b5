"""What spectral Koopman attention remembers: its sums, and the chunk that is not full yet.

A state is a dict of tensors, one row a sequence: `gram [N, H, R, R]`, `transition [N, H, R, R]`,
`values [N, H, P, R]`, `last [N, H, R]` (the last key) and `norm [N, H]` (the largest squared norm of a key): the
2r² + Pr + r + 1 numbers a head that are committed; and the tokens since the last full chunk, `pending_keys
[N, S − 1, H, R]`, `pending_values [N, S − 1, H, P]`, of which `pending [N]` are set. After a single token of
its own operator a state also has `inverse [N, H, R, R]`, which the next token would have to compute again from these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from halflife.precision import compute_dtype

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


COMMITTED = (*Sums._fields, "last")  # of a state: what an operator is made of, besides the tokens that wait


def blank(k: Tensor, v: Tensor, sequences: int, chunk_size: int) -> KoopmanState:
    """The state before the first token."""
    shapes, dtype = _shapes(k, v, sequences, chunk_size), compute_dtype(k)
    return {
        name: k.new_zeros(shape, dtype=torch.long if name == "pending" else dtype) for name, shape in shapes.items()
    }


def _shapes(k: Tensor, v: Tensor, sequences: int, chunk_size: int) -> dict[str, tuple[int, ...]]:
    heads, rank, width = k.shape[2], k.shape[3], v.shape[3]
    shapes = {
        "gram": (heads, rank, rank), "transition": (heads, rank, rank), "values": (heads, width, rank),
        "last": (heads, rank), "norm": (heads,), "pending_keys": (chunk_size - 1, heads, rank),
        "pending_values": (chunk_size - 1, heads, width), "pending": (),
    }  # fmt: skip
    return {name: (sequences, *shape) for name, shape in shapes.items()}


def checked(
    state: KoopmanState | None, tokens: tuple[Tensor, ...], cu_seqlens: Tensor | None, chunk_size: int
) -> KoopmanState:
    """The state in the compute dtype, a blank one for None.

    Raises:
        ValueError: a state of another op, number of sequences, head size or chunk size.
    """
    _, k, v = tokens
    sequences = k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if state is None:
        return blank(k, v, sequences, chunk_size)
    for name, shape in _shapes(k, v, sequences, chunk_size).items():
        if name not in state or state[name].shape != shape:
            found = tuple(state[name].shape) if name in state else "nothing"
            raise ValueError(f"initial_state[{name!r}] must be {shape}; got {found}")
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


def masked(k: Tensor, mask: Tensor | None) -> Tensor:
    """Keys `[B, T, H, R]` with zeros where `mask [B, T]` is not set: such tokens leave every sum as it is."""
    return k if mask is None else torch.where(mask.bool()[..., None, None], k, 0.0)


def with_pending(k: Tensor, v: Tensor, mask: Tensor | None, state: KoopmanState) -> tuple[Tensor, Tensor]:
    """All tokens that are not committed, those pending first; rows must have equally many pending."""
    k, counts = masked(k, mask), state["pending"]
    pending = int(counts.max()) if len(counts) else 0
    if (counts != pending).any():
        raise ValueError("this mode takes states whose sequences have equally many tokens since their last chunk")
    return torch.cat([state["pending_keys"][:, :pending], k], 1), torch.cat(
        [state["pending_values"][:, :pending], v], 1
    )


# -------------------------------------------------------------------------------------- one more token


def unit_of(norm: Tensor) -> Tensor:
    """m² `[n, H]`: in this unit everything is of order one; no keys at all read as 0."""
    return torch.where(norm > 0, norm, 1.0)


def invert(state: KoopmanState, ridge: float, cholesky: Callable[[Tensor], Tensor]) -> Tensor:
    """`L⁻ᵀ [N, H, R, R]` for the Cholesky factor L of `G / m² + ε I`.

    m² as a unit drops out of what is read, so that its gradient is that of the ridge ε m² alone; as derivatives of
    divisions by it, which cancel, it would overflow.
    """
    gram, norm = state["gram"], unit_of(state["norm"])[..., None, None]
    unit = norm.detach()
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor = cholesky(gram / unit + ridge * (norm / unit) * eye)
    return torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False).mT


_INVERSES = WeakIdKeyDictionary()  # the G of a state → (its m, its version, ε, L⁻ᵀ)


def inverse_of(state: KoopmanState, ridge: float, cholesky: Callable[[Tensor], Tensor]) -> Tensor:
    """`invert`, once for all the tokens that read the same sums: kept as long as G is, but not where gradients flow.

    It is no part of the state, which would grow by half of what it holds for something that follows from it.
    """
    gram, norm = state["gram"], state["norm"]
    if gram.requires_grad or norm.requires_grad:
        return invert(state, ridge, cholesky)
    inference = torch.is_inference_mode_enabled()  # tensors made in it do not count their versions
    version = 0 if gram.is_inference() else gram._version
    kept = _INVERSES.get(gram)
    if kept and kept[0] is norm and kept[1:3] == (version, ridge) and kept[3].is_inference() == inference:
        return kept[3]
    inverse = invert(state, ridge, cholesky)
    _INVERSES[gram] = norm, version, ridge, inverse
    return inverse


def wait(k: Tensor, v: Tensor, state: KoopmanState) -> KoopmanState:
    """The state with one more pending token `k [N, H, R]`, `v [N, H, P]`, for which there must be room."""
    at = torch.arange(len(k), device=k.device), state["pending"]
    keys, values = state["pending_keys"].index_put(at, k), state["pending_values"].index_put(at, v)
    return {**state, "pending_keys": keys, "pending_values": values, "pending": state["pending"] + 1}


def commit(k: Tensor, v: Tensor, state: KoopmanState) -> KoopmanState:
    """The state whose sums hold one more token, `k [N, H, R]`, `v [N, H, P]`."""
    key, row = k.unsqueeze(-1), k.unsqueeze(-2)
    return {
        **state,
        "gram": torch.addcmul(state["gram"], key, row),
        "transition": torch.addcmul(state["transition"], key, state["last"].unsqueeze(-2)),
        "values": torch.addcmul(state["values"], v.unsqueeze(-1), row),
        "last": k,
        "norm": torch.maximum(k.square().sum(-1), state["norm"]),
    }


def add_token(
    k: Tensor, v: Tensor, state: KoopmanState, inverse: Tensor, ridge: float, cholesky: Callable[[Tensor], Tensor]
) -> KoopmanState:
    """`commit`, with the inverse factor after it.

    That follows by a rank-one update; where the largest norm grows, the unit changes and it is made anew.
    """
    new = commit(k, v, state)
    grown = new["norm"] > state["norm"]
    if grown.all():
        return {**new, "inverse": invert(new, ridge, cholesky)}
    updated = rank_one(inverse, k / unit_of(new["norm"]).detach().sqrt().unsqueeze(-1))
    if grown.any():
        updated = torch.where(grown[..., None, None], invert(new, ridge, cholesky), updated)
    return {**new, "inverse": updated}


def rank_one(inverse: Tensor, z: Tensor) -> Tensor:
    """`L'⁻ᵀ` with `L' L'ᵀ = L Lᵀ + z zᵀ`, from `inverse = L⁻ᵀ [..., R, R]` and `z [..., R]`, in O(r²).

    With `w = L⁻¹ z`, `L Lᵀ + z zᵀ = L (I + w wᵀ) Lᵀ`, and the factor of `I + w wᵀ` has the inverse with diagonal
    `√(s_{i−1} / s_i)` and entries `−w_i w_j / √(s_i s_{i−1})` below, `s_i = 1 + Σ_{j ≤ i} w_j²`: column i of the
    product is L⁻ᵀ's times `√(s_i / s_{i−1})` less a multiple of `Σ_{j ≤ i} w_j (L⁻ᵀ)_j`, a running sum over columns.
    """
    w = z.unsqueeze(-2) @ inverse
    after = 1 + w.square().cumsum(-1)
    before = after - w.square()
    earlier = (inverse * w).cumsum(-1)
    return torch.addcmul(inverse * (after / before).sqrt(), earlier, w / (after * before).sqrt(), value=-1)
