"""The decay values that a model uses on a text, layer by layer (Decay, §5.1, Figures 1 to 9)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halflife.analysis.capture import capture, slow_gates
from halflife.analysis.horizon import RetainedEnergy, horizon, horizon_lags, next_reset, retained_energy
from halflife.analysis.readable import Progress, Readable, ignore, read_text
from halflife.analysis.records import Record
from halflife.evaluation import evaluating
from halflife.layers.mamba3 import Mamba3
from halflife.models.timescales import layer_decays

QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}
MAX_VALUES = 1 << 22  # values of a layer from which quantiles are taken; with more values, every n-th token counts
ERASING_DECAY = 0.5  # a decay below this leaves less than half of a memory at one token
LEAST_LOG_DECAY = -1e4  # lower bound of log-decays in sums: nothing is left, and differences of sums stay exact


@dataclass(frozen=True, kw_only=True)
class Quantiles(Record):
    """The `QUANTILES` of some numbers."""

    q05: float
    q25: float
    median: float
    q75: float
    q95: float


@dataclass(frozen=True, kw_only=True)
class HeadDecays(Quantiles):
    """The decays λ = e^g of one head on a text, with quantiles of λ over tokens and channels."""

    erased: float  # the fraction of λ below ½, without the first token of each sequence
    horizon: float  # the lag in tokens at which a write has faded to 1/e, see `measure_decays`


@dataclass(frozen=True, kw_only=True)
class StateDecays(Quantiles):
    """The decays λ = e^g of one state of a layer on a text, with quantiles of λ over tokens, heads and channels."""

    mean: float  # the mean of λ
    half_life: float  # the half-life at the median, in tokens
    # the half-life of the slowest channel, in tokens, from the mean of its log-decays over time. Rare resets shorten it
    # too. The first token of a sequence has nothing to forget and does not count.
    slowest_half_life: float
    erased: float  # the fraction of λ below ½, without first tokens
    horizon: float  # the longest horizon of all heads, in tokens. It is infinite if it lies beyond `longest_lag`.
    longest_lag: int  # the longest lag at which fading is measured, in tokens
    rates: list[float]  # the mean of −g over time of each channel, `[H · K]`, in 1 / token
    heads: list[HeadDecays]  # the same for each head


@dataclass(frozen=True, kw_only=True)
class SlowStateDecays(StateDecays):
    """The decays of GateRank's slow state alone."""

    resets: float  # the fraction of tokens that reset


@dataclass(frozen=True, kw_only=True)
class LayerDecays(StateDecays):
    """The decays of a layer. Under GateRank these are the decays of the fast state, with horizons of both states."""

    layer: int  # the index of the layer, from 0
    # under GateRank, the horizon of the fast state alone for each head, in tokens
    fast_horizons: list[float] | None = None
    slow: SlowStateDecays | None = None  # under GateRank, the decays of the slow state


@torch.no_grad()
def measure_decays(model: Readable, ids: Tensor, progress: Progress = ignore) -> list[LayerDecays]:
    """Measure the decays λ = e^g that every layer uses on a text.

    A quantile is a value that occurs, the lower of two equally near values, as in `torch.median`. If a layer has more
    than `MAX_VALUES` values, quantiles and mean are taken from every n-th token, evenly spread over the positions.

    The horizon of a head is the lag at which the root mean square of what is left of a token's write falls to 1/e:
    `E[e^{2 (g_{j+1} + … + g_{j+lag})}] = e^{−2}`. The mean is over the channels of the head and over the tokens j of
    the first half of each sequence (at most 256 tokens, evenly spread). If writes are independent, the energy of a
    state is the sum of such terms (PoST, Theorem B.1). A constant decay g has the horizon 1/|g|, its time-scale. The
    sums are taken along the text, because decays of neighbouring tokens depend on each other and a mean λ would hide
    that. Lags go up to half of the sequence, so that the same tokens count at each lag.

    Under GateRank all statistics are those of the fast state, except the horizons. The horizons describe both states
    together: what a token writes fades at the fast decay up to the next reset, and at the slow decay from there on.

    Args:
        model: any language model, also one of transformers.
        ids: sequences `[B, T]`, T ≥ 2. Each is read from its start.
        progress: is called with the number of tokens after each part of the text that is read.

    Returns:
        One entry for each layer with a decay.
    """
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(f"ids must be [B, T] with B ≥ 1 and T ≥ 2; got {tuple(ids.shape)}")
    fast = {layer: _Tally(ids.shape, decay.shape) for layer, decay in layer_decays(model)}
    slow = {layer: _SlowTally(ids.shape, fast[layer], isinstance(model.blocks[layer].mixer, Mamba3))
            for layer, _ in slow_gates(model) if layer in fast}  # fmt: skip
    with evaluating(model), capture(model, decay=lambda i, g: fast[i].add(g), slow_decay=lambda i, g: slow[i].add(g)):
        for sequence in ids.split(1):
            read_text(model, sequence, progress)
    return [_summarise(layer, tally, slow.get(layer)) for layer, tally in fast.items()]


