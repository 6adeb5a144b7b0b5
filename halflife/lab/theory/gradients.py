"""The Jacobians of softmax attention and SKA, and their bounds (Echo, Appendix J), in float64.

The statistics of a prefix are constants, as in the paper, and a Jacobian is that of one head with respect to its query.
If a bound is larger than necessary, a sharper one stands beside it. Axes written `…` are batch axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halflife.analysis.koopman import Operator, filtered_readout, lambda_min, norm
from halflife.lab.theory.koopman_bounds import Bound

RANK_TOLERANCE = 1e-10  # a singular value below this, relative to the largest, counts as 0


def numerical_rank(matrix: Tensor) -> Tensor:
    """Return the number of singular values above `RANK_TOLERANCE` times the largest one, `[…]`; 0 for a zero matrix."""
    sizes = torch.linalg.svdvals(matrix)
    return ((sizes > RANK_TOLERANCE * sizes[..., :1]) & (sizes > 0)).sum(-1)


def attention_weights(query: Tensor, keys: Tensor) -> Tensor:
    """Return α = softmax(K q / √r) of `query […, R]` and `keys […, T, R]`: `[…, T]` (Eq. 106)."""
    scores = (keys.double() @ query.double().unsqueeze(-1)).squeeze(-1) / math.sqrt(keys.shape[-1])
    return scores.softmax(-1)


def attention_jacobian(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return `Vᵀ (Diag α − α αᵀ) K / √r` `[…, P, R]`, of rank at most min(P, R, T − 1) (Prop. J.2).

    Args:
        query, keys, values: `[…, R]`, `[…, T, R]`, `[…, T, P]`.
    """
    weights, keys, values = attention_weights(query, keys), keys.double(), values.double()
    mean = weights.unsqueeze(-2) @ keys
    return values.mT @ (weights.unsqueeze(-1) * (keys - mean)) / math.sqrt(keys.shape[-1])


def attention_bound(query: Tensor, keys: Tensor, values: Tensor) -> Bound:
    """Bound the norm of `attention_jacobian` by `‖V‖ ‖K‖ / 2√r` (Prop. J.2) and by its saturation (Cor. J.3), `[…]`.

    The corollary has the factor 2 (1 − m) with m = max α in the place of ½, which is smaller only for m > 3/4. The norm
    of `Diag α − α αᵀ` is at most `2 m (1 − m)` if m ≥ ½, which two weights m and 1 − m reach, and at most ½ otherwise.
    `sharp` has this factor.
    """
    most = attention_weights(query, keys).amax(-1)
    size = norm(values.double()) * norm(keys.double()) / math.sqrt(keys.shape[-1])
    saturated = torch.where(most > 0.5, 2 * most * (1 - most), 0.5)
    return Bound(size * torch.minimum(torch.full_like(most, 0.5), 2 * (1 - most)), size * saturated)


def ska_jacobian(operator: Operator, power: int = 2, gamma: float = 1.0, eta: float = 1.0) -> Tensor:
    """Return `η B L Â^K L⁻¹` `[…, P, R]`, which does not depend on the query (Prop. J.4)."""
    return eta * filtered_readout(operator, power, gamma)


def ska_upper(operator: Operator, power: int = 2, gamma: float = 1.0, eta: float = 1.0) -> Bound:
    """Bound the norm of `ska_jacobian` by `η ‖B‖ γ^K √((‖G‖ + ε)/ε)` (Prop. J.4, with ε m² for ε), `[…]`.

    The statistics of keys have ‖A_w‖ ≤ 1 and `‖B L‖ = ‖C L⁻ᵀ‖`. So `η ‖C L⁻ᵀ‖ γ^K / √λ_min(G̃)` is a bound too
    (`sharp`). It is never larger, because ‖C L⁻ᵀ‖ ≤ ‖B‖ ‖L‖.
    """
    growth = eta * gamma**power
    paper = norm(operator.readout) * ((norm(operator.gram) + operator.ridge) / operator.ridge).sqrt()
    return Bound(growth * paper, growth * norm(operator.whitened_readout) / lambda_min(operator).sqrt())


