"""What PoST assumes of the data, measured: the power law of autocovariance, and information spread evenly over octaves.

Lemma 3.6 makes of Condition 3.2, `R_b(s) = b^{−β} R(s)` after averaging blocks of b, the exact law R(s) = C s^{−β}, by
taking R_b(1) for R(b). That is not so: the autocovariance of block averages mixes lags, and fractional Gaussian noise
meets the condition exactly with an R that is a power law for large s alone. β is therefore measured as a slope.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

CORRECTIONS = 50  # rounds, of which the last moves β by less than 1e-3
LEAST_BETA = 0.05
SIGNIFICANT = 2  # standard errors above 0 of an octave's autocovariance, for it to count


def autocovariance(sequence: Tensor, max_lag: int, mean: Tensor | float | None = None) -> Tensor:
    """`R(s) = mean_t (x_t − μ) · (x_{t+s} − μ)`, s = 0 … max_lag, over the T − s pairs there are.

    Args:
        sequence: `[…, T, D]`, D numbers a token (embeddings; D = 1 for bits).
        max_lag: below T.
        mean: μ, a number or `[D]`; the mean of all tokens unless given, whose variance R is then too low by.

    Returns:
        `[…, max_lag + 1]`.

    Raises:
        ValueError: max_lag is not below T.
    """
    length = sequence.shape[-2]
    if not 0 <= max_lag < length:
        raise ValueError(f"max_lag must be below the {length} tokens; got {max_lag}")
    x = sequence.double()
    x = x - (x.mean(dim=tuple(range(x.ndim - 1))) if mean is None else mean)
    power = torch.zeros(1, dtype=torch.float64)
    for column in x.unbind(-1):  # one at a time: embeddings have hundreds
        power = power + torch.fft.rfft(column, n=2 * length).abs().square()
    sums = torch.fft.irfft(power, n=2 * length)[..., : max_lag + 1]
    return sums / (length - torch.arange(max_lag + 1, dtype=torch.float64))


def bits(vocab_size: int) -> Tensor:
    """Every token id in binary, `[V, W]`: the `vectors` of `power_law` for text without a model."""
    width = max(1, (vocab_size - 1).bit_length())
    return (torch.arange(vocab_size).unsqueeze(-1) >> torch.arange(width)) & 1


def power_law(
    sequence: Tensor, vectors: Tensor | None = None, *, max_lag: int | None = None, mean: Tensor | float | None = None,
    blocks: int = 16, draws: int = 1000, confidence: float = 0.95, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """β of R(s) ∝ s^{−β}: the slope of log R against log s, both averaged over octaves of lags, with an interval.

    The sequence is cut into blocks, pairs are taken inside them, and the interval is that of a bootstrap over the
    blocks (percentiles). Blocks of a long-range process are not independent, so it is too narrow: of 24 samples of
    2¹⁷ numbers at β = 0.3 (0.6) a nominal 95 % held β 18 (21) times; estimates were 0.02 too high, ± 0.06 a sample.
    Octaves count up to the first whose autocovariance is not two standard errors above 0. With an estimated mean R is
    too low by the variance of that mean, for R(s) = C s^{−β} about `2C T^{−β} / ((1−β)(2−β))`, which falls as slowly
    as R itself: it is added, for the C and β that come out.

    Args:
        sequence: `[T]` (bits, say) or `[T, D]` (embeddings); with `vectors`, token ids `[T]`.
        vectors: `[V, D]`, what each id stands for; looked up block by block, as all of them would fill the memory.
        max_lag: the largest lag; a quarter of a block unless given.
        mean: μ if it is known; see `autocovariance`.
        blocks, draws, confidence, seed: of the bootstrap.

    Returns:
        "exponent", "low", "high"; "lags" (geometric mean of an octave), "autocovariance", "error" (its standard
        error over the blocks) and "used" (whether it counts), one an octave; "max_lag", "blocks".

    Raises:
        ValueError: blocks or max_lag too small, or fewer than three octaves that count.
    """
    if vectors is None:
        table, tokens = (sequence.unsqueeze(-1) if sequence.ndim == 1 else sequence), torch.arange(len(sequence))
    else:
        kept, tokens = sequence.long().unique(return_inverse=True)
        table = vectors[kept]
    shares = torch.bincount(tokens).double() / len(tokens)
    table = table.double() - (shares @ table.double() if mean is None else mean)
    if len(table) < table.shape[1]:  # the same inner products in fewer numbers
        table = torch.linalg.qr(table.mT).R.mT
    size = len(tokens) // blocks if blocks > 1 else 0
    max_lag = size // 4 if max_lag is None else max_lag
    if max_lag < 7 or max_lag >= size:
        raise ValueError(f"need 2 blocks or more, of more than max_lag ≥ 7 tokens; got {blocks} of {size}, {max_lag}")
    cut = tokens[: size * blocks].split(size)
    per_lag = torch.stack([autocovariance(table[block], max_lag, 0.0) for block in cut])
    octaves = [torch.arange(2**i, 2 ** (i + 1)) for i in range((max_lag + 1).bit_length() - 1)]
    logs = torch.stack([s.double().log().mean() for s in octaves])
    found = torch.stack([per_lag[:, s].mean(-1) for s in octaves], -1)  # [blocks, octaves]
    mean_of, error = found.mean(0), found.std(0) / math.sqrt(blocks)
    used = (mean_of > SIGNIFICANT * error).cumprod(0).bool()
    if int(used.sum()) < 3:
        raise ValueError(f"only {int(used.sum())} octaves of lags have an autocovariance clearly above 0; need 3")
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(blocks, (draws, blocks), generator=generator)
    again = found[picks].mean(1)[:, used]
    length = len(tokens) if mean is None else None
    exponents, _ = _fit(logs[used], again[(again > 0).all(-1)], length)
    exponent, added = _fit(logs[used], mean_of[used], length)
    tails = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    low, high = exponents.quantile(tails).tolist()
    return {
        "exponent": exponent.item(), "low": low, "high": high,
        "lags": logs.exp().tolist(), "autocovariance": (mean_of + added).tolist(), "error": error.tolist(),
        "used": used.tolist(), "max_lag": max_lag, "blocks": blocks,
    }  # fmt: skip


def _fit(logs: Tensor, values: Tensor, length: int | None) -> tuple[Tensor, Tensor]:
    """β and the variance of the mean of `length` tokens (0 if None), from R `[…, n]` at logs of lags `[n]`."""
    centred = logs - logs.mean()
    added = torch.zeros_like(values[..., 0])
    for _ in range(1 if length is None else CORRECTIONS):
        raised = (values + added.unsqueeze(-1)).log()
        beta = -(raised * centred).sum(-1) / (centred**2).sum()
        if length is not None:
            held = beta.clamp(LEAST_BETA, 1 - LEAST_BETA)  # outside, the variance of the mean is another law
            level = (raised.mean(-1) + held * logs.mean()).exp()
            added = 2 * level * length**-held / ((1 - held) * (2 - held))
    return beta, added


def octave_information(buckets: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    """J(σ), what a context of 2σ tells beyond one of σ (bits a token), and how evenly (Def. 3.4, Condition 3.5).

    `J(σ) = I(x; 2σ tokens) − I(x; σ tokens)` is the loss with σ tokens of context less that with 2σ, for a model
    that uses its context well; here that of one octave of positions less that of the next.

    Args:
        buckets: (first position, last, mean loss in nats), as of `evaluation.language.octave_means`. Those that are not
            whole octaves, such as a cut one at the end, are left out.

    Returns:
        "scales" σ (where the first octave ends) and "information" J, one a pair of octaves; "mean" J₀, "slack" ε:
        the smallest with J₀(1 − ε) ≤ J ≤ J₀(1 + ε). From 1 on (some octave tells nothing) the condition fails; None
        if J₀ is not positive.

    Raises:
        ValueError: fewer than two whole octaves.
    """
    whole = [(last, loss / math.log(2)) for first, last, loss in buckets if last == 2 * (first - 1)]
    if len(whole) < 2:
        raise ValueError(f"need two whole octaves of positions or more; got {len(whole)}")
    found = [before - after for (_, before), (_, after) in pairwise(whole)]
    middle, half = (max(found) + min(found)) / 2, (max(found) - min(found)) / 2
    return {
        "scales": [last for last, _ in whole[:-1]], "information": found,
        "mean": middle, "slack": half / middle if middle > 0 else None,
    }  # fmt: skip
