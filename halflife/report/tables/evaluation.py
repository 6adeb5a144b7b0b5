"""The table of `halflife eval`: a row a task and metric, on a terminal, in Markdown and beside the raw results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from halflife.files import write_json, write_text
from halflife.report.tables.terminal import print_wide

HEADINGS = ("task", "metric", "value", "± stderr")


def write_evaluation(result: dict[str, Any], output: Path) -> None:
    """Write `results.json`, which holds all of `result`, and `table.md`, which shows its rows."""
    write_json(output / "results.json", result)
    lines = [HEADINGS, ("---", "---", "---:", "---:"), *_cells(result["rows"])]
    write_text(output / "table.md", "".join(f"| {' | '.join(line)} |\n" for line in lines))


def print_evaluation(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows `{"task", "metric", "filter", "value", "stderr"}` of an evaluation."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("task", "metric") else "right")
    for row in _cells(rows):
        table.add_row(*map(escape, row))
    print_wide(table)


def _cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows as text. The filter that extracts an answer from a text stands in brackets after the metric."""
    return [
        (
            row["task"],
            row["metric"] if row.get("filter", "none") == "none" else f"{row['metric']} ({row['filter']})",
            _number(row["value"]),
            "" if row["stderr"] is None else _number(row["stderr"]),
        )
        for row in rows
    ]


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.4g}"
