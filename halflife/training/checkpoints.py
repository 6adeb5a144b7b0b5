"""Checkpoints with checksums. A checkpoint counts only if all of its files are there and unchanged."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import torch
from transformers import TrainerCallback

from halflife.files import COMPLETE_JSON, write_json


class MarkComplete(TrainerCallback):
    """Writes the checksums of a checkpoint after every process has written its files.

    A process that is killed while it saves leaves a folder without checksums, which is never loaded. The Trainer
    removes an old checkpoint only after it has written a new one, so one complete checkpoint always exists.
    """

    def on_save(self, args, state, control, **kwargs) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            write_json(folder / COMPLETE_JSON, checksums(folder))


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file in a checkpoint, by its path relative to the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != COMPLETE_JSON)
    return {path.relative_to(folder).as_posix(): _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`, or None. A damaged checkpoint is skipped with a warning."""
    marked = [path.parent for path in folder.glob(f"checkpoint-*/{COMPLETE_JSON}")]
    for path in sorted(marked, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        damaged = _damaged(path)
        if not damaged:
            return path
        warnings.warn(f"{path} is damaged ({', '.join(damaged)}); continuing from an older checkpoint", stacklevel=2)
    return None


def _damaged(folder: Path) -> list[str]:
    """The files of a checkpoint that are missing or have changed."""
    try:
        written = json.loads((folder / COMPLETE_JSON).read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        written = None
    if not isinstance(written, dict):
        return [COMPLETE_JSON]
    present = checksums(folder)
    return [name for name, value in written.items() if present.get(name) != value]
