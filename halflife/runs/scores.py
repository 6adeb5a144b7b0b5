"""The table `results.csv` of a sweep: its one schema, written and read."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from halflife.files import write_csv

IN_DISTRIBUTION = "in_distribution"


@dataclass(frozen=True)
class Score:
    """One row of `results.csv`: a trained model on one test at one length. The fields are the columns.

    `accuracy`, `chance` and `shortcut_accuracy` (see `tasks.Task`) are fractions in [0, 1]. `loss` is in nats per
    token. `validation` is that of the run after its last step, which selects learning rates: an accuracy, or the loss
    of runs on text. A number that does not apply, or that a diverged run does not have, is NaN in memory and an empty
    cell.
    """

    model: str
    learning_rate: float
    seed: int
    selected: bool
    parameters: float
    state_size: float
    tokens_per_second: float
    test: str
    length: int
    num_pairs: float = math.nan
    accuracy: float = math.nan
    chance: float = math.nan
    shortcut_accuracy: float = math.nan
    loss: float = math.nan
    validation: float = math.nan


COLUMNS = tuple(field.name for field in fields(Score))
ADDED = ("loss", "validation")  # columns that a table may lack


def scores_of(result: Mapping[str, Any], **cell: Any) -> list[Score]:
    """The rows of one finished run.

    Args:
        result: its `result.json`, of a run on tasks or on text.
        **cell: the columns `model`, `learning_rate`, `seed` and `selected`.
    """
    shared = {name: result[name] for name in ("parameters", "state_size")}
    # null after a resume from the last step, and the validation of a diverged run
    shared |= {name: number(result[name]) for name in ("tokens_per_second", "validation")}
    # A null, such as the number of pairs of a task without pairs, becomes NaN.
    tests = [{name: value for name, value in test.items() if value is not None} for test in result["tests"]]
    return [Score(**cell, **shared, **test) for test in tests]


def repeated_tests(rows: Iterable[Mapping[str, Any]]) -> set[tuple[str, int]]:
    """The tests, as (test, length), whose scores are those in distribution again, run by run, and so say nothing new.

    Args:
        rows: the rows of `results.csv`.
    """
    cells: dict[tuple[str, int], dict[Any, str]] = {}
    for row in rows:
        of_run = (row["model"], row["learning_rate"], row["seed"], repr(row["num_pairs"]))
        cells.setdefault((row["test"], row["length"]), {})[of_run] = repr(row["accuracy"])
    known = {length: own for (test, length), own in cells.items() if test == IN_DISTRIBUTION}
    return {key for key, own in cells.items() if key[0] != IN_DISTRIBUTION and own == known.get(key[1])}


def write_scores(path: Path, scores: Iterable[Score]) -> None:
    """Write the table, whole or not at all."""
    rows = ([getattr(score, name) for name in COLUMNS] for score in scores)
    write_csv(path, COLUMNS, ([None if isinstance(x, float) and math.isnan(x) else x for x in row] for row in rows))


def read_scores(path: Path, text: str) -> Iterator[Score]:
    """The rows of a table.

    Args:
        path: the path of the file, for messages.
        text: its content.

    Raises:
        ValueError: the table is truncated or damaged; the message names the file and the line.
    """
    rows = csv.DictReader(text.splitlines(), strict=True)
    names = rows.fieldnames or ()
    missing = set(COLUMNS) - set(ADDED) - set(names)
    if missing:
        raise ValueError(f"{path} is truncated or damaged: it has no column {', '.join(sorted(missing))}")
    columns = [name for name in COLUMNS if name in names]
    try:
        for row in rows:
            if None in row.values():
                raise ValueError("cells are missing")
            yield Score(**{name: _CONVERT.get(name, number)(row[name]) for name in columns})
    except (ValueError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is truncated or damaged: line {rows.line_num}: {error}") from error
    if not text.endswith("\n"):  # the last number may have lost digits
        raise ValueError(f"{path} is truncated: its last line has no end")


def number(value: Any) -> float:
    """A number; NaN for an empty cell or a JSON null."""
    return math.nan if value in ("", None) else float(value)


def _text_cell(value: str | None) -> str:
    if not value:
        raise ValueError("a cell is empty or missing")
    return value


def _boolean(value: str | None) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{value!r} is neither True nor False")
    return value == "True"


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "model": _text_cell,
    "test": _text_cell,
    "seed": int,
    "length": int,
    "selected": _boolean,
}
