"""The paths of a corpus in the JSON files of runs, which name no folder of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from halflife.data.documents import is_name
from halflife.data.tokenizers import OF_BYTES

DOTS = (f".{os.sep}", f"..{os.sep}")


def relative_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`CorpusConfig.to_dict` with paths relative to `folder`, so that the JSON names no folder of this machine."""
    data = _with_tokenizer(data, lambda name: _relative_tokenizer(name, folder))
    return _with_paths(data, lambda path: os.path.relpath(os.path.realpath(path), os.path.realpath(folder)))


def absolute_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The inverse of `relative_paths`. Absolute paths stay as they are."""

    def located(path: str) -> str:
        return os.path.normpath(os.path.join(os.path.realpath(folder), path))

    return _with_paths(_with_tokenizer(data, lambda name: located(name) if name.startswith(DOTS) else name), located)


def absolute_tokenizer(name: str) -> str:
    """The absolute path of a tokenizer's folder; the name of a tokenizer that is no folder here."""
    return name if name in OF_BYTES or not os.path.isdir(name) else os.path.abspath(name)


def _relative_tokenizer(name: str, folder: Path) -> str:
    """The path of a tokenizer's folder from `folder`, which begins with a dot as no name does; or the name."""
    if not os.path.isabs(name):
        return name
    path = os.path.relpath(os.path.realpath(name), os.path.realpath(folder))
    return path if path.startswith(DOTS) else os.path.join(".", path)


def _with_paths(data: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    def changed(sources: Iterable[Any]) -> list[Any]:
        return [s if not isinstance(s, str) or is_name(s) else change(s) for s in sources]

    paths = {"sources": changed(data["sources"])} if "sources" in data else {}
    return data | paths | ({"files": [changed(own) for own in data["files"]]} if "files" in data else {})


def _with_tokenizer(data: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    name = data.get("tokenizer")
    return {**data, "tokenizer": change(name)} if isinstance(name, str) else data
