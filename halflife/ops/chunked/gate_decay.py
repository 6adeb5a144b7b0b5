"""GateRank's decays inside the chunks of a block: a fast state, and a slow one that takes it over at resets.

With the inclusive cumulative log-decays A (slow) and B (fast) of a chunk, n(j) the first reset after j and f the first
of the chunk (`math.md` §4):

| | log of its weight |
|---|---|
| key j at query i | `A_i − A_j + B_{min(n(j), i)} − B_j` |
| entering fast, slow state at query i | `A_i + B_{min(f, i)}`, `A_i` |
| key j in the outgoing state | `A_C − A_j + B_{min(n(j), C)} − B_j`; slow if a reset follows, else fast |
| entering fast state in the outgoing fast one | `B_C`, if the chunk has no reset |
| entering fast, slow state in the outgoing slow one | `A_C + B_f` (if it has one), `A_C` |

B never rises, so that `B_{min(n(j), i)} = max(B_{n(j)}, B_i)`, with −∞ for no reset: no index is ever formed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halflife.ops.chunked.decays import FLOOR, Grads, Rows, wide


class GateDecay:
    """The weights of both states; the same members as `chunk_decay`'s classes.

    Args:
        g: the log-decays `[b, H, c, C, 2]`, slow and fast; a reset is where the slow one is not 0.
        chunk, chunks: tokens a chunk and chunks of the block.
    """

    parts = 2

    def __init__(self, g: Tensor, chunk: int, chunks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.reset = g[..., 0] != 0
        a, b = wide(g.clamp(min=FLOOR[dtype])).cumsum(-2).unbind(-1)
        at_resets = torch.where(self.reset, b, -torch.inf)
        first = at_resets.amax(-1, keepdim=True)  # B_f
        following = at_resets.flip(-1).cummax(-1).values.flip(-1)[..., 1:]
        following = torch.cat([following, torch.full_like(first, -torch.inf)], -1)  # B_n(j)
        last = following == -torch.inf  # no reset follows: the key leaves in the fast state

        self.rows = torch.stack([a + torch.maximum(b, first), a], -1).to(dtype).exp()
        left = a[..., -1:] - a - b + torch.maximum(following, b[..., -1:])
        left = torch.stack([left.where(last, -torch.inf), left.where(~last, -torch.inf)], -1)
        self.cols = left.to(dtype).exp()
        kept = b[..., -1:].where(first == -torch.inf, -torch.inf)
        self.total = torch.stack([kept, a[..., -1:]], -2).to(dtype).exp().unsqueeze(-1)  # [b, H, c, 2, 1, 1]
        self.merged = (a[..., -1:] + first).to(dtype).exp().unsqueeze(-1)  # fast into slow, [b, H, c, 1, 1]

        weights = torch.maximum(b.unsqueeze(-1), following.unsqueeze(-2)).add_(a.unsqueeze(-1))
        weights = weights.sub_((a + b).unsqueeze(-2)).to(dtype)
        bound = torch.ones(chunk, chunk, dtype=dtype, device=device).tril_().log_()  # 0, and −∞ above the diagonal
        self.matrix = torch.minimum(weights, bound, out=weights).exp_()

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.transpose(-1, -2)).mul_(self.matrix)

    def reading(self, x: Tensor) -> Tensor:
        return _spread(x, self.rows)

    def leaving(self, k: Tensor) -> Tensor:
        return _spread(k, self.cols)

    def read(self, x: Tensor, state: Tensor) -> Tensor:
        return self.reading(x) @ state

    def carry(self, c: int, state: Tensor, update: Tensor) -> Tensor:
        state, update = _states(state), _states(update)
        out = torch.addcmul(update, self.total[:, :, c], state)
        out[:, :, 1].addcmul_(self.merged[:, :, c], state[:, :, 0])
        return out.flatten(-3, -2)

    def carry_back(self, c: int, grad: Tensor, update: Tensor) -> Tensor:
        grad, update = _states(grad), _states(update)
        out = torch.addcmul(update, self.total[:, :, c], grad)
        out[:, :, 0].addcmul_(self.merged[:, :, c], grad[:, :, 1])
        return out.flatten(-3, -2)

    def reading_grad(self, d: Tensor) -> Tensor:
        return _states(d, -1).mul_(self.rows.unsqueeze(-1)).flatten(-2)

    def leaving_grad(self, d: Tensor) -> Tensor:
        return _states(d, -1).mul_(self.cols.unsqueeze(-1)).flatten(-2)

    def fold(self, d: Tensor) -> Tensor:
        fast, slow = d.chunk(2, -1)
        return fast + slow

    def scores_grad(self, grad: Tensor, x: Tensor, y: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in `chunk_decay`; the third is the gradient of the pairs' log-weights, `[…, C, C]`."""
        pairs = grad * scores
        grad = grad.mul_(self.matrix)
        return grad @ y, grad.transpose(-1, -2) @ x, pairs

    def log_grad(self, grads: Grads, entering: Tensor, leaving: Tensor) -> Tensor:
        """The gradient of both log-decays `[…, C, 2]`; that of the slow one is 0 where it does not reset.

        With the weights' exponents above, what a key leaves in the slow state, and what it gives to queries across a
        reset, decays fast from j to n(j): for t, the sum over the keys of the segment that ends at t or later.
        """
        inside, rows, cols = self._pair_sums(grads.pairs)
        read_fast, read_slow = _products(grads.reads).unbind(-1)
        left_fast, left_slow = _products(grads.left).unbind(-1)
        entering, leaving = _states(entering), _states(leaving)
        fast, slow = (self.total * entering * leaving).sum((-1, -2)).unbind(-1)
        merged = (self.merged * entering[..., 0, :, :] * leaving[..., 1, :, :]).sum((-1, -2))

        resets = self.reset.cumsum(-1)
        before = resets - self.reset.long()  # strictly before t
        earlier = torch.ones(resets.shape[-1], resets.shape[-1], dtype=torch.bool, device=resets.device).tril(-1)
        open_keys = (earlier & (before.unsqueeze(-1) == resets.unsqueeze(-2))).to(cols.dtype)
        dslow = _after(rows - cols + read_fast + read_slow) + _before(left_slow) + (slow + merged).unsqueeze(-1)
        dfast = _after(inside) + _before(left_fast) + (open_keys @ (cols + left_slow).unsqueeze(-1)).squeeze(-1)
        dfast += (_after(read_fast) + (fast + merged).unsqueeze(-1)).masked_fill_(before > 0, 0)
        return torch.stack([dslow.masked_fill_(~self.reset, 0), dfast], -1)

    def _pair_sums(self, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums by row less those by column of the pairs with no reset between them; by row, by column of the others.

        Only the latter see the slow decay. They are summed apart, so that no strong reset's gradient is what is left
        of sums that cancel.
        """
        segment = self.reset.to(pairs.dtype).cumsum(-1)
        across = pairs.masked_fill(segment.unsqueeze(-1) == segment.unsqueeze(-2), 0)
        inside = pairs - across
        return inside.sum(-1) - inside.sum(-2), across.sum(-1), across.sum(-2)


def _spread(x: Tensor, weights: Tensor) -> Tensor:
    """`[…, C, K]` with weights `[…, C, 2]` → `[…, C, 2K]`."""
    out = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
    for part, weight in zip(out.chunk(2, -1), weights.unsqueeze(-2).unbind(-1), strict=True):
        torch.mul(x, weight, out=part)
    return out


def _states(x: Tensor, dim: int = -2) -> Tensor:
    """The fast and the slow half of a dimension apart: 2K → (2, K)."""
    return x.unflatten(dim, (2, -1))


def _products(pairs: list[Rows]) -> Tensor:
    """Rows times the gradients of both states, summed over K: `[…, C, 2]`."""
    (x, d), *rest = pairs
    out = _states(d, -1) * x.unsqueeze(-2)
    for x, d in rest:
        out.addcmul_(_states(d, -1), x.unsqueeze(-2))
    return out.sum(-1)


def _after(x: Tensor) -> Tensor:
    """Sums over i ≥ t."""
    return x.flip(-1).cumsum(-1).flip(-1)


def _before(x: Tensor) -> Tensor:
    """Sums over j < t."""
    return torch.nn.functional.pad(x[..., :-1].cumsum(-1), (1, 0))
