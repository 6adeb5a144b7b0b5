"""Safetensors files with a checksum of what they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from halflife.files import atomic_path

CHECKSUM = "sha256"  # a key of the metadata


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


def read_tensors(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file and the strings about them.

    Files of other libraries have no checksum, and are not checked.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated, is no safetensors file, or has changed since it was written.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: {path.name} is missing")
    try:
        with safe_open(path, "pt") as file:
            about = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {' '.join(str(error).split())}") from error
    written = about.pop(CHECKSUM, None)
    if written is not None and written != checksum(tensors, about):
        raise ValueError(f"{path} is damaged: its content is not what was written. Copy it again, or make it anew")
    return {name: x.to(device) for name, x in tensors.items()}, about


def has_checksum(path: Path) -> bool:
    """Whether `write_tensors` wrote the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return CHECKSUM in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def checksum(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """SHA-256 of the names, types, shapes and values of tensors, and of the strings about them."""
    digest = hashlib.sha256(json.dumps(dict(sorted(about.items()))).encode())
    for name, x in sorted(tensors.items()):
        digest.update(json.dumps([name, str(x.dtype), list(x.shape)]).encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
