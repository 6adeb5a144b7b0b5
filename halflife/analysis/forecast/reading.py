"""One reading of a trained model, split into what it stored and the rest, and the state that follows at any later lag.

A state that is linear in what was written is a sum. After a beginning and t more tokens, `S_t = P_t + F_t`: the first
part is what is left of the beginning, the second is what the other tokens wrote. Both parts are computed exactly: each
layer runs twice on the same inputs, once from its state and once from zeros. A window of W ≤ T tokens gives the rate r
at which each row of P fades, by decay and by what later writes erase. From r follow both parts at any later lag L,
without reading that far:

    P_L = P_W · e^{−(R(L) − R(W))},   R(L) = Σ_{t ≤ L} r(t),   r(t) = r · τ(W) / τ(t)   (τ: base time-scales, for PoST)
    F_L: its mean over texts grows as Σ_t e^{−(R(L) − R(t))}, its fluctuation as the root of Σ_t e^{−2 (R(L) − R(t))}

Positions are those of the lag, and Mamba-3 turns on (`later_angle`). The forecast puts `P_L + F_L` into the model and
asks it (`recall` for pairs, `text` for the beginning of a text). So it includes whatever the model makes of a faint
state (skips, norms, gates). Ageing one part alone, `P_L + F_W` or `P_W + F_L`, shows why a model forgets: what it
stored *fades*, or its state *fills*.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halflife.analysis.capture import read_from
from halflife.analysis.forecast.ageing import (
    MEMORIES,
    LayerAgeing,
    SplitState,
    empty_memories,
    later_angle,
    memories,
    subtract,
)
from halflife.analysis.foreign.recurrent import RecurrentModel
from halflife.analysis.records import Record
from halflife.models import LanguageModel, ModelState

Rememberer = LanguageModel | RecurrentModel
ReadNext = Callable[[int], Tensor]  # a number of tokens → that many tokens which follow those before, `[B, T]`


@dataclass(frozen=True)
class HeadFading(Record):
    """The fading of one state of one head."""

    layer: int  # the index of the layer, from 0
    state: str  # the name of the state
    head: int  # the index of the head, from 0
    rate: float  # the rate of the slowest row that holds anything, in 1 / token


@dataclass(frozen=True, kw_only=True)
class Forecast(Record):
    """What a model is forecast to remember. A lag is infinite if no lag of the forecast reaches it."""

    lags: list[int]  # L, in tokens, ascending
    window: int  # W, the tokens that were read after the beginning
    values: list[float]  # what is forecast, one number for each lag
    level: float  # the value below which the model counts as having forgotten
    lag: float  # the lag at which the values fall below the level
    fade_lag: float  # the same if the beginning's part alone ages
    fill_lag: float  # the same if the others' part alone ages
    heads: list[HeadFading]  # one entry for each layer, state and head


class Reading:
    """The state of a model after a beginning and a window of other tokens, in parts, and at any later lag.

    Args:
        model: one of ours in float64 (`in_float64`), or one of transformers.
        beginning: the tokens that are to be remembered, `[B, P]`.
        read: returns the tokens that follow.
        window: W, at least 2.

    Raises:
        ValueError: if there is one sequence alone. The fluctuation is a difference of sequences.
    """

    def __init__(self, model: Rememberer, beginning: Tensor, read: ReadNext, window: int) -> None:
        if len(beginning) < 2:
            raise ValueError(
                f"a forecast needs at least 2 sequences, whose differences are the noise; got {len(beginning)}"
            )
        half = self._half = split(model, read(window // 2), start(model, beginning))
        self.full = split(model, read(window - window // 2), half)
        self.window, self._length = window, beginning.shape[1]
        self._layers = [LayerAgeing(model, half, self.full, layer) for layer in range(len(self.full.beginning))]

    def at(self, fade: int, fill: int) -> ModelState:
        """Return the state when the beginning's part is `fade` tokens old and the others' part `fill` tokens."""
        return self._with([layer.at(fade, fill) for layer in self._layers], max(fade, fill))

    def without_beginning(self, fill: int) -> ModelState:
        """Return the state that the other tokens alone make, when they are `fill` tokens."""
        return self._with([layer.others_at(fill) for layer in self._layers], fill)

    def _with(self, parts: Sequence[dict[str, Tensor]], lag: int) -> ModelState:
        at = torch.full_like(self.full.state[0]["position"], self._length + lag)
        pieces = round((lag - self.window) / (self.window - self._half.seen))
        return tuple(
            {**full, **part, "position": at, **later_angle(half, full, pieces)}
            for half, full, part in zip(self._half.state, self.full.state, parts, strict=True)
        )

    def heads(self) -> list[HeadFading]:
        """Return how each head fades."""
        return [
            HeadFading(layer.layer, name, head, rate)
            for layer in self._layers
            for name, rates in layer.rates.items()
            for head, rate in enumerate(rates.amin(-1).tolist())
        ]


def extrapolate(reading: Reading, lags: Sequence[int], value: Callable[[int, int], float], *, level: float) -> Forecast:
    """Forecast what the model remembers at later lags.

    Args:
        reading: the reading.
        lags: L, ascending, none below the window.
        value: what the model remembers when the beginning's part is `fade` tokens old and the others' part `fill`.
        level: the value below which the model counts as having forgotten.
    """
    window, values = reading.window, [value(lag, lag) for lag in lags]
    return Forecast(
        lags=list(lags), window=window, values=values, level=level, lag=crossing(lags, values, level),
        fade_lag=crossing(lags, [value(lag, window) for lag in lags], level),
        fill_lag=crossing(lags, [value(window, lag) for lag in lags], level),
        heads=reading.heads(),
    )  # fmt: skip


def require_window(window: int, lags: Sequence[int]) -> None:
    """Raise ValueError if the window has fewer than 2 tokens, there is no lag, or one is below the window."""
    if window < 2 or not lags or min(lags) < window:
        raise ValueError(f"need a window of 2 tokens or more, and lags from there on; got {window} and {list(lags)}")


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


def in_float64(model: Rememberer) -> Rememberer:
    """A copy of one of our models in float64, which gives differences of states more exactly; others are unchanged.
    Raises as `require_linear_memory`.
    """
    if not isinstance(model, LanguageModel):
        return model
    require_linear_memory(model)
    return copy.deepcopy(model).double().eval()


def require_linear_memory(model: LanguageModel) -> None:
    """Raise ValueError if a layer has other states than matrices that are linear in what was written.

    Such are the state of a decay, MesaNet's Gram matrix, the levels of log-linear attention, what a mixer beside the
    first one holds, and the Toeplitz layer's state.
    """
    _, state = model.hidden(torch.zeros(1, 1, dtype=torch.long, device=model.embedding.weight.device))
    for layer, parts in enumerate(state):
        names = [f"{name} of several levels" if x.ndim > 4 else name for name, x in parts.items()]
        others = [name for name in names if name in ("decay", "gram") or name.startswith("beside.")]
        if layer == len(model.blocks) or others or not set(MEMORIES) & set(names):
            of = f"layer {layer} ({model.config.mixer_of(layer)[0]})"
            raise ValueError(
                f"no forecast for {model.config.name}: the state of {of if layer < len(model.blocks) else 'TPE'} holds "
                f"{', '.join(names)}; a forecast needs matrices ({', '.join(MEMORIES)}) alone, that fade and that "
                "tokens write to linearly"
            )


@torch.no_grad()
def read(model: Rememberer, ids: Tensor, state: ModelState | None) -> ModelState:
    """Read tokens `[B, T]` after a state (None: from the start), and return the next state."""
    if isinstance(model, RecurrentModel):
        return model.advance(ids, state)[1]
    return model.hidden(ids.to(model.embedding.weight.device), state)[1]


def start(model: Rememberer, beginning: Tensor) -> SplitState:
    """The state after the beginning, all of which is the beginning's part."""
    state = read(model, beginning, None)
    nothing = [empty_memories(layer) for layer in state]
    return SplitState(0, state, [memories(layer) for layer in state], nothing, nothing)


@torch.no_grad()
def split(model: Rememberer, ids: Tensor, before: SplitState) -> SplitState:
    """Read on, with each block from three memories on the same inputs: the whole, the others' part of it, and zeros."""
    from_others = [{**state, **others} for state, others in zip(before.state, before.others, strict=True)]
    from_zeros = [{**state, **empty_memories(state)} for state in before.state]
    state, ends = read_from(model, ids, before.state, [from_others, from_zeros])
    others, newer = ([memories(layer) for layer in end] for end in ends)
    beginning = [subtract(memories(layer), part) for layer, part in zip(state, others, strict=True)]
    older = [subtract(part, new) for part, new in zip(others, newer, strict=True)]
    return SplitState(before.seen + ids.shape[1], state, beginning, others, older)
