"""Spectral Koopman attention: ridge regression on past tokens, read through powers of the keys' dynamics.

Each head has keys z_t and queries q_t in R^r and values v_t in R^P. An operator is fitted to a set of past tokens:

    G = Σ z zᵀ,   M = Σ z_t z_{t−1}ᵀ,   C = Σ v zᵀ,   G̃ = G + ε m² I,   m = max ‖z‖
    x = G̃⁻¹ q,   x_K = (γ G̃⁻¹ M)^K x,   y = C ((1 − μ) x + μ x_K)

Token s can fade: G, M and C decay by e^g per token and are written with strength β. Then the sums run over the weighted
data of `koopman.decays`, with one decay per head

    G_t = e^{g_t} G_{t−1} + β_t z_t z_tᵀ,   C_t = e^{g_t} C_{t−1} + β_t v_t z_tᵀ,
    M_t = e^{g_t} M_{t−1} + √(e^{g_t} β_t β_{t−1}) z_t z_{t−1}ᵀ,   m_t² = max(e^{g_t} m_{t−1}², β_t ‖z_t‖²)

This equals the paper's whitened form `C G̃⁻¹ L Â^K L⁻¹ q` (docs/equations.md, section 5). Raw keys with the ridge ε m²
give the same result as keys divided by m with the ridge ε. The maximum m runs over the keys that the operator has seen,
so no information flows backwards.
Source: Echo, §3.2, Appendices A, F, I.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halflife.ops import recurrent
from halflife.ops.arguments import may_branch, not_plain
from halflife.ops.backends import dispatch, triton
from halflife.ops.backends.dispatch import implements
from halflife.ops.backends.native import koopman as native
from halflife.ops.koopman import graph, reference  # noqa: F401 (the reference registers itself)
from halflife.ops.koopman.call import SPEC, KoopmanCall
from halflife.ops.koopman.layout import KoopmanLayout, arrange
from halflife.ops.koopman.readout import KoopmanReadout
from halflife.ops.koopman.solve import Count, Factor, add_token, cached_inverse_factor
from halflife.ops.koopman.state import (
    KoopmanMemory,
    KoopmanState,
    Sums,
    add_pending,
    freeze_norm,
    initial_memory,
    mask_keys,
    memory_after,
    sums_after,
    with_pending,
)
from halflife.packing import Packing
from halflife.precision import compute_dtype, without_autocast

OP = "koopman_attention"
LARGEST = 64  # rows of a matrix in the Triton kernels


def koopman_attention(
    q: Tensor, k: Tensor, v: Tensor, *, gamma: float | Tensor = 1.0, mix: float | Tensor = 1.0,
    g: Tensor | None = None, beta: Tensor | None = None, ridge: float = 1e-3, power: int = 2,
    mode: str = "chunk", mask: Tensor | None = None, chunk_size: int = 64, refresh: str = "chunk",
    normalization: str = "causal", initial_state: KoopmanState | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None, backend: str = "auto", operator: str = "whitened",
) -> tuple[Tensor, KoopmanState | None]:  # fmt: skip
    """Spectral Koopman attention; the equations stand at the top of the module.

    Args:
        q: queries `[B, S, H, R]`. S is T in mode "chunk", and may be another number in the other modes.
        k: keys `[B, T, H, R]`.
        v: values `[B, T, H, P]`, or m heads for each of q and k, `[B, T, m·H, P]`. An operator depends on keys, g and β
            alone, so m heads that share them are one head with m·P channels, also in the state.
        gamma, mix: γ and μ, numbers or one per head `[H]`. `mix [K + 1, H]` is a weight of every power,
            `y = C Σ μ_i x_i` with x_0 = x.
        g: log-decay ≤ 0, one per head `[B, T, H]` or one per key channel `[B, T, H, R]`; −∞ begins anew, and None is no
            decay. A query sees the weights after the last token of the sums that it reads. In modes "prefix" and
            "masked" this is the last token of all. Tokens that a mask leaves out still decay the sums.
        beta: strength β ≥ 0 of each token, `[B, T, H]`; None is 1. Its gradient is 0 where β is 0.
        ridge: ε, relative to the largest squared norm of the keys seen.
        power: K; 0 is ridge regression without the filter.
        mode: "chunk": the queries of a chunk of `chunk_size` tokens read the chunks before it; "prefix": all queries
            read all keys; "masked": all queries read the keys where `mask` is not 0.
        mask: `[B, T]`, 0 where a token is left out of the sums. A pair of neighbours counts where both are in.
        chunk_size: tokens that share one operator.
        refresh: "token" fits one operator a token, as `chunk_size=1` does, by rank-one updates while decoding.
        normalization: "causal"; "trace": `m² = tr G`, a ridge that grows with the sums, so that the condition number of
            G̃ is at most 1 + 1/ε at any length (docs/streaming.md); "sequence": m over the whole sequence including
            the future; or "paper": m over all keys of the first call with keys, masked ones and the future included,
            which later calls do not change.
        initial_state: the state before the first token (see `koopman.state`), or None. A sequence may be cut at any
            token.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1), in mode "chunk" only.
        backend: "auto", or one of `available_backends("koopman_attention")`. In modes "prefix" and "masked" the
            backends "chunked", "triton" and "reference" are the same. "main_text" runs on "chunked" and "reference"
            alone, and "native" has no "trace", "paper", weights of every power, and g either.
        operator: "whitened", or "main_text" for the paper's Eqs. 11 to 13, `A = M G̃⁻¹`, `A ← γ A / max(σ_max(A), 1)`
            with σ_max from 6 power iterations, and `y = C G̃⁻¹ ((1 − μ) + μ L A^K L⁻¹) q` with L Lᵀ = G̃.

    Returns:
        `y [B, S, H or m·H, P]` in v's dtype (0 where an operator has seen no key), and the state or None.

    Raises:
        ValueError: a shape, name or size does not fit, or the backend cannot run.
    """
    shared = _heads_of_a_key(k, v)
    v = v if shared == 1 else v.unflatten(2, (-1, shared)).flatten(3)
    call = KoopmanCall(
        q, k, v, gamma, mix, ridge, power, mode, mask, chunk_size, refresh, normalization, initial_state, cu_seqlens,
        operator, g, beta,
    )  # fmt: skip
    result = attend(call, backend)
    y = result.y if shared == 1 else result.y.unflatten(-1, (shared, -1)).flatten(2, 3)
    return y, result.state if output_final_state else None


def _heads_of_a_key(k: Any, v: Any) -> int:
    """The number of value heads for each head of keys; 1 where the check of arguments has something to say."""
    if not (isinstance(k, Tensor) and isinstance(v, Tensor) and k.ndim == v.ndim == 4 and k.shape[2] and v.shape[2]):
        return 1
    return v.shape[2] // k.shape[2] if v.shape[2] % k.shape[2] == 0 else 1


class KoopmanResult(NamedTuple):
    """What `attend` returns."""

    y: Tensor  # outputs `[B, T, H, P]` in v's dtype
    state: KoopmanState  # after the last token
    retries: Count  # operators whose Cholesky factorisation failed and was repeated with a larger ridge


def attend(call: KoopmanCall, backend: str = "auto") -> KoopmanResult:
    """`koopman_attention` with the count of repeated factorisations; raises as it does."""
    call.check()
    if (again := dispatch.again) is not None and "op" in again.kinds:
        names = [name for name in SPEC.tensors if isinstance(getattr(call, name), Tensor)]

        def run(*tensors: Tensor) -> KoopmanResult:
            return _attend(replace(call, **dict(zip(names, tensors, strict=True))), backend)

        return again.run(run, [getattr(call, name) for name in names])
    return _attend(call, backend)


def _attend(call: KoopmanCall, backend: str) -> KoopmanResult:
    dtype, output_dtype = compute_dtype(call.k), call.v.dtype
    call = call.with_weights(dtype)
    implementation = dispatch.choose(OP, backend, call.k.device, call)
    with without_autocast(call.k.device):
        masked, memory = _prepared(call, dtype)
        readout = KoopmanReadout(call.gamma, call.mix, call.ridge, call.power, call.k, call.operator)
        if call.mode != "chunk":
            implementation = native.run if implementation is native.run else _prefix
        elif implementation is by_kernels:
            pass
        elif backend != "reference" and not may_branch(call.k.device):
            compiled = implementation is native.run and not torch.compiler.is_exporting()
            implementation = native.run if compiled else graph.run
        elif backend != "reference" and call.normalization != "sequence" and _is_step(call, memory):
            implementation = _native_step if implementation is native.run and not _needs_grad(call, memory) else _step
        if implementation not in (native.run, _native_step, by_kernels):  # the kernels read bfloat16 as it is
            masked = replace(masked, **{name: getattr(masked, name).to(dtype) for name in "qkv"})
        y, memory, retries = implementation(masked, memory, readout)
    return KoopmanResult(y.to(output_dtype), memory.to_state(), retries)


def _prepared(call: KoopmanCall, dtype: torch.dtype) -> tuple[KoopmanCall, KoopmanMemory]:
    """The call with masked keys set to 0, and the memory before its first token."""
    memory = initial_memory(
        call.initial_state, call.k, call.v, call.packing.num_sequences, call.tokens_per_operator, call.decays
    )
    if call.normalization == "paper":
        memory = freeze_norm(memory, call.k.to(dtype), call.packing)
    return replace(call, k=mask_keys(call.k, call.mask)), memory


def takes_token(call: KoopmanCall, backend: str) -> bool:
    """Whether `attend_token` takes a call: one token of each sequence with a state, without decays and gradients."""
    if call.initial_state is None or call.packing.cu_seqlens is not None or torch.is_grad_enabled():
        return False
    fits = call.k.shape[1] == 1 and call.g is None and call.mode == "chunk" and call.normalization != "sequence"
    known = fits and backend in ("auto", "triton") and recurrent.runs_kernels(call.k.device)
    return known and why_not_by_kernels(OP, recurrent.CUDA, call) is None


def attend_token(call: KoopmanCall, gamma: Tensor | None, mix: Tensor | None, eta: Tensor) -> tuple[Tensor, Any]:
    """The outputs of a token of each sequence times η `[H]`, and the next state, by one kernel.

    γ is `1 + σ(gamma [H]) / 2` and μ is `σ(mix [H])`; where one is None, they are the numbers of the call. With
    mix `[K + 1, H]` these are its μ.
    """
    call = call.with_weights(dtype := compute_dtype(call.k))
    call, memory = _prepared(call, dtype)
    fixed = [1.0 if isinstance(x, Tensor) else float(x) for x in (call.gamma, call.mix)]
    power = 0 if mix is None and call.mix == 0 else call.power
    before = [*memory.sums, memory.last, memory.pending_keys, memory.pending_values, memory.pending]
    y, *after = triton.custom_op("koopman_token")(
        call.q, call.k, call.v, before, gamma, mix, eta, *fixed, power, call.ridge, call.normalization, call.v.dtype
    )
    return y, KoopmanMemory(Sums(*after[:4]), *after[4:]).to_state()


# Each takes the call (in the compute dtype, with masked keys set to 0), the memory before its first token
# and the read-out. It returns the outputs, the memory after the last token and the count of repeated factorisations.


def _prefix(call: KoopmanCall, memory: KoopmanMemory, readout: KoopmanReadout) -> tuple[Tensor, KoopmanMemory, Count]:
    """One operator for all tokens, those of the memory included; all queries read it."""
    k, v, g = call.k, call.v, call.g
    if call.initial_state is not None:
        k, v, g = with_pending(k, v, g, memory)
    sums = sums_after(memory, k, v, g, call.normalization)
    y, retries = readout.read(sums, call.q.transpose(1, 2))
    last = k[:, -1] if k.shape[1] else memory.last
    return y.transpose(1, 2), memory.without_pending(sums, last), retries


@implements(OP, "chunked")
def chunked(call: KoopmanCall, memory: KoopmanMemory, readout: KoopmanReadout) -> tuple[Tensor, KoopmanMemory, Count]:
    """One operator a chunk, all in one batch: sums of each chunk, running sums, one factorisation, K + 1 solves."""
    layout = KoopmanLayout(call.k, memory, call.tokens_per_operator, call.packing)
    placed, chunks, tokens = arrange(layout, call, memory)
    entering, leaving = layout.running_sums(tokens, memory.sums)
    norm = None
    if call.normalization == "sequence":
        norm = layout.largest_norm(chunks, memory.sums)
    elif call.normalization == "paper":
        norm = layout.same_norm(memory.sums.norm)
    elif call.normalization == "trace":
        norm = entering.normalized("trace", entering.norm).norm
    leaving = leaving.normalized(call.normalization, memory.sums.norm)
    queries = layout.split(layout.place(call.q))
    y, retries = readout.read(entering, queries.flatten(0, 1), norm)
    y = layout.restore(y.unflatten(0, queries.shape[:2]))
    return y, memory_after(leaving, placed, layout.first, layout.total, memory), retries


def _is_step(call: KoopmanCall, memory: KoopmanMemory) -> bool:
    room = memory.pending_keys.shape[1]
    single = call.k.shape[1] == 1 and call.packing.cu_seqlens is None
    return single and (room == 0 or bool((memory.pending < room).all()))


def _step(call: KoopmanCall, memory: KoopmanMemory, readout: KoopmanReadout) -> tuple[Tensor, KoopmanMemory, Count]:
    """One token in O(K r²). It reads by the inverse factor, and then waits for its chunk or enters the sums."""
    q, key, value, g = call.q.transpose(1, 2), call.k[:, 0], call.v[:, 0], None if call.g is None else call.g[:, 0]
    inverse, retries = _inverse_of(memory, readout)
    y = readout.read_by_inverse(inverse, memory.sums, q).transpose(1, 2)
    if memory.pending_keys.shape[1]:
        return y, add_pending(key, value, g, memory), retries
    after, more = add_token(key, value, g, memory, inverse, readout.ridge, call.normalization)
    return y, after, retries + more


def _native_step(
    call: KoopmanCall, memory: KoopmanMemory, readout: KoopmanReadout
) -> tuple[Tensor, KoopmanMemory, Count]:
    inverse, retries = _inverse_of(memory, readout)
    y, memory, more = native.step(call, memory, inverse, readout)
    return y, memory, retries + more


def _inverse_of(memory: KoopmanMemory, readout: KoopmanReadout) -> Factor:
    if memory.inverse is None or memory.pending_keys.shape[1] > 0:
        return cached_inverse_factor(memory.sums, readout.ridge)
    return Factor(memory.inverse, 0)


def _needs_grad(call: KoopmanCall, memory: KoopmanMemory) -> bool:
    tensors = call.q, call.k, call.v, call.gamma, call.mix, *memory.to_state().values()
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def why_not_by_kernels(op: str, device: torch.device, call: KoopmanCall | None = None) -> str | None:
    """Return the reason why the Triton kernels cannot run on `device` (and this call, if given), or None."""
    if call is not None:
        if (odd := not_plain(*vars(call).values(), *(call.initial_state or {}).values())) is not None:
            return odd
        if compute_dtype(call.k) == torch.float64:
            return f"the Triton kernels of {op} do not take float64"
        if call.operator != "whitened":
            return f"the Triton kernels of {op} do not cover operator={call.operator!r}"
        sizes = {"rank": call.k.shape[-1], "value size": call.v.shape[-1], "chunk_size": call.tokens_per_operator}
        for name, size in sizes.items():
            if size > LARGEST:
                return f"the Triton kernels of {op} take a {name} of at most {LARGEST}; got {size}"
    return triton.why_not(op, device)


@implements(OP, "triton", why_not=why_not_by_kernels)
def by_kernels(
    call: KoopmanCall, memory: KoopmanMemory, readout: KoopmanReadout
) -> tuple[Tensor, KoopmanMemory, Count]:
    """Operators are factorised and read by our Triton kernels; the sums are those of `graph`."""
    return graph.run(call, memory, readout, partial(triton.read_operators, dtype=call.v.dtype))


implements(OP, "native", native.run, why_not=native.why_not)
