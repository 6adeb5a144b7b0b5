"""Models from any folder: ours, ours as one of transformers', and other libraries'; and where such folders lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halflife.files import read_json
from halflife.models.checkpoint import load
from halflife.models.config import ModelConfig
from halflife.models.convert import SOURCES, assemble
from halflife.models.convert.files import Checkpoint
from halflife.models.lm import LanguageModel


def load_any(folder: str | Path, device: torch.device | str = "cpu") -> LanguageModel:
    """The model in `folder`: as `checkpoint.save` wrote it, as transformers' `save_pretrained` did, or of
    another library.

    Those of other libraries are converted in memory (`convert.SOURCES`). Safetensors only, whole or sharded.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a model that cannot be converted, a damaged file, or weights that do not fit the configuration.
    """
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


def checkpoints(folders: Sequence[Path]) -> dict[str, Path]:
    """label → folder of every checkpoint in or below the folders, sorted within each, none twice.

    Checkpoints are those that `load_any` reads; others below a folder are passed over. Labels are the models'
    names; where two agree, all get their folder's name too, or else are their folders.

    Raises:
        FileNotFoundError: a folder is missing, or there is no checkpoint in it.
        ValueError: a damaged `config.json`.
    """
    names: dict[Path, str] = {}
    for root in folders:
        if not root.is_dir():
            raise FileNotFoundError(f"there is no folder {root}")
        below = {folder: name for folder in _folders(root) if (name := _model_name(folder)) is not None}
        if not below and "model_type" in _config(root):
            below = {root: str(_config(root)["model_type"])}  # loading it says why it cannot be read
        if not below:
            raise FileNotFoundError(
                f"{root} holds no checkpoint (config.json and model.safetensors), nor do its folders"
            )
        known = {folder.resolve() for folder in names}
        names |= {folder: name for folder, name in below.items() if folder.resolve() not in known}
    if not names:
        raise ValueError("name at least one checkpoint or run")
    for labels in (list(names.values()), [f"{name} {folder.name}" for folder, name in names.items()]):
        if len(set(labels)) == len(names):
            return dict(zip(labels, names, strict=True))
    return {str(folder): folder for folder in names}


def _folders(root: Path) -> Iterator[Path]:
    """The folders with weights in or below a folder, and that itself if it says to be a model's."""
    if {"format", "model_type"} & _config(root).keys():
        yield root
    for pattern in ("model.safetensors", "model.safetensors.index.json"):
        yield from (path.parent for path in sorted(root.rglob(pattern)))


def _config(folder: Path) -> dict[str, Any]:
    return json_object(folder / "config.json")


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no such file, or it holds no object."""
    data = read_json(path) if path.is_file() else None
    return data if isinstance(data, dict) else {}


def _model_name(folder: Path) -> str | None:
    """The name of the model in a checkpoint; None for other folders."""
    config = _config(folder)
    model, kind = config.get("model"), config.get("model_type")
    if "format" in config or kind == "halflife":
        return model.get("name", "custom") if isinstance(model, dict) else "custom"
    return kind if kind in SOURCES else None
