"""Text of the Hugging Face Hub. A data set is streamed once and cached as JSON lines."""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halflife.data.cache import cache_folder, locked
from halflife.extras import missing
from halflife.files import atomic_path

GRAMMAR = "hf:owner/name[:configuration[:split]][@revision], the split as in train or train[:10000]"
HUB_SECONDS = 5  # seconds in which the hub must answer about a data set
MODEL_TIMEOUT = 10  # seconds in which it must answer about a model
_MODEL = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+?)(@(?P<revision>[\w.-]+))?")
_SOURCE = re.compile(
    r"hf:(?P<name>[^:@\s]+)(@(?P<revision>[^:@\s]+))?"
    r"(:(?P<configuration>[^:@\s]*)(:(?P<split>[^:@\[\s]+)(\[:(?P<rows>\d+)\])?)?)?(@(?P<last>[^:@\s]+))?"
)


@dataclass(frozen=True)
class HubSource:
    """A data set of the hub."""

    name: str  # "owner/name"
    revision: str | None = None  # a commit, branch or tag; a full commit that is cached needs no network
    configuration: str | None = None  # None for the default of the data set
    split: str = "train"
    rows: int | None = None  # rows from the start of the split; None for all

    @classmethod
    def parse(cls, source: str) -> HubSource:
        """Parse `hf:…`; a ValueError shows the `GRAMMAR`."""
        if (match := _SOURCE.fullmatch(source)) is None:
            raise ValueError(f"{source!r} is not a data set of the hub; write {GRAMMAR}")
        found = match.groupdict()
        rows = None if found["rows"] is None else int(found["rows"])
        if rows == 0:
            raise ValueError(f"{source!r} asks for zero rows")
        if found["revision"] and found["last"]:
            raise ValueError(f"{source!r} has two revisions")
        revision, split = found["revision"] or found["last"], found["split"] or "train"
        return cls(found["name"], revision, found["configuration"] or None, split, rows)

    def at(self, commit: str) -> str:
        """The source as `parse` reads it, at a commit."""
        rows = "" if self.rows is None else f"[:{self.rows}]"
        return f"hf:{self.name}@{commit}:{self.configuration or ''}:{self.split}{rows}"


def model_name(source: str | Path) -> tuple[str, str | None] | None:
    """The name and revision in `owner/name[@revision]`, a model of the hub; None for a path that exists, or no name."""
    match = None if Path(source).exists() else _MODEL.fullmatch(str(source))
    return None if match is None else (match["name"], match["revision"])


def unreachable(name: str, revision: str | None) -> str | None:
    """Return the reason why the hub does not answer about a model within some seconds, or None if it does.

    Without this question, transformers would retry for a minute.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, revision=revision, timeout=MODEL_TIMEOUT)
    except Exception as error:  # the HTTP library of the client may raise anything
        return " ".join(str(error).split())[:200]
    return None


def no_model(source: str | Path, reason: str) -> ConnectionError:
    """The error for a model that is neither a folder nor, because the hub does not answer, a model of the hub."""
    reason = textwrap.shorten(reason, 200, placeholder=" …")
    return ConnectionError(f"there is no folder {source}, and the hub cannot be asked for it: {reason}")


def fetch(source: str, field: str = "text", cache: Path | None = None) -> Path:
    """The file of JSON lines of a data set. It is downloaded row by row unless the cache holds this revision.

    Raises:
        ValueError: `source` does not have the form of `GRAMMAR`, the data set has no such configuration, split or
            column, or a row is not a string.
        ImportError: `datasets` is not installed.
        ConnectionError: the hub cannot be reached (this takes some seconds), or has no such data set.
    """
    wanted = HubSource.parse(source)
    commit = commit_of(wanted)
    parts = [wanted.name, commit, wanted.configuration, wanted.split, wanted.rows, field]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    path = cache_folder(cache) / "downloads" / f"{wanted.name.replace('/', '--')}-{key}.jsonl"
    if not path.exists():
        with locked(path):
            if not path.exists():
                with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
                    file.writelines(json.dumps({field: text}) + "\n" for text, _ in texts(wanted, commit, field))
    return path


def commit_of(wanted: HubSource) -> str:
    """The commit that a source names. The hub is asked, unless the revision is a whole commit."""
    is_commit = re.fullmatch("[0-9a-f]{40}", wanted.revision or "")
    return str(wanted.revision) if is_commit else _commit(wanted)


def _commit(wanted: HubSource) -> str:
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(wanted.name, revision=wanted.revision, timeout=HUB_SECONDS).sha)
    except Exception as error:  # the HTTP library of the client may raise anything
        raise ConnectionError(
            f"cannot ask the hub about {wanted.name} ({_line(error)}); a cached data set needs no "
            "network if you give its commit: hf:owner/name@commit"
        ) from error


def texts(
    wanted: HubSource, commit: str, field: str, state: dict[str, Any] | None = None, read: int = 0
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the text of each row, and a function that returns where the stream stands after this row.

    A stream can go on at the `state` of an earlier one, which has read `read` rows.

    Raises:
        ValueError, ImportError, ConnectionError: as `fetch`.
    """
    try:
        import datasets  # pyright: ignore
    except ImportError as error:
        raise missing(f"hf:{wanted.name}", "datasets") from error
    _commit(wanted)  # raises at once if the hub cannot be reached; `datasets` would retry for half a minute
    try:
        options: dict[str, Any] = {"split": wanted.split, "revision": commit, "streaming": True}
        rows = datasets.load_dataset(wanted.name, wanted.configuration, **options)
        if state is not None:
            rows.load_state_dict(state)
        for i, row in enumerate(rows, start=read + 1):
            if wanted.rows is not None and i > wanted.rows:
                return
            yield _text(row, field, i), rows.state_dict
    except ValueError as error:
        raise ValueError(f"hf:{wanted.name}: {_line(error)}") from error
    except Exception as error:  # the readers of the library may raise anything
        raise ConnectionError(f"cannot download hf:{wanted.name}: {_line(error)}") from error


def _text(row: dict[str, object], field: str, number: int) -> str:
    if field not in row:
        raise ValueError(f"there is no column {field!r}; the columns are {', '.join(row)}")
    text = row[field]
    if not isinstance(text, str):
        raise ValueError(f"row {number}: {field!r} is {type(text).__name__}, not a string")
    return text


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
