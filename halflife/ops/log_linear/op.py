"""Log-linear attention: one state for every power of two of the distance, read with weights of its own.

    o_t = Σ_ℓ w_t^(ℓ) S_t^(ℓ)ᵀ q_t · scale,    S_t^(ℓ) = Σ_{s: level(t, s) = ℓ} e^{G_t − G_s} k_s v_sᵀ

G is the cumulative log-decay. `level(t, s)` is the number of bits of `t xor s`: 0 for the token itself, 1 for its
neighbour in a pair, 2 for the pair before in a block of four, and so on (a Fenwick tree). With L levels, the last one
also holds the tokens of all higher ones. A step merges the levels below the lowest zero bit of t, as a binary
counter carries. T tokens need `log2 T + 1` levels. With all weights 1 this is `linear_attention`.

Source: Guo et al. 2025, "Log-Linear Attention", §3.1 to §3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halflife.ops.backends import fla
from halflife.ops.backends.dispatch import dispatch, implements
from halflife.ops.call import Call
from halflife.ops.chunked.groups import each_head
from halflife.ops.log_linear.rows import Rows, by_rows, final_states, levels
from halflife.ops.slow_decay import decay_and_add
from halflife.packing import Packing

State = tuple[Tensor, Tensor]


def log_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, weights: Tensor, *,
    scale: float | None = None, initial_state: State | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None, chunk_size: int = 64, backend: str = "auto",
) -> tuple[Tensor, State | None]:  # fmt: skip
    """Log-linear attention, `o_t = Σ_ℓ w_t^(ℓ) S_t^(ℓ)ᵀ q_t · scale`.

    Args:
        q, k: queries and keys `[B, T, G, K]`. H is a multiple of G, and head h reads group h // (H / G).
        v: values `[B, T, H, V]`.
        g: log-decay ≤ 0, `[B, T, H]`; −inf erases all states.
        weights: w, the weights of the L ≥ 2 levels at each token `[B, T, H, L]`. The first is that of the token itself.
        scale: factor of the output; None means `K ** -0.5`.
        initial_state: `(states [N, H, L − 1, K, V], position [N])`, which an earlier call returned; None means zeros.
        output_final_state: whether to return the states after the last token.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1): 0, …, T.
        chunk_size: tokens a chunk, rounded up to a power of two. It changes speed and memory, not the result.
        backend: "auto", or one of `available_backends("log_linear_attention")`; "mask" takes memory quadratic in T.

    Returns:
        `o [B, T, H, V]` in v's dtype, and the final `(states, position)` or None. The states have float32, or float64
        for float64 inputs.

    Raises:
        ValueError: a shape does not fit, a log-decay is positive, or the backend cannot run.
    """
    if isinstance(weights, Tensor) and weights.ndim == 4 and weights.shape[-1] < 2:
        raise ValueError(f"weights must be [B, T, H, L] with L ≥ 2; got {list(weights.shape)}")
    return dispatch(
        "log_linear_attention", {"q": q, "k": k, "v": v, "g": g, "weights": weights}, initial_state, cu_seqlens,
        backend, output_final_state, scale=scale, chunk_size=chunk_size,
    )  # fmt: skip


@implements("log_linear_attention", "fla", why_not=fla.why_not)
def _fla(call: Call) -> tuple[Tensor, State]:
    return fla.log_linear_attention(call), final_states(call)


@implements("log_linear_attention", "reference")
@by_rows
def reference(rows: Rows) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    states, outputs = rows.states, []
    for t in range(rows.q.shape[2]):
        position = rows.position + t
        token = [each_head(x[:, :, t], rows.v.shape[1]) for x in (rows.q, rows.k, rows.v, rows.g, rows.weights)]
        o, new = _token(states, position, *token)
        states = torch.where((t < rows.lengths).view(-1, 1, 1, 1, 1), new, states)
        outputs.append(o)
    return torch.stack(outputs, 2) if outputs else rows.v, states


def _token(
    states: Tensor, position: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: `states [N, H, L − 1, K, V]`, `position [N]`, `q, k [N, H, K]`, `g [N, H]`, `weights [N, H, L]`."""
    written = k.unsqueeze(-1) * v.unsqueeze(-2)
    decayed = decay_and_add(states, g[..., None, None], torch.zeros_like(states))
    read = torch.einsum("nhl,nhk,nhlkv->nhv", weights[..., 1:], q, decayed)
    o = read + weights[..., :1] * (q * k).sum(-1, keepdim=True) * v
    level = torch.arange(1, states.shape[2] + 1, device=states.device)
    carry = levels(position, position + 1, states.shape[2]).unsqueeze(-1)  # where the merged states go
    below, here = (x[:, None, :, None, None] for x in (level < carry, level == carry))
    merged = written.unsqueeze(2) + torch.where(below, decayed, 0).sum(2, keepdim=True)
    return o, torch.where(below, 0, decayed) + torch.where(here, merged, 0)
