"""How far a trained model will remember, forecast from one short reading; and how far it does, measured.

A state that is linear in what was written splits, after K pairs and t more tokens, into what is left of the pairs and
what the other tokens wrote: `S_t = P_t + F_t`. Both are had exactly, by letting every layer go on once from its state
and once from an empty one, over the same inputs. On W ≤ T tokens that gives the rate r at which each row of P fades
(decay, and what later writes erase), and so what both become at any later lag L, without reading that far:

    P_L = P_W · e^{−(R(L) − R(W))},   R(L) = Σ_{t ≤ L} r(t),   r(t) = r · τ(W) / τ(t)   (τ: base time-scales, for PoST)
    F_L: its mean over texts grows as Σ_t e^{−(R(L) − R(t))}, its fluctuation as the root of Σ_t e^{−2 (R(L) − R(t))}

Two lengths come of it. The *energy* forecast is the lag at which, in the last head that still held it, the energy of
a stored pair falls below that of the fluctuation in as many rows as a pair takes, one. The *aged state* forecast puts
`P_L + F_L` into the model, asks for every pair, and takes the lag at which fewer than half of the answers are right:
whatever the read-out makes of a faint state (skips, norms, gates) is then in it. Ageing one part alone, `P_L + F_W` or
`P_W + F_L`, says why a model forgets: because its pairs *fade*, or because its state *fills*.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halflife.analysis.spectrum import layer_decays
from halflife.layers import State
from halflife.models import LanguageModel, ModelState
from halflife.tasks.layout import FILLERS, QUERY
from halflife.tasks.recall import NIAH

MEMORIES = ("memory", "fast", "slow")  # states that are linear in what was written
FADED = 1e-9  # of the energy at half the window; below, float64 cannot tell a rate, and nothing is left to tell
PIECE = 512  # tokens read at once


class Reading(NamedTuple):
    """A model's state after K pairs and `seen` other tokens, split; one dict a layer, tensors `[B, H, K, V]`.

    `older` is what is left of the others' part of the reading before, which `others` has and newer writes on top.
    """

    seen: int
    state: ModelState
    pairs: list[State]
    others: list[State]
    older: list[State]


def measure(model: LanguageModel, task: Any, lags: Sequence[int], *, examples: int = 32, seed: int = 0) -> list[float]:
    """The share of a task's K pairs that a model recalls when L other tokens stand between them and the question.

    Args:
        model: trained on the task, at any length.
        task: `MQAR` or `NIAH`, for its pairs and fillers: its length does not matter, and needles stand before all
            fillers, without decoys.
        lags: L, ascending, from 0.
        examples: sequences; each is asked for all of its pairs, alone, at every lag.
        seed: of the sequences.

    Returns:
        One accuracy a lag.
    """
    pairs, draw = _pairs(task, examples, seed)
    found, state, seen = [], _read(model, pairs, None), 0
    for lag in lags:
        while seen < lag:
            step = min(PIECE, lag - seen)
            state, seen = _read(model, _fillers(task, examples, step, draw), state), seen + step
        found.append(_recall(model, task, pairs, state))
    return found


@torch.no_grad()
def forecast(
    model: LanguageModel, task: Any, lags: Sequence[int], *, window: int, examples: int = 32, seed: int = 0
) -> dict[str, Any]:
    """What `measure` would find, from K pairs and `window` other tokens alone; see the module's text.

    Args:
        model, task, lags, examples, seed: as of `measure`, but no lag below the window.
        window: W, at least 2; the training length, or what it leaves beside the pairs.

    Returns:
        "lags", "accuracy" (one a lag), "half_lag" (infinite if no lag forgets); likewise "fade_lag", where the pairs'
        part alone has aged, "fill_lag", where the others' alone has, and "energy_lag"; "window", and "heads": one
        dict a layer, state and head with "layer", "state", "head", "rate" (of its slowest row that holds anything, 1 a
        token), "energy" (of a pair) and "noise" (of a row) at W.

    Raises:
        ValueError: a layer whose state is no matrix that is linear in what was written, or a lag below the window.
    """
    if window < 2 or not lags or min(lags) < window:
        raise ValueError(f"need a window of 2 tokens or more, and lags from there on; got {window} and {list(lags)}")
    model = copy.deepcopy(model).double().eval()
    check(model)
    pairs, draw = _pairs(task, examples, seed)
    half = _split(model, _fillers(task, examples, window // 2, draw), _start(model, pairs))
    full = _split(model, _fillers(task, examples, window - window // 2, draw), half)
    ages = [_Ageing(model, half, full, layer) for layer in range(len(full.pairs))]

    def recall(fade: int, fill: int) -> float:
        """When the pairs' part is as old as one lag, and the others' as another."""
        at = torch.full_like(full.state[0]["position"], pairs.shape[1] + max(fade, fill))
        aged = zip(full.state, ages, strict=True)
        return _recall(model, task, pairs, tuple({**s, **age.at(fade, fill), "position": at} for s, age in aged))

    accuracy = [recall(lag, lag) for lag in lags]
    ratios = [max(age.ratio(lag, task.num_pairs) for age in ages) for lag in lags]
    return {
        "lags": list(lags), "window": window, "accuracy": accuracy, "half_lag": crossing(lags, accuracy, 0.5),
        "fade_lag": crossing(lags, [recall(lag, window) for lag in lags], 0.5),
        "fill_lag": crossing(lags, [recall(window, lag) for lag in lags], 0.5),
        "energy": ratios, "energy_lag": crossing(lags, ratios, 1.0),
        "heads": [row for age in ages for row in age.rows(task.num_pairs)],
    }  # fmt: skip


def crossing(lags: Sequence[int], values: Sequence[float], level: float) -> float:
    """The first lag, interpolated in log(1 + L), at which values fall below a level; infinite if they never do."""
    for i, value in enumerate(values):
        if value < level:
            if i == 0:
                return float(lags[0])
            low, high = math.log1p(lags[i - 1]), math.log1p(lags[i])
            share = (values[i - 1] - level) / (values[i - 1] - value) if math.isfinite(values[i - 1]) else 1.0
            return math.expm1(low + share * (high - low))
    return math.inf


def check(model: LanguageModel) -> None:
    """Whether a model's memory is linear in what was written.

    Raises:
        ValueError: a layer's is not, or its decay looks back by a state of its own.
    """
    _, state = model.hidden(torch.zeros(1, 1, dtype=torch.long, device=model.embedding.weight.device))
    for layer, own in enumerate(state[: len(model.blocks)]):
        if not set(MEMORIES) & set(own) or "decay" in own or len(state) > len(model.blocks):
            raise ValueError(
                f"no forecast for {model.config.name}: layer {layer} ({model.config.mixer_of(layer)[0]}) keeps "
                f"{', '.join(own)}; it takes matrices ({', '.join(MEMORIES)}) that fade and are written to linearly"
            )


# ------------------------------------------------------------------------------------------------ reading


def _pairs(task: Any, examples: int, seed: int) -> tuple[Tensor, torch.Generator]:
    """`k v` × K of every example, `[B, 2K]`, and the generator to draw fillers from."""
    draw = torch.Generator().manual_seed(seed)
    width = 2 * task.num_pairs
    if isinstance(task, NIAH):  # as short as it gets it has nothing before its pairs, nor between them
        task = dataclasses.replace(task, hard=False, length=width + 2)
    return task.sample(examples, draw).inputs[:, :width], draw


def _fillers(task: Any, examples: int, count: int, draw: torch.Generator) -> Tensor:
    low, high = FILLERS if isinstance(task, NIAH) else task.filler_range
    return torch.randint(low, high, (examples, count), generator=draw)


@torch.no_grad()
def _read(model: LanguageModel, ids: Tensor, state: ModelState | None) -> ModelState:
    return model.hidden(ids.to(model.embedding.weight.device), state)[1]


@torch.no_grad()
def _recall(model: LanguageModel, task: Any, pairs: Tensor, state: ModelState) -> float:
    """Accuracy of the answers when every key is asked for alone, from copies of one state."""
    keys, values = pairs[:, ::2], pairs[:, 1::2]
    copies = tuple({k: v.repeat_interleave(keys.shape[1], 0) for k, v in layer.items()} for layer in state)
    asked = keys.reshape(-1, 1)
    if isinstance(task, NIAH):
        asked = torch.cat([torch.full_like(asked, QUERY), asked], 1)
    logits, _ = model(asked.to(model.embedding.weight.device), copies)
    return (logits[:, -1].argmax(-1).cpu() == values.flatten()).double().mean().item()


def _start(model: LanguageModel, pairs: Tensor) -> Reading:
    """After the pairs: all that is in the state is theirs."""
    state = _read(model, pairs, None)
    nothing = [_empty(layer) for layer in state]
    return Reading(0, state, [_memories(layer) for layer in state], nothing, nothing)


def _memories(state: State) -> State:
    return {name: state[name] for name in MEMORIES if name in state}


def _empty(state: State) -> State:
    return {name: torch.zeros_like(value) for name, value in _memories(state).items()}


def _split(model: LanguageModel, ids: Tensor, before: Reading) -> Reading:
    """Reads on, every layer from three memories over the same inputs: its own, the others' part of it, and none."""
    others: list[State] = []
    newer: list[State] = []

    def thrice(block: Any, x: Tensor, state: State, cu_seqlens: Tensor | None, *, shared: Any) -> tuple[Tensor, State]:
        given = dict(shared)
        for memory, found in ((before.others[len(others)], others), (_empty(state), newer)):
            found.append(_memories(block(x, {**state, **memory}, cu_seqlens, shared=dict(given))[1]))
        return block(x, state, cu_seqlens, shared=shared)

    with torch.no_grad():
        _, state = model.hidden(ids.to(model.embedding.weight.device), before.state, call=thrice)
    pairs = [_less(_memories(layer), part) for layer, part in zip(state, others, strict=True)]
    older = [_less(part, new) for part, new in zip(others, newer, strict=True)]
    return Reading(before.seen + ids.shape[1], state, pairs, others, older)


