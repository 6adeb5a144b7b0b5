"""A cascade of N states: each passes a share of its content on to the next one, which decays more slowly.

    S_n ← e^{g_n} ((1 − r_n) S_n + r_{n−1} e^{g_{n−1}} S_{n−1}),   r_0 = r_N = 0
    u_t = v_t,  or  β_t (v_t − (Σ_n S_n)ᵀ k_t);        S_1 ← S_1 + k_t u_tᵀ,   o_t = (Σ_n S_n)ᵀ q_t · scale

All states on the right are those before the token. With two states and shares of 0 and 1 this is `gate_rank`, whose
g_slow is g_2, 0 where r_1 = 0. The states change by a matrix `M_t [N, N]`, with `1 − r_n` on its diagonal and `r_n`
below it, both times decays. The weight of key j at query i is therefore `1ᵀ M_i ⋯ M_{j+1} e_1`, and all blocks of the
mask below its diagonal have rank N at most: rows from a query, `1ᵀ M_i ⋯ M_m`, times columns from a key,
`M_{m−1} ⋯ M_{j+1} e_1`. This generalises GateRank, §3.2, and is not in its paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halflife.ops.arguments import check_decay, check_required, check_tensors, is_transformed
from halflife.ops.backends.dispatch import choose, why
from halflife.ops.call import OpCall
from halflife.precision import compute_dtype, without_autocast
from halflife.shapes import Float, Int


@dataclass(frozen=True)
class CascadeCall:
    """The arguments of a call: those of other ops, and in the dtype of the states g, r and the first states."""

    op: OpCall
    g: Tensor
    r: Tensor
    initial: Tensor

    @property
    def num_states(self) -> int:
        """N."""
        return self.g.shape[-1]

    @property
    def differentiated(self) -> bool:
        """Whether autograd will ask for a gradient."""
        return self.op.differentiated or (
            torch.is_grad_enabled() and any(x.requires_grad for x in (self.g, self.r, self.initial))
        )


def cascade(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H N"],
    r: Float[Tensor, "B T H M"],
    beta: Float[Tensor, "B T H"] | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "S H N K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """A cascade of N states, `S_n ← e^{g_n} ((1 − r_n) S_n + r_{n−1} e^{g_{n−1}} S_{n−1})`, then the update of S_1.

    Args:
        q, k: queries and keys `[B, T, H, K]`; under the delta rule, keys of norm 1.
        v: values `[B, T, H, V]`.
        g: log-decays of the states ≤ 0, `[B, T, H, N]`; −inf erases a state.
        r: shares of the first N − 1 states that move on, in [0, 1], `[B, T, H, N − 1]`.
        beta: writing strength `[B, T, H]` of the delta rule; None is the linear update.
        scale: factor of the output; None means `K ** -0.5`.
        initial_state: `[sequences, H, N, K, V]`; None means zeros.
        output_final_state: whether to return the states after the last token.
        cu_seqlens: boundaries `[sequences + 1]` of sequences packed along T (then B = 1): 0, …, T.
        chunk_size: tokens a chunk, rounded up to a power of two. It changes speed and memory, not the result.
        backend: "auto", or one of `available_backends("cascade")`; "mask" takes memory quadratic in T.

    Returns:
        `o [B, T, H, V]` in v's dtype, and the final states (float32, or float64 for float64 inputs), or None.

    Raises:
        ValueError: a shape does not fit, a log-decay is positive, or the backend cannot run.
    """
    call = OpCall("cascade", q, k, v, beta=beta, scale=scale, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    check_required(g=g, r=r)
    check_tensors(initial_state=initial_state)
    call.check()
    check_decay("g", g, (call.op, "g"))
    states = g.shape[-1]
    if g.ndim != 4 or g.shape[:3] != q.shape[:3] or r.shape != (*q.shape[:3], states - 1):
        heads = tuple(q.shape[:3])
        raise ValueError(
            f"g must be [B, T, H, N] and r [B, T, H, N − 1], with B, T, H = {heads}; got {tuple(g.shape)} and "
            f"{tuple(r.shape)}"
        )
    shape = (call.num_sequences, q.shape[2], states, q.shape[3], v.shape[3])
    if initial_state is not None and initial_state.shape != shape:
        raise ValueError(f"initial_state must be [sequences, H, N, K, V] = {shape}; got {tuple(initial_state.shape)}")
    call = call.with_wide_inputs(initial_state)
    dtype = compute_dtype(call.q)
    initial = q.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    whole = CascadeCall(call, g.to(dtype), r.to(dtype), initial)
    by_token = call.is_token and (whole.differentiated or why("cascade", "native", call.device, whole) is not None)
    if backend == "auto" and (by_token or is_transformed() or not q.shape[1]):
        backend = "reference"
    implementation = choose("cascade", backend, call.device, whole)
    with without_autocast(call.device):
        o, final = implementation(whole)
    return o.to(v.dtype), final if output_final_state else None


def transitions(g: Tensor, r: Tensor) -> Tensor:
    """The matrices M of log-decays `g […, N]` and shares `r […, N − 1]`: `[…, N, N]`."""
    decay = g.exp()
    kept = decay * torch.cat([1 - r, torch.ones_like(decay[..., :1])], -1)
    return torch.diag_embed(kept) + torch.diag_embed(_moved(g, r), offset=-1)


def changes(g: Tensor, r: Tensor) -> Tensor:
    """The diagonal of M − I and the entries below it, `[…, 2N − 1]`, without rounding M to 1 where decays are slow."""
    lost = torch.cat([r, torch.zeros_like(g[..., :1])], -1)
    return torch.cat([g.expm1() * (1 - lost) - lost, _moved(g, r)], -1)


def _moved(g: Tensor, r: Tensor) -> Tensor:
    return (g[..., 1:] + g[..., :-1]).exp() * r
