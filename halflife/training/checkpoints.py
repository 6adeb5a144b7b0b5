"""Checkpoints that can be trusted: one counts when all of its files are there with the bytes that were written."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import torch
from transformers import TrainerCallback

from halflife.files import write_json

COMPLETE = "complete.json"  # of a checkpoint that was written to its end: file → SHA-256


class MarkComplete(TrainerCallback):
    """Writes the sums of a checkpoint when every process has written its files, so that no half of one is ever taken.

    The Trainer removes the checkpoint before the last only after a new one is written, and a killed process leaves at
    worst a folder without sums: there is always one that is whole.
    """

    def on_save(self, args, state, control, **kwargs) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            write_json(folder / COMPLETE, sums(folder))


def sums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file in a checkpoint, by its path in there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != COMPLETE)
    return {path.relative_to(folder).as_posix(): _sum(path) for path in files}


def _sum(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`, None if there is none; a damaged one is warned of and passed over."""
    marked = [path.parent for path in folder.glob(f"checkpoint-*/{COMPLETE}")]
    for path in sorted(marked, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        damaged = _damaged(path)
        if not damaged:
            return path
        warnings.warn(f"{path} is damaged ({', '.join(damaged)}); going on from the one before", stacklevel=2)
    return None


def _damaged(folder: Path) -> list[str]:
    """The files of a checkpoint that are missing or not what was written."""
    try:
        written = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        written = None
    if not isinstance(written, dict):
        return [COMPLETE]
    found = sums(folder)
    return [name for name, value in written.items() if found.get(name) != value]
