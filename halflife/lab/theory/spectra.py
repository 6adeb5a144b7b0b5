"""Properties of a decay spectrum in the statements of PoST: gaps, channels in use, responses, energy, taper.

Rates `[N]` ascend, as in `approximation`, and `p = log r`. If a statement of the paper is wrong, or its
bound is larger than necessary, the docstring says so and gives the corrected statement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from halflife.decay.minimax import taper
from halflife.lab.theory.approximation import adapted_rates
from halflife.lab.theory.koopman_bounds import Bound
from halflife.shapes import Float, Int


def spread(first: float, last: float, points: int) -> Tensor:
    """Return at most `points` integers from `first` to `last`, evenly spaced in their logarithm: `[P]`, float64."""
    return torch.linspace(math.log(first), math.log(last), points, dtype=torch.float64).exp().round().unique()


def minimum_gap(
    channels: Sequence[int], density: float = 1.0, *,
    draw: Callable[[Tensor], Tensor] | None = None, trials: int = 1000, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Compare the mean smallest gap of N independent draws with `E[Δ_min] ≤ 1 / (m (N² − 1))` (Lemma 4.1).

    Uniform draws reach the bound, with m = 1 over the width of their range. The lemma holds for the parameter that is
    drawn, whatever it means. Coherence depends on the gaps of *log*-rates.

    Args:
        channels: N, each at least 2.
        density: m, the smallest density of the draws.
        draw: an inverse distribution function, which maps uniform numbers on [0, 1] to draws. Default: u/m.

    Returns:
        "channels", "trials", and one number for each N: "mean", "error" (the standard error of the mean), "bound",
        "even" (the gap of N evenly spaced points on the same range), "largest" (the mean largest gap).
    """
    if min(channels) < 2:
        raise ValueError(f"a gap needs two channels; got N = {min(channels)}")
    generator = torch.Generator().manual_seed(seed)
    draw = draw or (lambda u: u / density)
    ends = draw(torch.tensor([0.0, 1.0], dtype=torch.float64))
    rows = {name: [] for name in ("mean", "error", "bound", "even", "largest")}
    for n in channels:
        gaps = draw(torch.rand(trials, n, generator=generator, dtype=torch.float64)).sort(-1).values.diff()
        least = gaps.amin(-1)
        rows["mean"].append(least.mean().item())
        rows["error"].append((least.std() / math.sqrt(trials)).item())
        rows["bound"].append(1 / (density * (n**2 - 1)))
        rows["even"].append(((ends[1] - ends[0]) / (n - 1)).item())
        rows["largest"].append(gaps.amax(-1).mean().item())
    return {"channels": list(channels), "trials": trials, **rows}


def effective_channels(
    rates: Float[Tensor, " N"], positions: Sequence[float], length: float, reference_length: float | None = None
) -> dict[str, Any]:
    """Count the channels with time-scales in [1, t], and state the law N log t / log T (Prop. 4.9).

    For geometric rates on [1/T, 1] the number is `1 + ⌊(N − 1) log t / log T⌋`, within 1 of the law. The other channels
    are the slow ones, r < 1/t. The condition "p_k > log t" in the paper's proof selects the wrong end.

    With a reference length the rates are stretched, `r_k (t/t_ref)^{−α_k}`. All channels are then in use for t_ref = T
    (Theorem 4.11). For t_ref = 1, the default of the algorithm, the time-scales reach T·t, and the law is
    N log t / log (T t): half of the channels are slower than the text at t = T.

    Returns:
        "positions", "counted" and "law", one number for each position; "channels", "length".
    """
    rates = torch.as_tensor(rates, dtype=torch.float64)
    close = 1e-9  # tolerance for ends that rounding has moved
    counted, law = [], []
    for t in positions:
        stretch = 1.0 if reference_length is None else t / reference_length
        scales = 1 / (rates * stretch ** -taper(len(rates)))
        counted.append(int(((scales >= 1 - close) & (scales <= t * (1 + close))).sum()))
        widest = math.log(length * stretch)
        law.append(len(rates) * (math.log(t) / widest if widest > 0 else 1.0))
    return {
        "positions": list(positions), "counted": counted, "law": law, "channels": len(rates), "length": length,
    }  # fmt: skip


