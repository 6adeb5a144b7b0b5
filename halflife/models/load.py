"""Find the models in folders and load them, whichever library wrote them.

`halflife.models.checkpoint` reads halflife's models; those of other libraries go through `halflife.models.convert`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halflife.files import CONFIG_JSON, RESULT_JSON, WEIGHTS, read_json, read_json_object
from halflife.models.checkpoint import is_ours, load, runs_below
from halflife.models.config import ModelConfig
from halflife.models.convert import MIXERS, SOURCES, assemble
from halflife.models.lm import LanguageModel
from halflife.models.tensor_file import INDEX, Checkpoint


def load_any(folder: str | Path, device: torch.device | str = "cpu") -> LanguageModel:
    """Return the model in `folder`, which `checkpoint.save`, transformers' `save_pretrained` or another library wrote.

    A model of another library is converted in memory (`convert.SOURCES`). The weights must be safetensors, in one file
    or in shards.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the model cannot be converted, a file is damaged, or the weights do not fit the configuration.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG_JSON)
    if not isinstance(config, dict) or is_ours(config) or ("model_type" not in config and runs_below(folder)):
        return load(folder, device)
    kind = str(config.get("model_type", "model without a model_type"))
    if kind not in SOURCES:
        choices = ", ".join(["halflife", *SOURCES])
        hint = "; `halflife look` and `spectrum` read it in place" if kind in MIXERS else ""
        raise ValueError(
            f"{folder} holds a {kind}, which cannot be read or converted; model_type must be one of {choices}{hint}"
        )
    try:
        return assemble(*SOURCES[kind](config, Checkpoint(folder))).to(device)
    except RuntimeError as error:
        raise ValueError(f"{folder} holds a damaged checkpoint: {' '.join(str(error).split())}") from error


def check_finite(model: nn.Module, folder: str | Path) -> None:
    """Raise a ValueError if a weight is not finite: what such a model says would look like the words of a bad one."""
    if bad := [name for name, weight in model.named_parameters() if not weight.isfinite().all()]:
        raise ValueError(f"the model in {folder} has diverged: {bad[0]} holds numbers that are not finite")


def configurations(folders: Sequence[str]) -> list[ModelConfig]:
    """Return the configurations of the models in and below the folders, equal ones once; [] without folders.

    Raises:
        FileNotFoundError, ValueError: see `checkpoints` and `load_any`; or the models differ in width or layers.
    """
    found = checkpoints([Path(folder) for folder in folders]).values() if folders else ()
    configs = [*{(config := load_any(folder).config).to_json(): config for folder in found}.values()]
    if len({(config.hidden_size, config.num_layers) for config in configs}) > 1:
        each = ", ".join(f"{config.name} has {config.num_layers} of width {config.hidden_size:,}" for config in configs)
        raise ValueError(f"models of one size are compared, and their layers differ: {each}")
    return configs


def convertible(model_type: str) -> bool:
    """Whether `load_any` reads models of another library of this type."""
    return model_type in SOURCES


def checkpoints(folders: Sequence[Path], readable: Callable[[str], bool] = convertible) -> dict[str, Path]:
    """Return the checkpoints in and below the folders, as a mapping from label to folder.

    They are sorted within each folder, a comparison's in the order of its models, and none is listed twice. Checkpoints
    that are not readable are skipped.
    A label is the model's name. If two names agree, every label also has its folder's name; if these agree too, the
    labels are the folders' paths.

    Args:
        folders: the folders.
        readable: whether a model of another library counts, by its `model_type`.

    Raises:
        FileNotFoundError: a folder is missing or holds no checkpoint.
        ValueError: a `config.json` is damaged, or no folder is given.
    """
    names: dict[Path, str] = {}
    for root in folders:
        if not root.is_dir():
            raise FileNotFoundError(f"there is no folder {root}")
        below = {folder: name for folder in _folders(root) if (name := _model_name(folder, readable)) is not None}
        if not below and "model_type" in _config(root):
            below = {root: str(_config(root)["model_type"])}  # the error of `load_any` will say why it cannot be read
        if not below:
            raise FileNotFoundError(
                f"{root} and the folders below it hold no checkpoint (config.json and model.safetensors)"
            )
        known = {folder.resolve() for folder in names}
        names |= {folder: name for folder, name in below.items() if folder.resolve() not in known}
    if not names:
        raise ValueError("name at least one checkpoint or run")
    for labels in (list(names.values()), [f"{name} {folder.name}" for folder, name in names.items()]):
        if len(set(labels)) == len(names):
            return dict(zip(labels, names, strict=True))
    return {str(folder): folder for folder in names}


def without_diverged(found: dict[str, Path]) -> dict[str, Path]:
    """The models of `checkpoints` whose training did not diverge; a warning names the others, which hold no numbers.

    Raises:
        ValueError: there is none.
    """
    results = {label: read_json_object(folder / RESULT_JSON, optional=True) for label, folder in found.items()}
    if lost := [label for label, result in results.items() if "diverged" in result]:
        if len(lost) == len(found):
            raise ValueError(f"the training of {', '.join(lost)} diverged, so there is nothing to measure")
        warnings.warn(f"the training of {', '.join(lost)} diverged, so this is left out", stacklevel=2)
    return {label: folder for label, folder in found.items() if label not in lost}


def _folders(root: Path) -> Iterator[Path]:
    """Yield the folders with weights in and below `root`, and `root` itself if its config.json is a model's."""
    compared = _config(root).get("models")
    order = [str(name).replace("/", "-") for name in compared] if isinstance(compared, list) else []

    def place(path: Path) -> tuple[int, Path]:
        model = path.relative_to(root).parts[0]
        return (order.index(model) if model in order else len(order)), path

    if {"format", "model_type"} & _config(root).keys():
        yield root
    for pattern in (WEIGHTS, INDEX):
        yield from (path.parent for path in sorted(root.rglob(pattern), key=place))


def _config(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / CONFIG_JSON, optional=True)


def _model_name(folder: Path, readable: Callable[[str], bool]) -> str | None:
    config = _config(folder)
    model, kind = config.get("model"), config.get("model_type")
    if is_ours(config):
        return str(model.get("name", "custom")) if isinstance(model, dict) else "custom"
    return kind if isinstance(kind, str) and readable(kind) else None
