"""How queries read an operator of spectral Koopman attention: the power filter, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from halflife.ops.koopman.solve import Count, inverse_factor, inverse_of, unit_of
from halflife.ops.koopman.state import Sums
from halflife.precision import compute_dtype

Product = Callable[[Tensor], Tensor]  # applies matrices to the rows of a tensor


class KoopmanReadout:
    """The power filter `y = C Σ μ_i x_i` with the op's γ, μ, `ridge` ε and K (see `koopman.op`).

    Attributes:
        mix: μ as it is given, one per head, `[H, 1, 1]`; one per power and head, `[K + 1, H, 1, 1]`.
        weights: μ_0, …, μ_K, `[K + 1, H, 1, 1]`. One μ a head stands for `(1 − μ, 0, …, 0, μ)`.
    """

    def __init__(
        self, gamma: float | Tensor, mix: float | Tensor, ridge: float, power: int, like: Tensor, operator: str
    ) -> None:
        self.operator, self.ridge = operator, ridge
        dtype, heads = compute_dtype(like), like.shape[2]
        # With μ = 0 as a number the powers would be multiplied by 0, so they are not computed.
        self.power = 0 if isinstance(mix, (int, float)) and mix == 0 else power
        self.gamma, self.mix = (  # a number is not copied to the device, which would wait for it
            x.to(like.device, dtype) if isinstance(x, Tensor) else like.new_full((), x, dtype=dtype)
            for x in (gamma, mix)
        )
        self.gamma = self.gamma.expand(heads)[:, None, None]
        self.mix = (self.mix if self.mix.ndim == 2 else self.mix.expand(heads))[..., None, None]

    @property
    def weights(self) -> Tensor:
        if self.mix.ndim == 4:
            return self.mix
        first = 1 - self.mix
        if not self.power:
            return (first + self.mix).unsqueeze(0)
        return torch.stack([first, *(torch.zeros_like(first) for _ in range(self.power - 1)), self.mix])

    def read(self, sums: Sums, q: Tensor, norm: Tensor | None = None) -> tuple[Tensor, Count]:
        """Read operators with `q [n, H, S, R]` through Cholesky factors; `norm [n, H]` replaces the m² of `sums`.

        It returns the outputs `[n, H, S, P]`, and `Factor.retries`.
        """
        if self.operator == "main_text":
            factor = inverse_factor(sums if norm is None else sums._replace(norm=norm), self.ridge)
            return self._read_main_text(factor.matrix, sums, norm, q), factor.retries
        unit = unit_of(sums.norm if norm is None else norm)[..., None, None]
        with torch.no_grad():  # `_Read` has the gradient
            scaled = sums.gram / unit
            scaled.diagonal(dim1=-2, dim2=-1).add_(self.ridge)
            inverse, retries = inverse_of(scaled)
        settings = self.gamma, self.weights, self.ridge
        return _Read.apply(inverse, sums.gram, sums.transition, sums.values, unit, q, *settings), retries

    def read_by_inverse(self, inverse: Tensor, sums: Sums, q: Tensor) -> Tensor:
        """Read operators with `q [N, H, S, R]` through their inverse factors, which autograd differentiates."""
        if self.operator == "main_text":
            return self._read_main_text(inverse, sums, None, q)
        unit = unit_of(sums.norm)[..., None, None].detach()  # a constant, see `inverse_factor`
        solve, advance = (lambda b: _solve(inverse, b)), (lambda x: x @ sums.transition.mT)
        xs = powers(solve, advance, unit, q, self.gamma, self.power)
        return weighted_sum(self.weights, xs) @ sums.values.mT

    def _read_main_text(self, inverse: Tensor, sums: Sums, norm: Tensor | None, q: Tensor) -> Tensor:
        """Eqs. 11 to 13, with vectors as rows, so A is applied as `x Aᵀ`. `inverse` is L⁻ᵀ with `L Lᵀ = G̃ / m²`."""
        norm = sums.norm if norm is None else norm
        unit = unit_of(norm)[..., None, None].detach()  # a constant, see `inverse_factor`
        transposed = inverse @ inverse.mT @ (sums.transition / unit).mT  # Aᵀ = G̃⁻¹ Mᵀ
        transposed = self.gamma / largest_singular_value(transposed).clamp(min=1) * transposed
        powers = [q / unit @ inverse]
        for _ in range(self.power):
            powers.append(powers[-1] @ transposed)
        return weighted_sum(self.weights, powers) @ inverse.mT @ sums.values.mT


def weighted_sum(weights: Tensor, xs: Sequence[Tensor]) -> Tensor:
    """Σ μ_i x_i of `weights [K + 1, …]` and K + 1 tensors."""
    total = weights[0] * xs[0]
    for weight, x in zip(weights[1:], xs[1:], strict=True):
        total = torch.addcmul(total, weight, x)
    return total


POWER_ITERATIONS = 6


@torch.no_grad()
def largest_singular_value(a: Tensor) -> Tensor:
    """Estimate σ_max of `a [..., R, R]` as the paper does, `[..., 1, 1]`, without a gradient.

    Six power iterations start from the vector of ones; the paper does not give the start.
    """
    x = a.new_ones(*a.shape[:-1], 1)
    for _ in range(POWER_ITERATIONS):
        x = F.normalize(a.mT @ (a @ x), dim=-2)
    return (a @ x).norm(dim=-2, keepdim=True)


def powers(solve: Product, advance: Product, unit: Tensor, q: Tensor, gamma: Tensor, power: int) -> list[Tensor]:
    """`[x_0, …, x_K]` with `x_0 = G̃⁻¹ q` and `x_i = γ G̃⁻¹ M x_{i−1}`.

    `solve` applies the inverse of `G̃ / m²`, and `advance` applies M.
    Vectors are rows here and below. For one vector a matrix, torch's batched products are up to ten times faster so.
    """
    xs, step = [solve(q / unit)], gamma / unit
    for _ in range(power):
        xs.append(solve(step * advance(xs[-1])))
    return xs


class _Read(torch.autograd.Function):
    """`y = C Σ μ_i x_i` with one factor for all solves of both passes.

    The gradient does not pass through the factorisation. Let `b_i` be the gradient of the right-hand side of solve i,
    in raw units `b_i = G̃⁻¹ dx_i`. Then `dG̃ = −Σ b_i x_iᵀ`, `dM = γ Σ b_i x_{i−1}ᵀ` and `dC = dy xᵀ`. As m² occurs in
    `G̃ = G + ε m² I` alone, `dm² = ε tr dG̃`.
    """

    @staticmethod
    def forward(ctx, inverse, gram, transition, values, unit, q, gamma, weights, ridge: float) -> Tensor:  # type: ignore[override]
        solve, advance = (lambda b: _solve(inverse, b)), (lambda x: x @ transition.mT)
        xs = powers(solve, advance, unit, q, gamma, len(weights) - 1)
        ctx.save_for_backward(inverse, transition, values, unit, gamma, weights, *xs)
        ctx.ridge = ridge
        return weighted_sum(weights, xs) @ values.mT

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        inverse, transition, values, unit, gamma, weights, *xs = ctx.saved_tensors
        mixed = dy @ values
        dweights = torch.stack([(mixed * x).sum((0, -2, -1)) for x in xs])
        dx, dgamma = weights[-1] * mixed, torch.zeros_like(dweights[0])
        bs = []
        for weight, x in zip(weights[:-1].flip(0), reversed(xs[:-1]), strict=True):
            bs.append(_solve(inverse, dx) / unit)
            dx = bs[-1] @ transition
            dgamma = dgamma + (dx * x).sum((0, -2, -1))
            dx = gamma * dx + weight * mixed
        bs.append(_solve(inverse, dx) / unit)
        dgram = -_products(bs, xs[::-1])
        dtransition = gamma * _products(bs[:-1], xs[-2::-1]) if len(xs) > 1 else None
        dvalues = dy.mT @ weighted_sum(weights, xs)
        dunit = ctx.ridge * dgram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        dsettings = dgamma[:, None, None], dweights[..., None, None], None
        return None, dgram, dtransition, dvalues, dunit, bs[-1], *dsettings


def _products(bs: list[Tensor], xs: list[Tensor]) -> Tensor:
    """Σ b_iᵀ x_i over rows `[..., S, R]`, without joined copies of either."""
    total = bs[0].mT @ xs[0]
    for b, x in zip(bs[1:], xs[1:], strict=True):
        total += b.mT @ x
    return total


def _solve(inverse: Tensor, b: Tensor) -> Tensor:
    """Apply `(L Lᵀ)⁻¹` to the rows `b [..., S, R]` by `inverse`, which is L⁻ᵀ.

    It is as exact as triangular solves, and faster but where S is one.
    """
    return b @ inverse @ inverse.mT
