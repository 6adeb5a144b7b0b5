"""Log-linear attention with T × T weights, and the products that its chunks share with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.backends.dispatch import implements
from halflife.ops.chunked.decays import FLOOR
from halflife.ops.chunked.groups import scores, weigh
from halflife.ops.log_linear.rows import Rows, by_rows, levels
from halflife.precision import wide


@implements("log_linear_attention", "mask")
@by_rows
def mask(rows: Rows) -> tuple[Tensor, Tensor]:
    """The quadratic form with T × T weights, for reading and teaching; its memory is quadratic in T."""
    steps, total = rows.steps(), cumulative(rows.g)
    decay = total.to(rows.q.dtype).exp()
    o = products(rows.q, rows.k, rows.v, rows.weights, steps, total) + read_initial(
        rows, rows.q, rows.weights, steps, decay
    )
    end = rows.position + rows.lengths
    final = written_states(rows.k, rows.v, total, steps, end, rows.last) + kept_states(rows, end, rows.g.sum(-1).exp())
    return o, final


def cumulative(g: Tensor) -> Tensor:
    """The cumulative log-decay along the last dimension, in float64."""
    return wide(g).clamp(min=FLOOR[g.dtype]).cumsum(-1)


def products(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, steps: Tensor, total: Tensor) -> Tensor:
    """`(Q Kᵀ ⊙ e^{G_i − G_j} ⊙ w_i^(level)) V` inside chunks: `v, weights [N, H, …, C, …]`, `steps [N, …, C]`.

    The groups of `q, k [N, G, …, C, K]` are those of the op.
    """
    level = levels(steps.unsqueeze(-1), steps.unsqueeze(-2), weights.shape[-1] - 1).unsqueeze(1)
    lower = (steps.unsqueeze(-1) >= steps.unsqueeze(-2)).unsqueeze(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, -torch.inf).to(q.dtype).exp()
    weighted = weigh(scores(q, k), decay)
    return weighted * weights.gather(-1, level.expand_as(weighted)) @ v


def written_states(k: Tensor, v: Tensor, total: Tensor, steps: Tensor, end: Tensor, last: int) -> Tensor:
    """The states `[N, H, L − 1, K, V]` at the positions `end [N]` of tokens at `steps [N, C]`.

    The tokens are `k [N, G, C, K]`, `v [N, H, C, V]` and `total [N, H, C]`.
    """
    level = levels(steps, end.unsqueeze(-1), last)
    kept = weigh(k, (total[..., -1:] - total).to(k.dtype).exp().unsqueeze(-1))
    chosen = F.one_hot(level, last + 1)[..., 1:] * (steps < end.unsqueeze(-1)).unsqueeze(-1)
    return torch.einsum("ncl,nhck,nhcv->nhlkv", chosen.to(k.dtype), kept, v)


def read_initial(rows: Rows, q: Tensor, weights: Tensor, steps: Tensor, decay: Tensor) -> Tensor:
    """What `q [N, G, T, K]` at `steps [N, T]` reads from the initial states, decayed by `decay [N, H, T]`."""
    level = rows.bucket_levels(steps).unsqueeze(1).expand(*decay.shape, -1)
    weights, states = weights.gather(-1, level) * decay.unsqueeze(-1), rows.states
    weights, states = (x.unflatten(1, (q.shape[1], -1)) for x in (weights, states))
    return torch.einsum("ngptl,ngtk,ngplkv->ngptv", weights, q, states).flatten(1, 2)


def kept_states(rows: Rows, end: Tensor, decay: Tensor) -> Tensor:
    """The initial states at the levels that they have at the positions `end [N]`, decayed by `decay [N, H]`."""
    to = F.one_hot(rows.bucket_levels(end), rows.last + 1)[..., 1:].to(decay.dtype)
    return torch.einsum("nlm,nh,nhlkv->nhmkv", to, decay, rows.states)
