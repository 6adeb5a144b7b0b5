"""The tables that a comparison prints in a terminal."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from halflife.experiments.compare import levels, shown, summarise

MOST = 12  # columns of tests that a terminal has room for


def print_comparison(rows: list[dict[str, Any]]) -> None:
    """Two tables that fit 80 columns: what was trained, and its accuracy on every test."""
    keys, summary = levels(rows), summarise(rows)
    if len(keys) > MOST:  # a grid: one column a test, the mean of its cells
        keys, summary = _over_lengths(keys), [{**row, "accuracy": _over_lengths(row["accuracy"])} for row in summary]
    runs = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="runs", title_justify="left")
    tests = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="accuracy, %", title_justify="left")
    for table, headings in (
        (runs, ("model", "lr", "seed", "parameters", "state", "tokens/s")),
        (tests, ("model", "seed", *(_heading(test, length) for test, length in keys))),
    ):
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for row in summary:
        mark, style = "*" if row["selected"] else "", "bold" if isinstance(row["seed"], str) else None
        rate, seed = f"{row['learning_rate']:g}{mark}", str(row["seed"])
        sizes = (f"{row['parameters']:,}", f"{row['state_size']:,}", f"{row['tokens_per_second']:,.0f}")
        runs.add_row(row["model"], rate, seed, *sizes, style=style)
        label = row["model"] if row["selected"] else f"{row['model']} {rate}"
        tests.add_row(label, seed, *(shown(row["accuracy"][key]) for key in keys), style=style)
    for i, level in enumerate(("chance", "ignoring the key")):
        tests.add_row(level, "", *(f"{100 * values[i]:.1f}" for values in keys.values()), style="dim")
    console = Console()
    # A pipe has no width of its own: there the tables are as wide as they need to be.
    console = console if console.is_terminal else Console(width=200)
    console.print(runs, tests)
    print("lr*: the best on in-distribution validation. state: numbers that a sequence's memory holds.")
    if any(test == "capacity" for test, _ in keys):
        print("in: in distribution. cap: `capacity`, K = T/4 pairs. per: `persist`, the training K. Under them: T.")
    elif any(length is None for _, length in keys):
        print("in: in distribution; other tests: means over the lengths and numbers of pairs of their grids.")


def _over_lengths(cells: dict[tuple[str, int], Any]) -> dict[tuple[str, None], Any]:
    """The mean over lengths of each test's numbers."""
    tests: dict[tuple[str, None], list[Any]] = {}
    for (test, _), value in cells.items():
        tests.setdefault((test, None), []).append(value)
    return {
        key: tuple(map(fmean, zip(*own, strict=True))) if isinstance(own[0], tuple) else fmean(own)
        for key, own in tests.items()
    }


def _heading(test: str, length: int | None) -> str:
    if test == "in_distribution":
        return "in"
    return test if length is None else f"{test[:3]}\n{length}"
