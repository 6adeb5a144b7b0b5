"""Decays inside the chunks of a block: every weight that a chunk's products need, from its log-decays.

Tensors are `[B, H, n, C, D]` (see `chunking`). The classes here and `gate_decay.GateDecay` have the same members, so
that an op is written once for no, scalar and vector decay and for GateRank's two states:

| member | what |
|---|---|
| `parts` | states a key has: their rows stand one below the other, `K' = parts · K` |
| `scores(x, y)` | `Σ_K x_i y_j` with the decay from j to i, j ≤ i |
| `reading(x)`, `leaving(k)` | `[C, K']`: rows weighted to read the entering state, to be left in the outgoing one |
| `read(x, state)` | `reading(x) @ state` |
| `carry(c, state, update)` | the state decayed by chunk c, plus what the chunk leaves; `carry_back` is its adjoint |
| `scores_grad`, `reading_grad`, `leaving_grad` | the gradients of what they weigh |
| `fold(d)` | of a gradient `[C, K']`: that of the `[C, K]` rows |
| `log_grad(…)` | the gradient of the log-decays from all of these |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# exp(-110) is 0 in float32 and exp(-750) in float64: clamping the log-decay here changes nothing,
# and makes -inf a number whose differences are numbers.
FLOOR = {torch.float32: -110.0, torch.float64: -750.0}


def wide(x: Tensor) -> Tensor:
    """`x` in float64, in which cumulative sums lose nothing (float32 on Apple's MPS, which has no float64)."""
    return x.float() if x.device.type == "mps" else x.double()


Rows = tuple[Tensor, Tensor]  # rows `[…, C, K]` and a gradient of theirs


class Grads(NamedTuple):
    """What a log-decay's gradient is made of.

    Attributes:
        rows: rows that read, with the whole gradient of theirs: of pairs and of the entering state.
        cols: keys, with their gradient from pairs.
        reads, left: rows with the gradient `[…, C, K']` of what they read of the entering state, of what they leave.
        pairs: the third of `scores_grad`.
    """

    rows: list[Rows]
    cols: list[Rows]
    reads: list[Rows]
    left: list[Rows]
    pairs: Any = None


class _OneState:
    """What scalar and vector decays share: one state, each row of which decays on its own."""

    parts = 1
    rows: Tensor
    cols: Tensor
    total: Tensor

    def reading(self, x: Tensor) -> Tensor:
        return x * self.rows

    def leaving(self, k: Tensor) -> Tensor:
        return k * self.cols

    def carry(self, c: int, state: Tensor, update: Tensor) -> Tensor:
        return torch.addcmul(update, self.total[:, :, c], state)

    carry_back = carry

    def reading_grad(self, d: Tensor) -> Tensor:
        """The gradient of `reading`'s x from that of its result (overwrites it); `leaving_grad` alike."""
        return d.mul_(self.rows)

    def leaving_grad(self, d: Tensor) -> Tensor:
        return d.mul_(self.cols)

    def fold(self, d: Tensor) -> Tensor:
        return d


class ScalarDecay(_OneState):
    """Decays inside the chunks of a block, one rate a head; `g=None` is no decay.

    With the inclusive cumulative log-decay `b_t` of a chunk: `rows = e^{b_t}` (what a query still sees of
    the entering state), `cols = e^{b_C − b_t}` (what of a key is left when the chunk ends), `total = e^{b_C}`
    and the causal matrix `e^{b_i − b_j}`. Differences are formed before `exp`, and are all ≤ 0.
    """

    def __init__(self, g: Tensor | None, chunk: int, chunks: int, dtype: torch.dtype, device: torch.device) -> None:
        lower = torch.ones(chunk, chunk, dtype=dtype, device=device).tril_()
        if g is None:
            self.rows = self.cols = torch.ones(chunk, 1, dtype=dtype, device=device)
            self.total = torch.ones(1, 1, 1, 1, 1, dtype=dtype, device=device).expand(-1, -1, chunks, -1, -1)
            self.matrix = lower
            return
        b = wide(g.clamp(min=FLOOR[dtype])).cumsum(-1)
        self.rows = b.to(dtype).exp().unsqueeze(-1)
        self.cols = (b[..., -1:] - b).to(dtype).exp().unsqueeze(-1)
        self.total = self.rows[..., -1:, :]
        bound = torch.where(lower > 0, 0.0, -torch.inf)
        self.matrix = torch.minimum((b.unsqueeze(-1) - b.unsqueeze(-2)).to(dtype), bound).exp_()

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        """`Σ_K x_i y_j e^{b_i − b_j}` for j ≤ i, else 0: `[…, C, C]`."""
        return (x @ y.transpose(-1, -2)).mul_(self.matrix)

    def read(self, x: Tensor, state: Tensor) -> Tensor:
        """`(e^b x) S`: what rows x read from the entering state: `[…, C, V]`."""
        return (x @ state).mul_(self.rows)

    def scores_grad(self, grad: Tensor, x: Tensor, y: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor, None]:
        """Gradients of `scores` for x and y, from a `grad` whose diagonal is zero (overwrites `grad`).

        The third is what `log_grad` must know of the pairs besides: nothing here.
        """
        grad = grad.mul_(self.matrix)
        return grad @ y, grad.transpose(-1, -2) @ x, None

    def log_grad(self, grads: Grads, entering: Tensor, leaving: Tensor) -> Tensor:
        """See `_log_grad`; products are summed over K first."""
        carried = (self.total * entering * leaving).sum((-1, -2)).unsqueeze(-1)
        return _log_grad(_reads(grads).sum(-1), _products(grads.left).sum(-1), carried, -1)


class VectorDecay(_OneState):
    """Decays inside the chunks of a block, one rate a key channel; the same members as `ScalarDecay`.

    The causal matrix depends on the channel, so `scores` splits the chunk in halves, again and again: a
    tile below the diagonal (rows in a second half, columns in the first) factors at the last token of the
    first half into `e^{b_i − b_a} · e^{b_a − b_j}`, two exponents ≤ 0, whatever g is. The anchor lies at or
    before every row of the tile, so no output depends on later tokens.
    """

    def __init__(self, g: Tensor, chunk: int, chunks: int, dtype: torch.dtype, device: torch.device) -> None:
        b = wide(g.clamp(min=FLOOR[dtype])).cumsum(-2)
        self.rows = b.to(dtype).exp()
        self.cols = (b[..., -1:, :] - b).to(dtype).exp()
        self.total = self.rows[..., -1, :].unsqueeze(-1)
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

    def read(self, x: Tensor, state: Tensor) -> Tensor:
        return self.reading(x) @ state

    def scores_grad(self, grad: Tensor, x: Tensor, y: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor, None]:
        dx, dy = torch.zeros_like(x), torch.zeros_like(y)
        for size, row, col in self.tiles:
            tile = _tile(grad, size)
            second, first = _half(x, size, 1) * row, _half(y, size, 0) * col
            _half(dx, size, 1).addcmul_(tile @ first, row)
            _half(dy, size, 0).addcmul_(tile.transpose(-1, -2) @ second, col)
        return dx, dy, None

    def log_grad(self, grads: Grads, entering: Tensor, leaving: Tensor) -> Tensor:
        carried = (self.total * entering * leaving).sum(-1).unsqueeze(-2)
        return _log_grad(_reads(grads), _products(grads.left), carried, -2)


def _half(x: Tensor, size: int, which: int) -> Tensor:
    """Every first (0) or second (1) half of the pairs of `size` tokens: `[…, C, D]` → `[…, m, size, D]`."""
    return x.unflatten(-2, (-1, 2, size))[..., which, :, :]


def _tile(x: Tensor, size: int) -> Tensor:
    """The tiles (second half, first half) of a `[…, C, C]` matrix: a view `[…, m, size, size]`."""
    pairs = x.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))
    return pairs[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _products(pairs: list[Rows]) -> Tensor:
    (x, d), *rest = pairs
    out = x * d
    for x, d in rest:
        out.addcmul_(x, d)
    return out


def _reads(grads: Grads) -> Tensor:
    out = _products(grads.rows)
    for x, d in grads.cols:
        out.addcmul_(x, d, value=-1)
    return out


def _log_grad(reads: Tensor, writes: Tensor, carried: Tensor, dim: int) -> Tensor:
    """The gradient of the log-decays of a chunk from those of everything they weigh.

    A log-decay g_t weighs what tokens i ≥ t read from tokens j < t and from the entering state (`reads`:
    x ⊙ dx of the reads minus that of the keys read, summed from t on), what tokens j < t leave in the
    outgoing state (`writes`: k ⊙ dk of that, summed before t) and the entering state itself (`carried`).
    Splitting it so keeps strong decays exact: no large terms cancel.
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
