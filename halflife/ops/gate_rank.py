"""GateRank: a fast state, and a slow state that takes it over at resets, under the linear or the delta update.

    fast ← e^{g_fast} fast;   where g_slow ≠ 0 (a reset):  slow ← e^{g_slow} (slow + fast),  fast ← 0
    u_t = v_t,  or  β_t (v_t − (slow + fast)ᵀ k_t);        fast ← fast + k_t u_tᵀ,   o_t = (slow + fast)ᵀ q_t · scale

New tokens are written into the *fast state*, which decays at every token. At a reset its content moves to the *slow
state*, which decays at resets alone. Queries read the sum of both.

This is the recurrence of the paper's mask (its Eq. 13, Figure 2a). The paper's Eqs. 10 and 11 count the new token twice
(docs/equations.md, section 4). Without resets it is `linear_attention` or `delta_rule` with the log-decay g_fast.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.backends import native, triton
from halflife.ops.backends.dispatch import dispatch, folded, implements, steps_by
from halflife.ops.call import Call
from halflife.ops.chunked import blocks
from halflife.ops.chunked.decays import FLOOR
from halflife.ops.chunked.gate_decay import GateDecay
from halflife.ops.chunked.groups import by_head, read_states, scores, weigh
from halflife.ops.delta_rule import DeltaBlock
from halflife.ops.linear_attention import LinearBlock, linear_attention
from halflife.ops.recurrent import token_loop
from halflife.ops.slow_decay import decay_and_add
from halflife.ops.spec import define
from halflife.packing import Packing
from halflife.precision import compute_dtype, wide
from halflife.registry import check_choice

States = tuple[Tensor, Tensor]
RESET_LAWS = ("mask", "printed")

define(
    "gate_rank", q="B T G K", k="B T G K", v="B T H V", g_slow="B T H", g_fast="B T H", beta="B T H | None",
    gain="B T H | None", skip="H | None", state={"fast": "N H K V", "slow": "N H K V"}, log_decays=["g_fast", "g_slow"],
)  # fmt: skip


def gate_rank(
    q: Tensor, k: Tensor, v: Tensor, g_slow: Tensor, g_fast: Tensor, beta: Tensor | None = None,
    gain: Tensor | None = None, skip: Tensor | None = None, *,
    scale: float | None = None, initial_state: States | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None, chunk_size: int = 64, backend: str = "auto", reset_law: str = "mask",
) -> tuple[Tensor, States | None]:  # fmt: skip
    """GateRank: `fast ← e^{g_fast} fast`, at resets `slow ← e^{g_slow} (slow + fast)` and `fast ← 0`, then the update.

    Args:
        q, k: queries and keys `[B, T, G, K]`. H is a multiple of G, and head h reads group h // (H / G). Keys have
            norm 1 under the delta rule.
        v: values `[B, T, H, V]`.
        g_slow: log-decay of the slow state ≤ 0, `[B, T, H]`. A token is a reset unless this is exactly 0. The gradient
            is 0 where there is no reset.
        g_fast: log-decay of the fast state ≤ 0, `[B, T, H]`; −inf erases it.
        beta: writing strength `[B, T, H]` of the delta rule; None is the linear update.
        gain, skip: factors of the values `[B, T, H]`, and D `[H]`; see `ops.linear_attention`.
        scale: factor of the output; None means `K ** -0.5`.
        initial_state: `(fast, slow)`, each `[B, H, K, V]`, or `[N, H, K, V]` when packed; None means zeros.
        output_final_state: whether to return the states after the last token.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1): 0, …, T.
        chunk_size: tokens a chunk, rounded up to a power of two. It changes speed and memory, not the result.
        backend: "auto", or one of `available_backends("gate_rank")`; "mask" takes memory quadratic in T.
        reset_law: "mask", or "printed" for the paper's Eqs. 10 to 12, `slow ← e^{g_slow} slow + k vᵀ` and
            `fast ← k vᵀ` at a reset. It has the linear update only, and the backends of `linear_attention`.

    Returns:
        `o [B, T, H, V]` in v's dtype, and the final `(fast, slow)` (float32, or float64 for float64 inputs), or None.

    Raises:
        ValueError: a shape does not fit, a log-decay is positive (see `arguments.check_decay`), or the backend cannot
            run; the message names the backends that can.
    """
    if reset_law != "mask":
        check_reset_law(reset_law, delta=beta is not None)
    tensors = {"q": q, "k": k, "v": v, "g_slow": g_slow, "g_fast": g_fast, "beta": beta}
    tensors |= {"gain": gain, "skip": skip}
    settings = {"scale": scale, "chunk_size": chunk_size}
    if reset_law == "printed":
        call = Call.of("gate_rank", tensors, initial_state, cu_seqlens, **settings)
        return _printed(call, backend, output_final_state, **settings)
    o, state = dispatch("gate_rank", tensors, initial_state, cu_seqlens, backend, output_final_state, **settings)
    return o, state if state is None or isinstance(state, tuple) else split(state)


def check_reset_law(law: str, *, delta: bool) -> None:
    """Raise a ValueError if a reset law is unknown, or if it does not exist for the update."""
    check_choice("reset_law", law, RESET_LAWS)
    if law == "printed" and delta:
        raise ValueError("the paper prints its reset law for the linear update, so the delta rule has 'mask' alone")


def _printed(call: Call, backend: str, output_final_state: bool, **settings: Any) -> tuple[Tensor, States | None]:
    """Eqs. 10 to 12: two linear attentions. A reset erases the fast state, and its token enters both states."""
    q, k, v, g_slow, g_fast = (call[name] for name in ("q", "k", "v", "g_slow", "g_fast"))
    reset, pair = g_slow != 0, call.state or (None, None)
    settings |= {"output_final_state": output_final_state, "cu_seqlens": call.packing, "backend": backend}
    settings["gain"] = call["gain"]
    erased = torch.where(reset, -torch.inf, g_fast)
    recent, fast = linear_attention(q, k, v, erased, skip=call["skip"], initial_state=pair[0], **settings)
    added = by_head(lambda k, reset: torch.where(reset, k, 0), k, reset.unsqueeze(-1), dim=2)
    old, slow = linear_attention(q, added, v, g_slow, initial_state=pair[1], **settings)
    return recent + old, None if fast is None or slow is None else (fast, slow)


def split(state: Tensor) -> States:
    """The states above each other, `[N, H, 2K, V]`, as most backends return them → `(fast, slow)`."""
    fast, slow = state.chunk(2, -2)
    return (fast.contiguous(), slow.contiguous()) if state.is_cpu else (fast, slow)


implements("gate_rank", "triton", triton.run, why_not=triton.why_not)
implements("gate_rank", "native", native.run, why_not=native.why_not, steps=True)
steps_by("gate_rank", "triton", triton.run_step, triton.why_not_step)


@implements("gate_rank", "reference")
def reference(call: Call) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    return token_loop(_token, call, call["g_slow"], call["beta"])


def _token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g_slow: Tensor, beta: Tensor | None, g_fast: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: `state [B, H, 2K, V]`, `q, k [B, H, K]`, `v [B, H, V]`, `g_slow, beta [B, H]`, `g_fast [B, H, 1]`."""
    fast, slow = state.chunk(2, -2)
    decayed = g_fast.exp().unsqueeze(-1) * fast
    g_slow = g_slow.unsqueeze(-1)
    reset = g_slow != 0
    moved = decay_and_add(slow, g_slow, g_slow.exp().unsqueeze(-1) * decayed)
    slow = torch.where(reset.unsqueeze(-1), moved, slow)
    if beta is not None:
        held = slow + torch.where(reset.unsqueeze(-1), 0, decayed)
        v = beta.unsqueeze(-1) * (v - (held * k.unsqueeze(-1)).sum(-2))
    fast = decay_and_add(fast, torch.where(reset, -torch.inf, g_fast), k.unsqueeze(-1) * v.unsqueeze(-2))
    return ((slow + fast) * q.unsqueeze(-1)).sum(-2), torch.cat([fast, slow], -2)


