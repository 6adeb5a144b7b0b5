"""The paths of a corpus in the JSON files of runs, which name no folder of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from halflife.data.documents import is_name


def relative_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`CorpusConfig.to_dict` with paths relative to `folder`, so that the JSON names no folder of this machine."""
    return _with_paths(data, lambda path: os.path.relpath(os.path.realpath(path), os.path.realpath(folder)))


def absolute_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The inverse of `relative_paths`. Absolute paths, which earlier versions wrote, stay as they are."""
    return _with_paths(data, lambda path: os.path.normpath(os.path.join(os.path.realpath(folder), path)))


def _with_paths(data: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    def changed(sources: Iterable[Any]) -> list[Any]:
        return [s if not isinstance(s, str) or is_name(s) else change(s) for s in sources]

    paths = {name: changed(data[name]) for name in ("sources",) if name in data}
    return {**data, **paths, **({"files": [changed(own) for own in data["files"]]} if "files" in data else {})}
