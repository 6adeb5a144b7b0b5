"""Linear algebra of spectral Koopman attention: Cholesky factors of Gram matrices and their inverses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from halflife.ops.arguments import may_branch
from halflife.ops.koopman.state import KoopmanMemory, Sums, add_to_sums

FIRST_JITTER = 1e-4  # the first addition to a diagonal whose factorisation failed, in units of m²
SURE_JITTER = 1e-3  # relative to the trace, an addition that exceeds the rounding errors of a long sum

Count = int | Tensor  # a tensor on accelerators, which would wait for the number


class Factor(NamedTuple):
    """The result of a factorisation."""

    matrix: Tensor  # L or, from `inverse_factor`, L⁻ᵀ, `[…, R, R]`
    retries: Count  # how many factorisations failed and were repeated with a larger ridge


def cholesky(gram: Tensor) -> Factor:
    """Factorise `gram [..., R, R]`, which is in units of m², into L Lᵀ.

    Rounding errors of a long sum can exceed the ridge. A matrix whose factorisation fails is factorised again with
    `FIRST_JITTER` added to its diagonal, and each time it fails with ten times as much. It must be finite.
    """
    if not may_branch(gram.device):
        return _cholesky_without_waiting(gram)
    factor, info = torch.linalg.cholesky_ex(gram)
    jitter, retries, eye = FIRST_JITTER, 0, torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    while info.any():
        failed = info > 0
        retries += int(failed.sum())
        if jitter > 1 or not gram.isfinite().all():
            raise ValueError("keys of koopman_attention are not finite: their Gram matrix cannot be factorised")
        again, still = torch.linalg.cholesky_ex(gram[failed] + jitter * eye)
        factor, info = factor.clone(), info.clone()
        factor[failed], info[failed] = again, still
        jitter *= 10
    return Factor(factor, retries)


def _cholesky_without_waiting(gram: Tensor) -> Factor:
    """`cholesky` on an accelerator, where the host would wait for the answer whether a factorisation failed.

    All matrices are factorised twice, the second time with `SURE_JITTER` in the diagonals of those that failed. The
    factor of a matrix that is not finite is NaN.
    """
    failed = torch.linalg.cholesky_ex(gram).info > 0
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    jitter = torch.where(failed, SURE_JITTER * trace.clamp(min=1), 0.0)
    factor, info = torch.linalg.cholesky_ex(gram + torch.diag_embed(jitter.unsqueeze(-1).expand(gram.shape[:-1])))
    return Factor(torch.where((info > 0)[..., None, None], torch.nan, factor), failed.sum())


def unit_of(norm: Tensor) -> Tensor:
    """The unit m² `[n, H]`, in which all entries of G have order one.

    It is 1 before the first key, and where all keys have decayed to less than the smallest normal number.
    """
    return torch.where(norm >= torch.finfo(norm.dtype).tiny, norm, 1.0)


def inverse_factor(sums: Sums, ridge: float) -> Factor:
    """Compute `L⁻ᵀ [N, H, R, R]` for the Cholesky factor L of `G / m² + ε I`.

    The unit m² cancels in the output, so its only gradient is that of the ridge ε m². Gradients through the divisions
    by m² would cancel too, but they could overflow; the unit is therefore a constant here.
    """
    norm = unit_of(sums.norm)[..., None, None]
    unit = norm.detach()
    eye = torch.eye(sums.gram.shape[-1], dtype=sums.gram.dtype, device=sums.gram.device)
    scaled = sums.gram / unit + ridge * (norm / unit) * eye
    if torch.compiler.is_exporting():  # torch 2.11 says so of compiled code as well, which has gradients
        return Factor(eliminate(scaled, ridge), 0)
    return inverse_of(scaled)


def inverse_of(gram: Tensor) -> Factor:
    """Compute L⁻ᵀ of the Cholesky factor L of `gram [..., R, R]`."""
    factor, retries = cholesky(gram)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(factor)
    return Factor(torch.linalg.solve_triangular(factor, eye, upper=False).mT, retries)


def eliminate(gram: Tensor, ridge: float) -> Tensor:
    """Compute L⁻ᵀ of `gram [..., R, R]` without branches and factorisations, which graphs cannot express.

    Gaussian elimination turns the rows `[L Lᵀ | I]` into `[Lᵀ | L⁻¹]`. In exact arithmetic no pivot is below the
    smallest eigenvalue, which is at least ε. Smaller ones are rounding errors and become ε.
    """
    size, rows = gram.shape[-1], []
    left = torch.cat([gram, torch.eye(size, dtype=gram.dtype, device=gram.device).expand_as(gram)], -1)
    for done in range(size):  # the finished rows and columns are cut off
        scale = left[..., :1, :1].clamp(min=ridge).rsqrt()
        row = scale * left[..., :1, 1:]
        rows.append(row[..., size - done - 1 :])
        left = left[..., 1:, 1:] - scale * left[..., 1:, :1] * row
    return torch.cat(rows, -2).mT


_INVERSES = WeakIdKeyDictionary()  # the G of some sums → (their m², the version of G, ε, L⁻ᵀ)


def cached_inverse_factor(sums: Sums, ridge: float) -> Factor:
    """As `inverse_factor`, computed once for all tokens that read the same sums, except where gradients flow.

    The result is remembered as long as G exists. It is not part of the state, because it would enlarge the state by
    half.
    """
    if sums.gram.requires_grad or sums.norm.requires_grad:
        return inverse_factor(sums, ridge)
    inference = torch.is_inference_mode_enabled()  # tensors made in this mode do not count their versions
    version = 0 if sums.gram.is_inference() else sums.gram._version
    cached = _INVERSES.get(sums.gram)
    if cached and cached[0] is sums.norm and cached[1:3] == (version, ridge) and cached[3].is_inference() == inference:
        return Factor(cached[3], 0)
    factor = inverse_factor(sums, ridge)
    _INVERSES[sums.gram] = sums.norm, version, ridge, factor.matrix
    return factor


def add_token(
    k: Tensor, v: Tensor, g: Tensor | None, memory: KoopmanMemory, inverse: Tensor, ridge: float,
    normalization: str = "causal",
) -> tuple[KoopmanMemory, Count]:  # fmt: skip
    """Add one token to the sums, and update the inverse factor with them.

    A rank-one update gives the new inverse factor. With one decay per head, G and m² decay alike, so `G / m² + ε I`
    is unchanged before the token enters. Where m² does something else, the factor is computed from the sums instead:
    where the key sets a new m², under "trace", where every key does, with a decay under "paper", where m² does not
    decay, with one decay per channel, and where g has a gradient, since the unit m² is a constant (see
    `inverse_factor`) although it decays. The second result are the retries of the factorisations.
    """
    new = add_to_sums(k, v, g, memory)
    new = new._replace(sums=new.sums.normalized(normalization, memory.sums.norm))
    if g is None:
        grown = new.sums.norm > memory.sums.norm
    elif g.shape[-1] > 1 or normalization == "paper" or g.requires_grad:
        grown = torch.ones_like(memory.sums.norm, dtype=torch.bool)
    else:
        grown = new.sums.norm > g.squeeze(-1).exp() * memory.sums.norm
    if grown.all():
        factor = inverse_factor(new.sums, ridge)
        return new._replace(inverse=factor.matrix), factor.retries
    updated, retries = rank_one(inverse, k / unit_of(new.sums.norm).detach().sqrt().unsqueeze(-1)), 0
    if grown.any():
        factor, retries = inverse_factor(new.sums, ridge)
        updated = torch.where(grown[..., None, None], factor, updated)
    return new._replace(inverse=updated), retries


def rank_one(inverse: Tensor, z: Tensor) -> Tensor:
    """Compute `L'⁻ᵀ` with `L' L'ᵀ = L Lᵀ + z zᵀ` from `inverse = L⁻ᵀ [..., R, R]` and `z [..., R]`, in O(r²).

    With `w = L⁻¹ z`, `L Lᵀ + z zᵀ = L (I + w wᵀ) Lᵀ`. The Cholesky factor of `I + w wᵀ` has an inverse with diagonal
    `√(s_{i−1} / s_i)` and entries `−w_i w_j / √(s_i s_{i−1})` below it, where `s_i = 1 + Σ_{j ≤ i} w_j²`. Column i of
    L'⁻ᵀ is that of L⁻ᵀ times `√(s_i / s_{i−1})`, less a multiple of the running sum `Σ_{j ≤ i} w_j (L⁻ᵀ)_j`.
    """
    w = z.unsqueeze(-2) @ inverse
    after = 1 + w.square().cumsum(-1)
    before = after - w.square()
    earlier = (inverse * w).cumsum(-1)
    return torch.addcmul(inverse * (after / before).sqrt(), earlier, w / (after * before).sqrt(), value=-1)
