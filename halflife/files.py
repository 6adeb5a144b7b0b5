"""Files written whole or not at all, and read with an error that names them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes `text` to a temporary neighbour and moves it into place: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, data: Any) -> None:
    """`write_text` of JSON."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The JSON in `path`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is truncated or no JSON; the message names it.
    """
    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is truncated or no JSON: {error}") from error