def response(rates: Float[Tensor, " N"], lags: Tensor, position: float, reference_length: float = 1) -> Tensor:
    """Return `ψ_k(s; t) = exp(−s r_k (t/t_ref)^{−α_k})` at lags s `[S]`: `[N, S]` (Corollary 4.13).

    With α = 1 it depends on s/t alone, with α = 0 on s alone. It is the response of a recurrence with the gates of
    position t at all earlier positions too. For the gates of each position, see `response_as_run`.
    """
    slowed = adapted_rates(torch.as_tensor(rates, dtype=torch.float64), position, reference_length)
    return torch.exp(-slowed.unsqueeze(-1) * lags)


def response_as_run(
    rates: Float[Tensor, " N"], lags: Int[Tensor, " S"], position: int, reference_length: float = 1
) -> Tensor:
    """Return the response at t to the input at t − s, for s = 0 … t `[S]`, with the gates of each position: `[N, S]`.

    It is `exp(−r_k Σ_{j = t−s+1}^t (j/t_ref)^{−α_k})`. Remark 4.14 neglects the difference to `response`, O(α s/t), for
    s ≪ t. Slow channels, however, serve lags up to t. There, with α = 1 and t_ref = 1, the response is (1 − s/t)^r. It
    is still a function of s/t alone, but not the function e^{−r s/t}.
    """
    rates = torch.as_tensor(rates, dtype=torch.float64)
    steps = torch.arange(1, position + 1, dtype=torch.float64) / reference_length
    slowed = rates.unsqueeze(-1) * steps ** -taper(len(rates)).unsqueeze(-1)
    passed = torch.nn.functional.pad(slowed.flip(-1).cumsum(-1), (1, 0))  # sums from t backwards, without cancellation
    return torch.exp(-passed[:, lags])


def responses(
    rates: Float[Tensor, " N"], positions: Sequence[int], reference_length: float = 1, points: int = 60
) -> dict[str, Any]:
    """Compute both responses of every channel at some positions, at lags that are evenly spaced in their logarithm.

    Returns:
        "positions", "tapers", "rates", and lists with one entry for each position: "lags" `[S]`, "frozen" and "as run"
        `[N][S]`.
    """
    columns: dict[str, Any] = {"lags": [], "frozen": [], "as run": []}
    for t in positions:
        lags = spread(1, t, points).long()
        columns["lags"].append(lags.tolist())
        columns["frozen"].append(response(rates, lags, t, reference_length).tolist())
        columns["as run"].append(response_as_run(rates, lags, t, reference_length).tolist())
    return columns | {
        "positions": list(positions), "rates": torch.as_tensor(rates).tolist(), "tapers": taper(len(rates)).tolist(),
    }  # fmt: skip


def energy(rates: Float[Tensor, " N"], tapers: Float[Tensor, " N"], positions: Float[Tensor, " T"]) -> Tensor:
    """Return `E_k(t) = τ/2 (1 − e^{−2t/τ})` with τ = t^α / r, `[N, T]` (Thm B.1).

    This is the energy of white noise through gates that have the values of position t, in continuous time. For t₂ > t₁
    the ratio E(t₂)/E(t₁) lies between (t₂/t₁)^α and t₂/t₁. At α = 1 it equals both.
    """
    scales = positions ** tapers.unsqueeze(-1) / rates.unsqueeze(-1)
    return scales / 2 * -torch.expm1(-2 * positions / scales)


def energy_frozen(rates: Float[Tensor, " N"], tapers: Float[Tensor, " N"], positions: Float[Tensor, " T"]) -> Tensor:
    """Return `(1 − e^{−2t/τ}) / (1 − e^{−2/τ})`, the exact energy of the same gates in discrete time: `[N, T]`.

    See the proof of Thm B.1. Relative to `energy` it is larger by 1/τ + O(1/τ²), so the ratio bounds of continuous time
    hold for slow channels only.
    """
    scales = positions ** tapers.unsqueeze(-1) / rates.unsqueeze(-1)
    return torch.expm1(-2 * positions / scales) / torch.expm1(-2 / scales)


