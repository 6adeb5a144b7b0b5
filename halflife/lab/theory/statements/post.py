"""Statements of PoST about its map of parameters, its taper, and its form of RWKV-7."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.analysis.model_spectrum import coherence
from halflife.decay.minimax import geometric_rates, minimax_error, taper
from halflife.evaluation.memory import layer_states
from halflife.lab.theory.approximation import adapted_rates
from halflife.lab.theory.statements.row import BOUND, IDENTITY, NUMBER, error, quotient, row
from halflife.models import preset
from halflife.ops import linear_attention
from halflife.precision import inverse_softplus

CHANNELS, LENGTH, DRAWS = 16, 10_000, 200
ANCHORS = torch.tensor([10, 100, 1000], dtype=torch.float64)
# Rates with small errors at T = `LENGTH` and β = 0.5, from searches of Nelder and Mead that start at geometric rates.
FREE_RATES = {
    4: (0.0002481, 0.009665, 0.1126, 0.8298),
    6: (9.735e-05, 0.001708, 0.01268, 0.06989, 0.3182, 1.309),
    8: (6.356e-05, 0.0007782, 0.003934, 0.01628, 0.05966, 0.1993, 0.6171, 1.853),
}
BEST_ENDS = {4: (0.0006687, 0.6834), 6: (0.0001639, 0.9944), 8: (9.261e-05, 1.367)}  # of `best_endpoints` there
RWKV7_SCALE = math.exp(-0.5)  # λ of §5.3
PAIRS = ("mamba2", "gated_deltanet", "rwkv7", "gla", "retnet")


def reparameterise(theta: Tensor, delta: Tensor) -> Tensor:
    """Return `p_k = θ + Σ_{j<k} softplus(δ_j)` (Def. 4.4) for `theta […]` and `delta […, N − 1]`: `[…, N]`."""
    return theta.unsqueeze(-1) + F.pad(F.softplus(delta).cumsum(-1), (1, 0))


def adapted_taper(log_rates: Tensor, reference: float) -> Tensor:
    """Return α of Prop. 4.16 for ascending `log_rates […, N]`, where Eq. 9 has logarithms of rates."""
    offsets = log_rates - log_rates[..., :1]
    gap = offsets[..., -1:] / (log_rates.shape[-1] - 1)
    index = torch.arange(log_rates.shape[-1], dtype=log_rates.dtype)
    return taper(log_rates.shape[-1]) + (offsets - index * gap) / math.log(reference)


def rwkv7_logits(channels: int, length: float) -> Tensor:
    """Return the initial base logits `[N]` of RWKV-7 under PoST (Eq. 12)."""
    slowest = torch.logit(torch.tensor(1 / (RWKV7_SCALE * length), dtype=torch.float64)).item()
    return torch.linspace(slowest, 0.5, channels, dtype=torch.float64)


def rwkv7_timescales(logits: Tensor, tapers: Tensor, position: float) -> Tensor:
    """Return `1 / (λ σ(w − α log t))`, the time-scales of §5.3 at position t without input: `[N]`."""
    return 1 / (RWKV7_SCALE * torch.sigmoid(logits - tapers * math.log(position)))


def printed_coherence(anchor: Tensor, gap: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Return the largest coherence of N rates θ + (k − 1) ζ(c), and the bound that Prop. 4.5 prints for it, `[…]`.

    The proposition takes the p of Def. 4.4 as rates. The ratio of neighbouring rates then falls with k. `anchor` is θ >
    0, and `gap` is ζ(c).
    """
    rates = anchor.unsqueeze(-1) + gap.unsqueeze(-1) * torch.arange(channels, dtype=anchor.dtype)
    largest = torch.stack([coherence(one.log()).fill_diagonal_(0).max() for one in rates.reshape(-1, channels)])
    return largest.reshape(anchor.shape), 1 / torch.cosh(torch.log1p(gap / anchor) / 2)


def coherence_by_integration(log_rates: Tensor) -> Tensor:
    """Return ⟨h_i, h_j⟩ / (‖h_i‖ ‖h_j‖) of the responses h_k(s) = e^(−p_k s) (Def. 2.3), `[N, N]`.

    The integral over s is a sum over log s, whose error falls exponentially with the step.
    """
    grid = torch.arange(-60, 20, 0.02, dtype=log_rates.dtype)
    responses = (-(log_rates[:, None] + grid).exp()).exp() * (grid / 2).exp()  # h √s
    inner = responses @ responses.mT
    norms = inner.diagonal().sqrt()
    return inner / norms / norms[:, None]


def added_state() -> list[int]:
    """Return the numbers that `+post` adds to the state of each of `PAIRS` after one token, with 2 layers of width 64.

    The position, an integer, does not count.
    """
    sizes: Any = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 16, "train_length": 64}

    def numbers(name: str) -> int:
        return sum(layer.bytes.at(1) for layer in layer_states(preset(name, **sizes), "float32")) // 4

    return [numbers(f"{name}+post") - numbers(name) for name in PAIRS]


