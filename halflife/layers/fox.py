"""Forgetting attention: softmax attention whose scores carry the log-decay between two tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halflife import decay as decays
from halflife.layers.attention import Attention
from halflife.layers.init import zero_bias
from halflife.layers.mixer import LAYERS, State
from halflife.layers.options import Place
from halflife.layers.parts import DecayProjection
from halflife.ops.backends import fla
from halflife.ops.backends.dispatch import implements, run_pass
from halflife.ops.backends.widened import times
from halflife.ops.chunked.decays import FLOOR
from halflife.ops.spec import define
from halflife.precision import compute_dtype, wide

MAX_WEIGHTS = 1 << 25  # weights of the softmax in memory at once, over all rows and heads


@LAYERS.add("fox")
class ForgettingAttention(Attention):
    """Forgetting attention (Lin et al. 2025): softmax attention in which old tokens fade, without positions.

        o_i = Σ_{j ≤ i} softmax_j(q_iᵀ k_j / √K + Σ_{l = j+1}^{i} log f_l) v_j,   f_l = σ(w_h x_l + b_h)

    b starts at 0, as in the authors' code. The state is the KV cache, with `forget [N, S, H]`, log f in float32. The
    options are those of `Attention`.

    Args:
        position: "none", or "rope" for RoPE.
    """

    loops_over_length = True  # see `models.compiled`

    def __init__(self, place: Place, *, position: str = "none", **options: Any) -> None:
        super().__init__(place, position=position, **options)
        self.decay = decays.build("gla", num_heads=self.num_heads, head_dim=self.head_dim, tau=1)  # log σ(f)
        self.decay_proj = DecayProjection(place.hidden_size, self.decay.shape, None, bias=True, law=zero_bias)

    def cached(self, x: Tensor, k: Tensor, v: Tensor) -> State:
        return {"keys": k, "values": v, "forget": self.decay(self.decay_proj(x))}

    def attend(self, q: Tensor, cache: State, at: Tensor | None, visible: Tensor | None) -> Tensor:
        tensors = (q, cache["keys"], cache["values"], cache["forget"])
        if at is None:
            return forgetting_attention(*tensors, backend=self.pass_backend)
        return read_cache(*tensors, at, visible)


define("forgetting_attention", q="B T H K", k="B T G K", v="B T G V", g="B T H", log_decays=["g"])
implements("forgetting_attention", "fla", fla.forgetting_attention, why_not=fla.why_not_forgetting)


def forgetting_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, backend: str = "auto") -> Tensor:
    """Causal attention of whole sequences with log-decays `g [B, T, H]`; head h reads group h // (H / G).

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, G, K]`.
        v: values `[B, T, G, V]`.
        g: log-decay ≤ 0, `[B, T, H]`. −inf hides all earlier tokens.
        backend: "auto", or one of `available_backends("forgetting_attention")`.

    Returns:
        `o [B, T, H, V]` in v's dtype.
    """
    return run_pass("forgetting_attention", backend, (q, k, v, g))


@implements("forgetting_attention", "chunked", traceable=True)
@implements("forgetting_attention", "reference", traceable=True)
def _expression(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return read_cache(q, k, v, g, torch.arange(q.shape[1], device=q.device).expand(len(q), -1), None)


def read_cache(q: Tensor, k: Tensor, v: Tensor, g: Tensor, at: Tensor, visible: Tensor | None) -> Tensor:
    """The attention of queries to a cache of S tokens, a part of the queries at a time, `[N, T, H, V]`.

    Args:
        q: queries `[N, T, H, K]`.
        k, v: keys and values of the cache `[N, S, G, K]`.
        g: log-decays of the cache `[N, S, H]`.
        at: index in the cache of each query's token, `[N, T]`.
        visible: which tokens a query sees, `[N, T, S]`. None means those up to its own, the last T.
    """
    dtype, length, heads = compute_dtype(q), q.shape[1], q.shape[2]
    total = wide(g).clamp(min=FLOOR[dtype]).cumsum(1).transpose(1, 2)  # [N, H, S]
    queries, keys, values = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    at_once = max(1, MAX_WEIGHTS // max(1, total.numel()))
    read = []
    for start in range(0, max(length, 1), at_once):
        rows = slice(start, start + at_once)
        seen = total.shape[-1] if visible is not None else total.shape[-1] - max(0, length - start - at_once)
        place = at[:, rows].clamp(max=max(total.shape[-1] - 1, 0)).unsqueeze(1).expand(-1, heads, -1)
        bias = (total.gather(2, place).unsqueeze(-1) - total[:, :, None, :seen]).to(dtype)
        mask = torch.arange(seen, device=q.device) <= at[:, rows, None] if visible is None else visible[:, rows]
        scores = _by_group(queries[:, :, rows], keys[:, :, :seen].mT) * q.shape[-1] ** -0.5 + bias
        weights = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(-1)
        read.append(_by_group(weights, values[:, :, :seen]))
    return torch.cat(read, 2).transpose(1, 2).to(v.dtype)


def _by_group(rows: Tensor, matrices: Tensor) -> Tensor:
    """`rows [N, H, T, K] @ matrices [N, G, K, V]`, where each matrix serves the rows of H / G heads."""
    shared = rows.unflatten(1, (matrices.shape[1], -1))
    return times(shared.flatten(2, 3), matrices).unflatten(2, shared.shape[2:4]).flatten(1, 2)
