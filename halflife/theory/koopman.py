"""Diagnostics of spectral Koopman attention: what its statistics say about retrieval (Echo, Appendices A, C, D, I).

Everything is computed in float64 from the sums that an operator is fitted to (`halflife.ops.koopman.op`, math.md §5):

    G̃ = G + ε m² I = L Lᵀ,   A_w = L⁻¹ M L⁻ᵀ,   Â = γ A_w,   B* = C G̃⁻¹,   Φ_K = L Â^K L⁻¹

Letters in front of the last axes (`…`) are batch, such as sequences and heads.
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
    """The statistics of some tokens.

    Attributes:
        gram: G = Σ z zᵀ `[…, R, R]`.
        transition: M = Σ z_t z_{t−1}ᵀ `[…, R, R]`.
        values: C = Σ v zᵀ `[…, P, R]`.
        ridge: ε m² `[…]`.
    """

    gram: Tensor
    transition: Tensor
    values: Tensor
    ridge: Tensor

    def __post_init__(self) -> None:
        for name in ("gram", "transition", "values", "ridge"):
            object.__setattr__(self, name, getattr(self, name).double())

    @classmethod
    def of_tokens(cls, keys: Tensor, values: Tensor, ridge: float = 1e-3) -> Operator:
        """The operator of `keys […, T, R]` and `values […, T, P]`; ridge: ε."""
        keys, values = keys.double(), values.double()
        before = torch.cat([torch.zeros_like(keys[..., :1, :]), keys], -2)[..., :-1, :]
        norm = keys.square().sum(-1)
        longest = norm.amax(-1) if keys.shape[-2] else norm.sum(-1)
        return cls(keys.mT @ keys, keys.mT @ before, values.mT @ keys, ridge * _unit(longest))

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor], ridge: float = 1e-3) -> Operator:
        """What the op's state has committed, `[N, H, …]`; ridge: ε.

        Rounding can give a float32 Gram matrix eigenvalues below 0: they are 0 here.
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
        """Eigenvalues of G̃, ascending, `[…, R]`: none below the ridge (Lemma A.4), which is theirs without keys."""
        return torch.linalg.eigvalsh(self.gram).clamp(min=0) + self.ridge.unsqueeze(-1)

    @cached_property
    def factor(self) -> Tensor:
        """L `[…, R, R]`, lower, `L Lᵀ = G̃`."""
        return torch.linalg.cholesky(self.regularised)

    @cached_property
    def whitened(self) -> Tensor:
        """A_w = L⁻¹ M L⁻ᵀ `[…, R, R]`, similar to M G̃⁻¹ (Prop. A.3, I.4).

        It is similar to G̃⁻¹ M as well, which is `G̃⁻¹ (M G̃⁻¹) G̃`: the paper's Remark 2 denies that, in error.
        """
        return self._unwhiten(torch.linalg.solve_triangular(self.factor, self.transition, upper=False))

    @cached_property
    def eigenvalues(self) -> Tensor:
        """The complex eigenvalues of A_w `[…, R]`, in no order."""
        return torch.linalg.eigvals(self.whitened)

    @cached_property
    def whitened_readout(self) -> Tensor:
        """C L⁻ᵀ = B* L `[…, P, R]`, what a whitened query is read with."""
        return self._unwhiten(self.values)

    @cached_property
    def readout(self) -> Tensor:
        """B* = C G̃⁻¹ `[…, P, R]`, the minimiser of the ridge objective (Prop. I.2)."""
        return torch.cholesky_solve(self.values.mT, self.factor).mT

    def power(self, power: int, gamma: float | Tensor = 1.0) -> Tensor:
        """Â^K = (γ A_w)^K `[…, R, R]`; gamma: a number or `[…]`."""
        gamma = torch.as_tensor(gamma, dtype=torch.float64, device=self.whitened.device)
        return torch.linalg.matrix_power(gamma[..., None, None] * self.whitened, power)

    def _unwhiten(self, x: Tensor) -> Tensor:
        """`x L⁻ᵀ` for `x […, n, R]`."""
        return torch.linalg.solve_triangular(self.factor.mT, x, upper=True, left=False)


def _unit(norm: Tensor) -> Tensor:
    """m², or 1 where there are no keys, as the op has it."""
    return torch.where(norm > 0, norm, 1.0)


def norm(matrix: Tensor) -> Tensor:
    """The largest singular value of `[…, n, R]`: `[…]`."""
    return torch.linalg.matrix_norm(matrix, 2)


# --------------------------------------------------------------------------------------------- spectrum


def sigma_max(operator: Operator) -> Tensor:
    """σ_max(A_w) `[…]`, at most `λ_max(G) / (λ_max(G) + ε m²)` and so below 1, whatever the keys.

    A_w = (Z₁ L⁻ᵀ)ᵀ (Z₀ L⁻ᵀ) for the rows of keys Z₁ and, one earlier, Z₀, all of which are in G: each factor has the
    norm `λ_max(G) / λ_max(G̃)` to the ½ or less. So the division by `max(σ_max, 1)` (Eq. 12, Prop. D.2) never acts on
    the whitened operator, and Remark 4's σ_max ≫ 1 is that of M G̃⁻¹ (Eq. 11), which can reach √κ(G̃).
    """
    return norm(operator.whitened)


class Modes(NamedTuple):
    """Which modes are persistent, transient, or neither: masks `[…, R]`."""

    persistent: Tensor
    transient: Tensor
    neither: Tensor


