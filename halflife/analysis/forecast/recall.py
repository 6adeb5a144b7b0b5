"""How far a trained model recalls stored pairs: forecast from one short reading, and measured.

The *aged state* forecast asks the model for every pair at each lag, and takes the lag at which fewer than half of the
answers are right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halflife.analysis.forecast.reading import (
    Forecast,
    Reading,
    Rememberer,
    extrapolate,
    in_float64,
    read,
    require_window,
)
from halflife.evaluation import evaluating
from halflife.models import ModelState
from halflife.tasks.layout import FILLERS, QUERY
from halflife.tasks.mqar import MQAR
from halflife.tasks.recall import NIAH

HALF_RECALLED = 0.5  # of the pairs
MAX_READ = 512  # tokens that are read in one call


def measure_recall(
    model: Rememberer, task: Any, lags: Sequence[int], *, examples: int = 32, seed: int = 0
) -> list[float]:
    """Measure the fraction of a task's K pairs that a model recalls at each lag, with L other tokens in between.

    Args:
        model: trained on the task, at any length, or a `RecurrentModel` of transformers.
        task: `MQAR` or `NIAH`, which gives the pairs and fillers. Its length does not matter, and each key has one
            value. Needles stand before all fillers, without decoys.
        lags: L, ascending, from 0.
        examples: the number of sequences. Each is asked for all of its pairs, one at a time, at every lag.
    """
    pairs, draw = _pairs(task, examples, seed)
    with evaluating(model):
        accuracies, state, seen = [], read(model, pairs, None), 0
        for lag in lags:
            while seen < lag:
                step = min(MAX_READ, lag - seen)
                state, seen = read(model, _fillers(task, examples, draw, step), state), seen + step
            accuracies.append(_recall(model, task, pairs, state))
    return accuracies


@torch.no_grad()
def forecast_recall(
    model: Rememberer, task: Any, lags: Sequence[int], *, window: int, examples: int = 32, seed: int = 0
) -> Forecast:
    """Forecast the result of `measure_recall` from K pairs and `window` other tokens, see `analysis.forecast.reading`.

    Args:
        model, task, examples, seed: see `measure_recall`.
        lags: L, ascending, none below the window.
        window: W, at least 2. Usually the training length.
    """
    require_window(window, lags)
    model = in_float64(model)
    pairs, draw = _pairs(task, examples, seed)
    reading = Reading(model, pairs, partial(_fillers, task, examples, draw), window)

    def recall(fade: int, fill: int) -> float:
        return _recall(model, task, pairs, reading.at(fade, fill))

    return extrapolate(reading, lags, recall, level=HALF_RECALLED)


def _pairs(task: Any, examples: int, seed: int) -> tuple[Tensor, torch.Generator]:
    """Return the K pairs `k v` of every example, `[B, 2K]`, and the generator that draws fillers."""
    draw = torch.Generator().manual_seed(seed)
    width = 2 * task.num_pairs
    if isinstance(task, NIAH):  # at its least length, no filler stands before or between the pairs
        task = dataclasses.replace(task, hard=False, length=width + 2)
    elif isinstance(task, MQAR):  # each key has one value
        task = dataclasses.replace(task, updates=0)
    return task.sample(examples, draw).inputs[:, :width], draw


def _fillers(task: Any, examples: int, draw: torch.Generator, count: int) -> Tensor:
    low, high = FILLERS if isinstance(task, NIAH) else task.filler_range
    return torch.randint(low, high, (examples, count), generator=draw)


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
