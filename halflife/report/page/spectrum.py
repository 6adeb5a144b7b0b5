"""Data of the report page's spectrum explorer: the time-scale of every channel at positions from 1 to 16 T."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from halflife.decay import PoST
from halflife.models import LanguageModel, checkpoint
from halflife.models.timescales import granularity, layer_decays, timescales
from halflife.report.figures.data import FASTEST, SLOWEST
from halflife.report.numbers import evenly, rounded
from halflife.report.tables.csv_files import MAX_CHANNELS
from halflife.runs.records import Training

LAST_POSITION = 16  # training lengths
# What filled and hollow circles are, and the sentence about them.
TRAINED = {
    "filled": "trained", "hollow": "initial", "column": "initial time-scale (tokens)",
    "caption": "All values are at zero input. Filled circles are trained, hollow ones are at initialisation, "
    "where it is known.",
}  # fmt: skip
ON_TEXT = {
    "filled": "zero input", "hollow": "on the text", "column": "time-scale on the text (tokens)",
    "caption": "Filled circles and responses are at zero input. Hollow circles are from the mean log-decays on the "
    "text.",
}  # fmt: skip


def explorer(trainings: Mapping[str, Sequence[Training]], train_length: int | None) -> dict[str, Any] | None:
    """The spectra of trained models as the page's script reads them, or None if no model has a spectrum.

    Args:
        trainings: the trained models of each name. Their weights are read. If the weights are missing, the time-scales
            measured after training are used, which are known at a few positions.
        train_length: T, tokens.

    Returns:
        `{"names": {"filled", "hollow", "column", "caption"}, "models": [model, …]}`, where a model is
        `{"model", "label", "length", "positions", "channels", "note", "layers"}`, with T as its length. A layer is
        `{"layer", "total", "channels", "trained", "initial", "taper"}`: how many channels it has, the numbers (from 1)
        of those shown, and their time-scales (tokens). There is one row of time-scales for each position, or a single
        row if they are the same at all positions. "initial" and "taper" (PoST's α) are None where they are unknown.
    """
    models = [
        {"model": model, "label": f"{model}, seed {one.seed}", "length": train_length, **spectrum}
        for model, seeds in trainings.items() for one in seeds if (spectrum := _spectrum(one, train_length)) is not None
    ]  # fmt: skip
    return {"names": TRAINED, "models": models} if models and train_length else None


def explorer_of_measurements(models: Sequence[Mapping[str, Any]], length: int | None) -> dict[str, Any] | None:
    """The measured spectra of models as the page's script reads them, or None without a model or any T; see `explorer`.

    `models` are `ModelMeasurement.to_dict()` of models with a decay, and `length` is T where no model's training length
    is known. "trained" has the time-scales at zero input and "initial" those on the text, as the names say.
    """
    known = next((model["positions"][1] for model in models if len(model["positions"]) > 1), length)
    if not models or known is None:
        return None
    entries = []
    for model in models:
        train_length = model["positions"][1] if len(model["positions"]) > 1 else known
        layers = [_measured_layer(layer, model["positions"]) for layer in model["layers"]]
        note = _thinning_note(layers, model["channels"])
        moving = any(len(layer["trained"]) > 1 for layer in layers)
        entries.append({
            "model": model["model"], "label": model["model"], "length": train_length,
            "positions": model["positions"] if moving else grid(train_length),
            "channels": model["channels"], "note": note, "layers": layers,
        })  # fmt: skip
    return {"names": ON_TEXT, "models": entries}


def _measured_layer(layer: Mapping[str, Any], positions: Sequence[int]) -> dict[str, Any]:
    base = _table(layer["spectra"][str(position)]["timescales"] for position in positions)
    text = layer["spectra"].get("text")
    taper = np.array(layer["taper"]["learned"]) if "taper" in layer else None
    if taper is not None and len(taper) != base.shape[1]:  # heads share it, and the file does not say how
        taper = None
    base = base if np.any(base != base[0]) else base[:1]
    return _layer(layer["layer"], base, None if text is None else _table([text["timescales"]]), taper)


def _thinning_note(layers: Sequence[Mapping[str, Any]], channels: str) -> str:
    most = max(layer["total"] for layer in layers)
    if most <= MAX_CHANNELS:
        return ""
    return f"The plot shows {MAX_CHANNELS} evenly chosen {channels} of {most} in each layer."


def opened(spectra: Mapping[str, Any]) -> int:
    """The index of the model that the explorer shows first: one whose time-scales depend on the position, if any."""
    moving = (
        i for i, one in enumerate(spectra["models"]) for layer in one["layers"]
        if any(row != layer["trained"][0] for row in layer["trained"])
    )  # fmt: skip
    return next(moving, 0)


def without(models: Sequence[str], spectra: Mapping[str, Any]) -> list[str]:
    """The models that have no spectrum in the result of `explorer`."""
    shown = {entry["model"] for entry in spectra["models"]}
    return [model for model in models if model not in shown]


def grid(train_length: int) -> list[int]:
    """Positions from 1 to 16 T, two in each octave. They include T, 2 T, 4 T, …"""
    lowest = math.ceil(-2 * math.log2(train_length))
    highest = round(2 * math.log2(LAST_POSITION))
    return sorted({1, *(max(1, round(train_length * 2 ** (i / 2))) for i in range(lowest, highest + 1))})


def _spectrum(one: Training, train_length: int | None) -> dict[str, Any] | None:
    saved = {layer["layer"]: layer for layer in one.spectrum.get("layers", [])}
    model, note = _load(one)
    if model is not None and train_length:
        positions = grid(train_length)
        layers = _layers(model, positions, saved)
        channels = granularity(model)
    else:
        positions = sorted({int(t) for layer in saved.values() for t in layer["trained"]["timescales"]})
        layers = [_saved_layer(layer, positions) for layer in saved.values()]
        channels = one.spectrum.get("channels", "channels")
    if not layers:
        return None
    note += _thinning_note(layers, channels)
    return {"positions": positions, "channels": channels, "note": note, "layers": layers}


def _load(one: Training) -> tuple[LanguageModel | None, str]:
    """The trained model, or None and the reason why only the saved time-scales are shown."""
    try:
        return checkpoint.load(one.path), ""
    except FileNotFoundError:
        reason = "The weights are missing"
    except ValueError:  # weights of another version, or damaged ones
        reason = "The weights are damaged, or of another version"
    known = "The plot shows the time-scales measured after training, which are known at a few positions. "
    return None, f"{reason}. {known}"


@torch.no_grad()
def _layers(model: LanguageModel, positions: list[int], saved: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    trained, fixed = _scales(model, positions), _fixed_initial_scales(model, positions)
    layers = []
    for index, decay in layer_decays(model):
        initial = fixed.get(index)
        if initial is None and index in saved and len(trained[index]) == 1:  # the same at all positions
            initial = _table(saved[index]["init"]["timescales"].values())[:1]
        taper = None
        if isinstance(decay, PoST):
            taper = decay.taper().view(decay.base_shape).expand(decay.shape).flatten().numpy()
        layers.append(_layer(index, trained[index], initial, taper))
    return layers


def _scales(model: LanguageModel, positions: list[int]) -> dict[int, np.ndarray]:
    """Time-scales of each layer, `[P, N]`, or `[1, N]` if they are the same everywhere."""
    found = {layer.layer: _table(layer.timescales.values()) for layer in timescales(model, positions)}
    return {index: scales if np.any(scales != scales[0]) else scales[:1] for index, scales in found.items()}


def _fixed_initial_scales(model: LanguageModel, positions: list[int]) -> dict[int, np.ndarray]:
    """Time-scales at initialisation of the layers whose initialisation is not random, such as those with PoST."""
    with torch.random.fork_rng(devices=[]):
        fresh = LanguageModel(model.config)
        first = _scales(fresh, positions)
        fresh.reset_parameters()
        second = _scales(fresh, positions)
    return {index: scales for index, scales in first.items() if np.array_equal(scales, second[index])}


def _table(rows: Iterable[Any]) -> np.ndarray:
    """Time-scales `[P, N]`. JSON's null, which stands for a number that is not finite, becomes NaN."""
    return np.array([np.ravel(row) for row in rows], dtype=float)


def _saved_layer(layer: dict[str, Any], positions: list[int]) -> dict[str, Any]:
    initial, trained = (_table(layer[when]["timescales"][str(t)] for t in positions) for when in ("init", "trained"))
    return _layer(layer["layer"], trained, initial, None)


def _layer(index: int, trained: np.ndarray, initial: np.ndarray | None, taper: np.ndarray | None) -> dict[str, Any]:
    """A layer as the page's script reads it, with evenly chosen channels and numbers of 4 significant digits."""
    total = trained.shape[1]
    shown = evenly(range(total), MAX_CHANNELS)

    def rows(scales: np.ndarray) -> list[list[float | None]]:
        return [[rounded(x, 4) for x in row] for row in scales[:, shown].clip(FASTEST, SLOWEST).tolist()]

    return {
        "layer": index, "total": total, "channels": [channel + 1 for channel in shown], "trained": rows(trained),
        "initial": None if initial is None else rows(initial),
        "taper": None if taper is None else [rounded(alpha, 4) for alpha in taper[shown].tolist()],
    }  # fmt: skip
