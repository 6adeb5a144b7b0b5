"""The summary table of a report page, and how its numbers are printed."""

from __future__ import annotations

import math
from typing import NamedTuple

NOTHING = "–"
UNFINISHED = "No results yet: the run has not finished."


class Cell(NamedTuple):
    """A number as it is printed, and as it is sorted by."""

    text: str
    value: float = math.nan
    best: bool = False


class Row(NamedTuple):
    """A line of a table; `note` stands in grey beside its name."""

    name: str
    note: str
    cells: list[Cell]


class Table(NamedTuple):
    """Groups of rows that stay together: the first row of each is what the page sorts by.

    `columns` are the headings after `first`; the last ones stand under the headings of `spans`, (text, columns).
    """

    caption: str
    first: str
    columns: list[str]
    spans: list[tuple[str, int]]
    groups: list[list[Row]]

    @property
    def plain(self) -> int:
        """How many columns stand under no span."""
        return len(self.columns) - sum(width for _, width in self.spans)


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %" if math.isfinite(value) else NOTHING


def count(value: float) -> str:
    return f"{value:,.0f}"
