"""Decays and strengths of the tokens in the sums of spectral Koopman attention.

At token t, token s counts as the key `x_s = √β_s e^{(A_t − A_s)/2} ⊙ z_s` and the value
`u_s = √β_s e^{(a_t − a_s)/2} v_s`, where A sums the log-decays g, and a sums those of the slowest channel, `max_i g_i`.
The op is the one without decay on these data:

    G = Σ x_s x_sᵀ,   M = Σ x_s x_{s−1}ᵀ,   C = Σ u_s x_sᵀ,   m² = max e^{a_t − a_s} β_s ‖z_s‖²

So `C (G + ε m² I)⁻¹` is a ridge regression whatever the decays are, and σ_max of the whitened M is at most 1. With one
decay per head, token s has the weight `w_s = β_s e^{A_t − A_s}` in G and C, and a pair has `√(w_s w_{s−1})` in M.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SumDecay(NamedTuple):
    """The log-decays ≤ 0 of the sums over some tokens, for `G, M [n, H, R, R]`, `C [n, H, P, R]` and m² `[n, H]`."""

    matrix: Tensor  # of G and M, `[n, H, 1, 1]` or `[n, H, R, R]`
    values: Tensor  # of C, `[n, H, 1, 1]` or `[n, H, 1, R]`
    norm: Tensor  # of m², `[n, H]`


class Weighted(NamedTuple):
    """Tokens with the weights that they have after the last of them."""

    keys: Tensor
    previous: Tensor  # the keys before them
    values: Tensor
    norms: Tensor  # the squared norms of the keys
    decay: SumDecay | None  # what the tokens do to earlier sums; None is no decay


def strength_root(beta: Tensor) -> Tensor:
    """√β, whose gradient is 0 at β = 0. There the weight of a pair of tokens, `√(β_s β_{s−1})`, has no derivative."""
    positive = beta > 0
    return torch.where(positive, torch.where(positive, beta, 1.0).sqrt(), 0.0)


def weigh_tokens(keys: Tensor, previous: Tensor, values: Tensor, g: Tensor | None, dim: int) -> Weighted:
    """Weigh tokens along axis `dim`; `g` are their log-decays, of the shape of the keys with a last axis of 1 or R."""
    norms = keys.square().sum(-1)
    if g is None:
        return Weighted(keys, previous, values, norms, None)
    slowest = g if g.shape[-1] == 1 else g.amax(-1, keepdim=True)
    through, after = _suffix_sums(g, dim)
    after_slowest = after if slowest is g else _suffix_sums(slowest, dim)[1]
    return Weighted(
        keys * (after / 2).exp(), previous * (through / 2).exp(), values * (after_slowest / 2).exp(),
        norms * after_slowest.squeeze(-1).exp(), sum_decay(g.sum(dim), slowest.sum(dim)),
    )  # fmt: skip


def sum_decay(total: Tensor, slowest: Tensor) -> SumDecay:
    """The decay of sums from the log-decays of the channels `[…, H, 1 or R]` and of the slowest one `[…, H, 1]`."""
    return SumDecay(
        (total.unsqueeze(-1) + total.unsqueeze(-2)) / 2, ((slowest + total) / 2).unsqueeze(-2), slowest.squeeze(-1)
    )


def _suffix_sums(g: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The sums of g from each token on, with the token and without it. No differences, so that −∞ is a log-decay."""
    through = g.flip(dim).cumsum(dim).flip(dim)
    after = torch.cat([through, torch.zeros_like(through.narrow(dim, 0, min(1, g.shape[dim])))], dim)
    return through, after.narrow(dim, after.shape[dim] - g.shape[dim], g.shape[dim])


def running_norms(norms: Tensor, g: Tensor | None) -> Tensor:
    """Running maxima `m_c = max(norms_c, e^{g_c} m_{c−1})` along axis 0, in log n steps; None is no decay."""
    if g is None and not torch.compiler.is_exporting():  # ONNX has no cummax
        return norms.cummax(0).values
    shift = 1
    while shift < len(norms):
        before = norms[:-shift] if g is None else g[shift:].exp() * norms[:-shift]
        norms = torch.cat([norms[:shift], torch.maximum(norms[shift:], before)])
        g = None if g is None else torch.cat([g[:shift], g[shift:] + g[:-shift]])
        shift *= 2
    return norms
