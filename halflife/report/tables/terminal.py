"""Tables on a terminal."""

from __future__ import annotations

from typing import Any


def print_wide(table: Any) -> None:
    """Prints a table of rich; a pipe has no width of its own: there it is as wide as it needs to be."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
