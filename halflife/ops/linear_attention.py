"""Linear attention with no, scalar or vector decay, and the decays and keys of Longhorn and LightNet.

    S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ,      o_t = S_tᵀ q_t · scale

RetNet, TNL, Mamba-2, GLA, HGRN2, LightNet and Simple Decay use this update (Katharopoulos et al. 2020). The chunked
form follows Dao & Gu 2024 and Yang et al. 2024.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.backends import fla, native, triton
from halflife.ops.backends.dispatch import (
    dispatch,
    folded,
    implements,
    implements_pass,
    run_gpu_pass,
    run_pass,
    steps_by,
)
from halflife.ops.call import Call
from halflife.ops.chunked import blocks
from halflife.ops.chunked.decays import DecayGrads
from halflife.ops.fused import launch
from halflife.ops.laws import why_not
from halflife.ops.recurrent import token_loop
from halflife.ops.slow_decay import decay_and_add
from halflife.ops.spec import define
from halflife.packing import Packing
from halflife.precision import compute_dtype

define(
    "linear_attention", q="B T G K", k="B T G K", v="B T H V", g="B T H | B T H K | None", gain="B T H | None",
    skip="H | None", state="N H K V", log_decays=["g"],
)  # fmt: skip


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gain: Tensor | None = None,
    skip: Tensor | None = None, *,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None, chunk_size: int = 64, backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Linear attention: `S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ`, `o_t = S_tᵀ q_t · scale`.

    Args:
        q, k: queries and keys `[B, T, G, K]`. H is a multiple of G, and head h reads group h // (H / G).
        v: values `[B, T, H, V]`.
        g: log-decay ≤ 0, scalar `[B, T, H]` or vector `[B, T, H, K]`. −inf erases the state; None is no decay.
        gain: factors of the values `[B, T, H]`, as Mamba-2's step size; None means 1. Kernels multiply where they read
            v, so that no product is kept for the backward pass.
        skip: D `[H]`, with which `D ⊙ v` is added to the outputs; None means 0.
        scale: factor of the output; None means `K ** -0.5`.
        initial_state: `[B, H, K, V]`, or `[N, H, K, V]` when packed; None means zeros.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1): 0, …, T.
        chunk_size: tokens a chunk, rounded up to a power of two. It changes speed and memory, not the result.
        backend: "auto", or one of `available_backends("linear_attention")`.

    Returns:
        `o [B, T, H, V]` in v's dtype, and the final state (float32, or float64 for float64 inputs), or None.

    Raises:
        ValueError: a shape does not fit, a log-decay is positive (see `arguments.check_decay`), or the backend cannot
            run; the message names the backends that can.
    """
    tensors = {"q": q, "k": k, "v": v, "g": g, "gain": gain, "skip": skip}
    return dispatch(
        "linear_attention", tensors, initial_state, cu_seqlens, backend, output_final_state, scale=scale,
        chunk_size=chunk_size,
    )  # fmt: skip


implements("linear_attention", "triton", triton.run, why_not=triton.why_not)
implements("linear_attention", "fla", lambda call: fla.linear_attention(folded(call)), why_not=fla.why_not)
implements("linear_attention", "native", native.run, why_not=native.why_not, steps=True)
steps_by("linear_attention", "triton", triton.run_step, triton.why_not_step)


@implements("linear_attention", "reference")
def reference(call: Call) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    return token_loop(_token, call)


def _token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token: `state [B, H, K, V]`, `q, k [B, H, K]`, `v [B, H, V]`, `g [B, H, 1 or K]`."""
    state = decay_and_add(state, g, k.unsqueeze(-1) * v.unsqueeze(-2))
    return (state * q.unsqueeze(-1)).sum(-2), state


@implements("linear_attention", "chunked")
def chunked(call: Call) -> tuple[Tensor, Tensor]:
    """The chunked form: matrix products inside chunks of C tokens, and one state carried from chunk to chunk."""
    call = folded(call, "chunked")
    return blocks.run(LinearBlock, (call["q"], call["k"], call["v"], call["g"]), call)


class LinearBlock(blocks.ChunkBlock):
    """Each chunk computes `o = scores(q, k) V + (e^b q) S` and `S ← e^{b_C} S + (e^{b_C − b} k)ᵀ V`."""

    def __init__(self, *args):
        super().__init__(*args)
        self.k, self.v = self.inputs

    def forward(self, state, initial, final):
        entering, state = self.states(state, initial, final)
        o = self.decay.read_state(self.q, entering)
        return blocks.add_product_(o, self.decay.scores(self.q, self.k), self.v), state

    def states(self, state, initial, final=None):
        """The states entering each chunk `[b, H, c, K', V]`, and the one leaving the block."""
        update = self.decay.weight_keys(self.k).transpose(-1, -2) @ self.v
        return blocks.scan(lambda c, s: self.decay.carry(c, s, update[:, :, c]), state, self.place, initial, final)

    def backward(self, do, state, initial, dstate, dinitial, dfinal):
        q, k, v, decay = self.q, self.k, self.v, self.decay
        entering, _ = self.states(state, initial)
        update = decay.weight_queries(q).transpose(-1, -2) @ do
        leaving, dstate = blocks.scan_back(
            lambda c, ds: decay.carry_back(c, ds, update[:, :, c]), dstate, self.place, dinitial, dfinal
        )
        # The diagonal has weight 1 under any decay, so it is left out of the gradient of the log-decays.
        dscores, diagonal = blocks.split_diagonal(do @ v.transpose(-1, -2))
        scores = decay.scores(q, k)
        dv = scores.transpose(-1, -2) @ do
        dv += decay.weight_keys(k) @ leaving
        dq, dk, dlog_scores = decay.scores_grad(dscores, q, k, scores)
        dread = decay.weight_queries_grad(do @ entering.transpose(-1, -2))
        dwritten = decay.weight_keys_grad(v @ leaving.transpose(-1, -2))
        dq += decay.sum_over_states(dread)
        dg = self.log_grad(
            DecayGrads([(q, dq)], [(k, dk)], [(q, dread)], [(k, dwritten)], dlog_scores), entering, leaving
        )
        dq.addcmul_(diagonal, k).mul_(self.scale)
        dk.addcmul_(diagonal, q).add_(decay.sum_over_states(dwritten))
        return [dq, dk, dv, dg], dstate


def longhorn_keys(
    logits: Tensor, k: Tensor, dtype: torch.dtype | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Longhorn's log-decays `g = log(1 − ε k²)` and keys ε k, with `ε = β / (1 + β kᵀk)` and `β = σ(logits)`.

    g is accurate for slow decays, and finite for keys of any length. Source: Liu et al. 2024.

    Args:
        logits: `[B, T, H]`.
        k: `[B, T, K]`, of all heads.
        dtype: that of ε k, or None for that of k.
        backend: "auto", or one of `available_backends("longhorn_keys")`.

    Returns:
        g in float32 or wider and ε k in `dtype`, `[B, T, H, K]` each.
    """
    return run_gpu_pass("longhorn_keys", _longhorn_keys, backend, (logits, k), dtype)