def masks(g_slow: Tensor, g_fast: Tensor) -> tuple[Tensor, ...]:
    """The paper's masks Γ and Λ `[B, H, T, T]` in closed form, with `o = (Q Kᵀ ⊙ Γ ⊙ Λ) V` (Eq. 13, Figure 2a).

    `Γ_ij = e^{A_i − A_j}` and `Λ_ij = e^{B_{min(n(j), i)} − B_j}` for i ≥ j, else 0. A and B are the cumulative
    log-decays, slow and fast, and n(j) is the first reset after j. Autograd computes the gradient of a log-decay as a
    difference of sums here. Its error is small relative to the largest gradient, but not where everything that the
    log-decay weighs has decayed away; the chunked form is exact there too.

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
    """A and B `[B, H, T]` in float64, and the first reset at t or later `[B, H, T + 1]`; it is T if there is none."""
    floor = FLOOR[compute_dtype(g_fast)]
    slow, fast = (wide(g).transpose(1, 2) for g in (g_slow, g_fast))
    reset, length = slow != 0, slow.shape[-1]
    at = F.pad(torch.where(reset, torch.arange(length, device=slow.device), length), (0, 1), value=length)
    a = torch.where(reset, slow, 0.0).clamp(min=floor).cumsum(-1)
    return a, fast.clamp(min=floor).cumsum(-1), at.flip(-1).cummin(-1).values.flip(-1)


@implements("gate_rank", "mask")
def mask(call: Call) -> tuple[Tensor, Tensor]:
    """The quadratic form with T × T weights, for reading and teaching; its memory is quadratic in T."""
    call = folded(call, "chunked")
    states, outputs, finals = call.first_state(), [], []
    for rows, tokens in call.packing.pieces():
        state = states[rows]
        if tokens.stop > tokens.start:
            o, state = _quadratic(call, tokens, state)
            outputs.append(o)
        finals.append(state)
    o = torch.cat([call["v"][:, :0].to(states), *outputs], 1).mul(call.output_scale)
    return o.to(call["v"].dtype), torch.cat([states[:0], *finals])


def _quadratic(call: Call, tokens: slice, state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence: `O = (Q Kᵀ ⊙ D) U` plus what the queries read from the initial states."""
    q, k, v = (x[:, tokens].to(state.dtype).transpose(1, 2) for x in (call["q"], call["k"], call["v"]))
    fast, slow = state.chunk(2, -2)
    g_slow, g_fast = (x[:, tokens].to(state.dtype) for x in (call["g_slow"], call["g_fast"]))
    a, b, resets = _cumulative(g_slow, g_fast)
    first, until = resets[..., :1], resets[..., 1:]
    steps = torch.arange(q.shape[2], device=q.device)
    at_first = b.gather(-1, torch.minimum(first, steps))
    from_slow, from_fast = (x.to(state).exp().unsqueeze(-1) for x in (a, a + at_first))
    decay = torch.mul(*masks(g_slow, g_fast))

    written = v
    if call["beta"] is not None:
        beta = call["beta"][:, tokens].to(state.dtype).transpose(1, 2).unsqueeze(-1)
        held = from_fast * read_states(k, fast) + from_slow * read_states(k, slow)
        system = torch.eye(len(steps)).to(state) + (weigh(scores(k, k), beta) * decay).tril(-1)
        written = torch.linalg.solve_triangular(system, beta * (v - held), upper=False)
    o = weigh(scores(q, k), decay) @ written
    o = o + from_fast * read_states(q, fast) + from_slow * read_states(q, slow)

    keys = weigh(k, decay[..., -1, :, None])  # what is left of each key after the last token
    in_fast = (until == len(steps)).unsqueeze(-1)
    no_reset = (first == len(steps)).unsqueeze(-1)
    carried = from_fast[..., -1:, :] * fast
    fast = carried * no_reset + (keys * in_fast).transpose(-1, -2) @ written
    slow = from_slow[..., -1:, :] * slow + carried * ~no_reset + (keys * ~in_fast).transpose(-1, -2) @ written
    return o.transpose(1, 2), torch.cat([fast, slow], -2)


@implements("gate_rank", "chunked")
def chunked(call: Call) -> tuple[Tensor, Tensor]:
    """The chunks of `linear_attention` or `delta_rule` with the weights of `GateDecay`; both states are carried."""
    call = folded(call, "chunked")
    g = torch.stack(torch.broadcast_tensors(call["g_slow"], call["g_fast"]), -1)
    if call["beta"] is None:
        return blocks.run(_LinearBlock, (call["q"], call["k"], call["v"], g), call)
    return blocks.run(_DeltaBlock, (call["q"], call["k"], call["v"], call["beta"], g), call)


class _LinearBlock(LinearBlock):
    decay_type = GateDecay


class _DeltaBlock(DeltaBlock):
    decay_type = GateDecay
