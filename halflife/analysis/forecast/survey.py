"""Forecasts of how far many trained models remember, and measurements of the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halflife import tasks
from halflife.analysis.forecast.reading import Forecast, HeadFading, Rememberer, crossing, require_linear_memory
from halflife.analysis.forecast.recall import HALF_RECALLED, forecast_recall, measure_recall
from halflife.analysis.forecast.text import FORGOTTEN_SHARE, forecast_influence, measure_influence, texts_length
from halflife.analysis.foreign.load import load_foreign
from halflife.analysis.foreign.recurrent import RecurrentModel
from halflife.analysis.readable import TextIds, on_terminal
from halflife.analysis.records import Record
from halflife.analysis.survey import find_models, is_foreign
from halflife.data.tokenizers import check_ids
from halflife.files import RESULT_JSON, RUN_JSON, read_json_object
from halflife.models.load import load_any

RECALL_TASKS = ("mqar", "niah")


@dataclass(frozen=True, kw_only=True)
class _Compared(Record):
    """A forecast of one model, and the measurement of the same."""

    model: str  # the name of its configuration
    seed: int | None  # of its training, or None if it is unknown
    checkpoint: str  # its folder
    train_length: int  # T in tokens
    lags: list[int]  # the measured lags L, in tokens
    measured: list[float]  # the measured values, one for each lag
    forecast_lags: list[int]  # the lags of the forecast, from the window on
    forecast: list[float]  # the forecast values, one for each of these lags
    fade_lag: float  # this and the next fields are those of `forecast.reading.Forecast`
    fill_lag: float
    heads: list[HeadFading]


@dataclass(frozen=True, kw_only=True)
class ModelForecast(_Compared):
    """The forecast of one model on one task: fractions of recalled pairs. Half-lags are infinite if no lag forgets."""

    task: str  # "mqar" or "niah"
    num_pairs: int  # K
    # half_lag, forecast_half_lag: the lag at which fewer than half of the pairs are recalled
    half_lag: float
    forecast_half_lag: float
    # the run's own accuracy in distribution, with all K pairs and their questions within T tokens, as the report shows
    # it; None if the run has no result
    reported: float | None = None


@dataclass(frozen=True, kw_only=True)
class TextForecast(_Compared):
    """The forecast of how long one model uses the beginning of a text: its influence in nats per token.

    A beginning is forgotten where its influence is below a hundredth of that at lag 0. Lags are infinite if no lag
    reaches this. One that the model forgets within the window is not forecast, and has the window as its lag.
    """

    beginning: int  # the number of tokens whose influence is measured
    window: int  # the tokens after them that were read for the forecast
    # forgotten_lag, forecast_forgotten_lag: the lag at which the beginning is forgotten
    forgotten_lag: float
    forecast_forgotten_lag: float


@dataclass(frozen=True)
class ModelForecasts(Record):
    """The forecasts of several models."""

    examples: int  # the number of sequences that were read
    seed: int  # of these sequences
    window: int  # the training lengths that were read for the forecast
    models: list[ModelForecast]  # one for each model and recall task
    texts: list[TextForecast]  # one for each model of text
    refused: dict[str, str]  # label → the reason why there is no forecast for a model
    names: list[str]  # of all models in the folders, in the order of their colours


def measure_forecasts(
    folders: Sequence[Path],
    text: Sequence[Path] = (),
    *,
    longest: int = 128,
    window: int = 1,
    examples: int = 32,
    seed: int = 0,
    pairs: int = 8,
    beginning: int = 64,
    text_window: int = 16,
    length: int = 512,
    device: torch.device | str = "cpu",
    show: bool = False,
) -> ModelForecasts:
    """Forecast and measure what every model below the folders remembers: pairs, or the beginning of a text.

    Models that were validated on MQAR or NIAH are asked for pairs. Models that were trained on text read the text.
    Models of transformers have no run: they read the text if there is one, and otherwise are asked for pairs of MQAR
    over their own vocabulary.

    Args:
        folders: runs of `halflife compare` or `train`, folders that contain them, or models of transformers.
        text: files that models of text read, one after the other.
        longest: the longest measured lag, in training lengths.
        window: the training lengths that are read for the forecast, which begins at the end of this window.
        examples, seed: the number of sequences, evenly spread over the text, and the seed of those with pairs.
        pairs, length: K and T of MQAR for models of transformers. `length` is their T of a text as well.
        beginning: tokens of a text whose influence is measured.
        text_window: the further tokens of a text that are read for the forecast.
    """
    from rich.progress import track

    folder_of = find_models(folders)
    source = cache(lambda length: TextIds(text, None, length, examples))  # models of one length share what was read
    models: list[ModelForecast] = []
    texts: list[TextForecast] = []
    refused = {}
    for label, folder in track(folder_of.items(), "forecasting", **on_terminal(show)):
        run = read_json_object(folder / RUN_JSON, optional=True)
        try:
            model = _loaded(folder, run, bool(text), device)
            origin = {"model": model.config.name, "seed": run.get("seed"), "checkpoint": str(folder)}
            if specs := _specs(run, model, None if text else {"num_pairs": pairs, "length": length}):
                for spec in specs:
                    found = _forecast_and_measure(model, spec, longest, window, examples, seed)
                    models.append(ModelForecast(**origin, **found, reported=_reported(folder, spec)))
                continue
            train_length = run.get("context", length)
            ids = _text_ids(source(texts_length(beginning, longest * train_length)), model, folder)
            found = _forecast_and_measure_text(model, ids, train_length, longest, text_window, beginning)
            texts.append(TextForecast(**origin, **found))
        except ValueError as error:
            refused[label] = str(error)
    if not models and not texts:
        raise ValueError("nothing to forecast: " + "; ".join(f"{label}: {why}" for label, why in refused.items()))
    return ModelForecasts(
        examples=examples,
        seed=seed,
        window=window,
        models=models,
        texts=texts,
        refused=refused,
        names=[label.partition(" ")[0] for label in folder_of],
    )


def _loaded(folder: Path, run: Mapping[str, Any], has_text: bool, device: torch.device | str) -> Rememberer:
    """Load a model that can be asked. Raise ValueError if there is no forecast for it."""
    if is_foreign(folder):
        return RecurrentModel(load_foreign(folder, device))
    if not _trained_tasks(run) and ("context" not in run or not has_text):
        on_text = "a run on text needs --text" if "context" in run else "no run on text"
        raise ValueError(f"no run on {' or '.join(RECALL_TASKS)} (run.json), and {on_text}")
    ours = load_any(folder, device).eval()
    require_linear_memory(ours)
    return ours


def _text_ids(text: TextIds, model: Rememberer, folder: Path) -> Tensor:
    """Sequences `[B, text.length]` for a model. Raise ValueError if the text is too short or has unknown tokens."""
    ids, tokenizer = text.ids_for(model, folder)
    assert ids is not None, "a model of text is only loaded if there is a text"
    if ids.shape[1] < text.length:
        raise ValueError(
            f"the text has {ids.numel():,} tokens, and a lag this long needs {text.length:,}; choose a lower --longest"
        )
    if len(ids) < 2:
        raise ValueError(
            f"the text is too short: {ids.numel():,} to {2 * text.length - 1:,} tokens, and the forecast compares two "
            f"pieces of {text.length:,}; give {2 * text.length:,} tokens or more, or choose a lower --longest"
        )
    check_ids(model.config, ids, tokenizer)
    return ids


def _specs(run: Mapping[str, Any], model: Rememberer, foreign: Mapping[str, int] | None) -> list[dict[str, Any]]:
    """Return the recall tasks that a model is asked: those of its run, or `foreign` for a model of transformers."""
    if isinstance(model, RecurrentModel):
        return [] if foreign is None else [{"name": "mqar", "vocab_size": model.config.vocab_size, **foreign}]
    return _trained_tasks(run)


def _trained_tasks(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the `RECALL_TASKS` on which a run was validated. Of several sizes of a task, the one with most pairs."""
    specs = [spec for spec in run.get("validation", []) if isinstance(spec, dict) and spec.get("name") in RECALL_TASKS]
    return [max((s for s in specs if s["name"] == name), key=lambda s: s["num_pairs"])
            for name in dict.fromkeys(spec["name"] for spec in specs)]  # fmt: skip


