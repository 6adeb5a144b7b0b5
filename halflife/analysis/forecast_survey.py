"""Forecasts of how far many trained models remember, and measurements of the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halflife import tasks
from halflife.analysis.forecast import (
    HeadFading,
    Rememberer,
    crossing,
    forecast,
    measure_recall,
    require_linear_memory,
)
from halflife.analysis.foreign.load import load_foreign
from halflife.analysis.foreign.recurrent import RecurrentModel
from halflife.analysis.records import Record
from halflife.analysis.survey import find_models, is_foreign
from halflife.files import RESULT_JSON, RUN_JSON, read_json, read_json_object
from halflife.models.load import load_any

KINDS = ("mqar", "niah")


@dataclass(frozen=True, kw_only=True)
class ModelForecast(Record):
    """The forecast of one model on one task, and the measurement. Half-lags are infinite if no lag forgets.

    Attributes:
        model: the name of the model's configuration.
        seed: the seed of its training, or None if it is unknown.
        checkpoint: the folder of the model.
        task: "mqar" or "niah".
        train_length: T in tokens.
        num_pairs: K.
        lags: the measured lags L, in tokens.
        measured: the measured fraction of recalled pairs, one for each lag.
        half_lag: the measured lag at which fewer than half of the pairs are recalled.
        forecast_lags: the lags of the forecast, from the window on.
        forecast: the forecast fraction of recalled pairs, one for each of these lags.
        forecast_half_lag, fade_lag, fill_lag, energy_lag, energy, heads: see `forecast.Forecast`.
        reported: the run's own accuracy in distribution, with all K pairs and their questions within T tokens, as the
            report shows it; None if the run has no result.
    """

    model: str
    seed: int | None
    checkpoint: str
    task: str
    train_length: int
    num_pairs: int
    lags: list[int]
    measured: list[float]
    half_lag: float
    forecast_lags: list[int]
    forecast: list[float]
    forecast_half_lag: float
    fade_lag: float
    fill_lag: float
    energy_lag: float
    energy: list[float]
    heads: list[HeadFading]
    reported: float | None = None


@dataclass(frozen=True)
class ModelForecasts(Record):
    """The forecasts of several models.

    Attributes:
        examples, seed: the number of sequences that were read, and their seed.
        window: the training lengths that were read for the forecast.
        models: one entry for each model and task.
        refused: label → the reason why there is no forecast for a model.
    """

    examples: int
    seed: int
    window: int
    models: list[ModelForecast]
    refused: dict[str, str]


def measure_forecasts(
    folders: Sequence[Path],
    *,
    longest: int = 128,
    window: int = 1,
    examples: int = 32,
    seed: int = 0,
    pairs: int = 8,
    length: int = 512,
    device: torch.device | str = "cpu",
    show: bool = False,
) -> ModelForecasts:
    """Forecast and measure the recall of every model below the folders that was validated on MQAR or NIAH.

    Models of transformers have no such run. They are asked for pairs of MQAR over their own vocabulary.

    Args:
        folders: runs of `halflife compare`, folders that contain them, or models of transformers.
        longest: the longest measured lag, in training lengths.
        window: the training lengths that are read for the forecast, which begins at the end of this window.
        examples, seed: the number of sequences, and their seed.
        pairs, length: K and T of MQAR for models of transformers.
        device: where the models run.
        show: whether to draw a progress bar.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if a checkpoint is damaged, or none belongs to a run on MQAR or NIAH.
    """
    from rich.console import Console
    from rich.progress import track

    folder_of = find_models(folders)
    models, refused = [], {}
    console = Console(stderr=True)
    hidden = not (show and console.is_terminal)
    for label, folder in track(folder_of.items(), "forecasting", console=console, transient=True, disable=hidden):
        run = read_json(folder / RUN_JSON) if (folder / RUN_JSON).exists() else {}
        try:
            model, specs = _model_and_tasks(folder, run, pairs, length, device)
        except ValueError as error:
            refused[label] = str(error)
            continue
        origin = {"model": model.config.name, "seed": run.get("seed"), "checkpoint": str(folder)}
        for spec in specs:
            found = _forecast_and_measure(model, spec, longest, window, examples, seed)
            models.append(ModelForecast(**origin, **found, reported=_reported(folder, spec)))
    if not models:
        raise ValueError("nothing to forecast: " + "; ".join(f"{label}: {why}" for label, why in refused.items()))
    return ModelForecasts(examples=examples, seed=seed, window=window, models=models, refused=refused)


def _model_and_tasks(
    folder: Path, run: Mapping[str, Any], pairs: int, length: int, device: torch.device | str
) -> tuple[Rememberer, list[dict[str, Any]]]:
    """Return a model and the tasks that it is asked.

    Raises:
        ValueError: there is no forecast for the model.
    """
    if is_foreign(folder):
        model = RecurrentModel(load_foreign(folder, device))
        return model, [{"name": "mqar", "vocab_size": model.config.vocab_size, "num_pairs": pairs, "length": length}]
    specs = _specs(run)
    if not specs:
        raise ValueError(f"no run on {' or '.join(KINDS)} (run.json)")
    ours = load_any(folder, device).eval()
    require_linear_memory(ours)
    return ours, specs


def _specs(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tasks in `KINDS` on which a run was validated. Of several sizes of a task, the one with most pairs."""
    specs = [spec for spec in run.get("validation", []) if isinstance(spec, dict) and spec.get("name") in KINDS]
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
    ahead = forecast(model, task, beyond, window=num_read, examples=examples, seed=seed)
    return {
        "task": spec["name"], "train_length": task.length, "num_pairs": task.num_pairs, "lags": lags,
        "measured": measured, "half_lag": crossing(lags, measured, 0.5), "forecast_lags": beyond,
        "forecast": ahead.accuracy, "forecast_half_lag": ahead.half_lag, "fade_lag": ahead.fade_lag,
        "fill_lag": ahead.fill_lag, "energy_lag": ahead.energy_lag, "energy": ahead.energy, "heads": ahead.heads,
    }  # fmt: skip


def lags_to(longest: int) -> list[int]:
    """Return 0, and two lags in each octave from 4 to the longest."""
    steps = range(2 * int(math.log2(longest / 4)) + 1) if longest >= 4 else range(0)
    return [0, *dict.fromkeys(round(4 * 2 ** (i / 2)) for i in steps)]
