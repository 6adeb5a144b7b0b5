"""Tables on a terminal."""

from __future__ import annotations

from typing import Any


def print_wide(*tables: Any) -> None:
    """Print tables of rich. A pipe has no width, so there the tables are as wide as they need to be."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=200)).print(*tables)
