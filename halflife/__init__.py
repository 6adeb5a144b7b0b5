"""halflife: a library of linear recurrent sequence models, and of how they remember and forget."""

import importlib
from typing import Any

from halflife import decay, extensions, layers, ops, tasks
from halflife.extras import require
from halflife.models import SIZES, LanguageModel, ModelConfig, param_groups, preset
from halflife.models.session import Session

__version__ = "0.1.0"

__all__ = [
    "SIZES",
    "LanguageModel",
    "ModelConfig",
    "Session",
    "decay",
    "layers",
    "ops",
    "param_groups",
    "preset",
    "tasks",
]


def __getattr__(name: str) -> Any:
    """Import what needs more packages, or the upper floors, at its first access."""
    if name == "look":
        return importlib.import_module("halflife.report.look").look
    if name == "hf":
        require("halflife.hf", "transformers")
        return importlib.import_module("halflife.hf")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


extensions.load()
