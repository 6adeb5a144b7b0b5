"""Ridge attention: the ridge regression of values on keys that decays, solved anew at every token.

    G_t = e^{g_t} G_{t−1} + β_t k_t k_tᵀ,   C_t = e^{g_t} C_{t−1} + β_t v_t k_tᵀ,   y_t = C_t (G_t + Λ)⁻¹ q_t

The token's own pair is in both sums, and the ridge Λ = diag(λ) does not decay. Both sums are states of
`linear_attention`: a product with all G_t is `linear_attention(x, k, β k, g)`. Conjugate gradients need such products
alone, so the systems of all tokens are solved together, without one matrix a token. The derivative of a solution is
another solution with the same matrix.

Koopman attention of power 0 differs in that its ridge is relative to the keys, and its queries do not read their own
token.
Source: von Oswald et al. 2025, "MesaNet", §3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halflife.ops.arguments import check_required, check_tensors, is_traced
from halflife.ops.backends.dispatch import choose, implements
from halflife.ops.call import OpCall
from halflife.ops.conjugate_gradients import Solution, check_solver, conjugate_gradients
from halflife.ops.linear_attention import linear_attention
from halflife.ops.slow_decay import decay_and_add
from halflife.packing import Packing
from halflife.precision import compute_dtype, without_autocast
from halflife.shapes import Float, Int

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RidgeCall:
    """The arguments of a call: those of other ops, the ridge `[H, K]`, the first sums, and the solver's."""

    op: OpCall
    ridge: Tensor
    gram: Tensor
    values: Tensor
    iterations: int
    tolerance: float


