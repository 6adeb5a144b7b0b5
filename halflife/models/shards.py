"""The tensors of a Hugging Face folder: one safetensors file, or an index and its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from halflife.files import WEIGHTS, read_json_object

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


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
            self.files = open_tensors(whole)
            return
        placed = read_json_object(index).get("weight_map")
        if not isinstance(placed, dict):
            raise ValueError(f"{index} has no weight_map")
        for shard in placed.values():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise ValueError(f"{index} names the shard {shard!r}, which is no file of its folder")
        self.files: dict[str, Any] = {}
        for shard in sorted(set(placed.values())):
            self.files |= open_tensors(folder / shard)
        if differing := sorted(placed.keys() ^ self.files.keys()):
            raise ValueError(f"{index} and its shards do not agree on {differing[0]} ({len(differing)} in all)")

    def __getitem__(self, name: str) -> Tensor:
        return self.files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def open_tensors(path: Path) -> dict[str, Any]:
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
