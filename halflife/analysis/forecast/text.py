"""How far a trained model uses the beginning of a text: forecast from one short reading, and measured.

The *influence* of a beginning after L further tokens is how much its part of the state changes the prediction of the
tokens that follow, `KL(p ‖ p′)` in nats per token: p predicts from the whole state `P_L + F_L`, and p′ from `F_L`, with
what the beginning wrote taken out of every layer. Convolutions and positions are the same in both. A beginning counts
as forgotten at the lag at which its influence is below a hundredth of that without further tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halflife.analysis.forecast.ageing import SplitState
from halflife.analysis.forecast.reading import (
    Forecast,
    Reading,
    Rememberer,
    extrapolate,
    in_float64,
    require_window,
    split,
    start,
)
from halflife.models import ModelState

FORGOTTEN_SHARE = 0.01  # of the influence at lag 0; below it the beginning counts as forgotten
COMPARED_TOKENS = 16  # tokens whose predictions are compared


@torch.no_grad()
def measure_influence(model: Rememberer, ids: Tensor, lags: Sequence[int], *, beginning: int) -> list[float]:
    """Measure how much the first tokens of texts change the predictions after L further tokens, in nats per token.

    Args:
        model: a language model whose states are linear in what was written.
        ids: token ids of the texts, `[B, T]` with T of at least `texts_length(beginning, lags[-1])`.
        lags: L, ascending, from 0.
        beginning: the number of tokens whose influence is measured.
    """
    model = in_float64(model)
    text = _Text(ids, beginning, lags[-1])
    now, influences = start(model, text.beginning), []
    for lag in lags:
        if lag > now.seen:
            now = split(model, text.read(lag - now.seen), now)
        influences.append(_influence(model, text, now))
    return influences


@torch.no_grad()
def forecast_influence(model: Rememberer, ids: Tensor, lags: Sequence[int], *, beginning: int, window: int) -> Forecast:
    """Forecast the result of `measure_influence` from the first `beginning + window` tokens.

    The predictions that are compared are always those of the tokens after the window.

    Args:
        model, ids, beginning: see `measure_influence`. The texts have `texts_length(beginning, window)` tokens or more.
        lags: L, ascending, none below the window.
        window: W, at least 2.
    """
    require_window(window, lags)
    model = in_float64(model)
    text = _Text(ids, beginning, window)
    level = FORGOTTEN_SHARE * _influence(model, text, start(model, text.beginning))
    if not level > 0:
        raise ValueError(f"no forecast for {model.config.name}: the beginning of a text changes no prediction")
    reading = Reading(model, text.beginning, text.read, window)
    asked = text.ahead()

    def influence(fade: int, fill: int) -> float:
        return _divergence(model, asked, reading.at(fade, fill), reading.without_beginning(fill))

    return extrapolate(reading, lags, influence, level=level)


def texts_length(beginning: int, longest: int) -> int:
    """The tokens of a text that a measurement up to a lag of `longest` reads."""
    return beginning + longest + COMPARED_TOKENS


class _Text:
    """Texts `[B, T]` that are read from left to right, after their `beginning`."""

    def __init__(self, ids: Tensor, beginning: int, longest: int) -> None:
        needed = texts_length(beginning, longest)
        if beginning < 1 or ids.shape[1] < needed:
            raise ValueError(
                f"a beginning has at least 1 token, and texts of {needed} tokens are needed for a lag of {longest}; "
                f"got a beginning of {beginning} and texts of {ids.shape[1]}"
            )
        self.beginning, self._ids, self._at = ids[:, :beginning], ids, beginning

    def read(self, count: int) -> Tensor:
        """Return the next tokens, and go on behind them."""
        self._at += count
        return self._ids[:, self._at - count : self._at]

    def ahead(self) -> Tensor:
        """Return the next tokens whose predictions are compared, without going on."""
        return self._ids[:, self._at : self._at + COMPARED_TOKENS]


def _influence(model: Rememberer, text: _Text, now: SplitState) -> float:
    without = tuple({**state, **part} for state, part in zip(now.state, now.others, strict=True))
    return _divergence(model, text.ahead(), now.state, without)


def _divergence(model: Rememberer, ids: Tensor, whole: ModelState, without: ModelState) -> float:
    """KL(p ‖ p′) between the predictions from two states over the same tokens, the mean in nats per token."""
    ids = ids.to(model.embedding.weight.device)
    p, other = (model(ids, state)[0].double().log_softmax(-1) for state in (whole, without))
    return (p.exp() * (p - other)).sum(-1).mean().item()