def energy_as_run(rates: Float[Tensor, " N"], tapers: Float[Tensor, " N"], positions: Sequence[int]) -> Tensor:
    """Return the energy of unit noise at some positions in a recurrence with the gates of each position: `[N, P]`.

    It is `E_t = e^{−2 r t^{−α}} E_{t−1} + 1`, E_0 = 0, which is `Σ_{i ≤ t} e^{−2 (c_t − c_i)}` with
    `c_t = r Σ_{j ≤ t} j^{−α}`. At α = 1 it tends to t / (1 + 2r), while gates frozen at t give t (1 − e^{−2r}) / 2r.
    """
    steps = torch.arange(1, max(positions) + 1, dtype=torch.float64)
    slowed = (rates.unsqueeze(-1) * steps ** -tapers.unsqueeze(-1)).flip(-1)
    ends = [len(steps) - t for t in positions]  # sums from t backwards, without cancellation
    return torch.stack([1 + torch.exp(-2 * slowed[:, end:-1].cumsum(-1)).sum(-1) for end in ends], -1)


def energy_simulated(
    rates: Float[Tensor, " N"], tapers: Float[Tensor, " N"], length: int, trials: int = 1000, seed: int = 0
) -> Tensor:
    """Estimate `energy_as_run` by the mean square of the state over runs of `h_t = e^{−r t^{−α}} h_{t−1} + noise`."""
    generator = torch.Generator().manual_seed(seed)
    state, squares = torch.zeros(trials, len(rates), dtype=torch.float64), []
    for t in range(1, length + 1):
        noise = torch.randn(trials, 1, generator=generator, dtype=torch.float64)
        state = torch.exp(-rates * t**-tapers) * state + noise
        squares.append((state**2).mean(0))
    return torch.stack(squares, -1)


def energies(
    rates: Float[Tensor, " N"], tapers: Float[Tensor, " N"], length: int,
    trials: int = 1000, seed: int = 0, points: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compute the four energies at t = 1 … T, or at `points` positions that are evenly spaced in their logarithm.

    Returns:
        "positions" `[P]`; "continuous", "frozen", "as run", "simulated", each `[N][P]`; "rates", "tapers", "trials".
    """
    steps = torch.arange(1, length + 1, dtype=torch.float64) if points is None else spread(1, length, points)
    at = steps.long() - 1
    return {
        "positions": (at + 1).tolist(),
        "continuous": energy(rates, tapers, steps).tolist(),
        "frozen": energy_frozen(rates, tapers, steps).tolist(),
        "as run": energy_as_run(rates, tapers, (at + 1).tolist()).tolist(),
        "simulated": energy_simulated(rates, tapers, length, trials, seed)[:, at].tolist(),
        "rates": rates.tolist(), "tapers": tapers.tolist(), "trials": trials,
    }  # fmt: skip


def taper_bound(slack: float, channels: int) -> Bound:
    """Bound the distance of the best α_k from (N−k)/(N−1) if octaves carry J₀(1 ± ε) of information, `[N]` (Cor. 4.15).

    The paper's bound is `2ε/(1−ε) · q` with q = (N−k)/(N−1). For the slowest channel, which is fixed, it is 2ε/(1−ε)
    instead of 0. The paper's steps give `2ε q (1−q) / (1 − ε + 2ε min(q, 1−q))` (`sharp`) if they also bound the
    information of the other octaves. This bound is reached if the octaves up to τ_k all lie at one end of the slack and
    the others at the other end.

    Any ε outside [0, 1) is a ValueError.
    """
    if not 0 <= slack < 1:
        raise ValueError(f"the equipartition slack must be in [0, 1); got {slack}")
    q = taper(channels)
    sharp = 2 * slack * q * (1 - q) / (1 - slack + 2 * slack * torch.minimum(q, 1 - q))
    return Bound(2 * slack / (1 - slack) * q, sharp)


def best_taper(information: Float[Tensor, " M"], channels: int) -> Tensor:
    """Return α_k `[N]` that place channels by the information in octaves 1 … M: F(α_k M) = (N−k)/(N−1).

    Source: the proof of Cor. B.3. It is a ValueError if an octave has no information, so that F does not grow over it.
    """
    if not (information > 0).all():
        raise ValueError(f"every octave needs positive information; got {information.tolist()}")
    q = taper(channels)
    ends = torch.nn.functional.pad(information.double().cumsum(0) / information.sum(), (1, 0))
    ends[-1] = 1
    octave = torch.searchsorted(ends[1:-1].contiguous(), q)
    return (octave + (q - ends[octave]) / (ends[octave + 1] - ends[octave])) / len(information)
