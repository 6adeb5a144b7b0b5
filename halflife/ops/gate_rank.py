"""GateRank: a fast state, and a slow one that takes it over at resets, under the linear or the delta update.

    fast ← e^{g_fast} fast;   where g_slow ≠ 0 (a reset):  slow ← e^{g_slow} (slow + fast),  fast ← 0
    u_t = v_t,  or  β_t (v_t − (slow + fast)ᵀ k_t);        fast ← fast + k_t u_tᵀ,   o_t = (slow + fast)ᵀ q_t · scale

The recurrence that the paper's mask (its Figure 2a, Eq. 16) stands for; its Eqs. 10 and 11 count the new token twice
(`math.md` §4). Without resets it is `linear_attention` or `delta_rule` under g_fast.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops import recurrent
from halflife.ops.backends.dispatch import dispatch, implements
from halflife.ops.chunked import layout
from halflife.ops.chunked.decays import FLOOR, wide
from halflife.ops.chunked.gate_decay import GateDecay
from halflife.ops.delta_rule import Block as DeltaBlock
from halflife.ops.linear_attention import Block as LinearBlock
from halflife.precision import compute_dtype
from halflife.shapes import Float, Int

States = tuple[Tensor, Tensor]


def gate_rank(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g_slow: Float[Tensor, "B T H"],
    g_fast: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"] | None = None,
    *,
    scale: float | None = None,
    initial_state: States | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, States | None]:
    """GateRank: `fast ← e^{g_fast} fast`, at resets `slow ← e^{g_slow} (slow + fast)` and `fast ← 0`, then the update.

    Args:
        q, k: queries and keys `[B, T, H, K]`; under the delta rule, keys of norm 1.
        v: values `[B, T, H, V]`.
        g_slow: log-decay of the slow state ≤ 0, `[B, T, H]`. Exactly 0 is no reset; any other value, however small,
            is one. Its gradient is 0 where there is no reset.
        g_fast: log-decay of the fast state ≤ 0, `[B, T, H]`; −inf forgets it.
        beta: writing strength `[B, T, H]` of the delta rule; None is the linear update.
        scale: factor of the output; None means `K ** -0.5`.
        initial_state: `(fast, slow)`, each `[B, H, K, V]`, or `[N, H, K, V]` when packed; None means zeros.
        output_final_state: whether to return the states after the last token.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1): 0, …, T.
        chunk_size: tokens a chunk (rounded up to a power of two): speed and memory, not the result.
        backend: "auto", or one of `available_backends("gate_rank")`; "mask" is the quadratic form, for short T.

    Returns:
        `o [B, T, H, V]` in v's dtype, and the final `(fast, slow)` (float32, or float64 for float64 inputs), or None.

    Raises:
        ValueError: a shape does not fit, or the backend cannot run; the message says what would.
    """
    recurrent.check_inputs(q, k, v, None, None, cu_seqlens)
    for name, x in (("g_slow", g_slow), ("g_fast", g_fast), ("beta", beta)):
        if x is not None and x.shape != q.shape[:3]:
            raise ValueError(f"{name} must be [B, T, H] = {tuple(q.shape[:3])}; got {tuple(x.shape)}")
    if initial_state is not None and (not isinstance(initial_state, tuple | list) or len(initial_state) != 2):
        raise ValueError("initial_state must be the pair (fast, slow)")
    for state in initial_state or ():
        recurrent.check_inputs(q, k, v, None, state, cu_seqlens)
    joined = None if initial_state is None else torch.cat(tuple(initial_state), -2)
    inputs = (q, k, v, beta, g_slow, g_fast)
    o, state = dispatch("gate_rank", backend, inputs, scale, joined, output_final_state, cu_seqlens, chunk_size)
    return o, None if state is None else split(state)


def split(state: Tensor) -> States:
    """`[N, H, 2K, V]`, as every backend carries it, → `(fast, slow)`."""
    fast, slow = state.chunk(2, -2)
    return fast.contiguous(), slow.contiguous()


# ------------------------------------------------------------------------------------------- definition


@implements("gate_rank", "reference")
def reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g_slow: Tensor, g_fast: Tensor, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, token by token."""
    inputs = (q, k, v, g_slow, g_fast) if beta is None else (q, k, v, g_slow, g_fast, beta)
    return recurrent.token_loop(_token, inputs, None, scale, initial_state, cu_seqlens, parts=2)


