"""What the report page's spectrum explorer shows: every channel's time-scale at positions from 1 to 16 T."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from halflife.analysis.spectrum import granularity, layer_decays, timescales
from halflife.decay import PoST
from halflife.models import LanguageModel, checkpoint
from halflife.report.figures.comparison import FASTEST, SLOWEST
from halflife.report.page.plots import rounded
from halflife.runs.folder import Training

MAX_CHANNELS = 64  # of a layer; vector decays have hundreds
FURTHEST = 16  # training lengths

Scales = list[list[float | None]]  # a row a position; a single row where all are the same


def explorer(trainings: Mapping[str, Sequence[Training]], train_length: int | None) -> dict[str, Any] | None:
    """The spectra of trained models, as the page's script takes them; None if no model has any.

    Args:
        trainings: those of each model. Their weights are read; without them, what was measured after training.
        train_length: T.

    Returns:
        `{"length": T, "models": [{"model", "label", "positions", "channels", "note", "layers"}]}`, a layer being
        `{"layer", "total", "channels", "trained", "initial", "taper"}`: how many channels it has, the numbers of those
        shown, from 1, and their time-scales (tokens), a row a position, or one row where the position makes no
        difference. "initial" and "taper" (PoST's α) are None where they are unknown.
    """
    models = [
        {"model": model, "label": f"{model}, seed {one.seed}", **found}
        for model, own in trainings.items() for one in own if (found := _spectrum(one, train_length)) is not None
    ]  # fmt: skip
    return {"length": train_length, "models": models} if models and train_length else None


def without(models: Sequence[str], spectra: dict[str, Any] | None) -> list[str]:
    """The models that `explorer` found no spectrum of."""
    shown = {entry["model"] for entry in spectra["models"]} if spectra else set()
    return [model for model in models if model not in shown]


def grid(train_length: int) -> list[int]:
    """Positions from 1 to 16 T, two an octave; T, 2 T, 4 T, … are among them."""
    lowest = math.ceil(-2 * math.log2(train_length))
    highest = round(2 * math.log2(FURTHEST))
    return sorted({1, *(max(1, round(train_length * 2 ** (i / 2))) for i in range(lowest, highest + 1))})


def _spectrum(one: Training, train_length: int | None) -> dict[str, Any] | None:
    saved = {layer["layer"]: layer for layer in one.spectrum.get("layers", [])}
    model, note = _weights(one)
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
    most = max(layer["total"] for layer in layers)
    if most > MAX_CHANNELS:
        note += f"Of {most} {channels} a layer, {MAX_CHANNELS} evenly chosen ones are shown."
    return {"positions": positions, "channels": channels, "note": note, "layers": layers}


def _weights(one: Training) -> tuple[LanguageModel | None, str]:
    """The trained model, or why what was measured after training must do."""
    try:
        return checkpoint.load(one.path), ""
    except FileNotFoundError:
        reason = "The weights are missing"
    except ValueError:  # of another version, too: a page is still to be had
        reason = "The weights cannot be read by this version"
    return None, f"{reason}: shown is what was measured after training, at a few positions. "


@torch.no_grad()
def _layers(model: LanguageModel, positions: list[int], saved: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    trained, start = _scales(model, positions), _start(model, positions)
    layers = []
    for index, decay in layer_decays(model):
        initial = start.get(index)
        if initial is None and index in saved and len(trained[index]) == 1:  # whatever was drawn, no position moves it
            initial = _table(saved[index]["init"]["timescales"].values())[:1]
        taper = decay.taper().numpy() if isinstance(decay, PoST) else None
        layers.append(_chosen(index, trained[index], initial, taper))
    return layers


def _scales(model: LanguageModel, positions: list[int]) -> dict[int, np.ndarray]:
    """Time-scales of each layer, `[P, N]`, or `[1, N]` if they are the same everywhere."""
    found = {layer.layer: _table(layer.timescales.values()) for layer in timescales(model, positions)}
    return {index: scales if np.any(scales != scales[0]) else scales[:1] for index, scales in found.items()}


def _start(model: LanguageModel, positions: list[int]) -> dict[int, np.ndarray]:
    """Time-scales at initialisation of the layers whose law leaves nothing to chance: PoST's, and fixed ones."""
    with torch.random.fork_rng(devices=[]):
        fresh = LanguageModel(model.config)
        first = _scales(fresh, positions)
        fresh.reset_parameters()
        second = _scales(fresh, positions)
    return {index: drawn for index, drawn in first.items() if np.array_equal(drawn, second[index])}


def _table(rows: Iterable[Any]) -> np.ndarray:
    """Time-scales `[P, N]`; JSON's null, which is not finite, is NaN."""
    return np.array([np.ravel(row) for row in rows], dtype=float)


def _saved_layer(layer: dict[str, Any], positions: list[int]) -> dict[str, Any]:
    init, trained = (_table(layer[when]["timescales"][str(t)] for t in positions) for when in ("init", "trained"))
    return _chosen(layer["layer"], trained, init, None)


def _chosen(index: int, trained: np.ndarray, initial: np.ndarray | None, taper: np.ndarray | None) -> dict[str, Any]:
    """A layer as the page takes it: evenly chosen channels, numbers of 4 digits."""
    total = trained.shape[1]
    kept = np.linspace(0, total - 1, min(total, MAX_CHANNELS)).round().astype(int)
    return {
        "layer": index, "total": total, "channels": (kept + 1).tolist(), "trained": _rows(trained[:, kept]),
        "initial": None if initial is None else _rows(initial[:, kept]),
        "taper": None if taper is None else [rounded(alpha, 4) for alpha in taper[kept].tolist()],
    }  # fmt: skip


def _rows(scales: np.ndarray) -> Scales:
    return [[rounded(x, 4) for x in row] for row in scales.clip(FASTEST, SLOWEST).tolist()]
