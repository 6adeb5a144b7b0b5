"""PoST's assumptions about the data, measured: a power law of autocovariance, and the same information in every octave.

Condition 3.2 is `R_b(s) = b^{−β} R(s)` after averaging blocks of b. Lemma 3.6 derives the exact law R(s) = C s^{−β}
from it by using R_b(1) for R(b). The two are different: the autocovariance of block averages mixes lags. Fractional
Gaussian noise meets the condition exactly, but its R is a power law for large s alone. Therefore β is measured as a
slope here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

MEAN_CORRECTIONS = 50  # iterations; the last one moves β by less than 1e-3
LEAST_BETA = 0.05
TAILS = torch.tensor([(1 - 0.95) / 2, (1 + 0.95) / 2], dtype=torch.float64)  # quantiles: the ends of a 95 % interval
SIGNIFICANT_ERRORS = 2  # standard errors by which an octave's autocovariance must exceed 0 to be used


def autocovariance(sequence: Tensor, max_lag: int, mean: Tensor | float | None = None) -> Tensor:
    """Return `R(s) = mean_t (x_t − μ) · (x_{t+s} − μ)` for s = 0 … max_lag, the mean over all T − s pairs.

    Args:
        sequence: `[…, T, D]`, D numbers for each token (embeddings, or D = 1 for bits).
        max_lag: below T.
        mean: μ, a number or `[D]`. Default: the mean of all tokens. R is then too low by the variance of this mean.

    Returns:
        `[…, max_lag + 1]`.
    """
    length = sequence.shape[-2]
    if not 0 <= max_lag < length:
        raise ValueError(f"max_lag must be below the {length} tokens; got {max_lag}")
    x = sequence.double()
    x = x - (x.mean(dim=tuple(range(x.ndim - 1))) if mean is None else mean)
    sums = torch.fft.irfft(power(x, 2 * length), n=2 * length)[..., : max_lag + 1]
    return sums / (length - torch.arange(max_lag + 1, dtype=torch.float64))


def power(x: Tensor, length: int | None = None) -> Tensor:
    """Return the squared moduli `[…, F]` of the transforms of `[…, T, D]`, padded to a length, and summed over D."""
    total = torch.zeros(1, dtype=torch.float64)
    for column in x.unbind(-1):  # one column at a time, because embeddings have hundreds
        total = total + torch.fft.rfft(column, n=length).abs().square()
    return total


def resamples(blocks: int, draws: int, seed: int) -> Tensor:
    """Return the blocks of each draw of a bootstrap, `[draws, blocks]`."""
    return torch.randint(blocks, (draws, blocks), generator=torch.Generator().manual_seed(seed))


def slope(x: Tensor, y: Tensor) -> Tensor:
    """Return the least-squares slope of `y […, n]` against `x [n]`."""
    centred = x - x.mean()
    return (y * centred).sum(-1) / centred.square().sum()


def bits(vocab_size: int) -> Tensor:
    """Return every token id in binary, `[V, W]`, which are the `vectors` of `power_law` for a text without a model."""
    width = max(1, (vocab_size - 1).bit_length())
    return (torch.arange(vocab_size).unsqueeze(-1) >> torch.arange(width)) & 1


def power_law(
    sequence: Tensor, vectors: Tensor | None = None, *, mean: Tensor | float | None = None,
    blocks: int = 16, draws: int = 1000, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Estimate β of R(s) ∝ s^{−β}, with an interval.

    β is the slope of log R against log s, both averaged over octaves of lags. The sequence is cut into blocks, and
    pairs are taken inside the blocks. The interval comes from a bootstrap over the blocks (percentiles). It is too
    narrow, because blocks of a long-range process are not independent: of 24 samples of 2¹⁷ numbers at β = 0.3 (0.6), a
    nominal 95 % interval contained β 18 (21) times. Estimates were 0.02 too high, ± 0.06 per sample.

    Octaves are used up to the first one whose autocovariance is not two standard errors above 0. With an estimated
    mean, R is too low by the variance of this mean. For R(s) = C s^{−β} that is about `2C T^{−β} / ((1−β)(2−β))`, which
    falls as slowly as R itself. It is added, with the C and β of the estimate.

    Args:
        sequence: `[T]` (for example bits) or `[T, D]` (embeddings). With `vectors`, token ids `[T]`.
        vectors: `[V, D]`, a vector for each id. They are looked up block by block, because all of them would fill the
            memory.
        mean: μ if it is known; see `autocovariance`.
        blocks, draws, seed: settings of the bootstrap; the largest lag is a quarter of a block.

    Returns:
        "exponent", "low", "high", "max_lag", "blocks", "variance of the mean" (0 if the mean is known); and lists with
        one entry for each octave: "lags" (their geometric mean), "autocovariance", "error" (its standard error over the
        blocks) and "used" (whether the octave is used).

    Raises:
        ValueError: if blocks are too short, or fewer than three octaves can be used.
    """
    table, tokens = centred_vectors(sequence, vectors, mean)
    size = len(tokens) // blocks if blocks > 1 else 0
    max_lag = size // 4
    if max_lag < 7:
        raise ValueError(f"need 2 blocks or more, of 28 tokens or more; got {blocks} of {size}")
    cut = tokens[: size * blocks].split(size)
    per_lag = torch.stack([autocovariance(table[block], max_lag, 0.0) for block in cut])
    octave_lags = [torch.arange(2**i, 2 ** (i + 1)) for i in range((max_lag + 1).bit_length() - 1)]
    logs = torch.stack([s.double().log().mean() for s in octave_lags])
    octave_means = torch.stack([per_lag[:, s].mean(-1) for s in octave_lags], -1)  # [blocks, octaves]
    mean_of, error = octave_means.mean(0), octave_means.std(0) / math.sqrt(blocks)
    used = (mean_of > SIGNIFICANT_ERRORS * error).cumprod(0).bool()
    if int(used.sum()) < 3:
        raise ValueError(f"only {int(used.sum())} octaves of lags have an autocovariance clearly above 0; need 3")
    resampled = octave_means[resamples(blocks, draws, seed)].mean(1)[:, used]
    length = len(tokens) if mean is None else None
    exponents, _ = _fit(logs[used], resampled[(resampled > 0).all(-1)], length)
    exponent, added = _fit(logs[used], mean_of[used], length)
    low, high = exponents.quantile(TAILS).tolist()
    return {
        "exponent": exponent.item(), "low": low, "high": high,
        "lags": logs.exp().tolist(), "autocovariance": (mean_of + added).tolist(), "error": error.tolist(),
        "used": used.tolist(), "max_lag": max_lag, "blocks": blocks, "variance of the mean": added.item(),
    }  # fmt: skip