def ridge_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    ridge: Float[Tensor, "H K"],
    *,
    iterations: int = 30,
    tolerance: float = 1e-6,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | Packing | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, State | None]:
    """Ridge attention, `y_t = C_t (G_t + Λ)⁻¹ q_t`; the equations stand at the top of the module.

    Args:
        q, k: queries and keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        g: log-decay ≤ 0, `[B, T, H]`.
        beta: strength β ≥ 0 of each pair, `[B, T, H]`.
        ridge: λ > 0, one a head and key channel, `[H, K]`.
        iterations: steps of conjugate gradients at most. In exact arithmetic K of them solve a system. The error falls
            by `(√κ − 1)/(√κ + 1)` a step, where κ is at most `1 + tr G / min λ`.
        tolerance: a token's iteration ends when its residual is this small relative to its query, so a token has the
            same result alone as among others.
        initial_state: `(G [N, H, K, K], C [N, H, K, V])`, with C as `Σ k vᵀ`; None means zeros.
        output_final_state: whether to return the sums after the last token.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1): 0, …, T.
        chunk_size: passed to `linear_attention`.
        backend: "auto"; "chunked", conjugate gradients on `linear_attention`; or "reference", a loop over tokens with
            exact solves.

    Returns:
        `y [B, T, H, V]` in v's dtype, and the final sums (float32, or float64 for float64 inputs), or None.

    Raises:
        ValueError: a shape or number does not fit, or a log-decay is positive.
    """
    call = OpCall("ridge_attention", q, k, v, g, beta, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    check_required(g=g, beta=beta, ridge=ridge)
    call.check()
    if g.ndim != 3:
        raise ValueError(f"ridge attention needs one log-decay a head, g [B, T, H]; got {tuple(g.shape)}")
    if ridge.shape != q.shape[2:] or not (is_traced(ridge) or (ridge > 0).all()):
        raise ValueError(f"ridge must be positive numbers [H, K] = {tuple(q.shape[2:])}; got {tuple(ridge.shape)}")
    check_solver(iterations, tolerance)
    gram, values = _first(call, initial_state)
    dtype = gram.dtype
    implementation = choose(call.op, backend, call.device)
    with without_autocast(call.device):
        q, k, g, beta = (x.to(dtype) for x in (q, k, g, beta))
        call = OpCall(call.op, q, k, v.to(dtype), g, beta, cu_seqlens=call.packing, chunk_size=chunk_size)
        y, *state = implementation(RidgeCall(call, ridge.to(dtype), gram, values, iterations, tolerance))
    return y.to(v.dtype), (state[0], state[1]) if output_final_state else None


def _first(call: OpCall, initial: Any) -> State:
    """The sums before the first token."""
    (heads, key), value = call.q.shape[2:], call.v.shape[-1]
    shapes = [(call.packing.num_sequences, heads, key, last) for last in (key, value)]
    if initial is None:
        gram, values = (call.q.new_zeros(shape, dtype=compute_dtype(call.q)) for shape in shapes)
        return gram, values
    if not isinstance(initial, tuple | list) or len(initial) != 2 or [tuple(x.shape) for x in initial] != shapes:
        raise ValueError(f"initial_state must be the pair (G, C), of shapes {shapes[0]} and {shapes[1]}")
    check_tensors(G=initial[0], C=initial[1])
    dtype = compute_dtype(call.q, *initial)
    return initial[0].to(dtype), initial[1].to(dtype)


@implements("ridge_attention", "reference")
def reference(call: RidgeCall) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, token by token, with exact solves."""
    op, outputs, grams, values = call.op, [call.op.v[:, :0]], [], []
    assert op.g is not None
    assert op.beta is not None
    for rows, tokens in op.packing.pieces():
        gram, value = call.gram[rows], call.values[rows]
        for t in range(tokens.start, tokens.stop):
            q, k, v = (x[:, t].unsqueeze(-1) for x in (op.q, op.k, op.v))
            decay, beta = op.g[:, t, :, None, None].exp(), op.beta[:, t, :, None, None]
            gram, value = decay * gram + beta * k * k.mT, decay * value + beta * k * v.mT
            x = torch.linalg.solve(gram + torch.diag_embed(call.ridge), q)
            outputs.append((value.mT @ x).squeeze(-1).unsqueeze(1))
        grams.append(gram)
        values.append(value)
    return torch.cat(outputs, 1), torch.cat([call.gram[:0], *grams]), torch.cat([call.values[:0], *values])


@implements("ridge_attention", "chunked")
def chunked(call: RidgeCall) -> tuple[Tensor, Tensor, Tensor]:
    """Conjugate gradients for all tokens together, with products by `linear_attention`."""
    op = call.op
    assert op.beta is not None
    read = partial(
        linear_attention, k=op.k, g=op.g, scale=1, output_final_state=True, cu_seqlens=op.packing,
        chunk_size=op.chunk_size,
    )  # fmt: skip
    written = op.beta.unsqueeze(-1) * op.k

    def product(x: Tensor) -> Tensor:
        return read(x, v=written, initial_state=call.gram)[0] + call.ridge * x

    if op.is_token and not op.differentiated:
        return _step(call, written)

    solve = partial(conjugate_gradients, product, iterations=call.iterations, tolerance=call.tolerance)
    with torch.no_grad():
        x = solve(op.q)
    applied, gram = read(x, v=written, initial_state=call.gram)
    if torch.is_grad_enabled():
        x = Solution.apply(op.q - applied - call.ridge * x, x, solve)
    y, values = read(x, v=op.beta.unsqueeze(-1) * op.v, initial_state=call.values)
    assert values is not None
    assert gram is not None
    return y, gram, values


def _step(call: RidgeCall, written: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One token, whose products are with G itself."""
    assert call.op.g is not None
    q, key, value = call.op.q[:, 0], call.op.k[:, 0].unsqueeze(-2), call.op.v[:, 0].unsqueeze(-2)
    gram, values = (
        decay_and_add(sums, call.op.g[:, 0].unsqueeze(-1), written[:, 0].unsqueeze(-1) * row)
        for sums, row in ((call.gram, key), (call.values, value))
    )

    def product(x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) @ gram).squeeze(-2) + call.ridge * x

    x = conjugate_gradients(product, q, iterations=call.iterations, tolerance=call.tolerance)
    return (x.unsqueeze(-2) @ values).transpose(1, 2), gram, values