def fractional_noise() -> list[float]:
    """Return how well fractional Gaussian noise meets Condition 3.2, and R(1) over the power law of its long lags.

    Its autocovariance is `R(s) = (|s + 1|^h − 2 |s|^h + |s − 1|^h) / 2` with h = 2 − β. It tends to h (h − 1)/2 s^−β.
    The autocovariance of averages over b numbers is the sum of R over all pairs of two blocks, divided by b². Here β is
    0.5, b goes to 8 and s to 64.

    Returns:
        The largest relative error of `R_b(s) = b^−β R(s)`, and `R(1) / (h (h − 1)/2)`.
    """
    beta, blocks, lags = 0.5, 8, 64
    h = 2 - beta

    def covariance(s: Tensor) -> Tensor:
        return ((s + 1).abs() ** h - 2 * s.abs() ** h + (s - 1).abs() ** h) / 2

    errors, s = [], torch.arange(1, lags + 1, dtype=torch.float64)
    for b in range(2, blocks + 1):
        inside = torch.arange(b, dtype=torch.float64)
        apart = s[:, None, None] * b + inside[:, None] - inside
        errors.append(error(covariance(apart).mean((-2, -1)), b**-beta * covariance(s)))
    return [max(errors), covariance(s)[0].item() / (h * (h - 1) / 2)]


def octaves_of_fractional_noise(octaves: int = 9) -> list[float]:
    """Return J(σ) of Def. 3.4 in bits, at σ = 1, 2, 4, …, for normal fractional noise with β = 0.5: `[octaves]`.

    The information of n past numbers of a normal process is `−½ Σ_{j ≤ n} log₂(1 − φ_j²)`, with its partial
    correlations φ (Durbin and Levinson). They tend to d/j with d = (1 − β)/2, so J halves from octave to octave.
    """
    most, beta = 2**octaves, 0.5
    lags, h = torch.arange(most + 1, dtype=torch.float64), 2 - beta
    covariance = ((lags + 1) ** h - 2 * lags**h + (lags - 1).abs() ** h) / 2
    past, left, known = lags[:0], 1.0, [0.0]
    for n in range(1, most + 1):
        partial = (covariance[n] - past @ covariance[1:n].flip(0)).item() / left
        past = torch.cat([past - partial * past.flip(0), past.new_tensor([partial])])
        left *= 1 - partial**2
        known.append(-math.log2(left) / 2)
    return [known[2 ** (i + 1)] - known[2**i] for i in range(octaves)]


def free_rates() -> list[float]:
    """Compare `FREE_RATES` with the geometric rates of the smallest error (Thm 4.7, necessity).

    Returns:
        The geometric error over the free one for 4, 6 and 8 channels; the least and the largest gap of the 8 free
        log-rates over their mean; and the slopes of −log error from 4 to 8 channels, geometric and free.
    """
    free = {n: minimax_error(torch.tensor(rates, dtype=torch.float64), LENGTH) for n, rates in FREE_RATES.items()}
    best = {n: minimax_error(geometric_rates(n, LENGTH, *ends), LENGTH) for n, ends in BEST_ENDS.items()}
    gaps = torch.tensor(FREE_RATES[8], dtype=torch.float64).log().diff()
    ends = (gaps.min() / gaps.mean()).item(), (gaps.max() / gaps.mean()).item()
    slopes = (math.log(error[4] / error[8]) / 4 for error in (best, free))
    return [*(best[n] / free[n] for n in FREE_RATES), *ends, *slopes]


def remainder(anchor: Tensor) -> Tensor:
    """Return the bound of Prop. 4.5 at ζ(c) = 1 less the `1 − 1/(8 θ²)` of Remark 4.6, for θ `[n]`. It is 1/(8 θ³)."""
    return 1 / torch.cosh(torch.log1p(1 / anchor) / 2) - 1 + 1 / (8 * anchor**2)


def rwkv7_gaps(channels: int, length: float) -> list[float]:
    """Return the least and the largest gap of RWKV-7's log-rates over their mean, at t = 1, then at T (Algorithm 3).

    Its logits are evenly spaced at the start. The taper is that of Cor. 5.1, and stretches inside the sigmoid.
    """
    logits = rwkv7_logits(channels, length)
    tapers = adapted_taper(F.logsigmoid(logits), length).clamp(0, 1)
    gaps = [-rwkv7_timescales(logits, tapers, t).log().diff() for t in (1, length)]
    return [end.item() for gap in gaps for end in (gap.min() / gap.mean(), gap.max() / gap.mean())]


def _stretched_chunks(generator: torch.Generator) -> float:
    """Compare the chunked op with the token loop, on rates from 1/T to 1 over t^α."""
    tokens = 96
    q, k, v = torch.randn(3, 2, tokens, CHANNELS, 4, generator=generator, dtype=torch.float64)
    rates = geometric_rates(CHANNELS, tokens)
    g = -torch.stack([adapted_rates(rates, position) for position in range(1, tokens + 1)]).expand(2, -1, -1)
    chunked, _ = linear_attention(q, k, v, g, chunk_size=16, backend="chunked")
    loop, _ = linear_attention(q, k, v, g, backend="reference")
    return error(chunked, loop)


