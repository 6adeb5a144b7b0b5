"""Checkpoints with checksums. A checkpoint counts only if all of its files are there and unchanged."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from halflife.files import COMPLETE_JSON, read_json_object, sha256_of, sync, write_json
from halflife.training.config import rank

PARTIAL = ".partial"  # the folder in which a checkpoint is written
KEPT = 2  # checkpoints of a run


class UnreadableCheckpoint(Exception):
    """A checkpoint whose checksums are right and that cannot be loaded all the same."""


class CheckpointStore:
    """The checkpoints of a run, `checkpoint-<step>/` in one folder, of which the two newest by their steps are kept.

    A checkpoint is written into another folder, gets its checksums, and is then renamed, so a process that is killed
    leaves either a whole checkpoint or none. Times of files are never compared, because a clock can be wrong.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        newest = last_checkpoint(folder)
        self.whole = [] if newest is None else [newest]  # checkpoints of this run whose files are known to be right

    @property
    def newest(self) -> Path | None:
        """The checkpoint from which the run continues."""
        return self.whole[-1] if self.whole else None

    @contextmanager
    def write(self, step: int) -> Iterator[Path]:
        """Give the folder into which every process writes `checkpoint-<step>/`; publish the checkpoint at the end.

        Raises:
            OSError: the checkpoint cannot be written, for example because the disk is full.
        """
        partial, first = self.folder / PARTIAL, rank() == 0
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / f"checkpoint-{step}").mkdir(parents=True)
        _barrier()
        try:
            yield partial
            _barrier()
            if first:
                self._publish(partial / f"checkpoint-{step}")
        except Exception as error:
            raise self._error(step, error) from error
        finally:
            if first:
                shutil.rmtree(partial, ignore_errors=True)
        _barrier()

    def _publish(self, written: Path) -> None:
        write_json(written / COMPLETE_JSON, checksums(written))
        for path in written.rglob("*"):
            sync(path)
        place = self.folder / written.name
        # What stands there is damaged: the run would not have come to this step otherwise.
        place.unlink() if place.is_file() else shutil.rmtree(place, ignore_errors=True)
        written.rename(place)
        sync(self.folder)
        self.whole = [*(path for path in self.whole if path != place), place][-KEPT:]
        for path in self.folder.glob("checkpoint-*"):
            if path not in self.whole:
                shutil.rmtree(path, ignore_errors=True)

    def discard(self, path: Path) -> None:
        """Remove the checksums of a checkpoint that cannot be loaded, so that it is never tried again."""
        _barrier()
        if rank() == 0:
            (path / COMPLETE_JSON).unlink(missing_ok=True)
        _barrier()

    def _error(self, step: int, error: Exception) -> OSError:
        usage = shutil.disk_usage(self.folder)
        size = sum(file.stat().st_size for file in (self.newest or self.folder).rglob("*") if file.is_file())
        needed = f"; the last checkpoint has {size:,} bytes" if self.newest else ""
        return OSError(
            f"cannot write the checkpoint of step {step} into {self.folder}: {_reason(error)} "
            f"({usage.free:,} bytes are free there{needed}). Make room, then resume the run"
        )


@contextmanager
def loading(checkpoint: Path) -> Iterator[None]:
    """Turn the errors of whatever reads `checkpoint` into `UnreadableCheckpoint`. Errors of the disk stay errors."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise UnreadableCheckpoint(f"{checkpoint} cannot be loaded ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file in a checkpoint, by its path relative to the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != COMPLETE_JSON)
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`, or None. A damaged checkpoint is skipped with a warning."""
    marked = [p.parent for p in folder.glob(f"checkpoint-*/{COMPLETE_JSON}") if p.parent.name[11:].isdecimal()]
    for path in sorted(marked, key=lambda path: int(path.name[11:]), reverse=True):
        damaged = _damaged(path)
        if not damaged:
            return path
        warnings.warn(
            f"{path} is damaged ({', '.join(damaged)}); the run continues from an older checkpoint, or from its start",
            stacklevel=2,
        )
    return None


def _damaged(folder: Path) -> list[str]:
    """The files of a checkpoint that are missing, have changed, or were not there when it was written."""
    try:
        written = read_json_object(folder / COMPLETE_JSON)
    except ValueError:
        written = {}
    if not written:
        return [COMPLETE_JSON]
    present = checksums(folder)
    return [name for name in {**written, **present} if present.get(name) != written.get(name)]
