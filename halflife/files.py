"""Atomic writes of files, reads whose errors name the file, and a lock on folders."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Files in the folders of models and runs that several parts of the package name; `runs.folder` says what they hold.
CONFIG_JSON = "config.json"
WEIGHTS = "model.safetensors"
RUN_JSON = "run.json"
METRICS_JSONL = "metrics.jsonl"
RESULT_JSON = "result.json"
CHECKPOINTS = "checkpoints"  # a folder
COMPLETE_JSON = "complete.json"  # in a folder of `checkpoints` that was written to its end
DECAYS_JSON = "decays.json"  # from `halflife spectrum`, as is the next
KOOPMAN_JSON = "koopman.json"
FORECAST_JSON = "forecast.json"  # from `halflife forecast`
THEORY_JSON = "theory.json"  # from `halflife theory`


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary path in the same folder. It is moved to `path` at the end, or deleted after an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically (see `atomic_path`), so that a reader never sees half a file."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """Write `data` as JSON atomically."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Return the content of the JSON file `path`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated or not JSON; the message names it.
    """
    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is truncated or no JSON: {error}") from error


def read_json_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Args:
        path: the file.
        optional: return an empty object where the file is missing or holds another kind of JSON.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: the file is truncated or is no JSON, or holds no object. The message names the file.
    """
    data = None if optional and not path.is_file() else read_json(path)
    if isinstance(data, dict):
        return data
    if optional:
        return {}
    raise ValueError(f"{path} holds no JSON object")


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a text file, decompressed if its name ends in `.gz`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty or not complete gzip data; the message names it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is truncated or no gzip: {error}") from error
    if not data:
        raise ValueError(f"{path} is empty")
    return data


@contextmanager
def folder_lock(folder: Path, patience: float = 0) -> Iterator[None]:
    """Lock `folder` against other processes that use this lock. The system releases the lock of a killed process.

    Args:
        folder: the folder, which is created if it does not exist.
        patience: seconds to wait for another process to release the lock.

    Raises:
        ValueError: another process still holds the lock.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        raise ValueError(f"another process is at work in {folder}; wait until it ends, or stop it") from None
    try:
        yield
    finally:
        lock.release()
