"""Bounds on the output of spectral Koopman attention, and on changes of its modes with its statistics (Echo, C, I.7).

If the paper's bound is larger than necessary, or its steps do not prove it, our bound stands beside it. Axes that are
written `…` are batch axes, as in `halflife.analysis.koopman`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from halflife.analysis.koopman import Operator, condition, eigenvector_condition, lambda_min, modes, norm


class Bound(NamedTuple):
    """An upper bound in the paper's form, and the sharper one that its argument gives when it is followed closely."""

    paper: Tensor
    sharp: Tensor


class Regime(NamedTuple):
    """Theorem I.11 for a query: C L⁻ᵀ q_pers, and bounds of the distance to it with the filter and without (K = 0)."""

    target: Tensor
    filtered: Bound
    unfiltered: Tensor


def regime(
    operator: Operator, query: Tensor, power: int = 2, gamma: float = 1.0, delta: float = 0.3, rho: float = 0.7
) -> Regime:
    """Bound the distance of y / η from what the persistent modes alone would read (Theorem I.11).

    The error consists of the change of the persistent modes and the rest of the transient modes. The paper bounds the
    norm of their sum by the sum of their norms. The parts are orthogonal, so the root of the sum of squares is a bound
    too (`sharp`). Corollary I.12 (the filter helps if `filtered.paper < unfiltered`) compares bounds. The errors
    themselves follow it if C L⁻ᵀ is a multiple of an isometry. For other C they need not: if C does not read the
    transient part, the filter cannot help.

    Args:
        operator: the statistics; Â must be normal.
        query: q `[…, R]`.
        power, gamma, delta, rho: K, γ, δ, ρ. Every mode must be persistent or transient.

    Returns:
        `target […, P]` and the bounds `[…]`.

    Raises:
        ValueError: if Â is not normal, or has modes that are neither persistent nor transient.
    """
    scaled = operator.power(1, gamma)
    if (norm(scaled @ scaled.mT - scaled.mT @ scaled) > 1e-9 * norm(scaled) ** 2).any():
        raise ValueError("Theorem I.11 needs a normal operator: A Aᵀ = Aᵀ A")
    eigenvalues, basis = _normal_eig(scaled)
    kinds = modes(eigenvalues, delta, rho)
    if kinds.neither.any():
        raise ValueError(f"Theorem I.11 needs every mode within {delta} of 1 or {rho} of 0; got {eigenvalues}")
    white = torch.linalg.solve_triangular(operator.factor, query.double().unsqueeze(-1), upper=False)
    parts = basis.mH @ white.to(basis.dtype) * kinds.persistent.unsqueeze(-1)
    persistent = (basis @ parts).real
    gain = norm(operator.whitened_readout)
    moved = ((1 + delta) ** power - 1) * persistent.norm(dim=(-2, -1))
    transient = (white - persistent).norm(dim=(-2, -1))
    left = rho**power * transient
    return Regime(
        (operator.whitened_readout @ persistent).squeeze(-1),
        Bound(gain * (moved + left), gain * torch.hypot(moved, left)),
        gain * transient,
    )


def _normal_eig(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and orthonormal eigenvectors of a real normal matrix, also if eigenvalues repeat.

    The matrix shares its eigenvectors with its symmetric part and with −i times its antisymmetric part, whose
    eigenvalues are Re λ and Im λ. A Hermitian sum of the two has orthonormal eigenvectors. Its weights make it unlikely
    that two different λ coincide.
    """
    real, imaginary = (matrix + matrix.mT) / 2, (matrix - matrix.mT) / 2
    basis = torch.linalg.eigh(torch.complex(real, -math.sqrt(2) * imaginary)).eigenvectors
    return (basis.conj() * (matrix.to(basis.dtype) @ basis)).sum(-2), basis


def perturbation_bound(operator: Operator, other: Operator) -> Bound:
    """Bound ‖Â_ε − A_ε‖ for A_ε = M G̃⁻¹ and other statistics Ĝ, M̂ `[…]` (Theorem C.1).

    The paper bounds ‖M G̃⁻¹ E_G‖ by ‖A‖ ‖G̃‖ ‖G̃⁻¹‖ ‖E_G‖. Since M G̃⁻¹ is A itself, the factor κ(G̃) is not needed.
    The sharp bound is (‖E_M‖ + ‖A‖ ‖E_G‖) / λ_min(Ĝ), which R = 1 reaches. It contains λ_min of the other statistics.
    """
    gram, transition, size = _errors(operator, other)
    low = lambda_min(other)
    return Bound((transition + size * condition(operator) * gram) / low, (transition + size * gram) / low)


def eigenvalue_bound(operator: Operator, other: Operator) -> Bound:
    """Bound the distance of an eigenvalue of `other` from the nearest one of `operator`, `[…]` (Corollary C.4).

    The paper combines the eigenvectors of A_w with the perturbation of M G̃⁻¹. The eigenvectors of M G̃⁻¹ itself, L V,
    are worse conditioned by up to √κ(G̃), so the paper's steps do not prove its bound, although we know no
    counterexample. Bauer–Fike for the pencil M x = λ G̃ x gives a bound directly: `L⁻¹ (E_M − λ̂ E_G) L⁻ᵀ` perturbs A_w
    itself, so κ(V) (‖E_M‖ + |λ̂| ‖E_G‖) / λ_min(G̃) is a bound (`sharp`). For statistics of keys |λ̂| < 1. It contains
    neither κ(G̃) nor λ_min(Ĝ), and R = 1 reaches it.
    """
    gram, transition, size = _errors(operator, other)
    vectors = eigenvector_condition(operator.whitened)
    largest = other.eigenvalues.abs().amax(-1)
    paper = transition / lambda_min(other) + size * condition(operator) * gram / lambda_min(other)
    return Bound(vectors * paper, vectors * (transition + largest * gram) / lambda_min(operator))


def _errors(operator: Operator, other: Operator) -> tuple[Tensor, Tensor, Tensor]:
    """Return ‖E_G‖ (with ridges), ‖E_M‖ and ‖A_ε‖."""
    unwhitened = torch.cholesky_solve(operator.transition.mT, operator.factor).mT
    return (
        norm(other.regularised - operator.regularised), norm(other.transition - operator.transition), norm(unwhitened),
    )  # fmt: skip


def bauer_fike(matrix: Tensor, error: Tensor) -> Tensor:
    """Return κ(V) ‖E‖ `[…]`, the largest distance of an eigenvalue of A + E from the nearest one of A (Theorem C.3)."""
    return eigenvector_condition(matrix) * norm(error)
