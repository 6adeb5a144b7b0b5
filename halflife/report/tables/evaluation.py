"""The table of `halflife eval`: one row per task and metric, on a terminal, in Markdown and beside the raw results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halflife.files import write_json, write_text
from halflife.report.table import Table


def write_evaluation(result: dict[str, Any], output: Path) -> None:
    """Write `results.json`, which holds all of `result`, and `table.md`, which shows its rows."""
    write_json(output / "results.json", result)
    write_text(output / "table.md", evaluation_table(result["rows"]).markdown() + "\n")


def evaluation_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The table of the rows `{"task", "metric", "filter", "value", "stderr", "guess"}` of an evaluation.

    "guess" is the level of a guess, where it is known. The filter that extracts an answer from a text stands in
    brackets after the metric.
    """
    cells = [
        (
            row["task"], row["metric"] if row.get("filter", "none") == "none" else f"{row['metric']} ({row['filter']})",
            _number(row["value"]), *("" if row.get(key) is None else _number(row[key]) for key in ("stderr", "guess")),
        )
        for row in rows
    ]  # fmt: skip
    return Table(("task", "metric", "value", "± stderr", "guess"), cells, left=("task", "metric"))


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.4g}"