def ska_lower(operator: Operator, power: int = 2, gamma: float = 1.0, eta: float = 1.0) -> Tensor:
    """Bound the smallest singular value from below by `η σ_min(B) ν^K √(ε/(‖G‖ + ε))`, ν = σ_min(Â), `[…]` (Prop. J.6).

    It is 0 unless P ≥ R, C has rank R and Â is invertible (Prop. J.5). Fewer than R + 1 tokens have an M of rank below
    R, so that Â is singular. The conclusion of §3 that the gradient has full rank "by construction" needs these
    conditions.
    """
    width, rank = operator.readout.shape[-2:]
    least = torch.linalg.svdvals(operator.readout)[..., -1] if width >= rank else 0.0
    nu = torch.linalg.svdvals(operator.power(1, gamma))[..., -1]
    return eta * least * nu**power * (operator.ridge / (norm(operator.gram) + operator.ridge)).sqrt()


def gradient_flow(
    rank: int = 16, width: int = 16, tokens: Sequence[int] = (4, 8, 16, 17, 32, 64, 256),
    scales: Sequence[float] = (1, 4, 16, 64), depths: Sequence[int] = (1, 2, 4, 8),
    *, trials: int = 20, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Compute Jacobians and their bounds for normal keys, values and queries, with K = 2, γ = η = 1 and ε = 1e-3.

    Args:
        rank, width, tokens: R, P, and numbers of tokens T.
        scales: factors on the query, at the last T.
        depths: numbers of branches whose Jacobians are multiplied (Theorem J.9), at the last T. Needs R = P.
        trials, seed: draws, of which means are taken, and their seed; ranks are the smallest, and quotients "… over …"
            the largest.

    Returns:
        "rank", "width", "power", "trials"; "by tokens", "by scale" and "by depth", lists of dicts of numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(trials, *shape, generator=generator, dtype=torch.float64)

    by_tokens = []
    for length in tokens:
        query, keys, values = draw(rank), draw(length, rank), draw(length, width)
        attended, bound = attention_jacobian(query, keys, values), attention_bound(query, keys, values)
        operator = Operator.of_tokens(keys, values)
        read, upper = ska_jacobian(operator), ska_upper(operator)
        by_tokens.append({
            "tokens": length, "attention rank": int(numerical_rank(attended).min()),
            "attention": _mean(norm(attended)), "attention bound": _mean(bound.paper),
            "attention sharp": _mean(bound.sharp), "ska rank": int(numerical_rank(read).min()),
            "ska": _mean(norm(read)), "ska bound": _mean(upper.paper), "ska sharp": _mean(upper.sharp),
            "ska least": _mean(torch.linalg.svdvals(read)[..., -1]), "ska lower": _mean(ska_lower(operator)),
            "attention over bound": _most(norm(attended), bound.paper),
            "ska over bound": _most(norm(read), upper.paper),
            "lower over ska": _most(ska_lower(operator), torch.linalg.svdvals(read)[..., -1]),
        })  # fmt: skip
    query, keys, values = draw(rank), draw(tokens[-1], rank), draw(tokens[-1], width)
    read = ska_jacobian(Operator.of_tokens(keys, values))
    by_scale = [
        {
            "scale": float(scale), "largest weight": _mean(attention_weights(scale * query, keys).amax(-1)),
            "attention": _mean(norm(attention_jacobian(scale * query, keys, values))),
            "attention bound": _mean(attention_bound(scale * query, keys, values).paper), "ska": _mean(norm(read)),
        }
        for scale in scales
    ]  # fmt: skip
    by_depth = []
    for depth in depths:
        row: dict[str, Any] = {"depth": depth}
        layers = [(draw(rank), draw(tokens[-1], rank), draw(tokens[-1], width)) for _ in range(depth)]
        operators = [Operator.of_tokens(keys, values) for _, keys, values in layers]
        for name, jacobians, bounds in (
            ("attention", [attention_jacobian(*x) for x in layers], [attention_bound(*x).paper for x in layers]),
            ("ska", [ska_jacobian(o) for o in operators], [ska_upper(o).paper for o in operators]),
        ):
            product = torch.eye(rank, dtype=torch.float64)
            for jacobian in jacobians:
                product = product @ jacobian
            row[name] = _mean(norm(product))
            row[f"{name} bound"] = _mean(torch.stack(bounds).prod(0))
            row[f"{name} over bound"] = _most(norm(product), torch.stack(bounds).prod(0))
        by_depth.append(row)
    return {"rank": rank, "width": width, "power": 2, "trials": trials,
            "by tokens": by_tokens, "by scale": by_scale, "by depth": by_depth}  # fmt: skip


def _most(values: Tensor, bounds: Tensor) -> float:
    return (values / bounds).max().item()


def _mean(values: Tensor) -> float:
    return values.mean().item()
