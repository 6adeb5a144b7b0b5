"""Atomic writes of files, reads whose errors name the file, and a lock on folders."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import os
import re
import secrets
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from io import StringIO
from pathlib import Path
from typing import IO, Any

# Files in the folders of models and runs that several parts of the package name; `runs.folder` says what they hold.
CONFIG_JSON = "config.json"
WEIGHTS = "model.safetensors"
RUN_JSON = "run.json"
VERSIONS_JSON = "versions.json"  # versions of the packages, the device, and the command of a language run
METRICS_JSONL = "metrics.jsonl"
PROFILE_CSV, TRACE_JSON = "profile.csv", "trace.json"  # of `halflife train --profile`
RESULT_JSON = "result.json"
CHECKPOINTS = "checkpoints"  # a folder
COMPLETE_JSON = "complete.json"  # in a folder of `checkpoints` that was written to its end
DECAYS_JSON = "decays.json"  # from `halflife spectrum`, as is the next
KOOPMAN_JSON = "koopman.json"
FORECAST_JSON = "forecast.json"  # from `halflife forecast`
THEORY_JSON = "theory.json"  # from `halflife theory`

UNPACKED = 1 << 28  # bytes; the largest text that `read_bytes` decompresses
# What `atomic_path` and safetensors leave beside a file when the process is killed.
_ORPHAN = re.compile(r"\..+\.tmp|\.tmp[0-9A-Za-z]{6}")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary path in the same folder. It is moved to `path` at the end, or deleted after an exception.

    The content is on the disk before the move, so that a crash of the machine leaves the old file or the new one. The
    name is random and the file is created exclusively: processes of two machines never share it. The file has the
    permissions that the user's umask gives.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    mode = os.fstat(descriptor).st_mode
    os.close(descriptor)
    try:
        with naming(path):
            yield temporary
            os.chmod(temporary, mode)  # safetensors puts a file of mode 0600 in its place
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of a file to the errors of writing into it, which do not have it: a full disk, a limit of size."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():  # some file systems cannot sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_orphans(folder: Path, older_than: float = 0.0) -> None:
    """Delete the temporary files that killed processes left in `folder`, which need not exist.

    Files younger than `older_than` seconds stay, because another process may be writing them.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if _ORPHAN.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            with suppress(FileNotFoundError):
                if not older_than or time.time() - path.stat().st_mtime >= older_than:
                    path.unlink()


def write_text(path: Path, text: str) -> Path:
    """Write `text` atomically (see `atomic_path`), so that a reader never sees half a file; return the file."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table with a row of headings as comma-separated values. None is an empty cell."""
    table = StringIO()
    csv.writer(table, lineterminator="\n").writerows([columns, *rows])
    return table.getvalue()


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write `csv_text` atomically; return the file."""
    return write_text(path, csv_text(columns, rows))


def write_json(path: Path, data: Any) -> Path:
    """Write `data` as JSON atomically; return the file. A number that is not finite becomes null, see `finite`."""
    return write_text(path, json.dumps(finite(data), indent=2, allow_nan=False) + "\n")


def write_with_table(data: Any, columns: Sequence[str], rows: Iterable[Sequence[Any]], path: Path) -> list[Path]:
    """Write data as `path.json` and its table as `path.csv`; return both files."""
    return [write_json(path.with_suffix(".json"), data), write_csv(path.with_suffix(".csv"), columns, rows)]


def finite(data: Any) -> Any:
    """Return the data with None in place of numbers that are not finite, which JSON cannot hold."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def without_null(data: Any, value: float) -> Any:
    """Return data that was read from JSON with `value` in place of None."""
    if isinstance(data, dict):
        return {key: without_null(part, value) for key, part in data.items()}
    if isinstance(data, list):
        return [without_null(part, value) for part in data]
    return value if data is None else data