def centred_vectors(
    sequence: Tensor, vectors: Tensor | None = None, mean: Tensor | float | None = None
) -> tuple[Tensor, Tensor]:
    """Return centred vectors `[V, D]` and the rows of them that the tokens have `[T]`. Arguments as in `power_law`.

    If there are fewer vectors than D, they are replaced by V numbers each with the same inner products.
    """
    if vectors is None:
        table, tokens = (sequence.unsqueeze(-1) if sequence.ndim == 1 else sequence), torch.arange(len(sequence))
    else:
        used_ids, tokens = sequence.long().unique(return_inverse=True)
        table = vectors[used_ids]
    shares = torch.bincount(tokens).double() / len(tokens)
    table = table.double() - (shares @ table.double() if mean is None else mean)
    if len(table) < table.shape[1]:
        table = torch.linalg.qr(table.mT).R.mT
    return table, tokens


def _fit(logs: Tensor, values: Tensor, length: int | None) -> tuple[Tensor, Tensor]:
    """Fit β to R `[…, n]` at log lags `[n]`; return β and the variance of the mean of `length` tokens (0 if None)."""
    added = torch.zeros_like(values[..., 0])
    for _ in range(1 if length is None else MEAN_CORRECTIONS):
        raised = (values + added.unsqueeze(-1)).log()
        beta = -slope(logs, raised)
        if length is not None:
            held = beta.clamp(LEAST_BETA, 1 - LEAST_BETA)  # outside, the variance of the mean follows another law
            level = (raised.mean(-1) + held * logs.mean()).exp()
            added = 2 * level * length**-held / ((1 - held) * (2 - held))
    return beta, added


def octave_information(buckets: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    """Return J(σ), the information of a context of 2σ beyond one of σ (bits per token) (Def. 3.4, Condition 3.5).

    `J(σ) = I(x; 2σ tokens) − I(x; σ tokens)` is the loss with σ tokens of context minus the loss with 2σ, for a model
    that uses its context well. Here it is the loss in one octave of positions minus the loss in the next.

    Args:
        buckets: (first position, last position, mean loss in nats), from `halflife.evaluation.language`. Buckets that
            are not whole octaves, such as one that is cut at the end, are left out.

    Returns:
        "scales" σ (the ends of the first octaves) and "information" J, one entry for each pair of octaves; "mean" J₀;
        "slack" ε, the smallest with J₀(1 − ε) ≤ J ≤ J₀(1 + ε). The condition fails if ε ≥ 1, since some octave then has
        no information. ε is None if J₀ is not positive.
    """
    whole = [(last, loss / math.log(2)) for first, last, loss in buckets if last == 2 * (first - 1)]
    if len(whole) < 2:
        raise ValueError(f"need two whole octaves of positions or more; got {len(whole)}")
    information = [before - after for (_, before), (_, after) in pairwise(whole)]
    high, low = max(information), min(information)
    middle, half = (high + low) / 2, (high - low) / 2
    return {
        "scales": [last for last, _ in whole[:-1]], "information": information,
        "mean": middle, "slack": half / middle if middle > 0 else None,
    }  # fmt: skip
