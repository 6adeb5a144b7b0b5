"""Write Hugging Face folders. Weights are safetensors only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from halflife.files import CONFIG_JSON, WEIGHTS, write_json
from halflife.models.tensor_file import write_tensors


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