def statements(seed: int) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    wanted = uniform(DRAWS, CHANNELS).sort(-1).values * 20 - 10
    gaps = wanted.diff(dim=-1)
    reached = reparameterise(wanted[:, 0], inverse_softplus(gaps))
    alpha = adapted_taper(wanted, LENGTH)
    even, clamped = ((wanted - a * math.log(LENGTH)).diff(dim=-1) for a in (alpha, alpha.clamp(0, 1)))
    scales, bound = printed_coherence(0.1 + uniform(DRAWS), 0.1 + uniform(DRAWS), CHANNELS)
    logits, exponents = rwkv7_logits(CHANNELS, LENGTH), taper(CHANNELS)
    slowest = rwkv7_timescales(logits, exponents, LENGTH)
    start = rwkv7_timescales(logits, exponents, 1)
    return {
        "surjective": row(
            "PoST, Prop. 4.18", "error of p after Φ(θ, softplus⁻¹(gaps))", IDENTITY, error(reached, wanted)),
        "ordered": row("PoST, Def. 4.4", "smallest gap of p for normal δ",
            NUMBER, reparameterise(wanted[:, 0], 4 * uniform(DRAWS, CHANNELS - 1) - 8).diff(dim=-1).min()),
        "stretched chunks": row(
            "PoST, §5.2", "error of the chunked op with decays that t^−α changes at every token", IDENTITY,
            _stretched_chunks(generator)),
        "spacing restored": row("PoST, Prop. 4.16", "spread of the gaps of log-rates at t_ref", IDENTITY,
            error(even, even.mean(-1, keepdim=True).expand_as(even))),
        "spacing clamped": row(
            "PoST, Algorithms 1 to 4", "the same with α in [0, 1], a median over spectra, and share of them", NUMBER,
            _clamped(alpha, clamped)),
        "coherence by integration": row("PoST, Def. 2.3", "coherence by integrals of responses − sech(δ/2)", IDENTITY,
            error(coherence_by_integration(wanted[0]), coherence(wanted[0]))),
        "printed coherence": row("PoST, Prop. 4.5", "largest coherence / printed bound, rates with equal gaps", BOUND,
            quotient(scales, bound)),
        "printed coherence of the slowest pair": row(
            "PoST, Remark 4.6", "coherence of channels 1 and 2 − printed bound", IDENTITY,
            _slowest_pair(uniform(DRAWS) + 0.1, uniform(DRAWS) + 0.1)),
        "printed remainder": row("PoST, Remark 4.6", "(bound − 1 + 1/8θ²) θ³ for θ = 10, 100, 1,000", NUMBER,
            remainder(ANCHORS) * ANCHORS**3),
        "rwkv7 slowest": row("PoST, §5.3", "τ_1 / T at t = 1 and t = T", NUMBER, [
            start[0].item() / LENGTH, slowest[0].item() / LENGTH,
        ]),
        "rwkv7 fastest": row("PoST, §5.3", "τ_C at t = 1 and t = T", NUMBER, [start[-1].item(), slowest[-1].item()]),
        "rwkv7 law": row("PoST, Remark 5.2", "τ_k(T) / (τ_k(1) T^α), slowest and middle channel", NUMBER,
            [(slowest / start / LENGTH**exponents)[k].item() for k in (0, CHANNELS // 2)]),
        "free rates": row("PoST, Thm 4.7", "geometric / free error at N = 4, 6, 8; gaps at 8; slopes", NUMBER,
            free_rates()),
        "rwkv7 gaps": row("PoST, §5.3, Cor. 5.1", "gaps of log-rates over their mean at t = 1 and t = T", NUMBER,
            rwkv7_gaps(CHANNELS, LENGTH)),
        "octaves of fractional noise": row("PoST, Conditions 3.2 and 3.5", "J(σ) in bits at σ = 1, 2, 4, …", NUMBER,
            octaves_of_fractional_noise()),
        "fractional noise": row(
            "PoST, Lemma 3.6", "error of Condition 3.2, and R(1) over the power law of long lags", NUMBER,
            fractional_noise()),
        "added state": row(
            "PoST, Prop. 4.17", f"numbers that PoST adds to the state of {', '.join(PAIRS)}", NUMBER, added_state()),
    }  # fmt: skip


def _clamped(alpha: Tensor, gaps: Tensor) -> list[float]:
    """Return the largest relative deviation of `gaps`, the median over spectra, and the share with α out of [0, 1]."""
    away = (gaps / gaps.mean(-1, keepdim=True) - 1).abs().amax(-1)
    beyond = ((alpha < -1e-9) | (alpha > 1 + 1e-9)).any(-1)
    return [away.median().item(), beyond.double().mean().item()]


def _slowest_pair(anchor: Tensor, gap: Tensor) -> float:
    """Compare the coherence of rates θ and θ + ζ(c) with the bound of Prop. 4.5."""
    pair = 2 * (anchor * (anchor + gap)).sqrt() / (2 * anchor + gap)
    return error(pair, 1 / torch.cosh(torch.log1p(gap / anchor) / 2))
