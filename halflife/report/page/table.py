"""The summary table of a report page."""

from __future__ import annotations

import math
from typing import NamedTuple

UNFINISHED = "There are no results yet because the run has not finished."


class Cell(NamedTuple):
    """A number of the table.

    Attributes:
        text: the number as it is printed.
        value: the number that the column is sorted by; NaN if there is none.
        best: whether it is the best of its column.
    """

    text: str
    value: float = math.nan
    best: bool = False


class Row(NamedTuple):
    """A row of the table. `note` stands in grey beside its name."""

    name: str
    note: str
    cells: list[Cell]


class Table(NamedTuple):
    """A table whose rows stay together in groups. Sorting compares the first row of each group.

    Attributes:
        caption: what the table shows.
        first: the heading of the names.
        columns: the headings of the other columns.
        spans: (text, width) of the headings above the columns, in order; "" for columns without one. Empty without any.
        groups: the rows of each group.
    """

    caption: str
    first: str
    columns: list[str]
    spans: list[tuple[str, int]]
    groups: list[list[Row]]

    @property
    def parts(self) -> list[tuple[str, list[tuple[int, str]]]]:
        """The heading above each part of the columns, and (number, heading) of its columns, counted from 1."""
        numbered, parts = list(enumerate(self.columns, 1)), []
        for text, width in self.spans or [("", len(self.columns))]:
            parts.append((text, numbered[:width]))
            numbered = numbered[width:]
        return parts
