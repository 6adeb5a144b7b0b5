"""What can be measured inside a trained model, whichever library it comes from, and all of it at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halflife.analysis.forecast.reading import read, require_linear_memory
from halflife.analysis.forecast.survey import measure_forecasts
from halflife.analysis.foreign.recurrent import RecurrentModel
from halflife.analysis.readable import TextIds, layer_kinds
from halflife.analysis.records import Record
from halflife.analysis.survey import find_models, load_readable, measure_models
from halflife.evaluation.memory import layer_states, model_state_size
from halflife.models import LanguageModel
from halflife.models.timescales import layer_decays


@dataclass(frozen=True)
class Allowed(Record):
    """What a model allows: for each measurement the reason why it cannot be made, "" if it can."""

    mixers: list[str]  # what mixes the tokens of each layer
    spectrum: str
    forecast: str
    memory: str  # or the reason why its state is of unknown size
    state_bytes: int | None  # of one sequence, in the parts that do not grow, or with all levels (log-linear attention)
    token_bytes: int | None  # by which the state grows with a token


def what_is_allowed(folders: Sequence[Path], device: torch.device | str = "cpu") -> dict[str, Allowed]:
    """Load every model below the folders, and return label → what it allows. The errors are those of `find_models`."""
    return {label: _allowed(folder, device) for label, folder in find_models(folders).items()}


def _allowed(folder: Path, device: torch.device | str) -> Allowed:
    model = load_readable(folder, device)
    mixers, forecast, memory, sizes = layer_kinds(model), "", "", (None, None)
    spectrum = "" if layer_decays(model) else "no layer has a decay"
    try:
        if isinstance(model, LanguageModel):
            dtype = "float32" if model.embedding.weight.dtype.itemsize > 2 else "bfloat16"
            size = model_state_size(layer_states(model.config, dtype))
            sizes = (size.constant + size.per_digit * size.most_digits, size.per_token)
            require_linear_memory(model.eval())
        else:
            recurrent = RecurrentModel(model)
            state = read(recurrent, torch.zeros(1, 2, dtype=torch.long), None)
            sizes = (sum(x.nbytes for layer in state for x in layer.values() if x.is_floating_point()), 0)
    except ValueError as error:
        forecast = str(error).removeprefix(f"no forecast for {model.config.name}: ")
    if sizes == (None, None):
        memory = "its cache is that of another library, and not one matrix a head"
    return Allowed(mixers, spectrum, forecast, memory, *sizes)


def diagnose(
    folders: Sequence[Path], text: Sequence[Path] = (), *, longest: int = 32, length: int = 2048, **options: Any
) -> dict[str, Any]:
    """Measure spectra and forecasts of every model that allows them, see `measure_models` and `measure_forecasts`.

    `longest` is the longest lag of the forecasts, in training lengths. Spectra are measured on sequences of `length`
    tokens. Return "spectrum" and "forecast": the results as dicts, or the reason why no model has one. A text that no
    model can read is a ValueError.
    """
    if longest < 1:
        raise ValueError(f"the longest lag (--longest) is at least 1 training length; got {longest}")
    if text:
        TextIds(text, None, length, 1)
    found: dict[str, Any] = {}
    for name, measure in (
        ("spectrum", lambda: measure_models(folders, text, length=length, **options)),
        ("forecast", lambda: measure_forecasts(folders, text, longest=longest, **options)),
    ):
        try:
            found[name] = measure().to_dict()
        except ValueError as error:
            found[name] = str(error)
    return found