def _longhorn_keys(logits: Tensor, k: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    beta = logits.sigmoid().to(compute_dtype(logits)).unsqueeze(-1)
    squares = k.to(compute_dtype(k)).square().unsqueeze(2)
    total = squares.sum(-1, keepdim=True)
    f = beta * squares / (1 + beta * (total - squares).clamp(min=0))  # with which 1 − ε k² = 1 / (1 + f)
    return -torch.log1p(f), (beta / (1 + beta * total) * k.unsqueeze(2)).to(dtype or k.dtype)


def _why_not_keys(op: str, device: torch.device, tensors: Any = None) -> str | None:
    wide = None if tensors is None else triton.too_wide(op, tensors[1].shape[-1])
    return triton.why_not_pass(op, device, tensors) if wide is None else wide


define("longhorn_keys", logits="B T H", k="B T K", settings={"dtype": None})
implements_pass("longhorn_keys", _longhorn_keys, triton=(partial(launch, "longhorn_keys"), _why_not_keys))


def running_decay(
    f: Tensor, first: Tensor | None, packing: Packing, empty: bool = True, with_key: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute `g = −softplus(f − lse f_{<t})` in float32 (float64 for float64 activations), and the key `1 − e^g`.

    `lse` is the logsumexp of all tokens before. Source: Qin et al. 2024, "LightNet"; Decay, Table 1.

    Args:
        f, with_key, backend: as in `ops.laws.bounded_decay`.
        first: lse before the first token of each sequence, `[N, H]` or `[N, H, K]`, or None for −∞.
        packing: where the sequences lie.
        empty: whether no first lse is −∞; otherwise it is 0.

    Returns:
        g, the lse after the last token of each sequence, and the key in the dtype of f or None.
    """
    tensors = f.flatten(2), None if first is None else first.flatten(1)
    g, last, key = run_pass("running_decay", backend, tensors, empty, with_key, packing)
    return g.view(f.shape), last.view(-1, *f.shape[2:]), None if key is None else key.view(f.shape)


def _running_decay(
    f: Tensor, first: Tensor | None, empty: bool, with_key: bool, packing: Packing | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    x = f.to(compute_dtype(f))
    first, packing = _first(x, first, empty, packing)
    found = [_of_rows(x[:, tokens], first[rows]) for rows, tokens in packing.pieces()] or [(x, first)]
    g, last = found[0]
    if len(found) > 1:
        g, last = torch.cat([part for part, _ in found], 1), torch.cat([part for _, part in found])
    return g, last, -torch.expm1(g).to(f.dtype) if with_key else None


def _first(x: Tensor, first: Tensor | None, empty: bool, packing: Packing | None) -> tuple[Tensor, Packing]:
    packing = packing or Packing(x.shape[0], x.shape[1])
    if first is None:
        first = x.new_full((packing.num_sequences, x.shape[2]), -torch.inf if empty else 0.0, dtype=compute_dtype(x))
    return first, packing


def _native_running(f: Tensor, first: Tensor | None, empty: bool, with_key: bool, packing: Packing | None) -> Any:
    first, packing = _first(f, first, empty, packing)
    g, last, key = native.op("running_decay")(f, first.float(), packing.cu_seqlens)
    return g, last, key if with_key else None


def _of_rows(f: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    if f.shape[1] == 0:
        return f, first
    seen = torch.logaddexp(f.logcumsumexp(1), first.unsqueeze(1))
    before = torch.cat([first.unsqueeze(1), seen[:, :-1]], 1)
    return -F.softplus(f - before), seen[:, -1]


def _running_kernel(f: Tensor, first: Tensor | None, empty: bool, with_key: bool, packing: Packing | None) -> Any:
    bounds = None if packing is None else packing.cu_seqlens
    g, last, key = launch("running_decay", f, first, bounds, empty, with_key)
    return g, last, key if with_key else None


define(
    "running_decay", f="B T D", first="B D | None", settings={"empty": True, "with_key": True, "packing": None}
)  # fmt: skip
implements_pass(
    "running_decay", _running_decay, native=(_native_running, native.why_not_matrices(1)),
    triton=(_running_kernel, why_not),
)  # fmt: skip