def modes(eigenvalues: Tensor, delta: float = 0.3, rho: float = 0.7) -> Modes:
    """Persistent modes |1 − λ| ≤ δ and, of the others, transient ones |λ| ≤ ρ (Theorem I.11).

    The main text calls every mode with |λ| ≈ 1 persistent; but one at −1 or at e^{iθ} turns, and the theorem's target
    keeps only what stays in place. Those that turn or grow are `neither`, and with them the theorem does not apply.
    The defaults meet on the real axis, where K = 2 keeps half (Remark 3).

    Args:
        eigenvalues: those of Â, that is γ times those of A_w, `[…, R]`.
        delta, rho: δ, ρ.
    """
    persistent = (1 - eigenvalues).abs() <= delta
    transient = (eigenvalues.abs() <= rho) & ~persistent
    return Modes(persistent, transient, ~persistent & ~transient)


def kept(eigenvalues: Tensor, power: int) -> Tensor:
    """|λ|^K `[…, R]`: the share of a mode's amplitude that is left after the filter (Prop. D.1).

    The paper's remark calls it energy, which is its square.
    """
    return eigenvalues.abs() ** power


def lambda_min(operator: Operator) -> Tensor:
    """λ_min(G̃) `[…]`: 1 / λ_min is the most that noise in the statistics is amplified (Corollary C.2)."""
    return operator.levels[..., 0]


def condition(operator: Operator) -> Tensor:
    """κ(G̃) = λ_max / λ_min `[…]`."""
    return operator.levels[..., -1] / operator.levels[..., 0]


# ------------------------------------------------------------------------------- ridge, linear attention


def loss(operator: Operator, readout: Tensor, energy: Tensor) -> Tensor:
    """Σ ‖v − B z‖² + ε m² ‖B‖² `[…]` (Eq. 63); readout: B `[…, P, R]`; energy: Σ ‖v‖² `[…]`."""
    return energy - 2 * _inner(readout, operator.values) + _inner(readout @ operator.regularised, readout)


def residual(operator: Operator, readout: Tensor, energy: Tensor) -> Tensor:
    """Σ ‖v − B z‖² `[…]`, the part of `loss` without the ridge."""
    return energy - 2 * _inner(readout, operator.values) + _inner(readout @ operator.gram, readout)


def excess_risk(operator: Operator, readout: Tensor) -> Tensor:
    """‖(B − B*) L‖_F² `[…]`, what `loss` of B exceeds its minimum by (Prop. I.3)."""
    return ((readout - operator.readout) @ operator.factor).square().sum((-2, -1))


def linear_bound(operator: Operator) -> Tensor:
    """(κ − 1) / (κ + 1) `[…]`: ‖C q − a B* q‖ ≤ this · ‖C‖ ‖q‖ for a = `linear_scale` (Theorem I.6).

    With orthogonal C there is a q for which no a does better; for other C and q the error may be anything down to 0
    (an eigenvector q): the bound is reached, but not "unavoidable" (I.10), and a* is the best a only for the worst q.
    """
    return (condition(operator) - 1) / (condition(operator) + 1)


def linear_scale(operator: Operator) -> Tensor:
    """a* = 2 λ_min λ_max / (λ_min + λ_max) `[…]` of Theorem I.6."""
    low, high = operator.levels[..., 0], operator.levels[..., -1]
    return 2 * low * high / (low + high)


def linear_distance(operator: Operator) -> Tensor:
    """min_a ‖C − a B*‖_F / ‖C‖_F `[…]`, for queries of all directions alike; `linear_bound` or less."""
    ours, theirs = operator.readout, operator.values
    scale = _inner(ours, theirs) / _inner(ours, ours)
    rest = (theirs - scale[..., None, None] * ours).square().sum((-2, -1))
    return (rest / _inner(theirs, theirs)).sqrt()


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1))


# ----------------------------------------------------------------------------------------- power filter


def filtered_readout(
    operator: Operator, power: int = 2, gamma: float | Tensor = 1.0, mix: float | Tensor = 1.0
) -> Tensor:
    """B* ((1 − μ) I + μ Φ_K) `[…, P, R]`, which the layer, times η, applies to queries.

    Args:
        operator: of which statistics.
        power: K.
        gamma, mix: γ and μ, numbers or `[…]`.
    """
    change = operator.whitened_readout @ _change(operator, power, gamma, mix)
    return operator.readout + torch.linalg.solve_triangular(operator.factor, change, upper=False, left=False)


def filter_bias(operator: Operator, power: int = 2, gamma: float | Tensor = 1.0, mix: float | Tensor = 1.0) -> Tensor:
    """‖μ B* (Φ_K − I) L‖_F² `[…]`: what the filter adds to `loss` (Prop. I.10; there μ = 1)."""
    return (operator.whitened_readout @ _change(operator, power, gamma, mix)).square().sum((-2, -1))


def _change(operator: Operator, power: int, gamma: float | Tensor, mix: float | Tensor) -> Tensor:
    """μ (Â^K − I)."""
    mix = torch.as_tensor(mix, dtype=torch.float64, device=operator.gram.device)
    eye = torch.eye(operator.gram.shape[-1], dtype=torch.float64, device=operator.gram.device)
    return mix[..., None, None] * (operator.power(power, gamma) - eye)


# ----------------------------------------------------------------------------------------------- memory


def state_size(rank: int, width: int, chunk_size: int = 1) -> int:
    """Numbers of a head's state, whatever the length: 2r² + Pr + r + 1 (Prop. I.14), and the chunk not yet full.

    The paper leaves out the chunk, which chunk-causal streaming must keep. Its 77 KB for the 50M model (§3.5; r 56,
    P 64, 7 heads, 4 layers, float32) are 1.1 MB by its own formula.
    """
    return 2 * rank**2 + width * rank + rank + 1 + (chunk_size - 1) * (rank + width)


def crossover(rank: int, width: int, chunk_size: int = 1) -> float:
    """The length T beyond which a cache of keys and values, T (r + P) numbers, is larger than `state_size`."""
    return state_size(rank, width, chunk_size) / (rank + width)
