"""Checkpoints on the disk: a Hugging Face folder in and out, and one layer on its own. Safetensors only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from halflife import layers
from halflife.files import atomic_path, read_json, write_json
from halflife.layers import Mixer

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
LAYER_FORMAT = 1


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a Hugging Face folder by name, in one file or in shards; each is read when it is asked for.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and its shards.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: pickles alone, a truncated file, or shards that do not hold what the index says.
    """

    def __init__(self, folder: Path) -> None:
        whole, index = folder / "model.safetensors", folder / INDEX
        if whole.exists() or not index.exists():
            self.files = _open(whole)
            return
        placed = read_object(index).get("weight_map")
        if not isinstance(placed, dict):
            raise ValueError(f"{index} has no weight_map")
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
    """Every name in a file, with the open file."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        pickles = sorted(p.name for p in path.parent.glob("*") if p.suffix in PICKLES)
        if pickles:
            raise ValueError(f"{path.parent} holds {pickles[0]}, a pickle, but no safetensors: only those are read")
        raise FileNotFoundError(f"{path} is missing")
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}") from error
    return dict.fromkeys(file.keys(), file)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; the errors are those of `files.read_json`, and ValueError for a list or a number."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no JSON object")
    return data


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, whole or not at all."""
    from safetensors.torch import save_file

    with atomic_path(path) as temporary:
        save_file({name: x.contiguous() for name, x in tensors.items()}, temporary, {"format": "pt"})


def write_model(folder: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A Hugging Face folder: `config.json` and `model.safetensors`; returns it."""
    write_tensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", config)
    return folder


def save_layer(folder: str | Path, name: str, options: dict[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """One layer: its name and options in `layer.json`, its weights in `layer.safetensors`; returns the folder.

    Args:
        name: a name of `layers.LAYERS`.
        options: what `layers.build` takes, hidden_size too.
        tensors: the layer's state dict.
    """
    folder = Path(folder)
    write_tensors(folder / "layer.safetensors", tensors)
    write_json(folder / "layer.json", {"format": LAYER_FORMAT, "layer": name, "options": options})
    return folder


def load_layer(folder: str | Path) -> Mixer:
    """The layer in `folder`, as `save_layer` wrote it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another format, a truncated file, or weights that do not fit the options.
    """
    import torch

    folder = Path(folder)
    data = read_object(folder / "layer.json")
    if data.get("format") != LAYER_FORMAT:
        raise ValueError(f"{folder} holds a layer of format {data.get('format')}; this version reads {LAYER_FORMAT}")
    file = _open(folder / "layer.safetensors")
    with torch.device("meta"):
        layer = layers.build(data["layer"], **data["options"])
    try:
        layer.load_state_dict({name: file[name].get_tensor(name) for name in file}, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder / 'layer.safetensors'} is of another layer: {error}") from error
    return layer
