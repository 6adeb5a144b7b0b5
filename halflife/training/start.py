"""Where training starts from: trained weights instead of new ones, and parameters that stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from halflife.data.hub import model_name, no_model
from halflife.files import sha256_of
from halflife.models import LanguageModel, ModelConfig
from halflife.models.load import check_finite, load_any

TOKEN_PARAMETERS = ("embedding.weight", "head.weight")  # parameters with one row for each token
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")  # of a model on the hub
MAX_NAMES_SHOWN = 4  # names in a message


def local_folder(source: str) -> Path:
    """A folder with a model: the folder itself, or that of the hub's cache for `owner/name[@revision]`.

    Neither is a FileNotFoundError. It is a ConnectionError if the hub does not answer and its cache lacks the model.
    """
    if Path(source).is_dir():
        return Path(source)
    if (found := model_name(source)) is None:
        raise FileNotFoundError(f"there is no folder {source}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(found[0], revision=found[1], allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the HTTP library of the client may raise anything
        raise no_model(source, str(error)) from error


def start_of(source: str, vocab_size: int) -> tuple[ModelConfig, str, str, int]:
    """What a run needs to know of the weights that it starts from, in a folder or on the hub (`local_folder`).

    It returns the configuration, whose embeddings grow to the `vocab_size` ids of the tokenizer, the absolute path of
    the folder, the SHA-256 of the weights, and the number of tokens in the folder.
    """
    folder = local_folder(source).resolve()
    model = load_any(folder)
    check_finite(model, folder)
    config = model.config
    grown = replace(config, vocab_size=max(vocab_size, config.vocab_size))
    return grown, str(folder), digest(folder), config.vocab_size


def digest(folder: Path) -> str:
    """Return the SHA-256 of the safetensors files in a folder."""
    return sha256_of(*sorted(folder.glob("*.safetensors")))


@torch.no_grad()
def load_start(model: LanguageModel, folder: Path, expected: str) -> None:
    """Copy the weights in a folder, whose SHA-256 is `expected`, into a new model. New tokens keep their new rows."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}, from which the run starts")
    if digest(folder) != expected:
        raise ValueError(f"the weights in {folder}, from which the run starts, have changed since it began")
    tensors, new = load_any(folder).state_dict(), model.state_dict()
    for name in TOKEN_PARAMETERS:
        if name in tensors and name in new and (old := tensors[name]).shape[1:] == new[name].shape[1:]:
            tensors[name] = torch.cat([old.to(new[name]), new[name][len(old) :]])
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the weights in {folder} do not fit the model of the run: {reason}") from error


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Let no gradient reach the parameters whose names match one of the patterns, such as `embedding*`."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = f"{', '.join(names[:MAX_NAMES_SHOWN])}, … ({len(names)} in all)"
            raise ValueError(f"--freeze {pattern} matches no parameter; there are {known}")
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"--freeze {' '.join(patterns)} leaves no parameter to train")