def _token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g_slow: Tensor, g_fast: Tensor, *rest: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token: `state [B, H, 2K, V]`, `q, k [B, H, K]`, `v [B, H, V]`, gates `[B, H]`; beta, if any, comes first of
    `rest`."""
    fast, slow = state.chunk(2, -2)
    fast = fast * g_fast.exp()[..., None, None]
    reset = (g_slow != 0)[..., None, None]
    slow = torch.where(reset, g_slow.exp()[..., None, None] * (slow + fast), slow)
    fast = torch.where(reset, 0, fast)
    beta = rest[0] if len(rest) == 2 else None
    if beta is not None:
        v = beta.unsqueeze(-1) * (v - ((slow + fast) * k.unsqueeze(-1)).sum(-2))
    fast = fast + k.unsqueeze(-1) * v.unsqueeze(-2)
    return ((slow + fast) * q.unsqueeze(-1)).sum(-2), torch.cat([fast, slow], -2)


# ------------------------------------------------------------------------------------------------- mask


def masks(g_slow: Tensor, g_fast: Tensor) -> tuple[Tensor, ...]:
    """The paper's Γ and Λ, `[B, H, T, T]`: `o = (Q Kᵀ ⊙ Γ ⊙ Λ) V` (its Eqs. 12 to 16, in closed form).

    `Γ_ij = e^{A_i − A_j}` and `Λ_ij = e^{B_{min(n(j), i)} − B_j}` for i ≥ j, else 0, with the cumulative log-decays A
    (slow), B (fast) and n(j), the first reset after j. Autograd's gradient of a log-decay is a difference of sums here:
    right to rounding beside the other gradients, not where all that it weighs has decayed away (the chunked form's is).

    Args:
        g_slow, g_fast: log-decays `[B, T, H]`.
    """
    a, b, resets = _cumulative(g_slow, g_fast)
    until = resets[..., 1:]
    steps = torch.arange(until.shape[-1], device=until.device)
    lower = steps.unsqueeze(-1) >= steps
    last = torch.minimum(until.unsqueeze(-2), steps.unsqueeze(-1))  # min(n(j), i)
    at_last = b.unsqueeze(-1).expand(*last.shape).gather(-2, last)
    slow, fast = a.unsqueeze(-1) - a.unsqueeze(-2), at_last - b.unsqueeze(-2)
    dtype = compute_dtype(g_fast)
    return tuple(x.masked_fill(~lower, -torch.inf).to(dtype).exp() for x in (slow, fast))


def _cumulative(g_slow: Tensor, g_fast: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A and B `[B, H, T]` in float64, and the first reset at t or later `[B, H, T + 1]`, T where there is none."""
    floor = FLOOR[compute_dtype(g_fast)]
    slow, fast = (wide(g).transpose(1, 2) for g in (g_slow, g_fast))
    reset, length = slow != 0, slow.shape[-1]
    at = F.pad(torch.where(reset, torch.arange(length, device=slow.device), length), (0, 1), value=length)
    a = torch.where(reset, slow, 0.0).clamp(min=floor).cumsum(-1)
    return a, fast.clamp(min=floor).cumsum(-1), at.flip(-1).cummin(-1).values.flip(-1)


@implements("gate_rank", "mask")
def mask(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g_slow: Tensor, g_fast: Tensor, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The quadratic form, for reading and teaching: T × T weights, memory quadratic in T."""
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    states = recurrent.first_state(q, v, initial_state, q.shape[0] if cu_seqlens is None else len(bounds) - 1, 2)
    outputs, finals = [], []
    for row, (start, stop) in enumerate(pairwise(bounds)):
        tokens, state = slice(start, stop), states if cu_seqlens is None else states[row : row + 1]
        if stop > start:
            gain = None if beta is None else beta[:, tokens]
            o, state = _quadratic(
                q[:, tokens], k[:, tokens], v[:, tokens], g_slow[:, tokens], g_fast[:, tokens], gain, state
            )
            outputs.append(o)
        finals.append(state)
    return torch.cat([v[:, :0].to(states), *outputs], 1).mul(scale).to(v.dtype), torch.cat([states[:0], *finals])


def _quadratic(
    q: Tensor, k: Tensor, v: Tensor, g_slow: Tensor, g_fast: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence: `O = (Q Kᵀ ⊙ D) U` plus what the queries read from the initial states."""
    q, k, v = (x.to(state.dtype).transpose(1, 2) for x in (q, k, v))
    fast, slow = state.chunk(2, -2)
    g_slow, g_fast = g_slow.to(state.dtype), g_fast.to(state.dtype)
    a, b, resets = _cumulative(g_slow, g_fast)
    first, until = resets[..., :1], resets[..., 1:]
    steps = torch.arange(q.shape[2], device=q.device)
    at_first = b.gather(-1, torch.minimum(first, steps))
    from_slow, from_fast = (x.to(state).exp().unsqueeze(-1) for x in (a, a + at_first))
    decay = torch.mul(*masks(g_slow, g_fast))

    written = v
    if beta is not None:
        gain = beta.to(state.dtype).transpose(1, 2).unsqueeze(-1)
        known = from_fast * (k @ fast) + from_slow * (k @ slow)
        system = torch.eye(len(steps)).to(state) + (gain * (k @ k.transpose(-1, -2)) * decay).tril(-1)
        written = torch.linalg.solve_triangular(system, gain * (v - known), upper=False)
    o = (q @ k.transpose(-1, -2) * decay) @ written + from_fast * (q @ fast) + from_slow * (q @ slow)

    left = k * decay[..., -1, :, None]  # what is left of each key after the last token
    still = (until == len(steps)).unsqueeze(-1)
    kept = (first == len(steps)).unsqueeze(-1)
    carried = from_fast[..., -1:, :] * fast
    fast = carried * kept + (left * still).transpose(-1, -2) @ written
    slow = from_slow[..., -1:, :] * slow + carried * ~kept + (left * ~still).transpose(-1, -2) @ written
    return o.transpose(1, 2), torch.cat([fast, slow], -2)


# ---------------------------------------------------------------------------------------------- chunked


@implements("gate_rank", "chunked")
def chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g_slow: Tensor, g_fast: Tensor, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`linear_attention`'s and `delta_rule`'s chunks with the weights of `GateDecay` and both states carried."""
    g = torch.stack(torch.broadcast_tensors(g_slow, g_fast), -1)
    block, inputs = (_Linear, (q, k, v, g)) if beta is None else (_Delta, (q, k, v, beta, g))
    return layout.run(block, inputs, scale, initial_state, cu_seqlens, chunk_size)


class _Linear(LinearBlock):
    decay_of, parts = GateDecay, GateDecay.parts


class _Delta(DeltaBlock):
    decay_of, parts = GateDecay, GateDecay.parts
