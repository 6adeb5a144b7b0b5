"""Modules of users, which register decays, layers, presets and tasks of their own.

`import halflife` imports the modules that the environment variable `HALFLIFE_IMPORT` names, divided by commas, and the
entry points of installed distributions in the group "halflife". A worker process inherits the variable, so it knows
what the command knows.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib import metadata

VARIABLE = "HALFLIFE_IMPORT"
GROUP = "halflife"


def names() -> list[str]:
    """Return the modules that the environment variable names."""
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]


def load() -> None:
    """Import the modules of the environment variable and of the entry points; raises as `add`."""
    for name in names():
        add(name)
    for point in metadata.entry_points(group=GROUP):
        point.load()


def add(name: str) -> None:
    """Import a module now, and in every process that this one starts. It may lie in the current folder.

    Raises:
        ImportError: there is no such module, or it cannot be imported.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"cannot import the extension {name}: {error}") from error
    os.environ[VARIABLE] = ",".join(dict.fromkeys([*names(), name]))
