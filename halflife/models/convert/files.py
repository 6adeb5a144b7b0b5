"""Read and write Hugging Face folders, and folders of a single layer. Weights are safetensors only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from halflife import layers
from halflife.files import CONFIG_JSON, WEIGHTS, read_json_object, write_json
from halflife.layers import Mixer
from halflife.models.tensor_file import read_tensors, write_tensors

LAYER_FORMAT = 1


def write_model(folder: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a Hugging Face folder, `config.json` and `model.safetensors`, and return it."""
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    write_json(folder / CONFIG_JSON, {name: _encoded(value) for name, value in config.items()})
    return folder


def _encoded(value: Any) -> Any:
    """The inverse of `source.plain`. JSON has no infinity; transformers writes `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_encoded(each) for each in value]
    return {"__float__": "Infinity"} if value == math.inf else value


def save_layer(folder: str | Path, name: str, options: dict[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write one layer, its name and options to `layer.json` and its weights to `layer.safetensors`; return the folder.

    Name and options are the arguments of `layers.build`, hidden_size included.
    """
    folder = Path(folder)
    write_tensors(folder / "layer.safetensors", tensors, {"format": "pt"})
    write_json(folder / "layer.json", {"format": LAYER_FORMAT, "layer": name, "options": options})
    return folder


def load_layer(folder: str | Path) -> Mixer:
    """Return the layer that `save_layer` wrote into `folder`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the format is another one, a file is truncated, or the weights do not fit the options.
    """
    import torch

    folder = Path(folder)
    data = read_json_object(folder / "layer.json")
    if data.get("format") != LAYER_FORMAT:
        raise ValueError(f"{folder} holds a layer of format {data.get('format')}; this version reads {LAYER_FORMAT}")
    tensors, _ = read_tensors(folder / "layer.safetensors")
    with torch.device("meta"):
        layer = layers.build(data["layer"], **data["options"])
    try:
        layer.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder / 'layer.safetensors'} belongs to another layer: {error}") from error
    return layer