def _reported(folder: Path, spec: Mapping[str, Any]) -> float | None:
    """The accuracy that a run reached in distribution on a task with K pairs."""
    result = read_json_object(folder / RESULT_JSON, optional=True)
    tests = [test for test in result.get("tests", []) if test.get("test") == "in_distribution"]
    found = [test.get("accuracy") for test in tests if test.get("num_pairs") == spec["num_pairs"]]
    return found[0] if len(found) == 1 else None


def _forecast_and_measure(
    model: Any, spec: Mapping[str, Any], longest: int, window: int, examples: int, seed: int
) -> dict[str, Any]:
    """Return the fields of `ModelForecast` from `task` on."""
    task: Any = tasks.build(**spec)
    num_read = window * task.length
    lags = lags_to(longest * task.length)
    measured = measure_recall(model, task, lags, examples=examples, seed=seed)
    beyond = [lag for lag in lags if lag >= num_read]
    ahead = forecast_recall(model, task, beyond, window=num_read, examples=examples, seed=seed)
    return {
        "task": spec["name"], "train_length": task.length, "num_pairs": task.num_pairs, "lags": lags,
        "measured": measured, "half_lag": crossing(lags, measured, HALF_RECALLED), "forecast_half_lag": ahead.lag,
        **_common(ahead),
    }  # fmt: skip


def _forecast_and_measure_text(
    model: Rememberer, ids: Tensor, train_length: int, longest: int, window: int, beginning: int
) -> dict[str, Any]:
    """Return the fields of `TextForecast` from `train_length` on."""
    lags = sorted({*lags_to(longest * train_length), window})
    measured = measure_influence(model, ids, lags, beginning=beginning)
    beyond = [lag for lag in lags if lag >= window]
    ahead = forecast_influence(model, ids, beyond, beginning=beginning, window=window)
    return {
        "train_length": train_length, "beginning": beginning, "window": window, "lags": lags, "measured": measured,
        "forgotten_lag": crossing(lags, measured, FORGOTTEN_SHARE * measured[0]), "forecast_forgotten_lag": ahead.lag,
        **_common(ahead),
    }  # fmt: skip


def _common(ahead: Forecast) -> dict[str, Any]:
    return {
        "forecast_lags": ahead.lags, "forecast": ahead.values, "fade_lag": ahead.fade_lag, "fill_lag": ahead.fill_lag,
        "heads": ahead.heads,
    }  # fmt: skip


def lags_to(longest: int) -> list[int]:
    """Return 0, two lags in each octave from 4 to the longest, and the longest."""
    steps = range(math.floor(2 * math.log2(longest / 4)) + 1) if longest >= 4 else range(0)
    return [0, *dict.fromkeys([*(round(4 * 2 ** (i / 2)) for i in steps), longest])]
