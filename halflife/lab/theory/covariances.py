"""The covariances of keys: rotating phases (Echo, Prop. C.5), and keys divided by the largest norm (Prop. E.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

RIDGE = 1e-3  # ε


class Estimates(NamedTuple):
    """Estimates of a scalar operator A = M/G, each `[…]`."""

    raw: Tensor  # of the keys `k̃ e^{iθ}`, complex
    invariant: Tensor  # of the lift |k|²
    centred: Tensor  # of the lift minus its mean


def operators_of_phases(content: Tensor, phases: Tensor) -> Estimates:
    """Return `Σ k_{t+1} k̄_t / Σ |k_t|²` of `k_t = k̃_t e^{iθ_t}`, and the same of |k|² (Prop. C.5).

    The proposition says that M_inv = Σ |k̃_{t+1}|² |k̃_t|² reflects the dynamics of the content. But |k̃|² has a mean
    above 0. For independent normal k̃, which have no dynamics, M_inv/G_inv is therefore E[k̃²]²/E[k̃⁴] = 1/3. Only the
    centred lift gives 0 for them, and ρ² for an autoregression with coefficient ρ, where the plain lift gives
    (1 + 2ρ²)/3. A rotation at a constant speed does not attenuate anything: M is rotated, and |M|/G is ρ.

    Args:
        content: k̃, real, `[…, T]`.
        phases: θ, `[…, T]`.
    """
    keys = torch.polar(content.abs(), phases + math.pi * (content < 0))
    lift = content.double() ** 2
    return Estimates(_ratio(keys), _ratio(lift), _ratio(lift - lift.mean(-1, keepdim=True)))


def _ratio(x: Tensor) -> Tensor:
    return (x[..., 1:] * x[..., :-1].conj()).sum(-1) / (x * x.conj()).sum(-1).real


def phase_attenuation(
    length: int = 1024, correlations: Sequence[float] = (0.0, 0.5, 0.9),
    jitters: Sequence[float] = (0.0, 0.5, 1.0, 2.0, math.inf), *, trials: int = 64, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Estimate the operator of an autoregression of coefficient ρ whose phase makes normal steps.

    Args:
        length: T.
        correlations: ρ of the content k̃, a normal autoregression of order 1.
        jitters: standard deviations σ of the phase's steps. ∞ draws every phase uniformly.
        trials, seed: number of sequences, and their seed. Means over the sequences are given.

    Returns:
        "length", "trials" and "rows", a dict for each ρ and σ: "correlation", "jitter" (None for ∞), "raw" (|A|),
        "expected" = ρ e^{−σ²/2}, "invariant", "expected invariant" = (1 + 2ρ²)/3, "centred", "expected centred" = ρ².
    """
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(trials, length, generator=generator, dtype=torch.float64)

    rows = []
    for rho in correlations:
        noise = draw()
        content = [noise[:, 0]]
        for t in range(1, length):
            content.append(rho * content[-1] + math.sqrt(1 - rho**2) * noise[:, t])
        for sigma in jitters:
            uniform = 2 * math.pi * torch.rand(trials, length, generator=generator, dtype=torch.float64)
            phases = uniform if math.isinf(sigma) else uniform[:, :1] + sigma * draw().cumsum(-1)
            found = operators_of_phases(torch.stack(content, -1), phases)
            rows.append({
                "correlation": rho, "jitter": None if math.isinf(sigma) else sigma,
                "raw": found.raw.abs().mean().item(), "expected": rho * math.exp(-(sigma**2) / 2),
                "invariant": found.invariant.mean().item(), "expected invariant": (1 + 2 * rho**2) / 3,
                "centred": found.centred.mean().item(), "expected centred": rho**2,
            })  # fmt: skip
    return {"length": length, "trials": trials, "rows": rows}


class GramSizes(NamedTuple):
    """Sizes of the Gram matrix of keys that are divided by the largest norm, each `[…]`."""

    # trace, frobenius, largest, least: tr Ḡ, ‖Ḡ‖_F and the extreme eigenvalues
    trace: Tensor
    frobenius: Tensor
    largest: Tensor
    least: Tensor
    directions: Tensor  # `tr(Ḡ (Ḡ + ε I)⁻¹)`, the number of directions that the ridge leaves


def gram_sizes(keys: Tensor) -> GramSizes:
    """Return the sizes of Ḡ for `keys […, T, R]` (Prop. E.1).

    The proposition bounds trace, norm and λ_max by T. The trace is exactly Σ ‖k_t‖²/m², with m the largest norm, and
    bounds the other two. It is T only if all keys have the same norm, and λ_max is T only if they are parallel too.
    """
    keys = keys.double() / keys.double().norm(dim=-1).amax(-1)[..., None, None]
    gram = keys.mT @ keys
    levels = torch.linalg.eigvalsh(gram).clamp(min=0)
    return GramSizes(
        levels.sum(-1), torch.linalg.matrix_norm(gram), levels[..., -1], levels[..., 0],
        (levels / (levels + RIDGE)).sum(-1),
    )  # fmt: skip


def gram_bounds(
    rank: int = 48, tokens: Sequence[int] = (64, 512, 4096), outliers: Sequence[float] = (1, 4, 16, 64),
    *, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Compute `gram_sizes` for T normal keys of size R of which the first is multiplied by a factor.

    Returns:
        "rank", "ridge" and "rows", a dict for each T and factor: "tokens", which is the bound, "outlier", and the
        fields of `GramSizes`.
    """
    rows = []
    for length in tokens:
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(length, rank, generator=generator, dtype=torch.float64)
        for outlier in outliers:
            scaled = torch.cat([outlier * keys[:1], keys[1:]])
            sizes = {name: value.item() for name, value in gram_sizes(scaled)._asdict().items()}
            rows.append({"tokens": length, "outlier": float(outlier), **sizes})
    return {"rank": rank, "ridge": RIDGE, "rows": rows}
