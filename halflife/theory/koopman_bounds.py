"""Bounds on what spectral Koopman attention reads, and on how its modes move with its statistics (Echo, C and I.7).

Where the paper's bound is larger than need be, or not proved by its steps, ours stands beside it. Letters in front of
the last axes (`…`) are batch, as in `halflife.theory.koopman`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from halflife.theory.koopman import Operator, condition, lambda_min, modes, norm


class Bound(NamedTuple):
    """An upper bound as the paper has it, and the one that its argument gives when followed closely."""

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
    """How far y / η lies from what the persistent modes alone would read (Theorem I.11).

    The paper bounds the norm of a sum, of what the persistent part moves and the transient part keeps, by the sum of
    norms. The two are orthogonal, so the root of the sum of squares will do (`sharp`). Corollary I.12 (the filter
    helps where `filtered.paper < unfiltered`) compares bounds: errors follow it if C L⁻ᵀ is a multiple of an isometry,
    and need not otherwise, for a C that does not see the transient part has nothing to gain.

    Args:
        operator: of which Â is normal.
        query: q `[…, R]`.
        power, gamma, delta, rho: K, γ, δ, ρ; every mode must be persistent or transient.

    Returns:
        `target […, P]` and the bounds `[…]`.

    Raises:
        ValueError: Â is not normal, or has modes that are neither.
    """
    scaled = operator.power(1, gamma)
    if (norm(scaled @ scaled.mT - scaled.mT @ scaled) > 1e-9 * norm(scaled) ** 2).any():
        raise ValueError("Theorem I.11 needs a normal operator: A Aᵀ = Aᵀ A")
    eigenvalues, basis = _normal_eig(scaled)
    found = modes(eigenvalues, delta, rho)
    if found.neither.any():
        raise ValueError(f"Theorem I.11 needs every mode within {delta} of 1 or {rho} of 0; got {eigenvalues}")
    white = torch.linalg.solve_triangular(operator.factor, query.double().unsqueeze(-1), upper=False)
    parts = basis.mH @ white.to(basis.dtype) * found.persistent.unsqueeze(-1)
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
    """Eigenvalues and orthonormal eigenvectors of a real normal matrix, repeated eigenvalues included.

    Its symmetric part and −i times its antisymmetric part share its eigenvectors, with the eigenvalues Re λ and Im λ;
    a Hermitian sum of the two, with weights for which no two λ are likely to agree, has them orthonormal.
    """
    real, imaginary = (matrix + matrix.mT) / 2, (matrix - matrix.mT) / 2
    basis = torch.linalg.eigh(torch.complex(real, -math.sqrt(2) * imaginary)).eigenvectors
    return (basis.conj() * (matrix.to(basis.dtype) @ basis)).sum(-2), basis


# ----------------------------------------------------------------------------------------- perturbation


def perturbation_bound(operator: Operator, other: Operator) -> Bound:
    """‖Â_ε − A_ε‖ for A_ε = M G̃⁻¹ and other statistics Ĝ, M̂ `[…]` (Theorem C.1).

    The paper bounds ‖M G̃⁻¹ E_G‖ by ‖A‖ ‖G̃‖ ‖G̃⁻¹‖ ‖E_G‖; as M G̃⁻¹ is A itself, the factor κ(G̃) is needless.
    The sharp bound is (‖E_M‖ + ‖A‖ ‖E_G‖) / λ_min(Ĝ), reached at R = 1: what counts is the other λ_min.
    """
    gram, transition, size = _errors(operator, other)
    low = lambda_min(other)
    return Bound((transition + size * condition(operator) * gram) / low, (transition + size * gram) / low)


def eigenvalue_bound(operator: Operator, other: Operator) -> Bound:
    """How far an eigenvalue of `other` may lie from the nearest one of `operator`, `[…]` (Corollary C.4).

    The paper puts the eigenvectors of A_w before the perturbation of M G̃⁻¹, whose own eigenvectors L V are up to √κ(G̃)
    worse: its steps do not prove it (we found no case that breaks it). Bauer–Fike for the pencil M x = λ G̃ x does it
    directly: `L⁻¹ (E_M − λ̂ E_G) L⁻ᵀ` perturbs A_w itself, so that κ(V) (‖E_M‖ + |λ̂| ‖E_G‖) / λ_min(G̃) suffices
    (`sharp`), where |λ̂| < 1 for statistics of keys; no κ(G̃), no λ_min(Ĝ). It is reached at R = 1.
    """
    gram, transition, size = _errors(operator, other)
    vectors = eigenvector_condition(operator.whitened)
    largest = other.eigenvalues.abs().amax(-1)
    paper = transition / lambda_min(other) + size * condition(operator) * gram / lambda_min(other)
    return Bound(vectors * paper, vectors * (transition + largest * gram) / lambda_min(operator))


def _errors(operator: Operator, other: Operator) -> tuple[Tensor, Tensor, Tensor]:
    """‖E_G‖ (ridges included), ‖E_M‖ and ‖A_ε‖."""
    unwhitened = torch.cholesky_solve(operator.transition.mT, operator.factor).mT
    return (
        norm(other.regularised - operator.regularised), norm(other.transition - operator.transition), norm(unwhitened),
    )  # fmt: skip


def eigenvector_condition(matrix: Tensor) -> Tensor:
    """κ(V) `[…]` of `V Λ V⁻¹` `[…, R, R]`: 1 for normal matrices, infinite for those with no such form."""
    return torch.linalg.cond(torch.linalg.eig(matrix).eigenvectors)


def bauer_fike(matrix: Tensor, error: Tensor) -> Tensor:
    """κ(V) ‖E‖ `[…]`: no eigenvalue of A + E is farther from the nearest one of A (Theorem C.3)."""
    return eigenvector_condition(matrix) * norm(error)
