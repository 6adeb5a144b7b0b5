"""Diagnostics of spectral Koopman attention: what its statistics say about retrieval (Echo, Appendices A, C, D, I).

Everything is computed in float64 from the statistics of the op (`halflife.ops.koopman`, docs/equations.md, "SKA"):

    G̃ = G + ε m² I = L Lᵀ,   A_w = L⁻¹ M L⁻ᵀ,   Â = γ A_w,   B* = C G̃⁻¹,   Φ_K = L Â^K L⁻¹

Axes that are written `…` are batch axes, such as sequences and heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Operator:
    """The statistics of some tokens, and the matrices that follow from them."""

    gram: Tensor  # G = Σ z zᵀ `[…, R, R]`
    transition: Tensor  # M = Σ z_t z_{t−1}ᵀ `[…, R, R]`
    values: Tensor  # C = Σ v zᵀ `[…, P, R]`
    ridge: Tensor  # ε m² `[…]`

    def __post_init__(self) -> None:
        for name in ("gram", "transition", "values", "ridge"):
            object.__setattr__(self, name, getattr(self, name).double())

    @classmethod
    def of_tokens(cls, keys: Tensor, values: Tensor, ridge: float = 1e-3) -> Operator:
        """Return the operator of `keys […, T, R]` and `values […, T, P]`; `ridge` is ε."""
        keys, values = keys.double(), values.double()
        before = torch.cat([torch.zeros_like(keys[..., :1, :]), keys], -2)[..., :-1, :]
        norm = keys.square().sum(-1)
        longest = norm.amax(-1) if keys.shape[-2] else norm.sum(-1)
        return cls(keys.mT @ keys, keys.mT @ before, values.mT @ keys, ridge * _unit(longest))

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor], ridge: float = 1e-3) -> Operator:
        """Return the operator of the committed tokens in a state of the op, `[N, H, …]`; `ridge` is ε.

        Rounding can give a float32 Gram matrix negative eigenvalues. They are set to 0.
        """
        gram = state["gram"].double()
        levels, basis = torch.linalg.eigh(gram)
        clipped = basis * levels.clamp(min=0).unsqueeze(-2) @ basis.mT
        gram = torch.where((levels < 0).any(-1)[..., None, None], clipped, gram)
        return cls(gram, state["transition"], state["values"], ridge * _unit(state["norm"].double()))

    @cached_property
    def regularised(self) -> Tensor:
        """G̃ = G + ε m² I `[…, R, R]`."""
        eye = torch.eye(self.gram.shape[-1], dtype=self.gram.dtype, device=self.gram.device)
        return self.gram + self.ridge[..., None, None] * eye

    @cached_property
    def levels(self) -> Tensor:
        """Eigenvalues of G̃, ascending, `[…, R]`. None is below the ridge (Lemma A.4). Without keys all equal it."""
        return torch.linalg.eigvalsh(self.gram).clamp(min=0) + self.ridge.unsqueeze(-1)

    @cached_property
    def factor(self) -> Tensor:
        """L `[…, R, R]`, lower, `L Lᵀ = G̃`."""
        return torch.linalg.cholesky(self.regularised)

    @cached_property
    def whitened(self) -> Tensor:
        """A_w = L⁻¹ M L⁻ᵀ `[…, R, R]`, similar to M G̃⁻¹ (Prop. A.3, I.4).

        It is also similar to G̃⁻¹ M, which is `G̃⁻¹ (M G̃⁻¹) G̃`. The paper's Remark 2 denies this, which is an error.
        """
        return self._unwhiten(torch.linalg.solve_triangular(self.factor, self.transition, upper=False))

    @cached_property
    def eigenvalues(self) -> Tensor:
        """The complex eigenvalues of A_w `[…, R]`, in no particular order."""
        return torch.linalg.eigvals(self.whitened)

    @cached_property
    def whitened_readout(self) -> Tensor:
        """C L⁻ᵀ = B* L `[…, P, R]`, which reads a whitened query."""
        return self._unwhiten(self.values)

    @cached_property
    def readout(self) -> Tensor:
        """B* = C G̃⁻¹ `[…, P, R]`, which minimises the ridge objective (Prop. I.2)."""
        return torch.cholesky_solve(self.values.mT, self.factor).mT

    def power(self, power: int, gamma: float | Tensor = 1.0) -> Tensor:
        """Return Â^K = (γ A_w)^K `[…, R, R]`; gamma is a number or `[…]`."""
        gamma = torch.as_tensor(gamma, dtype=torch.float64, device=self.whitened.device)
        return torch.linalg.matrix_power(gamma[..., None, None] * self.whitened, power)

    def _unwhiten(self, x: Tensor) -> Tensor:
        """Return `x L⁻ᵀ` for `x […, n, R]`."""
        return torch.linalg.solve_triangular(self.factor.mT, x, upper=True, left=False)


def _unit(norm: Tensor) -> Tensor:
    """Return m², or 1 where there are no keys, as the op does."""
    return torch.where(norm > 0, norm, 1.0)


def norm(matrix: Tensor) -> Tensor:
    """Return the largest singular value of `[…, n, R]`: `[…]`."""
    return torch.linalg.matrix_norm(matrix, 2)


def sigma_max(operator: Operator) -> Tensor:
    """Return σ_max(A_w) `[…]`. It is at most `λ_max(G) / (λ_max(G) + ε m²)`, so it is below 1 for all keys.

    A_w = (Z₁ L⁻ᵀ)ᵀ (Z₀ L⁻ᵀ), where the rows of Z₁ are keys and the rows of Z₀ are the keys one token earlier. All of
    them are in G, so each factor has a norm of at most `(λ_max(G) / λ_max(G̃))^½`. Therefore the division by
    `max(σ_max, 1)` (Eq. 12, Prop. D.2) never changes the whitened operator. The σ_max ≫ 1 of Remark 4 belongs to M G̃⁻¹
    (Eq. 11), which can reach √κ(G̃).
    """
    return norm(operator.whitened)


class Modes(NamedTuple):
    """Masks `[…, R]` of persistent modes, transient modes, and modes that are neither."""

    persistent: Tensor
    transient: Tensor
    neither: Tensor


def modes(eigenvalues: Tensor, delta: float = 0.3, rho: float = 0.7) -> Modes:
    """Classify modes as persistent, |1 − λ| ≤ δ, or as transient, |λ| ≤ ρ among the others (Theorem I.11).

    The main text calls every mode with |λ| ≈ 1 persistent. A mode at −1 or at e^{iθ} however rotates, and the theorem's
    target only keeps modes that stay in place. Modes that rotate or grow are `neither`. The theorem does not apply if
    there are such modes. The default limits meet on the real axis, where K = 2 keeps half (Remark 3).

    Args:
        eigenvalues: eigenvalues of Â, which are γ times those of A_w, `[…, R]`.
        delta, rho: δ, ρ.
    """
    persistent = (1 - eigenvalues).abs() <= delta
    transient = (eigenvalues.abs() <= rho) & ~persistent
    return Modes(persistent, transient, ~persistent & ~transient)


def filtered_amplitude(eigenvalues: Tensor, power: int) -> Tensor:
    """Return |λ|^K `[…, R]`, the fraction of a mode's amplitude that is left after the filter (Prop. D.1).

    The paper's remark calls it energy, which is the square of it.
    """
    return eigenvalues.abs() ** power


def lambda_min(operator: Operator) -> Tensor:
    """Return λ_min(G̃) `[…]`. Noise in the statistics is amplified by at most 1 / λ_min (Corollary C.2)."""
    return operator.levels[..., 0]


def condition(operator: Operator) -> Tensor:
    """Return κ(G̃) = λ_max / λ_min `[…]`."""
    return operator.levels[..., -1] / operator.levels[..., 0]


def eigenvector_condition(matrix: Tensor) -> Tensor:
    """Return κ(V) `[…]` of `V Λ V⁻¹` `[…, R, R]`: 1 for normal matrices, infinite if there is no such form."""
    return torch.linalg.cond(torch.linalg.eig(matrix).eigenvectors)


def loss(operator: Operator, readout: Tensor, energy: Tensor) -> Tensor:
    """Return Σ ‖v − B z‖² + ε m² ‖B‖² `[…]` (Eq. 63), for the readout B `[…, P, R]` and the energy Σ ‖v‖² `[…]`."""
    return energy - 2 * _inner(readout, operator.values) + _inner(readout @ operator.regularised, readout)


def residual(operator: Operator, readout: Tensor, energy: Tensor) -> Tensor:
    """Return Σ ‖v − B z‖² `[…]`, which is `loss` without the ridge term."""
    return energy - 2 * _inner(readout, operator.values) + _inner(readout @ operator.gram, readout)


def excess_risk(operator: Operator, readout: Tensor) -> Tensor:
    """Return ‖(B − B*) L‖_F² `[…]`, by which `loss` of B exceeds its minimum (Prop. I.3)."""
    return ((readout - operator.readout) @ operator.factor).square().sum((-2, -1))


def linear_bound(operator: Operator) -> Tensor:
    """Return (κ − 1) / (κ + 1) `[…]`. With a = `linear_scale`, ‖C q − a B* q‖ ≤ this · ‖C‖ ‖q‖ (Theorem I.6).

    For orthogonal C there is a q for which no a does better. For other C and q the error can be anything down to 0,
    which an eigenvector q reaches. So the bound is tight, but the error is not "unavoidable" (I.10), and a* is the best
    a only for the worst q.
    """
    return (condition(operator) - 1) / (condition(operator) + 1)


def linear_scale(operator: Operator) -> Tensor:
    """Return a* = 2 λ_min λ_max / (λ_min + λ_max) `[…]` of Theorem I.6."""
    low, high = operator.levels[..., 0], operator.levels[..., -1]
    return 2 * low * high / (low + high)


def linear_distance(operator: Operator) -> Tensor:
    """Return min_a ‖C − a B*‖_F / ‖C‖_F `[…]`, for queries of all directions. It is at most `linear_bound`."""
    ridge, linear = operator.readout, operator.values
    scale = _inner(ridge, linear) / _inner(ridge, ridge)
    rest = (linear - scale[..., None, None] * ridge).square().sum((-2, -1))
    return (rest / _inner(linear, linear)).sqrt()


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1))


def filtered_readout(
    operator: Operator, power: int = 2, gamma: float | Tensor = 1.0, mix: float | Tensor = 1.0
) -> Tensor:
    """Return B* ((1 − μ) I + μ Φ_K) `[…, P, R]`, which the layer multiplies by η and applies to queries.

    Args:
        power: K.
        gamma, mix: γ and μ, numbers or `[…]`.
    """
    change = operator.whitened_readout @ _change(operator, power, gamma, mix)
    return operator.readout + torch.linalg.solve_triangular(operator.factor, change, upper=False, left=False)


def filter_bias(operator: Operator, power: int = 2, gamma: float | Tensor = 1.0, mix: float | Tensor = 1.0) -> Tensor:
    """Return ‖μ B* (Φ_K − I) L‖_F² `[…]`, which the filter adds to `loss` (Prop. I.10, with μ = 1 there)."""
    return (operator.whitened_readout @ _change(operator, power, gamma, mix)).square().sum((-2, -1))


def _change(operator: Operator, power: int, gamma: float | Tensor, mix: float | Tensor) -> Tensor:
    """Return μ (Â^K − I)."""
    mix = torch.as_tensor(mix, dtype=torch.float64, device=operator.gram.device)
    eye = torch.eye(operator.gram.shape[-1], dtype=torch.float64, device=operator.gram.device)
    return mix[..., None, None] * (operator.power(power, gamma) - eye)
