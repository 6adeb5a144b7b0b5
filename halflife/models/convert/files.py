"""Read and write Hugging Face folders, and folders of a single layer. Weights are safetensors only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from halflife import layers
from halflife.files import CONFIG_JSON, WEIGHTS, read_json_object, write_json
from halflife.layers import Mixer
from halflife.models.tensor_file import write_tensors

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
LAYER_FORMAT = 1


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a Hugging Face folder by name. A tensor is read from the disk when it is accessed.

    Args:
        folder: folder with `model.safetensors`, or with `model.safetensors.index.json` and its shards.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the folder holds only pickles, a file is truncated, or the shards do not agree with the index.
    """

    def __init__(self, folder: Path) -> None:
        whole, index = folder / WEIGHTS, folder / INDEX
        if whole.exists() or not index.exists():
            self.files = _open(whole)
            return
        placed = read_json_object(index).get("weight_map")
        if not isinstance(placed, dict):
            raise ValueError(f"{index} has no weight_map")
        for shard in placed.values():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise ValueError(f"{index} names the shard {shard!r}, which is no file of its folder")
        self.files: dict[str, Any] = {}
        for shard in sorted(set(placed.values())):
            self.files |= _open(folder / shard)
        if differing := sorted(placed.keys() ^ self.files.keys()):
            raise ValueError(f"{index} and its shards do not agree on {differing[0]} ({len(differing)} in all)")

    def __getitem__(self, name: str) -> Tensor:
        return self.files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def _open(path: Path) -> dict[str, Any]:
    """Open a safetensors file, and return a mapping from each tensor's name to the open file."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        pickles = sorted(p.name for p in path.parent.glob("*") if p.suffix in PICKLES)
        if pickles:
            raise ValueError(f"{path.parent} holds {pickles[0]}, a pickle; only safetensors are read")
        raise FileNotFoundError(f"{path} is missing")
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}") from error
    return dict.fromkeys(file.keys(), file)


def write_model(folder: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a Hugging Face folder, `config.json` and `model.safetensors`, and return it."""
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    write_json(folder / CONFIG_JSON, config)
    return folder


def save_layer(folder: str | Path, name: str, options: dict[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write one layer, its name and options to `layer.json` and its weights to `layer.safetensors`; return the folder.

    Args:
        folder: the folder.
        name: name of the layer in `layers.LAYERS`.
        options: arguments of `layers.build`, hidden_size included.
        tensors: state dict of the layer.
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
    file = _open(folder / "layer.safetensors")
    with torch.device("meta"):
        layer = layers.build(data["layer"], **data["options"])
    try:
        layer.load_state_dict({name: file[name].get_tensor(name) for name in file}, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder / 'layer.safetensors'} belongs to another layer: {error}") from error
    return layer
