"""Tables on a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any


def print_wide(*tables: Any) -> None:
    """Print tables of rich. A pipe has no width, so there the tables are as wide as they need to be.

    Raises:
        BrokenPipeError: the reader of a pipe has ended.
    """
    from rich.console import Console

    class RaisingConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would exit with code 1 instead

    console = RaisingConsole()
    (console if console.is_terminal else RaisingConsole(width=200)).print(*tables)


def print_sections(
    title: str | None,
    headings: Sequence[str],
    sections: Iterable[Sequence[Sequence[str]]],
    *,
    left: Sequence[str] = ("model",),
    padding: tuple[int, int, int, int] = (0, 1, 0, 0),
) -> None:
    """Print rows of cells in sections that a line separates.

    Args:
        title: a line above the table.
        headings: one for each column.
        sections: rows of cells. Cells may have rich's markup.
        left: the headings of columns that are aligned on the left. All others are aligned on the right.
        padding: spaces around a cell: top, right, bottom, left.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=padding, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    for section in sections:
        for i, row in enumerate(section):
            table.add_row(*row, end_section=i + 1 == len(section))
    print_wide(table)


def token_count(number: float | None, longest: int | None = None) -> str:
    """Format a number of tokens in a few digits: None as "–", infinity as "∞" or, with a longest lag, as ">longest"."""
    if number is None:
        return "–"
    if math.isinf(number):
        return "∞" if longest is None else f">{longest:,}"
    return f"{number:,.0f}" if 100 <= number < 1e6 else f"{number:.3g}"
