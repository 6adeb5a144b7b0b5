"""A model in a folder: `config.json` and `model.safetensors`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halflife.files import read_json, replacing, write_json
from halflife.models.config import ModelConfig
from halflife.models.lm import LanguageModel

FORMAT = 1  # raised when a checkpoint of before can no longer be read


def save(model: LanguageModel, folder: str | Path, tokenizer: str | None = None) -> Path:
    """Writes the model's configuration and weights into `folder`; returns the folder.

    transformers reads it too: `AutoModelForCausalLM.from_pretrained(folder)`, after `import halflife.hf`.

    Args:
        tokenizer: name of the one built in that the model reads ("bytes", "bytes+eos"), if any.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as temporary:
        save_file({name: x.contiguous() for name, x in model.state_dict().items()}, temporary, {"format": "pt"})
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    known = {"model_type": "halflife", "architectures": ["HalflifeForCausalLM"], "dtype": dtype}
    named = {} if tokenizer is None else {"tokenizer": tokenizer}
    write_json(folder / "config.json", {"format": FORMAT, **known, **named, "model": model.config.to_dict()})
    return folder


def load(folder: str | Path, device: torch.device | str = "cpu") -> LanguageModel:
    """The model in `folder`, as `save` wrote it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another format, a truncated file, or weights that do not fit the configuration.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or "format" not in config:
        raise ValueError(f"{folder} holds no checkpoint of halflife: its config.json names no format")
    if config["format"] != FORMAT:
        raise ValueError(f"{folder} holds a checkpoint of format {config['format']}; this version reads {FORMAT}")
    if "model" not in config:
        raise ValueError(f"{folder} holds a damaged checkpoint: its config.json describes no model")
    weights = folder / "model.safetensors"
    if not weights.exists():
        raise FileNotFoundError(f"{weights} is missing")
    with torch.device("meta"):
        model = LanguageModel(ModelConfig.from_dict(config["model"]))
    try:
        tensors = load_file(weights, device=str(device))
        model.load_state_dict(tensors, assign=True)
    except (SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{weights} is truncated or of another model: {reason}") from error
    return model


def load_any(folder: str | Path, device: torch.device | str = "cpu") -> LanguageModel:
    """The model in `folder`: as `save` wrote it, as transformers' `save_pretrained` did, or of another library.

    Those of other libraries are converted in memory (`convert.SOURCES`). Safetensors only, whole or sharded.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a model that cannot be converted, a damaged file, or weights that do not fit the configuration.
    """
    from halflife.models.convert import SOURCES, assemble  # which itself needs this file
    from halflife.models.convert.files import Checkpoint

    folder = Path(folder)
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or "format" in config or "model_type" not in config:
        return load(folder, device)
    kind = str(config["model_type"])
    if kind != "halflife" and kind not in SOURCES:
        choices = ", ".join(["halflife", *SOURCES])
        raise ValueError(f"{folder} holds a {kind}, which cannot be read or converted; model_type is one of {choices}")
    convert = _of_transformers if kind == "halflife" else SOURCES[kind]
    try:
        return assemble(*convert(config, Checkpoint(folder))).to(device)
    except RuntimeError as error:
        raise ValueError(f"{folder} holds a damaged checkpoint: {' '.join(str(error).split())}") from error


def _of_transformers(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """What `hf.HalflifeForCausalLM` saves: the same weights, under `model.`."""
    if not isinstance(config.get("model"), dict):
        raise ValueError("this is a damaged checkpoint: its config.json describes no model")
    return ModelConfig.from_dict(config["model"]), {name.removeprefix("model."): tensors[name] for name in tensors}