def _less(state: State, part: State) -> State:
    return {name: value - part[name] for name, value in state.items()}


# ------------------------------------------------------------------------------------------------- ageing


class _Ageing:
    """One layer's memory at any lag, from two readings of it."""

    def __init__(self, model: LanguageModel, half: Reading, full: Reading, layer: int) -> None:
        self.layer, self.window = layer, full.seen
        self.pairs, self.others = full.pairs[layer], full.others[layer]
        self.before = int(full.state[layer]["position"][0]) - full.seen
        self.decay = dict(layer_decays(model)).get(layer)
        self.rates, self.noise_rates = (
            {name: self._rate(name, early[layer][name], value, half.seen) for name, value in late[layer].items()}
            for early, late in ((half.pairs, full.pairs), (half.others, full.older))
        )

    def _rate(self, name: str, half: Tensor, full: Tensor, seen: int) -> Tensor:
        """How fast rows fade at position W, `[H, K]`, a token: of the root mean square over examples and columns."""
        early, late = (part.square().mean((0, -1)) for part in (half, full))
        stretch = self._stretch(name, self.window)[seen:].mean(0)
        rate = (early / late).log() / 2 / (self.window - seen) / stretch
        return torch.where(late > FADED * early, rate.clamp(min=0), torch.inf)

    def _stretch(self, name: str, lag: int) -> Tensor:
        """`r(t) / r(W)` at t = 1 … L tokens after the pairs, `[L, H, K]` (or 1): moves only under PoST."""
        if self.decay is None or name == "slow":
            return torch.ones(lag, 1, 1, dtype=torch.float64)
        at = torch.arange(1, lag + 1, dtype=torch.float64) + self.before
        known = torch.linspace(0, math.log(self.before + max(lag, self.window)), 33, dtype=torch.float64).exp()
        scales = torch.stack([self.decay.timescales(t).double() for t in known.tolist()]).log()
        place = (at.log() / known.log()[-1] * 32).clamp(max=32)
        low = place.floor().clamp(max=31).long()
        share = (place - low).view(-1, *[1] * (scales.ndim - 1))
        log_scale = scales[low] * (1 - share) + scales[low + 1] * share
        own = self.decay.timescales(self.before + self.window).double().log()
        stretch = (own - log_scale).exp()
        rows = self.pairs[name].shape[-2]
        return stretch.unsqueeze(-1) if stretch.ndim == 2 else stretch.repeat(1, 1, rows // stretch.shape[-1])

    def at(self, fade: int, fill: int) -> State:
        """The memories when the pairs' part is `fade` tokens old, and the others' `fill`."""
        found = {}
        for name, pairs in self.pairs.items():
            kept = self._kept(name, fade).unsqueeze(-1)
            mean, noise = (factor.unsqueeze(-1) for factor in self._grown(name, fill))
            others = self.others[name]
            steady = others.mean(0)
            found[name] = pairs * kept + steady * mean + (others - steady) * noise
        return found

    def _kept(self, name: str, lag: int) -> Tensor:
        """By what the pairs' part is multiplied from W to L, `[H, K]`."""
        passed, at_window = ((self._stretch(name, t) * self.rates[name]).sum(0) for t in (lag, self.window))
        return (at_window - passed).exp().nan_to_num(0)

    def _grown(self, name: str, lag: int) -> tuple[Tensor, Tensor]:
        """By what the others' mean and their fluctuation are multiplied from W to L, `[H, K]`."""
        (mean, energy), (mean_then, energy_then) = (self._sums(name, t) for t in (lag, self.window))
        return mean / mean_then, (energy / energy_then).sqrt()

    def _sums(self, name: str, lag: int) -> tuple[Tensor, Tensor]:
        """`Σ_t e^{−(R(L) − R(t))}` over the t = 1 … L tokens that wrote, with the others' own rates; and of squares."""
        passed = self._stretch(name, lag) * self.noise_rates[name]
        since = (passed.flip(0).cumsum(0) - passed.flip(0)).flip(0).nan_to_num(0)
        return (-since).exp().sum(0), (-2 * since).exp().sum(0)

    def _energies(self, lag: int, num_pairs: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Of every state: energy of one pair, and of the fluctuation in one row, each `[H]`."""
        found = {}
        for name, pairs in self.pairs.items():
            kept, (_, noise) = self._kept(name, lag), self._grown(name, lag)
            others = self.others[name]
            signal = (pairs.square().sum(-1).mean(0) * kept**2).sum(-1) / num_pairs
            found[name] = signal, (others.var(0).sum(-1) * noise**2).mean(-1)
        return found

    def ratio(self, lag: int, num_pairs: int) -> float:
        """Energy of a pair over noise, in the head that holds it best."""
        return max(
            (signal / noise).nan_to_num(0).max().item() for signal, noise in self._energies(lag, num_pairs).values()
        )

    def rows(self, num_pairs: int) -> list[dict[str, Any]]:
        """What `forecast` says of every head."""
        found = self._energies(self.window, num_pairs)
        return [
            {"layer": self.layer, "state": name, "head": head, "rate": self.rates[name][head].min().item(),
             "energy": signal[head].item(), "noise": noise[head].item()}
            for name, (signal, noise) in found.items() for head in range(len(signal))
        ]  # fmt: skip
