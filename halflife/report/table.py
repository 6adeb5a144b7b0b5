"""Tables, for a terminal, Markdown, CSV and HTML."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

from halflife.files import csv_text

MAX_SPACED_COLUMNS = 10  # on a terminal; more columns stand closer, so that a table fits 80 characters
PIPE_WIDTH = 200  # characters of a line where the output is no terminal
TEMPLATE = Path(__file__).parent / "table.html.jinja"
TWO_LINES = 240  # characters of a page as wide as a laptop

BREAKS = re.compile(r"(?<=[+_./:-])")  # a name may break after these characters

Style = Literal["", "bold", "dim"]


class Cell(NamedTuple):
    """A cell that is more than its text."""

    text: Any  # what is printed. None is empty.
    value: float = math.nan  # the number that a page sorts by; NaN if there is none
    style: Style = ""  # how the text is emphasised. Markdown and HTML ignore "dim".
    note: str = ""  # what a page adds in grey

    def print(self) -> str:
        """The text."""
        return "" if self.text is None else str(self.text)


Row = Sequence[Any]
GAP: Row = ()  # a row that separates groups


def styled(style: Style, *cells: str) -> list[Cell]:
    """A row whose cells have the same style."""
    return [Cell(text, style=style) for text in cells]


def grouped(groups: Iterable[tuple[str, Iterable[Row]]]) -> list[Row]:
    """Rows with the name of their group in front: in the first row of each group, and empty in the others."""
    table: list[Row] = []
    for name, rows in groups:
        table += [*(["" if i else name, *row] for i, row in enumerate(rows)), GAP]
    return table


@dataclass(frozen=True)
class Table:
    """Headings and rows."""

    headings: Sequence[str]  # one for each column, or none
    # cells, which are texts, numbers or a `Cell`. A `GAP` separates groups: a line on a terminal, and rows that sorting
    # in a page keeps together.
    rows: Sequence[Row]
    note: str = ""  # what stands below, and above in a page
    title: str = ""  # the line above
    left: Collection[str] = ()  # the headings of columns that are aligned on the left; by default the first column is
    # (text, width) of the headings above the columns after the first in a page; "" where there is none
    spans: Sequence[tuple[str, int]] = ()

    def aligned_left(self) -> list[bool]:
        """Whether each column is aligned on the left."""
        return [name in self.left if self.left else i == 0 for i, name in enumerate(self.headings)]

    def cells(self) -> list[list[Cell]]:
        """The rows, without gaps."""
        return [row for group in self.groups() for row in group]

    def groups(self) -> list[list[list[Cell]]]:
        """The rows of each group."""
        groups: list[list[list[Cell]]] = [[]]
        for row in self.rows:
            if row:
                groups[-1].append([cell if isinstance(cell, Cell) else Cell(cell) for cell in row])
            else:
                groups.append([])
        return [group for group in groups if group]

    def terminal(self) -> str:
        """The table for the terminal that standard output is. In a pipe it is as wide as it needs to be."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table as Grid
        from rich.text import Text

        space = int(len(self.headings) <= MAX_SPACED_COLUMNS) if self.headings else 3
        box = SIMPLE_HEAD if self.headings else None
        grid = Grid(box=box, padding=(0, space, 0, 0), show_header=bool(self.headings))
        for heading, left in zip(self.headings, self.aligned_left(), strict=True):
            grid.add_column(Text(heading), justify="left" if left else "right", overflow="fold")
        for group in self.groups():
            for i, row in enumerate(group, 1):
                grid.add_row(*(Text(cell.print(), cell.style) for cell in row), end_section=i == len(group))
        shown = Console()
        width = shown.width if shown.is_terminal else PIPE_WIDTH
        text = StringIO()  # where a pipe's reader has ended, rich would exit instead of raising an error
        Console(file=text, width=width, force_terminal=shown.is_terminal).print(grid)
        return "\n".join(part for part in (self.title, text.getvalue().rstrip("\n"), self.note) if part)

    def markdown(self) -> str:
        """The table in Markdown, without title and note."""
        rules = ["---" if left else "---:" for left in self.aligned_left()]
        rows = [
            [f"**{cell.print()}**" if cell.style == "bold" else cell.print() for cell in row] for row in self.cells()
        ]
        lines = [" | ".join(cell.replace("|", r"\|") for cell in cells) for cells in (self.headings, *rows)]
        return "\n".join([f"| {lines[0]} |", f"|{'|'.join(rules)}|", *(f"| {line} |" for line in lines[1:])])

    def csv(self) -> str:
        """The table as comma-separated values."""
        return csv_text(self.headings, ([cell.text for cell in row] for row in self.cells()))

    def html(self) -> str:
        """The table in HTML with buttons that sort it, or of pairs of a name and a value if it has no headings."""
        return template(TEMPLATE).render(table=self, breakable=BREAKS.split, captioned=captioned)

    def parts(self) -> list[tuple[str, list[tuple[int, str]]]]:
        """The heading above each part of the columns after the first, and (number, heading) of its columns."""
        numbered, parts = list(enumerate(self.headings))[1:], []
        for text, width in self.spans or [("", len(numbered))]:
            parts.append((text, numbered[:width]))
            numbered = numbered[width:]
        return parts


@cache
def template(file: Path) -> Any:
    """A template of Jinja, which escapes what is not marked as HTML and needs all of its names."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    options = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=FileSystemLoader(file.parent), **options).get_template(file.name)


def captioned(text: str) -> str:
    """A caption in HTML: the sentences that fit into two lines, at least one, and the others behind a click."""
    sentences = re.split(r"(?<=\.) ", escape(text.replace(" %", "\u00a0%")))
    ends = accumulate(len(sentence) + 1 for sentence in sentences)
    shown = max(1, sum(end <= TWO_LINES for end in ends))
    more = f'<details class="more"><summary>More</summary>{" ".join(sentences[shown:])}</details>'
    return " ".join(sentences[:shown]) + more * (shown < len(sentences))


def pairs(title: str, entries: Mapping[str, Any]) -> Table:
    """Names and values, which are printed as JSON unless they are texts."""
    texts = {name: x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for name, x in entries.items()}
    return Table((), list(texts.items()), title=title)


def show(*tables: Table) -> None:
    """Print tables one below the other."""
    for table in tables:
        print(table.terminal())
