"""The versions of the packages and of the system that the numbers of a run depend on."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from halflife import __version__


def versions() -> dict[str, str]:
    """The versions of the packages that the numbers depend on, and the device."""
    names = ("torch", "transformers", "accelerate", "safetensors")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    packages = {name: _version(name) for name in names}
    system = {"python": platform.python_version(), "platform": platform.platform(), "device": device}
    return {"halflife": __version__, **packages, **system}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
