"""Selects the publishable files of a model's folder, and uploads them to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from halflife.extras import require
from halflife.files import (
    CHECKPOINTS,
    COMPLETE_JSON,
    CONFIG_JSON,
    METRICS_JSONL,
    RESULT_JSON,
    RUN_JSON,
    WEIGHTS,
    read_json_object,
)
from halflife.runs.folder import FIGURES, FolderKind, folder_kind, read_result

# Patterns of the files that are uploaded: the model, its tokenizer, its card with figures, and its numbers.
SHARED = (
    CONFIG_JSON, "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "README.md",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model",
    "chat_template.*", f"{FIGURES}/*.png", f"{FIGURES}/*.svg", METRICS_JSONL, RESULT_JSON,
)  # fmt: skip


def check_name(name: str) -> None:
    """Raise a ValueError if the name of a repository is not owner/name, or one that the Hub does not allow."""
    require("halflife push", "huggingface_hub")
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"the Hub allows no repository {name!r}: {' '.join(str(error).split())}") from None
    if "/" not in name:
        raise ValueError(f"name the repository as owner/name; got {name!r}")


def divide_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return the publishable files of a finished model, and the names of the other files in its folder.

    Raises:
        FileNotFoundError: the folder is missing or holds no model.
        ValueError: the folder is a checkpoint or a comparison, or its run has not ended or has diverged.
    """
    _check_finished(folder)
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    shared = [name for name in names if any(_matches(name, pattern) for pattern in SHARED)]
    kept = sorted({name.partition("/")[0] + "/" * ("/" in name) for name in names if name not in shared})
    return shared, [name for name in kept if not name.startswith(".")]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) and name.count("/") == pattern.count("/")


def _check_finished(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    if (folder / COMPLETE_JSON).exists() or folder.absolute().parent.name == CHECKPOINTS:
        raise ValueError(
            f"{folder} is a checkpoint of a run, with the state of its optimiser; push the folder of the run when it "
            "has ended"
        )
    if not (folder / RUN_JSON).exists() and not (folder / CONFIG_JSON).exists():
        raise FileNotFoundError(f"{folder} holds no model (it has no {CONFIG_JSON})")
    if (folder / RUN_JSON).exists() and not (folder / RESULT_JSON).exists():
        raise ValueError(f"the run in {folder} has not ended; continue it with --resume {folder}")
    config = read_json_object(folder / CONFIG_JSON)
    if "model_type" not in config and "format" not in config:
        kind = folder_kind(folder)
        if kind in (FolderKind.COMPARISON, FolderKind.GRID):
            raise ValueError(f"{folder} is a comparison of models; push the folder of one run in it")
    if not any(folder.glob("model*.safetensors")):
        raise FileNotFoundError(f"{folder} holds no weights (it has no {WEIGHTS})")
    if (folder / RESULT_JSON).exists() and (reason := read_result(folder).get("diverged")):
        raise ValueError(f"the run in {folder} diverged: {reason}")


def push(folder: Path, name: str, files: Sequence[str], *, private: bool) -> str:
    """Upload `files` of `folder` in one commit, and return the address of the repository.

    `private` holds for a repository that is created. One that exists stays as it is.

    Raises:
        ConnectionError: the Hub cannot be reached, or refuses; the message has its reason.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    unreached: Any = HfHubHTTPError.__bases__[0]  # what the client's HTTP library raises; versions use different ones
    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, allow_patterns=list(files), commit_message=f"Upload {folder.name}"
        )
    except LocalTokenNotFoundError as error:
        raise ConnectionError("the Hub asks who you are: log in with `hf auth login`, or set HF_TOKEN") from error
    except (unreached, OfflineModeIsEnabled) as error:
        raise ConnectionError(f"the Hub did not take {name}: {' '.join(str(error).split())}") from error
    return str(address)
