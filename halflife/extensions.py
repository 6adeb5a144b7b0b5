"""Modules of users, which register decays, layers, presets and tasks of their own.

`import halflife` imports the modules that the environment variable `HALFLIFE_IMPORT` names, divided by commas, and the
entry points of installed distributions in the group "halflife". A worker process inherits the variable, so it knows
what the command knows.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

VARIABLE = "HALFLIFE_IMPORT"
GROUP = "halflife"
IMPORTS = "imports"  # the key of `run.json` and of a comparison's `config.json`


def names() -> list[str]:
    """Return the modules that the environment variable names."""
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]


def record() -> dict[str, list[str]]:
    """Return the names as `run.json` holds them, by the key `IMPORTS`; nothing without extensions."""
    return {IMPORTS: found} if (found := names()) else {}


def recall(saved: Mapping[str, Any], folder: Path | None = None) -> None:
    """Import the modules that the `run.json` or `config.json` of a run names, so that it can be resumed.

    A module in the `folder` of the run is refused, because the run may come from somebody else. Raises as `add`.
    """
    _look_in_current_folder()
    for name in map(str, saved.get(IMPORTS, ())):
        if folder and name not in names() and any(place.is_relative_to(folder.resolve()) for place in _places(name)):
            raise ImportError(f"{folder} names the extension {name} and holds it; give --import {name} to run its code")
        add(name)


def _places(name: str) -> list[Path]:
    """Where the code of a module may lie, without importing a package above it."""
    first, *rest = name.split(".")
    if (top := importlib.util.find_spec(first)) is None:
        return []
    places = [Path(place, *rest) for place in top.submodule_search_locations or ()]
    return [place.resolve() for place in (*places, *([Path(top.origin)] if top.origin else []))]


def advice(saved: Mapping[str, Any]) -> str:
    """What to do about an unknown name in a model that was made with extensions; "" without missing ones."""
    absent = [str(name) for name in saved.get(IMPORTS, ()) if name not in names()]
    return f". The model was made with extensions; give --import {' --import '.join(absent)}" if absent else ""


def load() -> None:
    """Import the modules of the environment variable and of the entry points; raises as `add`."""
    for name in names():
        add(name)
    for point in metadata.entry_points(group=GROUP):
        point.load()


def add(name: str) -> None:
    """Import a module now, and in every process that this one starts. It may lie in the current folder."""
    if name.startswith(".") or name.endswith(".py") or "/" in name:
        raise ImportError(f"cannot import the extension {name}: give the name of a module, not of its file")
    _look_in_current_folder()
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"cannot import the extension {name}: {error}") from error
    os.environ[VARIABLE] = ",".join(dict.fromkeys([*names(), name]))


def _look_in_current_folder() -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
