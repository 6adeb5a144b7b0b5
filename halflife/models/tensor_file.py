"""Safetensors files: ours, with a checksum of what they hold, and the folders of Hugging Face, perhaps in shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halflife.files import WEIGHTS, atomic_path, read_json_object

CHECKSUM = "sha256"  # a key of the metadata
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors and strings about them. After a failure the file is as it was before."""
    from safetensors.torch import save_file

    contiguous = {name: x.detach().contiguous() for name, x in tensors.items()}
    with atomic_path(path) as temporary:
        save_file(contiguous, temporary, {**about, CHECKSUM: checksum(contiguous, about)})
        _sort_metadata(temporary)


def _sort_metadata(path: Path) -> None:
    """Sort the strings in a safetensors header, whose order is random. Equal content then has equal bytes."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        data = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(data) == size:
            file.seek(8)
            file.write(data)


def open_tensors(path: Path) -> Any:
    """Open a safetensors file, whose tensors are read when they are accessed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: {path.name} is missing")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is truncated or no safetensors file: {' '.join(str(error).split())}")


def read_tensors(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file and the strings about them. Files without a checksum are not checked.

    Raises:
        FileNotFoundError, ValueError: see `open_tensors`; or the file has changed since it was written.
    """
    from safetensors import SafetensorError

    try:
        with open_tensors(path) as file:
            about = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    except (SafetensorError, RuntimeError) as error:
        raise _damaged(path, error) from error
    written = about.pop(CHECKSUM, None)
    if written is not None and written != checksum(tensors, about):
        raise ValueError(f"{path} is damaged: its content is not what was written. Copy it again, or make it anew")
    return {name: x.to(device) for name, x in tensors.items()}, about


def has_checksum(path: Path) -> bool:
    """Whether `write_tensors` wrote the file."""
    try:
        with open_tensors(path) as file:
            return CHECKSUM in (file.metadata() or {})
    except (OSError, ValueError):
        return False


def checksum(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """SHA-256 of the names, types, shapes and values of tensors, and of the strings about them."""
    digest = hashlib.sha256(json.dumps(dict(sorted(about.items()))).encode())
    for name, x in sorted(tensors.items()):
        digest.update(json.dumps([name, str(x.dtype), list(x.shape)]).encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
            self.files = _by_name(whole)
            return
        placed = read_json_object(index).get("weight_map")
        if not isinstance(placed, dict):
            raise ValueError(f"{index} has no weight_map")
        for shard in placed.values():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise ValueError(f"{index} names the shard {shard!r}, which is no file of its folder")
        self.files: dict[str, Any] = {}
        for shard in sorted(set(placed.values())):
            self.files |= _by_name(folder / shard)
        if differing := sorted(placed.keys() ^ self.files.keys()):
            raise ValueError(f"{index} and its shards do not agree on {differing[0]} ({len(differing)} in all)")

    def __getitem__(self, name: str) -> Tensor:
        return self.files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def _by_name(path: Path) -> dict[str, Any]:
    pickles = sorted(p.name for p in path.parent.glob("*") if p.suffix in PICKLES)
    if pickles and not path.is_file():
        raise ValueError(f"{path.parent} holds {pickles[0]}, a pickle; only safetensors are read")
    file = open_tensors(path)
    return dict.fromkeys(file.keys(), file)
