"""PoST's Condition 3.2 and Corollary 3.7, measured on a text: block averages and the power spectrum.

Condition 3.2 says that averages over blocks of b tokens have the autocovariance `R_b(s) = b^{−β} R(s)` for all b and s.
Corollary 3.7 derives the power spectrum `S(ω) ∝ |ω|^{β−1}` from it. Both statements have one β. The autocovariance has
a third estimate of it (`halflife.lab.theory.correlations.power_law`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halflife.files import finite
from halflife.lab.theory.correlations import TAILS, centred_vectors, power, power_law, resamples, slope

BLOCK_FACTORS = (2, 4, 8, 16, 32)
BLOCK_LAGS = (1, 2, 4, 8)


def block_averages(sequence: Tensor, factor: int) -> Tensor:
    """Return the means of blocks of b tokens, `[T, D]` → `[T // b, D]` (Def. 3.1). A rest is left out."""
    whole = len(sequence) // factor * factor
    return sequence[:whole].unflatten(0, (-1, factor)).mean(1)


def block_exponents(
    sequence: Tensor, vectors: Tensor | None = None, *, factors: Sequence[int] = BLOCK_FACTORS,
    lags: Sequence[int] = BLOCK_LAGS, mean: Tensor | float | None = None, blocks: int = 16, draws: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Estimate the exponent `h(b, s) = −log(R_b(s) / R(s)) / log b` of Condition 3.2, under which it is β for all b, s.

    The sequence is cut into segments. R and R_b are means over the segments, and the interval is a bootstrap over them.
    It is too narrow, as that of `power_law` is. All R get the correction of `power_law` for the estimated mean.

    Args:
        sequence, vectors, mean, blocks, draws, seed: as in `power_law`; `blocks` is the number of segments.
        factors: b.
        lags: s, in blocks for R_b and in tokens for R.

    Returns:
        "factors", "lags", "blocks", and `[b][s]` lists: "exponents", "low", "high". An entry is None where a
        covariance is not positive, and an end of its interval where it is so in a tenth of the bootstrap. "beta" is the
        exponent of `power_law`.
    """
    law = power_law(sequence, vectors, mean=mean, blocks=blocks, draws=draws, seed=seed)
    table, tokens = centred_vectors(sequence, vectors, mean)
    size = len(tokens) // blocks
    if size // max(factors) <= max(lags):
        raise ValueError(f"a segment of {size} tokens is too short for {max(lags) + 1} blocks of {max(factors)}")
    cut = tokens[: size * blocks].split(size)
    covariances = law["variance of the mean"] + torch.stack([
        torch.stack([_covariances(block_averages(table[segment], factor), lags) for factor in (1, *factors)])
        for segment in cut
    ])  # fmt: skip
    resampled = _exponents(covariances[resamples(blocks, draws, seed)].mean(1), factors)
    low, high = resampled.nanquantile(TAILS, 0)
    unsure = resampled.isnan().double().mean(0) > 0.1
    ends = (end.masked_fill(unsure, math.nan) for end in (low, high))
    names = ("exponents", "low", "high")
    found = (_exponents(covariances.mean(0), factors), *ends)
    return {
        "factors": list(factors), "lags": list(lags), "blocks": blocks, "beta": law["exponent"],
        **{name: finite(values.tolist()) for name, values in zip(names, found, strict=True)},
    }  # fmt: skip


def _covariances(x: Tensor, lags: Sequence[int]) -> Tensor:
    """Return `mean_t x_t · x_{t+s}` of `[T, D]` at lags s: `[S]`."""
    return torch.stack([(x[:-s] * x[s:]).sum(-1).mean() for s in lags])


def _exponents(covariances: Tensor, factors: Sequence[int]) -> Tensor:
    """Return h `[…, B, S]` from the covariances of b = 1 and of all factors, `[…, 1 + B, S]`; NaN if not positive."""
    positive = torch.where(covariances > 0, covariances, math.nan).log()
    return (positive[..., :1, :] - positive[..., 1:, :]) / torch.tensor(factors).double().log().unsqueeze(-1)


def spectral_density(
    sequence: Tensor, vectors: Tensor | None = None, *, high: float = 1 / 16, mean: Tensor | float | None = None,
    blocks: int = 16, draws: int = 1000, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Fit the slope of the power spectrum at low frequencies, which Corollary 3.7 gives as β − 1.

    The spectrum is the mean of the periodograms `|Σ_t (x_t − μ) e^{−iωt}|² / L` of segments of L tokens with a Hann
    window, averaged over octaves of ω. The corollary is about R(s) at all s > 0. A part of R(0) beyond the power law,
    which tokens have, is white noise: it adds a constant to the spectrum and makes the slope flatter.

    Args:
        sequence, vectors, mean, blocks, draws, seed: as in `power_law`; `blocks` is the number of segments.
        high: the largest frequency of the fit, in cycles per token. The two lowest octaves of a segment are left out.

    Returns:
        "slope", "low", "high" (its interval by a bootstrap over the segments); and lists with one entry per octave:
        "frequencies" (in cycles per token, their geometric mean), "density", "error" and "used" (in the fit).
    """
    table, tokens = centred_vectors(sequence, vectors, mean)
    size = len(tokens) // blocks
    window = torch.hann_window(size, periodic=True, dtype=torch.float64)
    window = (window / window.square().mean().sqrt()).unsqueeze(-1)
    frequencies = torch.arange(1, size // 2 + 1, dtype=torch.float64) / size
    octave = (torch.arange(1, size // 2 + 1).double().log2() + 1e-9).floor().long()
    counts = torch.bincount(octave).double()
    density = torch.stack([
        torch.zeros_like(counts).index_add(0, octave, power(table[segment] * window)[1:] / size) / counts
        for segment in tokens[: size * blocks].split(size)
    ])  # fmt: skip
    logs = torch.zeros_like(counts).index_add(0, octave, frequencies.log()) / counts
    used = (logs <= math.log(high)) & (torch.arange(len(logs)) >= 2)
    if int(used.sum()) < 3:
        raise ValueError(f"need three octaves of frequencies up to {high:g} in {size} tokens; got {int(used.sum())}")
    resampled = density[resamples(blocks, draws, seed)].mean(1)
    ends = slope(logs[used], resampled[:, used].log()).quantile(TAILS).tolist()
    average = density.mean(0)
    return {
        "slope": slope(logs[used], average[used].log()).item(), "low": ends[0], "high": ends[1],
        "frequencies": logs.exp().tolist(), "density": average.tolist(),
        "error": (density.std(0) / math.sqrt(blocks)).tolist(), "used": used.tolist(),
    }  # fmt: skip