def _summarise(layer: int, fast: _Tally, slow: _SlowTally | None) -> LayerDecays:
    if slow is None:
        return LayerDecays(layer=layer, **fast.statistics(fast.energy))
    return LayerDecays(
        layer=layer, **fast.statistics(slow.energy_of_both), fast_horizons=fast.horizons(fast.energy),
        slow=SlowStateDecays(**slow.statistics(slow.energy), resets=slow.resets / slow.num_summed),
    )  # fmt: skip


class _Tally:
    """Sums and samples of a state's log-decays of ids in shape (B, T), with channels `(H,)` or `(H, K)`, in pieces."""

    def __init__(self, shape: tuple[int, ...], channels: tuple[int, ...]) -> None:
        sequences, length = shape
        self.sequences, self.length, self.num_heads = sequences, length, channels[0]
        self.stride = max(1, math.ceil(sequences * length * math.prod(channels) / MAX_VALUES))
        while math.gcd(self.stride, length) > 1:  # otherwise some positions would never count
            self.stride += 1
        self.samples: list[Tensor] = []
        self.total: Tensor | float = 0.0
        self.erased: Tensor | float = 0.0
        self.energy: Tensor | float = 0.0
        self.lags = horizon_lags(length)
        self.num_seen = self.num_summed = 0

    def add(self, g: Tensor) -> None:
        """Add the next tokens, `[1, W, H]` or `[1, W, H, K]`. After T tokens a sequence is complete."""
        g = g[0].detach().cpu().double().reshape(g.shape[1], self.num_heads, -1)
        self.samples.append(g[-self.num_seen % self.stride :: self.stride].clone())
        before = self.num_seen % self.length
        forgetting = g if before else g[1:]
        self.total = self.total + forgetting.sum(0)
        self.erased = self.erased + (forgetting < math.log(ERASING_DECAY)).double().mean(-1).sum(0)
        sums = g.clamp(min=LEAST_LOG_DECAY).cumsum(0)
        if before:
            self.sums = sums + self.sums[-1]
        else:
            self.sums, self.fading = sums, RetainedEnergy(self.length, self.lags)
        self.fading.add(self.sums, before)
        if before + len(g) == self.length:
            self.energy = self.energy + self.fading.total
        self.num_seen += len(g)
        self.num_summed += len(forgetting)

    def statistics(self, energy: Tensor | float) -> dict[str, Any]:
        """The fields of `StateDecays`, with the horizons of the given energies `[L, H]`."""
        g = torch.cat(self.samples)
        levels = list(QUANTILES.values())
        decays = np.exp(np.quantile(g.flatten().numpy(), levels, method="lower")).tolist()
        by_head = np.exp(np.quantile(g.transpose(0, 1).flatten(1).numpy(), levels, axis=1, method="lower")).T.tolist()
        rates = -torch.as_tensor(self.total / self.num_summed) + 0.0  # −0 would have the time-scale −∞
        erased = torch.as_tensor(self.erased / self.num_summed)
        horizons = self.horizons(energy)
        quantiles = dict(zip(QUANTILES, decays, strict=True))
        return {
            "mean": g.exp().mean().item(), **quantiles, "half_life": half_life(quantiles["median"]),
            "slowest_half_life": half_life(rates.neg().exp().max().item()), "erased": erased.mean().item(),
            "horizon": max(horizons), "longest_lag": int(self.lags[-1]), "rates": rates.flatten().tolist(),
            "heads": [
                HeadDecays(**dict(zip(QUANTILES, decays, strict=True)), erased=share, horizon=reach)
                for decays, share, reach in zip(by_head, erased.tolist(), horizons, strict=True)
            ],
        }  # fmt: skip

    def horizons(self, energy: Tensor | float) -> list[float]:
        """The horizon of each head, from energies `[L, H]` that are summed over the sequences."""
        return [horizon(self.lags, one) for one in torch.as_tensor(energy).T / self.sequences]


class _SlowTally(_Tally):
    """The same for GateRank's slow state, and the energy of both states. Each sequence is first added to `fast`.

    Here a piece is a whole sequence, because a reset that lies ahead counts. `entry` is that of `retained_energy`.
    """

    def __init__(self, shape: tuple[int, ...], fast: _Tally, entry: int) -> None:
        super().__init__(shape, (fast.num_heads,))
        self.fast, self.entry = fast, entry
        self.energy_of_both: Tensor | float = 0.0
        self.resets = 0.0

    def add(self, g: Tensor) -> None:
        super().add(g)
        resets = g[0].detach().cpu() != 0
        self.resets += resets[1:].double().mean(-1).sum().item()
        energy = retained_energy(self.fast.sums, self.lags, self.sums, next_reset(resets).unsqueeze(-1), self.entry)
        self.energy_of_both = self.energy_of_both + energy


def half_life(decay: float) -> float:
    """Tokens after which half of a memory is left, log ½ / log λ. It is 0 for λ = 0 and infinite for λ = 1."""
    if decay <= 0:
        return 0.0
    return math.inf if decay >= 1 else math.log(0.5) / math.log(decay)
