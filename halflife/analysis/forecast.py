"""Forecast how far a trained model will remember from one short reading, and measure how far it does remember.

A state that is linear in what was written is a sum. After K pairs and t more tokens, `S_t = P_t + F_t`: the first part
is what is left of the pairs, the second is what the other tokens wrote. Both parts are computed exactly: each layer
runs twice on the same inputs, once from its state and once from zeros. A window of W ≤ T tokens gives the rate r at
which each row of P fades, by decay and by what later writes erase. From r follow both parts at any later lag L, without
reading that far:

    P_L = P_W · e^{−(R(L) − R(W))},   R(L) = Σ_{t ≤ L} r(t),   r(t) = r · τ(W) / τ(t)   (τ: base time-scales, for PoST)
    F_L: its mean over texts grows as Σ_t e^{−(R(L) − R(t))}, its fluctuation as the root of Σ_t e^{−2 (R(L) − R(t))}

There are two forecasts. The *energy* forecast is the lag at which the energy of a stored pair falls below the energy of
the fluctuation in as many rows as a pair takes, which is one. It takes the head in which this happens last. The *aged
state* forecast puts `P_L + F_L` into the model, asks for every pair, and takes the lag at which fewer than half of the
answers are right. It includes whatever the model makes of a faint state (skips, norms, gates). Ageing one part alone,
`P_L + F_W` or `P_W + F_L`, shows why a model forgets: its pairs *fade*, or its state *fills*.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halflife.analysis.ageing import MEMORIES, LayerAgeing, SplitState, empty_memories, memories, subtract
from halflife.analysis.capture import read_from
from halflife.analysis.foreign.recurrent import RecurrentModel
from halflife.analysis.records import Record
from halflife.models import LanguageModel, ModelState
from halflife.tasks.layout import FILLERS, QUERY
from halflife.tasks.mqar import MQAR
from halflife.tasks.recall import NIAH

Rememberer = LanguageModel | RecurrentModel
MAX_READ = 512  # tokens that are read in one call


@dataclass(frozen=True)
class HeadFading(Record):
    """The fading of one state of one head.

    Attributes:
        layer: the index of the layer, from 0.
        state: the name of the state.
        head: the index of the head, from 0.
        rate: the rate of the slowest row that holds anything, in 1 / token.
        energy: the energy of a stored pair at the window.
        noise: the energy of the fluctuation in a row at the window.
    """

    layer: int
    state: str
    head: int
    rate: float
    energy: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class Forecast(Record):
    """The forecast recall of a model.

    Attributes:
        lags: L, in tokens, ascending.
        window: W, the tokens that were read after the pairs.
        accuracy: the forecast fraction of recalled pairs, one for each lag.
        half_lag: the lag at which the accuracy falls below one half. Infinite if it does so at no lag.
        fade_lag: the same if the pairs' part alone ages.
        fill_lag: the same if the others' part alone ages.
        energy: the energy of a pair over the energy of the fluctuation, one for each lag.
        energy_lag: the lag at which this ratio falls below one. Infinite if it does so at no lag.
        heads: one entry for each layer, state and head.
    """

    lags: list[int]
    window: int
    accuracy: list[float]
    half_lag: float
    fade_lag: float
    fill_lag: float
    energy: list[float]
    energy_lag: float
    heads: list[HeadFading]


def measure_recall(
    model: Rememberer, task: Any, lags: Sequence[int], *, examples: int = 32, seed: int = 0
) -> list[float]:
    """Measure the fraction of a task's K pairs that a model recalls with L other tokens before the question.

    Args:
        model: trained on the task, at any length, or a `RecurrentModel` of transformers.
        task: `MQAR` or `NIAH`, which gives the pairs and fillers. Its length does not matter, and each key has one
            value. Needles stand before all fillers, without decoys.
        lags: L, ascending, from 0.
        examples: the number of sequences. Each is asked for all of its pairs, one at a time, at every lag.
        seed: the seed of the sequences.

    Returns:
        One accuracy for each lag.
    """
    pairs, draw = _pairs(task, examples, seed)
    accuracies, state, seen = [], _read(model, pairs, None), 0
    for lag in lags:
        while seen < lag:
            step = min(MAX_READ, lag - seen)
            state, seen = _read(model, _fillers(task, examples, step, draw), state), seen + step
        accuracies.append(_recall(model, task, pairs, state))
    return accuracies


@torch.no_grad()
def forecast(
    model: Rememberer, task: Any, lags: Sequence[int], *, window: int, examples: int = 32, seed: int = 0
) -> Forecast:
    """Forecast the result of `measure_recall` from K pairs and `window` other tokens, see the module's text.

    Args:
        model, task, examples, seed: see `measure_recall`.
        lags: L, ascending, none below the window.
        window: W, at least 2. Usually the training length.

    Raises:
        ValueError: if a layer's state is not a matrix that is linear in what was written, or a lag is below the window.
    """
    if window < 2 or not lags or min(lags) < window:
        raise ValueError(f"need a window of 2 tokens or more, and lags from there on; got {window} and {list(lags)}")
    if isinstance(model, LanguageModel):  # the parts of a state are differences, which float64 gives more exactly
        model = copy.deepcopy(model).double().eval()
        require_linear_memory(model)
    pairs, draw = _pairs(task, examples, seed)
    half = _split(model, _fillers(task, examples, window // 2, draw), _start(model, pairs))
    full = _split(model, _fillers(task, examples, window - window // 2, draw), half)
    layers = [LayerAgeing(model, half, full, layer) for layer in range(len(full.pairs))]

    def recall(fade: int, fill: int) -> float:
        """The accuracy when the pairs' part is `fade` tokens old and the others' part `fill` tokens."""
        at = torch.full_like(full.state[0]["position"], pairs.shape[1] + max(fade, fill))
        aged = zip(full.state, layers, strict=True)
        return _recall(model, task, pairs, tuple({**s, **layer.at(fade, fill), "position": at} for s, layer in aged))

    accuracy = [recall(lag, lag) for lag in lags]
    ratios = [max(layer.ratio(lag, task.num_pairs) for layer in layers) for lag in lags]
    return Forecast(
        lags=list(lags), window=window, accuracy=accuracy, half_lag=crossing(lags, accuracy, 0.5),
        fade_lag=crossing(lags, [recall(lag, window) for lag in lags], 0.5),
        fill_lag=crossing(lags, [recall(window, lag) for lag in lags], 0.5),
        energy=ratios, energy_lag=crossing(lags, ratios, 1.0),
        heads=[head for layer in layers for head in _heads(layer, task.num_pairs)],
    )  # fmt: skip


def _heads(layer: LayerAgeing, num_pairs: int) -> list[HeadFading]:
    energies = layer.energies(layer.window, num_pairs)
    return [
        HeadFading(layer.layer, name, head, layer.rates[name][head].min().item(), pair[head].item(), noise[head].item())
        for name, (pair, noise) in energies.items() for head in range(len(pair))
    ]  # fmt: skip


def crossing(lags: Sequence[int], values: Sequence[float], level: float) -> float:
    """The first lag at which values fall below a level, interpolated in log(1 + L). It is infinite if they never do."""
    for i, value in enumerate(values):
        if value < level:
            if i == 0:
                return float(lags[0])
            low, high = math.log1p(lags[i - 1]), math.log1p(lags[i])
            share = (values[i - 1] - level) / (values[i - 1] - value) if math.isfinite(values[i - 1]) else 1.0
            return math.expm1(low + share * (high - low))
    return math.inf


def require_linear_memory(model: LanguageModel) -> None:
    """Check that the states of all layers are linear in what was written.

    Raises:
        ValueError: if the state of a layer is not, or if its decay has a state of its own.
    """
    _, state = model.hidden(torch.zeros(1, 1, dtype=torch.long, device=model.embedding.weight.device))
    for layer, names in enumerate(state[: len(model.blocks)]):
        if not set(MEMORIES) & set(names) or "decay" in names or len(state) > len(model.blocks):
            raise ValueError(
                f"no forecast for {model.config.name}: the state of layer {layer} "
                f"({model.config.mixer_of(layer)[0]}) holds {', '.join(names)}; a forecast needs matrices "
                f"({', '.join(MEMORIES)}) that fade and that tokens write to linearly"
            )


# ------------------------------------------------------------------------------------------------ reading


def _pairs(task: Any, examples: int, seed: int) -> tuple[Tensor, torch.Generator]:
    """Return the K pairs `k v` of every example, `[B, 2K]`, and the generator that draws fillers."""
    draw = torch.Generator().manual_seed(seed)
    width = 2 * task.num_pairs
    if isinstance(task, NIAH):  # at its least length, no filler stands before or between the pairs
        task = dataclasses.replace(task, hard=False, length=width + 2)
    elif isinstance(task, MQAR):  # each key has one value
        task = dataclasses.replace(task, updates=0)
    return task.sample(examples, draw).inputs[:, :width], draw


def _fillers(task: Any, examples: int, count: int, draw: torch.Generator) -> Tensor:
    low, high = FILLERS if isinstance(task, NIAH) else task.filler_range
    return torch.randint(low, high, (examples, count), generator=draw)


@torch.no_grad()
def _read(model: Rememberer, ids: Tensor, state: ModelState | None) -> ModelState:
    if isinstance(model, RecurrentModel):
        return model.advance(ids, state)[1]
    return model.hidden(ids.to(model.embedding.weight.device), state)[1]


@torch.no_grad()
def _recall(model: Rememberer, task: Any, pairs: Tensor, state: ModelState) -> float:
    """The accuracy of the answers if each key is asked for alone, from copies of one state."""
    keys, values = pairs[:, ::2], pairs[:, 1::2]
    copies = tuple({k: v.repeat_interleave(keys.shape[1], 0) for k, v in layer.items()} for layer in state)
    questions = keys.reshape(-1, 1)
    if isinstance(task, NIAH):
        questions = torch.cat([torch.full_like(questions, QUERY), questions], 1)
    logits, _ = model(questions.to(model.embedding.weight.device), copies)
    return (logits[:, -1].argmax(-1).cpu() == values.flatten()).double().mean().item()


def _start(model: Rememberer, pairs: Tensor) -> SplitState:
    """The state after the pairs, all of which is the pairs' part."""
    state = _read(model, pairs, None)
    nothing = [empty_memories(layer) for layer in state]
    return SplitState(0, state, [memories(layer) for layer in state], nothing, nothing)


def _split(model: Rememberer, ids: Tensor, before: SplitState) -> SplitState:
    """Read on, with each block from three memories on the same inputs: the whole, the others' part of it, and zeros."""
    from_others = [{**state, **others} for state, others in zip(before.state, before.others, strict=True)]
    from_zeros = [{**state, **empty_memories(state)} for state in before.state]
    state, ends = read_from(model, ids, before.state, [from_others, from_zeros])
    others, newer = ([memories(layer) for layer in end] for end in ends)
    pairs = [subtract(memories(layer), part) for layer, part in zip(state, others, strict=True)]
    older = [subtract(part, new) for part, new in zip(others, newer, strict=True)]
    return SplitState(before.seen + ids.shape[1], state, pairs, others, older)
