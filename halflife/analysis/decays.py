"""The decay values that a model uses on a text, layer by layer (Decay, §5.1, Figures 1 to 9)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halflife.analysis.spectrum import layer_decays
from halflife.decay import Decay
from halflife.layers.gate_rank import SlowGate
from halflife.models import LanguageModel

QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}
MAX_VALUES = 1 << 22  # of a layer that quantiles are taken of; beyond, every n-th token counts
MAX_STARTS = 256  # tokens of a sequence whose fading is followed
ERASED = 0.5  # a decay below leaves less than half of a memory, at one token
GONE = -1e4  # the least log-decay in sums: it leaves nothing, and differences of sums stay exact


Take = Callable[[int, Tensor], object]


@contextmanager
def recording(model: LanguageModel, take: Take, take_slow: Take | None = None) -> Iterator[None]:
    """While it is open, `take(layer, g)` gets the log-decays that each layer uses, `[B, T, H]` or `[B, T, H, K]`.

    `take_slow(layer, g)` gets those of the slow state of layers with GateRank, `[B, T, H]`, after the fast ones.
    """
    with ExitStack() as stack:
        for layer, decay in layer_decays(model):
            stack.enter_context(_tapped(decay, partial(take, layer)))
            if take_slow is not None and (gate := _slow_gate(model, layer)) is not None:
                stack.enter_context(gate.register_forward_hook(partial(_take_first, partial(take_slow, layer))))
        yield


def _slow_gate(model: LanguageModel, layer: int) -> SlowGate | None:
    gate = getattr(model.blocks[layer].mixer, "gate_rank", None)
    return None if gate is None else gate.slow_gate


def _take_first(
    take: Callable[[Tensor], object], module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]
) -> None:
    take(output[0])


@contextmanager
def _tapped(decay: Decay, take: Callable[[Tensor], object]) -> Iterator[None]:
    """One decay with `take` behind it; a stateful one is read at its `scan`, which does not pass through `forward`."""

    def after_forward(module: Decay, inputs: Any, g: Tensor) -> None:
        take(g)

    if not decay.stateful:
        with decay.register_forward_hook(after_forward):
            yield
        return
    scan = decay.scan

    def tapped_scan(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        g, state = scan(*args, **options)
        take(g)
        return g, state

    decay.scan = tapped_scan  # hides the method of the class
    try:
        yield
    finally:
        del decay.scan


@torch.no_grad()
def decay_values(model: LanguageModel, ids: Tensor) -> list[dict[str, Any]]:
    """Statistics of the decays λ = e^g that every layer uses on a text, over tokens, heads and channels.

    Quantiles are values that occur, the lower of two equally near ones, as `torch.median` gives. Above `MAX_VALUES`
    values a layer they, and the mean, are of every n-th token, evenly spread over the positions.

    The horizon of a head is the lag at which the root mean square of what is left of a token's write falls to 1/e:
    `E[e^{2 (g_{j+1} + … + g_{j+lag})}] = e^{−2}`, the mean over the channels of the head and the tokens j of the first
    half of each sequence (at most `MAX_STARTS`, evenly spread). Such energies are what a state's own is the sum of when
    writes are independent (PoST, Theorem B.1), and a constant decay g has horizon 1/|g|, its time-scale. The sums are
    those of the text, since decays of neighbouring tokens are not independent: a mean λ would not tell. Lags go up to
    half of the sequence, so that the same tokens count at each.

    Under GateRank the statistics are those of the fast state, but for the horizons: these are of what both states keep
    together, a token's write being fast up to the next reset and slow from there on.

    Args:
        model: any language model.
        ids: sequences `[B, T]`, T ≥ 2, each read from its start.

    Returns:
        One dict a layer with a decay: "layer" (from 0); "median", "mean", "q05", "q25", "q75", "q95" of λ;
        "half_life", tokens after which half of a memory is left at the median λ; "slowest_half_life", that of the
        channel that keeps longest, from the mean of its log-decays over time, which rare resets shorten too (a
        sequence's first token has nothing to forget and is left out); "erased", the share of λ < ½ (without first
        tokens); "horizon", the longest of the heads' (infinite: beyond "longest_lag"); "rates", the mean −g of each
        channel over time, flat; and "heads", a dict each: the quantiles of its λ, "half_lives", theirs, "erased",
        "horizon". With GateRank also "slow", the same of the slow state alone, with "resets", the share of tokens
        that reset, and "fast_horizons", those of the fast state alone, a head each.

    Raises:
        ValueError: ids that are no sequences of two tokens or more.
    """
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(f"ids must be [B, T] with B ≥ 1 and T ≥ 2; got {tuple(ids.shape)}")
    tallies = {layer: _Tally(ids.shape, decay.shape) for layer, decay in layer_decays(model)}
    slow = {layer: _SlowTally(ids.shape, tally) for layer, tally in tallies.items() if _slow_gate(model, layer)}
    with recording(model, lambda layer, g: tallies[layer].take(g), lambda layer, g: slow[layer].take(g)):
        for sequence in ids.to(model.embedding.weight.device).split(1):
            model.hidden(sequence)
    rows = []
    for layer, tally in tallies.items():
        row = tally.summary()
        if layer in slow:
            row = slow[layer].joined(row)
        rows.append({"layer": layer, **row})
    return rows


class _Tally:
    """What one state's log-decays come to, taken a sequence at a time.

    Args:
        shape: of the ids, `(B, T)`.
        channels: `(H,)` or `(H, K)`.
    """

    def __init__(self, shape: tuple[int, ...], channels: tuple[int, ...]) -> None:
        sequences, length = shape
        self.sequences, self.heads = sequences, channels[0]
        self.stride = max(1, math.ceil(sequences * length * math.prod(channels) / MAX_VALUES))
        while math.gcd(self.stride, length) > 1:  # otherwise some positions would never count
            self.stride += 1
        self.kept: list[Tensor] = []
        self.total: Tensor | float = 0.0
        self.erased: Tensor | float = 0.0
        self.energy: Tensor | float = 0.0
        self.lags = _lags(length)
        self.seen = self.summed = 0

    def take(self, g: Tensor) -> None:
        """Counts one sequence, `[1, T, H]` or `[1, T, H, K]`."""
        g = g[0].detach().cpu().double().reshape(g.shape[1], self.heads, -1)
        self.kept.append(g[-self.seen % self.stride :: self.stride].clone())
        self.total = self.total + g[1:].sum(0)
        self.erased = self.erased + (g[1:] < math.log(ERASED)).double().mean(-1).sum(0)
        self.sums = g.clamp(min=GONE).cumsum(0)
        self.energy = self.energy + retained_energy(self.sums, self.lags)
        self.seen += len(g)
        self.summed += len(g) - 1

    def summary(self) -> dict[str, Any]:
        g = torch.cat(self.kept)
        levels = list(QUANTILES.values())
        decays = np.exp(np.quantile(g.flatten().numpy(), levels, method="lower")).tolist()
        by_head = np.exp(np.quantile(g.transpose(0, 1).flatten(1).numpy(), levels, axis=1, method="lower")).T.tolist()
        rates = -torch.as_tensor(self.total / self.summed)
        erased = torch.as_tensor(self.erased / self.summed)
        horizons = self.horizons(self.energy)
        named = dict(zip(QUANTILES, decays, strict=True))
        return {
            "mean": g.exp().mean().item(), **named, "half_life": half_life(named["median"]),
            "slowest_half_life": half_life(rates.neg().exp().max().item()), "erased": erased.mean().item(),
            "horizon": max(horizons), "longest_lag": int(self.lags[-1]), "rates": rates.flatten().tolist(),
            "heads": [
                {**dict(zip(QUANTILES, quantiles, strict=True)),
                 "half_lives": dict(zip(QUANTILES, map(half_life, quantiles), strict=True)),
                 "erased": share, "horizon": reach}
                for quantiles, share, reach in zip(by_head, erased.tolist(), horizons, strict=True)
            ],
        }  # fmt: skip

    def horizons(self, energy: Tensor | float) -> list[float]:
        """The horizon of each head, of energies `[L, H]` summed over the sequences."""
        return [horizon(self.lags, one) for one in torch.as_tensor(energy).T / self.sequences]


class _SlowTally(_Tally):
    """The same of GateRank's slow state, and of both states together; `fast` has taken the same sequence before."""

    def __init__(self, shape: tuple[int, ...], fast: _Tally) -> None:
        super().__init__(shape, (fast.heads,))
        self.fast = fast
        self.together: Tensor | float = 0.0
        self.resets = 0.0

    def take(self, g: Tensor) -> None:
        super().take(g)
        resets = g[0].detach().cpu() != 0
        self.resets += resets[1:].double().mean(-1).sum().item()
        energy = retained_energy(self.fast.sums, self.lags, self.sums, next_reset(resets).unsqueeze(-1))
        self.together = self.together + energy

    def joined(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row of the fast state with the horizons of both, and the slow state's own."""
        alone = [head["horizon"] for head in row["heads"]]
        slow = {**self.summary(), "resets": self.resets / self.summed}
        horizons = self.horizons(self.together)
        heads = [{**head, "horizon": reach} for head, reach in zip(row["heads"], horizons, strict=True)]
        return {**row, "horizon": max(horizons), "heads": heads, "fast_horizons": alone, "slow": slow}


# ---------------------------------------------------------------------------------------------- horizon


def _lags(length: int) -> Tensor:
    """1 to half of the length, eight an octave."""
    longest = length // 2
    octaves = torch.arange(0, 8 * math.log2(longest) + 1) / 8 if longest > 1 else torch.zeros(1)
    return torch.cat([(2**octaves).round().clamp(max=longest), torch.tensor([float(longest)])]).unique().long()


def next_reset(resets: Tensor) -> Tensor:
    """The first reset strictly after each token, T where there is none: booleans `[T, H]` → `[T, H]`."""
    length = len(resets)
    at = torch.where(resets, torch.arange(length).unsqueeze(-1), length)
    return torch.cat([at[1:], torch.full_like(at[:1], length)]).flip(0).cummin(0).values.flip(0)


def retained_energy(sums: Tensor, lags: Tensor, slow: Tensor | None = None, reset: Tensor | None = None) -> Tensor:
    """Mean over tokens and channels of the squared share of a token's write that is left at each lag: `[L, H]`.

    Args:
        sums: inclusive sums of log-decays along one sequence, `[T, H, K]`.
        lags: `[L]`, ascending; the tokens that count have the longest one ahead of them.
        slow: GateRank's sums of the slow state, `[T, H, K]`; `sums` are then those of the fast one.
        reset: each token's next reset, `[T, H, K]`, T for none.
    """
    starts = torch.arange(len(sums) - int(lags[-1]))
    starts = starts[:: math.ceil(len(starts) / MAX_STARTS)]
    energies = []
    for lag in lags.tolist():
        ends = starts + lag
        if slow is None or reset is None:
            left = sums[ends] - sums[starts]
        else:  # fast up to the reset, slow all along: math of `ops.gate_rank.masks`
            until = torch.minimum(reset[starts], ends.view(-1, 1, 1))
            left = slow[ends] - slow[starts] + sums.gather(0, until) - sums[starts]
        energies.append((2 * left).exp().mean((0, 2)))
    return torch.stack(energies)


def horizon(lags: Tensor, energy: Tensor) -> float:
    """The lag at which `energy [L]` falls to e^{−2}, its logarithm taken as linear between lags; infinite: it does not.

    At lag 0 it is 1. NaN where the energy is.
    """
    if energy.isnan().any():
        return math.nan
    x, logs = [0, *lags.tolist()], [0.0, *(energy.log() / 2).tolist()]
    last = next((i for i, level in enumerate(logs) if level <= -1), None)
    if last is None:
        return math.inf
    share = (-1 - logs[last - 1]) / (logs[last] - logs[last - 1])
    return x[last - 1] + share * (x[last] - x[last - 1])


def half_life(decay: float) -> float:
    """Tokens after which half of a memory is left, log ½ / log λ: 0 for λ = 0, infinite for λ = 1."""
    if decay <= 0:
        return 0.0
    return math.inf if decay >= 1 else math.log(0.5) / math.log(decay)
