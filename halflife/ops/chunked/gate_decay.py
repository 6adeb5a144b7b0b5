"""GateRank's decays inside the chunks of a block, for its fast and its slow state (see `halflife.ops.gate_rank`).

A and B are the inclusive cumulative log-decays of a chunk, slow and fast. n(j) is the first reset after token j, and f
is the first reset of the chunk (docs/equations.md, section 4):

| | log of its weight |
|---|---|
| key j at query i | `A_i − A_j + B_{min(n(j), i)} − B_j` |
| entering fast, slow state at query i | `A_i + B_{min(f, i)}`, `A_i` |
| key j in the outgoing state (slow if a reset follows, else fast) | `A_C − A_j + B_{min(n(j), C)} − B_j` |
| entering fast state in the outgoing fast state | `B_C`, if the chunk has no reset |
| entering fast state in the outgoing slow state | `A_C + B_f`, if the chunk has a reset |
| entering slow state in the outgoing slow state | `A_C` |

B never rises, so `B_{min(n(j), i)} = max(B_{n(j)}, B_i)`, where B_{n(j)} is −∞ if no reset follows. So no indices are
needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halflife.ops.chunked.decays import FLOOR, DecayGrads, RowGrads
from halflife.ops.slow_decay import split_decay
from halflife.precision import wide


class GateDecay:
    """The weights of both states. `halflife.ops.chunked.decays` describes the members.

    `g [b, H, c, C, 2]` are the log-decays, slow and fast. A token whose slow log-decay is not 0 is a reset.
    """

    num_states = 2

    def __init__(self, g: Tensor, chunk: int, chunks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.reset = g[..., 0] != 0
        a, b = wide(g.clamp(min=FLOOR[dtype])).cumsum(-2).unbind(-1)
        at_resets = torch.where(self.reset, b, -torch.inf)
        first = at_resets.amax(-1, keepdim=True)  # B_f
        following = at_resets.flip(-1).cummax(-1).values.flip(-1)[..., 1:]
        following = torch.cat([following, torch.full_like(first, -torch.inf)], -1)  # B_n(j)
        stays_fast = following == -torch.inf  # no reset follows, so the key ends in the fast state

        self.query_weights = torch.stack([a + torch.maximum(b, first), a], -1).to(dtype).exp()
        log_keys = a[..., -1:] - a - b + torch.maximum(following, b[..., -1:])
        log_keys = torch.stack([log_keys.where(stays_fast, -torch.inf), log_keys.where(~stays_fast, -torch.inf)], -1)
        self.key_weights = log_keys.to(dtype).exp()
        fast_to_fast = b[..., -1:].where(first == -torch.inf, -torch.inf)
        log_decay = torch.stack([fast_to_fast, a[..., -1:]], -2).unsqueeze(-1)
        self.chunk_decay, self.chunk_change = log_decay.to(dtype).exp(), split_decay(log_decay, dtype)
        self.fast_to_slow = (a[..., -1:] + first).to(dtype).exp().unsqueeze(-1)  # [b, H, c, 1, 1]

        weights = torch.maximum(b.unsqueeze(-1), following.unsqueeze(-2)).add_(a.unsqueeze(-1))
        weights = weights.sub_((a + b).unsqueeze(-2)).to(dtype)
        bound = torch.ones(chunk, chunk, dtype=dtype, device=device).tril_().log_()  # 0, and −∞ above the diagonal
        self.matrix = torch.minimum(weights, bound, out=weights).exp_()

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.transpose(-1, -2)).mul_(self.matrix)

    def weight_queries(self, x: Tensor) -> Tensor:
        return _weight_states(x, self.query_weights)

    def weight_keys(self, k: Tensor) -> Tensor:
        return _weight_states(k, self.key_weights)

    def read_state(self, x: Tensor, state: Tensor) -> Tensor:
        return self.weight_queries(x) @ state

    def carry(self, c: int, state: Tensor, update: Tensor) -> Tensor:
        state, update = _split_states(state), _split_states(update)
        kept, change = (x[:, :, c] for x in self.chunk_change)
        out = torch.addcmul(update, change, state)
        out[:, :, 1].addcmul_(self.fast_to_slow[:, :, c], state[:, :, 0])
        return out.addcmul_(kept, state).flatten(-3, -2)

    def carry_back(self, c: int, grad: Tensor, update: Tensor) -> Tensor:
        grad, update = _split_states(grad), _split_states(update)
        kept, change = (x[:, :, c] for x in self.chunk_change)
        out = torch.addcmul(update, change, grad)
        out[:, :, 0].addcmul_(self.fast_to_slow[:, :, c], grad[:, :, 1])
        return out.addcmul_(kept, grad).flatten(-3, -2)

    def weight_queries_grad(self, d: Tensor) -> Tensor:
        return _split_states(d, -1).mul_(self.query_weights.unsqueeze(-1)).flatten(-2)

    def weight_keys_grad(self, d: Tensor) -> Tensor:
        return _split_states(d, -1).mul_(self.key_weights.unsqueeze(-1)).flatten(-2)

    def sum_over_states(self, d: Tensor) -> Tensor:
        fast, slow = d.chunk(2, -1)
        return fast + slow

    def scores_grad(self, grad: Tensor, x: Tensor, y: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in `ScalarDecay`; the third result is the gradient of the log-weights of the scores, `[…, C, C]`."""
        log_scores = grad * scores
        grad = grad.mul_(self.matrix)
        return grad @ y, grad.transpose(-1, -2) @ x, log_scores

    def log_grad(self, grads: DecayGrads, entering: Tensor, leaving: Tensor) -> Tensor:
        """The gradient of both log-decays `[…, C, 2]`; that of the slow one is 0 where there is no reset.

        A key that ends in the slow state, or that a query reads across a reset, decays fast from j to n(j). The fast
        log-decay of t therefore sums over the keys before t of the segment that ends at t or later.
        """
        inside, across_queries, across_keys = self._score_sums(grads.log_scores)
        read_fast, read_slow = _products(grads.reads).unbind(-1)
        write_fast, write_slow = _products(grads.writes).unbind(-1)
        entering, leaving = _split_states(entering), _split_states(leaving)
        fast, slow = (self.chunk_decay * entering * leaving).sum((-1, -2)).unbind(-1)
        merged = (self.fast_to_slow * entering[..., 0, :, :] * leaving[..., 1, :, :]).sum((-1, -2))

        resets = self.reset.cumsum(-1)
        resets_before = resets - self.reset.long()  # strictly before t
        earlier = torch.ones(resets.shape[-1], resets.shape[-1], dtype=torch.bool, device=resets.device).tril(-1)
        open_keys = (earlier & (resets_before.unsqueeze(-1) == resets.unsqueeze(-2))).to(across_keys.dtype)
        dslow = _sum_from(across_queries - across_keys + read_fast + read_slow)
        dslow = dslow + _sum_before(write_slow) + (slow + merged).unsqueeze(-1)
        dfast = _sum_from(inside) + _sum_before(write_fast)
        dfast = dfast + (open_keys @ (across_keys + write_slow).unsqueeze(-1)).squeeze(-1)
        dfast += (_sum_from(read_fast) + (fast + merged).unsqueeze(-1)).masked_fill_(resets_before > 0, 0)
        return torch.stack([dslow.masked_fill_(~self.reset, 0), dfast], -1)

    def _score_sums(self, log_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Row sums minus column sums of pairs without a reset between, then row sums and column sums of the others.

        Only the others see the slow decay. Apart, large sums do not cancel in the gradient of a strong reset.
        """
        segment = self.reset.to(log_scores.dtype).cumsum(-1)
        across = log_scores.masked_fill(segment.unsqueeze(-1) == segment.unsqueeze(-2), 0)
        inside = log_scores - across
        return inside.sum(-1) - inside.sum(-2), across.sum(-1), across.sum(-2)


def _weight_states(x: Tensor, weights: Tensor) -> Tensor:
    """Weigh `[…, C, K]` for both states by `[…, C, 2]`: `[…, C, 2K]`."""
    out = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
    for part, weight in zip(out.chunk(2, -1), weights.unsqueeze(-2).unbind(-1), strict=True):
        part.copy_(x).mul_(weight)  # torch.compile refuses out= of a part
    return out


def _split_states(x: Tensor, dim: int = -2) -> Tensor:
    """Split a dimension 2K into (2, K), the fast and the slow state."""
    return x.unflatten(dim, (2, -1))


def _products(pairs: list[RowGrads]) -> Tensor:
    """Rows times the gradients of both states, summed over K: `[…, C, 2]`."""
    (x, d), *rest = pairs
    out = _split_states(d, -1) * x.unsqueeze(-2)
    for x, d in rest:
        out.addcmul_(_split_states(d, -1), x.unsqueeze(-2))
    return out.sum(-1)


def _sum_from(x: Tensor) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1)


def _sum_before(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x[..., :-1].cumsum(-1), (1, 0))
