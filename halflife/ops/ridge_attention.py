"""Ridge attention: the ridge regression of values on keys that decays, solved anew at every token.

    G_t = e^{g_t} G_{t−1} + β_t k_t k_tᵀ,   C_t = e^{g_t} C_{t−1} + β_t v_t k_tᵀ,   y_t = C_t (G_t + Λ)⁻¹ q_t

The token's own pair is in both sums, and the ridge Λ = diag(λ) does not decay. Both sums are states of
`linear_attention`: a product with all G_t is `linear_attention(x, k, β k, g)`. Conjugate gradients need such products
alone, so the systems of all tokens are solved together, without one matrix per token. The derivative of a solution is
another solution with the same matrix. Every iteration starts at `q_t / (diag G_t + λ)`, as the authors' code does for
single tokens; their code for sequences starts at 0.

Koopman attention of power 0 differs in that its ridge is relative to the keys, and its queries do not read their own
token.
Source: von Oswald et al. 2025, "MesaNet", §3, and flash-linear-attention's `mesa_net`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from halflife.ops.arguments import is_traced, may_branch
from halflife.ops.backends import fla, native, triton
from halflife.ops.backends.dispatch import dispatch, implements
from halflife.ops.call import Call
from halflife.ops.chunked.groups import each_head, weigh
from halflife.ops.linear_attention import linear_attention
from halflife.ops.slow_decay import decay_and_add
from halflife.ops.spec import define
from halflife.packing import Packing

State = tuple[Tensor, Tensor]
FEWEST_ROWS = 16  # of a state that our Triton kernels take
Product = Callable[[Tensor], Tensor]  # applies the matrices to vectors `[…, K]`
TINY = 1e-30  # keeps 0 / 0 away where a right-hand side or a residual is 0

define(
    "ridge_attention", q="B T G K", k="B T G K", v="B T H V", g="B T H", beta="B T H", ridge="H K",
    state={"G": "N H K K", "C": "N H K V"}, log_decays=["g"],
)  # fmt: skip


def ridge_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ridge: Tensor, *,
    iterations: int = 30, tolerance: float = 1e-6, initial_state: State | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | Packing | None = None, chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, State | None]:  # fmt: skip
    """Ridge attention, `y_t = C_t (G_t + Λ)⁻¹ q_t`; the equations stand at the top of the module.

    Args:
        q, k: queries and keys `[B, T, G, K]`. H is a multiple of G, and head h reads group h // (H / G).
        v: values `[B, T, H, V]`.
        g: log-decay ≤ 0, `[B, T, H]`.
        beta: strength β ≥ 0 of each pair, `[B, T, H]`.
        ridge: λ > 0, one per head and key channel, `[H, K]`.
        iterations: steps of conjugate gradients after the start, at most. In exact arithmetic K of them solve a system.
            The error falls by `(√κ − 1)/(√κ + 1)` a step, where κ is at most `1 + tr G / min λ`.
        tolerance: a token's iteration ends when its residual is this small relative to its query, so a token has the
            same result alone as among others.
        initial_state: `(G [N, H, K, K], C [N, H, K, V])`, with G symmetric and C as `Σ k vᵀ`; None means zeros.
        output_final_state: whether to return the sums after the last token.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1): 0, …, T.
        chunk_size: passed to `linear_attention`.
        backend: "auto"; "chunked", "native" or "triton" for conjugate gradients on `linear_attention` by that backend;
            "fla", which takes all `iterations`; or "reference", a loop over tokens with exact solves.

    Returns:
        `y [B, T, H, V]` in v's dtype, and the final sums (float32, or float64 for float64 inputs), or None.

    Raises:
        ValueError: a shape or number does not fit, or a log-decay is positive.
    """
    if iterations < 1 or tolerance < 0:
        raise ValueError(f"need iterations ≥ 1 and tolerance ≥ 0; got {iterations} and {tolerance}")
    if isinstance(ridge, Tensor) and may_branch(ridge.device) and not (is_traced(ridge) or (ridge > 0).all()):
        raise ValueError("ridge must be positive numbers")
    return dispatch(
        "ridge_attention", {"q": q, "k": k, "v": v, "g": g, "beta": beta, "ridge": ridge}, initial_state, cu_seqlens,
        backend, output_final_state, chunk_size=chunk_size, iterations=iterations, tolerance=tolerance,
    )  # fmt: skip


def _in_dtype_of_states(call: Call) -> tuple[Call, Tensor, Tensor]:
    """The call with tensors in the dtype of its states, and the sums G and C before the first token."""
    gram, values = call.first_states()
    return call.with_tensors(**{name: x.to(gram.dtype) for name, x in call.tensors.items()}), gram, values


@implements("ridge_attention", "reference")
def reference(call: Call) -> tuple[Tensor, State]:
    """The definition, token by token, with exact solves."""
    call, first_gram, first_values = _in_dtype_of_states(call)
    outputs, grams, values = [call["v"][:, :0]], [first_gram[:0]], [first_values[:0]]
    for rows, tokens in call.packing.pieces():
        gram, value = first_gram[rows], first_values[rows]
        for t in range(tokens.start, tokens.stop):
            q, k, v = (each_head(call[name][:, t], len(call["ridge"])).unsqueeze(-1) for name in "qkv")
            decay, beta = call["g"][:, t, :, None, None].exp(), call["beta"][:, t, :, None, None]
            gram, value = decay * gram + beta * k * k.mT, decay * value + beta * k * v.mT
            x = torch.linalg.solve(gram + torch.diag_embed(call["ridge"]), q)
            outputs.append((value.mT @ x).squeeze(-1).unsqueeze(1))
        grams.append(gram)
        values.append(value)
    return torch.cat(outputs, 1), (torch.cat(grams), torch.cat(values))


def _solve(call: Call, backend: str) -> tuple[Tensor, State]:
    """Conjugate gradients for all tokens together, with products by `linear_attention`."""
    call, first_gram, first_values = _in_dtype_of_states(call)
    ridge, beta = call["ridge"], call["beta"].unsqueeze(-1)
    q = each_head(call["q"], len(ridge), 2)  # each head solves a system of its own
    read = partial(
        linear_attention, k=call["k"], g=call["g"], scale=1, output_final_state=True, cu_seqlens=call.packing,
        chunk_size=call.chunk_size, backend=backend,
    )  # fmt: skip
    written = weigh(call["k"], beta, 2)

    if call.is_token and not call.differentiated:
        return _step(call, q, written, first_gram, first_values)

    # A read is Sᵀ x. The state is Gᵀ, so that G has its own gradient and not that of Gᵀ.
    def product(x: Tensor) -> Tensor:
        return read(x, v=written, initial_state=first_gram.mT)[0] + ridge * x

    with torch.no_grad():
        solve = partial(conjugate_gradients, product, _diagonals(call, first_gram, backend), **call.options)
        x = solve(q)
    applied, gram = read(x, v=written, initial_state=first_gram.mT)
    if torch.is_grad_enabled():
        x = Solution.apply(q - applied - ridge * x, x, solve)
    y, values = read(x, v=beta * call["v"], initial_state=first_values)
    assert values is not None
    assert gram is not None
    return y, (gram.mT, values)


def _diagonals(call: Call, gram: Tensor, backend: str) -> Tensor:
    """The diagonals of all `G_t + Λ`, `[B, T, H, K]`: those of G are sums of β k² that decay, so states of one row."""
    ones = torch.ones_like(call["k"][:, :, :1, :FEWEST_ROWS])
    first = gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-2).expand(-1, -1, ones.shape[-1], -1)
    sums, _ = linear_attention(
        ones, ones, weigh(call["k"].square(), call["beta"].unsqueeze(-1), 2), call["g"], scale=1 / ones.shape[-1],
        initial_state=first, cu_seqlens=call.packing, chunk_size=call.chunk_size, backend=backend,
    )  # fmt: skip
    return sums + call["ridge"]


implements("ridge_attention", "fla", fla.ridge_attention, why_not=fla.why_not)
for _name, _why_not in (("triton", triton.why_not), ("native", native.why_not), ("chunked", None)):
    implements("ridge_attention", _name, partial(_solve, backend=_name), why_not=_why_not, steps=True)


def _step(call: Call, q: Tensor, written: Tensor, gram: Tensor, values: Tensor) -> tuple[Tensor, State]:
    """One token, whose products are with G itself."""
    key, value = (each_head(call[name][:, 0], q.shape[2]).unsqueeze(-2) for name in "kv")
    gram, values = (
        decay_and_add(sums, call["g"][:, 0].unsqueeze(-1), written[:, 0].unsqueeze(-1) * row)
        for sums, row in ((gram, key), (values, value))
    )

    def product(x: Tensor) -> Tensor:
        return (gram @ x.unsqueeze(-1)).squeeze(-1) + call["ridge"] * x

    diagonal = gram.diagonal(dim1=-2, dim2=-1) + call["ridge"]
    x = conjugate_gradients(product, diagonal, q[:, 0], **call.options)
    return (x.unsqueeze(-2) @ values).transpose(1, 2), (gram, values)


def conjugate_gradients(product: Product, diagonal: Tensor, b: Tensor, *, iterations: int, tolerance: float) -> Tensor:
    """Solve `A x = b` for symmetric positive matrices, one for each vector `[…, K]`; `product` applies all of them.

    The iteration starts at `b / diagonal`, the solution if A had no other entries than its diagonal. A vector whose
    residual is at most `tolerance · ‖b‖` is not changed any more. The loop ends when this holds for all, but not on
    accelerators and in graphs (`may_branch`).
    """
    x = b / diagonal
    residual = b - product(x)
    direction, square = residual, residual.square().sum(-1, keepdim=True)
    enough = (tolerance**2 * b.square().sum(-1, keepdim=True)).clamp(min=TINY)
    for _ in range(iterations):
        open_ = square > enough
        if may_branch(b.device) and not is_traced(b) and not open_.any():
            break
        applied = product(direction)
        step = torch.where(open_, square / (direction * applied).sum(-1, keepdim=True).clamp(min=TINY), 0)
        x, residual = x + step * direction, residual - step * applied
        after = residual.square().sum(-1, keepdim=True)
        direction, square = residual + after / square.clamp(min=TINY) * direction, torch.where(open_, after, square)
    return x


class Solution(torch.autograd.Function):
    """A solution x of A x = q with its derivatives: those of the residual `q − A x`, through A⁻¹."""

    @staticmethod
    def forward(ctx, residual: Tensor, x: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        ctx.solve = solve
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        with torch.no_grad():
            return ctx.solve(grad), None, None
