"""Decays inside the chunks of a block: the weights that the log-decays give to each product of a chunk.

Tensors are `[B, H, n, C, D]` (see `layout`). The classes here and `gate_decay.GateDecay` have the same members, so that
one block serves an op without decay, with scalar or vector decay, and with the two states of GateRank:

| member | meaning |
|---|---|
| `num_states` | states per head; their rows stand one below the other, `K' = num_states · K` |
| `scores(x, y)` | `Σ_K x_i y_j`, decayed from token j to token i, for j ≤ i |
| `weight_queries(x)` | `[C, K']`, rows x weighted by what is left of the entering state when they read it |
| `weight_keys(k)` | `[C, K']`, keys weighted by what is left of them when the chunk ends |
| `read_state(x, state)` | `weight_queries(x) @ state` |
| `carry(c, state, update)` | the state decayed over chunk c, plus the update; `carry_back` is its adjoint |
| `scores_grad`, `weight_queries_grad`, `weight_keys_grad` | the gradients of the functions above |
| `sum_over_states(d)` | adds a gradient `[C, K']` over the states, `[C, K]` |
| `log_grad(…)` | the gradient of the log-decays from all of these |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from halflife.ops.slow_decay import split_decay
from halflife.precision import wide

# exp(-110) is 0 in float32 and exp(-750) is 0 in float64. Clamping log-decays here changes no result, and it makes
# differences of -inf finite.
FLOOR = {torch.float32: -110.0, torch.float64: -750.0}


RowGrads = tuple[Tensor, Tensor]  # rows `[…, C, K]` and a gradient of them


class DecayGrads(NamedTuple):
    """The parts of the gradient of the log-decays."""

    queries: list[RowGrads]  # query rows and their total gradient, within-chunk attention plus the entering state
    keys: list[RowGrads]  # key rows and their gradient from within-chunk attention
    reads: list[RowGrads]  # query rows and the gradient `[…, C, K']` of what they read from the entering state
    writes: list[RowGrads]  # key rows and the gradient `[…, C, K']` of what they write into the outgoing state
    log_scores: Any = None  # the third result of `scores_grad`


class _OneState:
    """The members that scalar and vector decays share: one state, whose rows decay separately."""

    num_states = 1
    query_weights: Tensor  # e^{b_t}
    key_weights: Tensor  # e^{b_C − b_t}
    chunk_decay: Tensor  # e^{b_C}
    chunk_change: tuple[Tensor, Tensor] | None = None  # the two parts of e^{b_C}, or None for no decay

    def weight_queries(self, x: Tensor) -> Tensor:
        return x * self.query_weights

    def weight_keys(self, k: Tensor) -> Tensor:
        return k * self.key_weights

    def carry(self, c: int, state: Tensor, update: Tensor) -> Tensor:
        if self.chunk_change is None:
            return update + state
        kept, change = (x[:, :, c] for x in self.chunk_change)
        return torch.addcmul(update, change, state).addcmul_(kept, state)

    carry_back = carry

    def weight_queries_grad(self, d: Tensor) -> Tensor:
        return d.mul_(self.query_weights)

    def weight_keys_grad(self, d: Tensor) -> Tensor:
        return d.mul_(self.key_weights)

    def sum_over_states(self, d: Tensor) -> Tensor:
        return d


class ScalarDecay(_OneState):
    """Decays inside the chunks of a block, one rate per head; `g=None` is no decay.

    With the inclusive cumulative log-decay `b_t` of a chunk, queries read the entering state with weight `e^{b_t}`,
    `e^{b_C − b_t}` is left of a key when the chunk ends, the state decays by `e^{b_C}`, and key j reaches query i with
    weight `e^{b_i − b_j}`. Differences are formed before `exp`, and all are ≤ 0.
    """

    def __init__(self, g: Tensor | None, chunk: int, chunks: int, dtype: torch.dtype, device: torch.device) -> None:
        lower = torch.ones(chunk, chunk, dtype=dtype, device=device).tril_()
        if g is None:
            self.query_weights = self.key_weights = torch.ones(chunk, 1, dtype=dtype, device=device)
            one = torch.ones(1, 1, 1, 1, 1, dtype=dtype, device=device)
            self.chunk_decay = one.expand(-1, -1, chunks, -1, -1)
            self.matrix = lower
            return
        b = wide(g.clamp(min=FLOOR[dtype])).cumsum(-1)
        self.query_weights = b.to(dtype).exp().unsqueeze(-1)
        self.key_weights = (b[..., -1:] - b).to(dtype).exp().unsqueeze(-1)
        self.chunk_decay = self.query_weights[..., -1:, :]
        self.chunk_change = split_decay(b[..., -1:].unsqueeze(-1), dtype)
        bound = torch.where(lower > 0, 0.0, -torch.inf)
        self.matrix = torch.minimum((b.unsqueeze(-1) - b.unsqueeze(-2)).to(dtype), bound).exp_()

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute `Σ_K x_i y_j e^{b_i − b_j}` for j ≤ i, else 0: `[…, C, C]`."""
        return (x @ y.transpose(-1, -2)).mul_(self.matrix)

    def read_state(self, x: Tensor, state: Tensor) -> Tensor:
        """Compute `(e^b x) S`, what rows x read from the entering state: `[…, C, V]`."""
        return (x @ state).mul_(self.query_weights)

    def scores_grad(self, grad: Tensor, x: Tensor, y: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of `scores` in x and y, from a `grad` whose diagonal is zero (it is overwritten).

        The third result is the gradient of the log-weights of the scores where `log_grad` needs it, here None.
        """
        grad = grad.mul_(self.matrix)
        return grad @ y, grad.transpose(-1, -2) @ x, None

    def log_grad(self, grads: DecayGrads, entering: Tensor, leaving: Tensor) -> Tensor:
        """See `_log_grad`; the products are summed over K first."""
        carried = (self.chunk_decay * entering * leaving).sum((-1, -2)).unsqueeze(-1)
        return _log_grad(_read_products(grads).sum(-1), _products(grads.writes).sum(-1), carried, -1)


class VectorDecay(_OneState):
    """Decays inside the chunks of a block, one rate a key channel.

    Here the weights `e^{b_i − b_j}` depend on the channel, so that no single C×C matrix holds them. `scores` therefore
    halves the chunk recursively. A tile below the diagonal has its rows i in the second half and its columns j in the
    first half. Its weights factor at the last token a of the first half into `e^{b_i − b_a} · e^{b_a − b_j}`, and both
    exponents are ≤ 0. Token a comes before every row of the tile, so no output depends on later tokens.
    """

    def __init__(self, g: Tensor, chunk: int, chunks: int, dtype: torch.dtype, device: torch.device) -> None:
        b = wide(g.clamp(min=FLOOR[dtype])).cumsum(-2)
        self.query_weights = b.to(dtype).exp()
        self.key_weights = (b[..., -1:, :] - b).to(dtype).exp()
        self.chunk_decay = self.query_weights[..., -1, :].unsqueeze(-1)
        self.chunk_change = split_decay(b[..., -1, :].unsqueeze(-1), dtype)
        self.tiles: list[tuple[int, Tensor, Tensor]] = []
        size = chunk // 2
        while size:
            halves = b.unflatten(-2, (-1, 2, size))
            anchor = halves[..., 0, -1:, :]
            row = (halves[..., 1, :, :] - anchor).to(dtype).clamp(max=0).exp()
            col = (anchor - halves[..., 0, :, :]).to(dtype).clamp(max=0).exp()
            self.tiles.append((size, row, col))
            size //= 2

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        out = x.new_zeros(*x.shape[:-1], x.shape[-2])
        for size, row, col in self.tiles:
            second, first = _half(x, size, 1) * row, _half(y, size, 0) * col
            _tile(out, size).copy_(second @ first.transpose(-1, -2))
        out.diagonal(dim1=-2, dim2=-1).copy_((x * y).sum(-1))
        return out

    def read_state(self, x: Tensor, state: Tensor) -> Tensor:
        return self.weight_queries(x) @ state

    def scores_grad(self, grad: Tensor, x: Tensor, y: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor, None]:
        dx, dy = torch.zeros_like(x), torch.zeros_like(y)
        for size, row, col in self.tiles:
            tile = _tile(grad, size)
            second, first = _half(x, size, 1) * row, _half(y, size, 0) * col
            _half(dx, size, 1).addcmul_(tile @ first, row)
            _half(dy, size, 0).addcmul_(tile.transpose(-1, -2) @ second, col)
        return dx, dy, None

    def log_grad(self, grads: DecayGrads, entering: Tensor, leaving: Tensor) -> Tensor:
        carried = (self.chunk_decay * entering * leaving).sum(-1).unsqueeze(-2)
        return _log_grad(_read_products(grads), _products(grads.writes), carried, -2)


def _half(x: Tensor, size: int, which: int) -> Tensor:
    """The first (0) or second (1) halves of all pairs of `size` tokens: `[…, C, D]` → `[…, m, size, D]`."""
    return x.unflatten(-2, (-1, 2, size))[..., which, :, :]


def _tile(x: Tensor, size: int) -> Tensor:
    """The tiles (second half, first half) of a `[…, C, C]` matrix, a view `[…, m, size, size]`."""
    pairs = x.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))
    return pairs[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _products(pairs: list[RowGrads]) -> Tensor:
    (x, d), *rest = pairs
    out = x * d
    for x, d in rest:
        out.addcmul_(x, d)
    return out


def _read_products(grads: DecayGrads) -> Tensor:
    out = _products(grads.queries)
    for x, d in grads.keys:
        out.addcmul_(x, d, value=-1)
    return out


def _log_grad(reads: Tensor, writes: Tensor, carried: Tensor, dim: int) -> Tensor:
    """The gradient of the log-decays of a chunk, from the gradients of everything that they weigh.

    A log-decay g_t weighs what tokens i ≥ t read from tokens j < t and from the entering state (`reads`, x ⊙ dx of the
    queries minus that of the keys, summed from t on), what tokens j < t write into the outgoing state (`writes`,
    k ⊙ dk of that, summed before t), and the entering state itself (`carried`). With these three sums apart, no large
    terms cancel, and the gradient of a strong decay is exact.
    """
    after = reads.flip(dim).cumsum(dim).flip(dim)
    after.narrow(dim, 1, writes.shape[dim] - 1).add_(writes.narrow(dim, 0, writes.shape[dim] - 1).cumsum(dim))
    return after.add_(carried)


def make_decay(
    g: Tensor | None, chunk: int, chunks: int, dtype: torch.dtype, device: torch.device
) -> ScalarDecay | VectorDecay:
    """The decay of a block of `chunks` chunks: `g [b, H, c, C]` scalar, `[b, H, c, C, K]` vector, None for none."""
    kind = VectorDecay if g is not None and g.ndim == 5 else ScalarDecay
    return kind(g, chunk, chunks, dtype, device)  # pyright: ignore[reportArgumentType] (a vector decay has a g)