def read_json(path: Path) -> Any:
    """Return the content of the JSON file `path`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated or not JSON; the message names it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is damaged: its brackets are nested too deeply") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path} is truncated or no JSON: {error}") from error


def read_json_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Return the JSON object in `path`; raises as `read_json`. With `optional`, a missing file or other JSON is an
    empty object.
    """
    data = None if optional and not path.is_file() else read_json(path)
    if not isinstance(data, dict) and not optional:
        raise ValueError(f"{path} holds no JSON object")
    return data if isinstance(data, dict) else {}


NUMBER = (int, float, type(None))  # a number of a JSON file, where null stands for one that is not finite
METRICS = {"step": int, "gates": {str: {str: NUMBER}}}  # the entries of a line of metrics; others are numbers


def flatten(data: Mapping[str, Any], divider: str = ".", prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one dict, whose names have the levels divided by `divider`."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        inner = isinstance(value, Mapping)
        flat |= flatten(value, divider, f"{prefix}{name}{divider}") if inner else {f"{prefix}{name}": value}
    return flat


def fits(value: Any, schema: Any) -> bool:
    """Whether JSON data has the types of a schema.

    A schema is a type or several, a `range` of whole numbers, `[item]` for a list, `{str: item}` for a mapping with any
    names, or `{"name": item}` for a mapping that may have further names. A name that ends in "?" may be missing.
    """
    if isinstance(schema, list):
        return isinstance(value, list) and all(fits(item, schema[0]) for item in value)
    if isinstance(schema, range):
        return type(value) is int and value in schema
    if not isinstance(schema, dict):
        huge = isinstance(value, int) and value.bit_length() > 1000  # larger than any float
        return isinstance(value, schema) and not huge and (schema is bool or not isinstance(value, bool))
    if not isinstance(value, dict):
        return False
    if str in schema:
        return all(fits(item, schema[str]) for item in value.values())
    names = {name.removesuffix("?"): name for name in schema}
    return all(fits(value[name], schema[key]) if name in value else key != name for name, key in names.items())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, one dict with the key "step" each; no lines if there is no file.

    A killed process can leave half of a last line, which is left out. Other lines that are damaged are left out with a
    warning that counts them.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines, damaged = [], 0
    for line in text.splitlines(keepends=True):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if (
            isinstance(values, dict)
            and "step" in values
            and all(fits(x, METRICS.get(name, NUMBER)) for name, x in values.items())
        ):
            lines.append(values)
        else:
            damaged += line.endswith("\n")
    if damaged:
        warnings.warn(f"{path} has {damaged} damaged line{'s' * (damaged > 1)}, which are left out", stacklevel=2)
    return lines


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, and decompress it if its name ends in `.gz`. Errors while it is read name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield file  # pyright: ignore
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is truncated or not gzip: {error}") from error


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a text file, decompressed if its name ends in `.gz`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, not complete gzip data, or larger than `UNPACKED` when it is decompressed; the
            message names it.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the files in it")
    with opened(path) as file:
        data = file.read(UNPACKED + 1 if path.suffix == ".gz" else -1)  # few megabytes may stand for any number
    if not data:
        raise ValueError(f"{path} is empty")
    if path.suffix == ".gz" and len(data) > UNPACKED:
        raise ValueError(f"{path} unpacks to more than {UNPACKED >> 20} MB; unpack it with gunzip, and name that file")
    return data


def sha256_of(*paths: Path) -> str:
    """SHA-256 of the content of files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def check_new_folder(folder: Path) -> None:
    """Raise a FileExistsError if a folder holds more than a lock and temporary files of a killed process."""
    if folder.exists() and any(path.name != ".lock" and not _ORPHAN.fullmatch(path.name) for path in folder.iterdir()):
        raise FileExistsError(f"{folder.absolute()} is not empty; choose another folder")


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Check that files can be made in a folder before the work of hours inside this block. The OSError names it.

    The folder is made, and removed at the end if it is still empty.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with atomic_path(folder / ".writable"):
            pass
        (folder / ".writable").unlink()
        yield
    finally:
        for path in made:
            with suppress(OSError):  # it has content
                path.rmdir()


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
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=patience)
    except Timeout:
        raise ValueError(f"another process is at work in {folder}; wait until it ends, or stop it") from None
    with lock:
        yield
