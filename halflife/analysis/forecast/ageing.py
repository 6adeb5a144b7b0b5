"""The parts of a state that is linear in what was written, and how they age; see `analysis.forecast.reading`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from halflife.analysis.readable import Readable
from halflife.layers import State
from halflife.models import ModelState
from halflife.models.timescales import layer_decays

MEMORIES = ("memory", "fast", "slow")  # names of the states that are linear in what was written
FADED_ENERGY = 1e-9  # share of the energy at half the window, below which float64 cannot tell the rate of a row
TIMESCALE_NODES = 33  # positions at which PoST's time-scales are computed; between them they are interpolated


@dataclass(frozen=True)
class SplitState:
    """A model's state after a beginning (K pairs, or the first tokens of a text) and other tokens, split into parts.

    Each part has one dict per layer, with tensors `[B, H, K, V]`.
    """

    seen: int  # the number of other tokens after the beginning
    state: ModelState  # the whole state
    beginning: list[State]  # what is left of the beginning
    others: list[State]  # what the other tokens wrote
    older: list[State]  # the part of `others` that was written before the latest reading


def memories(state: State) -> State:
    """Return the parts of a layer's state that are linear in what was written."""
    return {name: state[name] for name in MEMORIES if name in state}


def empty_memories(state: State) -> State:
    """Return zeros in the shapes of `memories`."""
    return {name: torch.zeros_like(value) for name, value in memories(state).items()}


def subtract(state: State, part: State) -> State:
    """Return the difference of two dicts of memories."""
    return {name: value - part[name] for name, value in state.items()}


def later_angle(half: State, full: State, pieces: int) -> State:
    """Mamba-3's `angle` in turns, after `pieces` more pieces of text as long as the second half of the window.

    In each the mean over texts turns as it did there, and the fluctuation grows as the root of their number. Layers
    without an angle have an empty dict.
    """
    if "angle" not in full:
        return {}
    turned = full["angle"] - half["angle"]
    mean = torch.exp(2j * torch.pi * turned).mean(0).angle() / (2 * torch.pi)
    fluctuation = turned - mean
    angle = full["angle"] + pieces * mean + math.sqrt(pieces) * (fluctuation - fluctuation.round())
    return {"angle": angle - angle.round()}


class LayerAgeing:
    """The memory of one layer at any lag, extrapolated from the states at half the window and at its end.

    A model of ours is in float64, one of transformers in float32.

    Attributes:
        rates: state → the rate at which rows of the beginning's part fade at the end of the window, `[H, K]`, in
            1 / token. It is infinite for rows that have faded too far to tell.
        noise_rates: the same for the others' part.
    """

    def __init__(self, model: Readable, half: SplitState, full: SplitState, layer: int) -> None:
        self.layer, self.window = layer, full.seen
        self.beginning, self.others = full.beginning[layer], full.others[layer]
        self.before = int(full.state[layer]["position"][0]) - full.seen
        self.decay = dict(layer_decays(model)).get(layer)
        self.rates, self.noise_rates = (
            {name: self._rate(name, early[layer][name], value, half.seen) for name, value in late[layer].items()}
            for early, late in ((half.beginning, full.beginning), (half.others, full.older))
        )

    def _rate(self, name: str, half: Tensor, full: Tensor, seen: int) -> Tensor:
        """The rate of each row at position W, `[H, K]`, from its root mean square over examples and columns."""
        early, late = (part.square().mean((0, -1)) for part in (half, full))
        stretch = self._stretch(name, self.window)[seen:].mean(0)
        rate = (early / late).log() / 2 / (self.window - seen) / stretch
        return torch.where(late > FADED_ENERGY * early, rate.clamp(min=0), torch.inf)

    def _stretch(self, name: str, lag: int) -> Tensor:
        """`r(t) / r(W)` at t = 1 … L tokens after the beginning, `[L, H, K]` or `[L, 1, 1]`. It is 1 without PoST."""
        if self.decay is None or name == "slow":
            return torch.ones(lag, 1, 1, dtype=torch.float64)
        at = torch.arange(1, lag + 1, dtype=torch.float64) + self.before
        last = math.log(self.before + max(lag, self.window))
        nodes = torch.linspace(0, last, TIMESCALE_NODES, dtype=torch.float64).exp()
        log_scales = torch.stack([self.decay.timescales(t).double() for t in nodes.tolist()]).log()
        place = (at.log() / nodes.log()[-1] * (TIMESCALE_NODES - 1)).clamp(max=TIMESCALE_NODES - 1)
        low = place.floor().clamp(max=TIMESCALE_NODES - 2).long()
        share = (place - low).view(-1, *[1] * (log_scales.ndim - 1))
        log_scale = log_scales[low] * (1 - share) + log_scales[low + 1] * share
        at_window = self.decay.timescales(self.before + self.window).double().log()
        stretch = torch.where(at_window.isinf(), 0, at_window - log_scale).exp()  # Longhorn fades by its keys alone
        rows = self.beginning[name].shape[-2]
        return stretch.unsqueeze(-1) if stretch.ndim == 2 else stretch.repeat(1, 1, rows // stretch.shape[-1])

    def at(self, fade: int, fill: int) -> State:
        """Return the memories when the beginning's part is `fade` tokens old and the others' part `fill` tokens."""
        others = self.others_at(fill)
        return {
            name: part * self.fading(name, fade).unsqueeze(-1) + others[name] for name, part in self.beginning.items()
        }

    def others_at(self, fill: int) -> State:
        """Return what the other tokens alone wrote, when they are `fill` tokens."""
        aged = {}
        for name, others in self.others.items():
            mean, noise = (factor.unsqueeze(-1) for factor in self.growth(name, fill))
            steady = others.mean(0)
            aged[name] = steady * mean + (others - steady) * noise
        return aged

    def fading(self, name: str, lag: int) -> Tensor:
        """Return the factor by which the beginning's part changes from lag W to L, `[H, K]`."""
        passed, at_window = ((self._stretch(name, t) * self.rates[name]).sum(0) for t in (lag, self.window))
        return (at_window - passed).exp().nan_to_num(0)

    def growth(self, name: str, lag: int) -> tuple[Tensor, Tensor]:
        """Return the factors by which the others' mean and fluctuation change from lag W to L, `[H, K]` each."""
        (mean, energy), (mean_then, energy_then) = (self._sums(name, t) for t in (lag, self.window))
        return mean / mean_then, (energy / energy_then).sqrt()

    def _sums(self, name: str, lag: int) -> tuple[Tensor, Tensor]:
        """`Σ_t e^{−(R(L) − R(t))}` over the t = 1 … L other tokens, with the others' rates, and the sum of squares."""
        passed = self._stretch(name, lag) * self.noise_rates[name]
        later = passed[1:].flip(0).cumsum(0).flip(0)  # rates may be infinite, so nothing is subtracted
        since = torch.cat([later, torch.zeros_like(passed[:1])])
        return (-since).exp().sum(0), (-2 * since).exp().sum(0)
