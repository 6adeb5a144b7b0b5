"""Add the runs of one table of a comparison to a file of results, or those of the decay grid to a regression.

    python docs/join.py post_parts_text_norm.csv runs/text/lengths.csv
    python docs/join.py endpoints.csv mamba2=0.02 runs/finer/results.csv
    python docs/join.py decay_regression.json runs/grid

Runs that the file has (model, learning rate and seed) keep their rows. The rate of a model that both have is the one
that the table with more rates selects, or the one of MODEL=RATE, which has the best validation of all.
A regression gets the decays of the selected runs of the folder, before and after training, and is fitted again.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from halflife.files import read_json, write_csv, write_json
from halflife.lab.experiments.decay_design import DecayDesign
from halflife.lab.experiments.evidence import decay_regression
from halflife.report.markdown import Rows
from halflife.runs.records import ADDED, read_scores

RESULTS = Path(__file__).parent / "results"

Table = list[dict[str, str]]


def read_table(path: Path) -> Table:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def scores(path: Path) -> Rows:
    """The rows of a `results.csv` with their numbers."""
    return [dataclasses.asdict(score) for score in read_scores(path, path.read_text(encoding="utf-8"))]


def add(
    path: Path, new: Table, place: Callable[[str], Any] = lambda model: 0, rates: Mapping[str, str] | None = None
) -> None:
    """Add the rows of runs that a file of results has not, sorted by the key `place` of their models.

    Columns that earlier versions did not write get empty cells. `rates` are selected rates of models, in the place of
    those that the tables select.

    Raises:
        ValueError: the new table has other columns, or no run has a rate of `rates`.
    """
    old = _widened(read_table(path), new)
    new = _widened(new, old)
    if new and list(new[0]) != list(old[0]):
        raise ValueError(f"{path} has the columns {', '.join(old[0])}, and the new table {', '.join(new[0])}")
    known = {_run(row) for row in old}
    rows = [*old, *(row for row in new if _run(row) not in known)]
    if missing := set((rates or {}).items()) - {(row["model"], row["learning_rate"]) for row in rows}:
        raise ValueError(f"{path} has no run of {', '.join('='.join(pair) for pair in sorted(missing))}")
    selected = {row["model"]: _selected(row["model"], old, new) for row in rows} | dict(rates or {})
    for row in rows:
        row["selected"] = str(row["learning_rate"] == selected[row["model"]])
    rows.sort(key=lambda row: place(row["model"]))  # a stable sort: the rows of a model keep their order
    write_csv(path, list(rows[0]), (list(row.values()) for row in rows))


def add_decays(path: Path, folder: Path) -> None:
    """Add the decays of the runs of a comparison on the decay grid to a `decay_regression.json`, and fit it again."""
    rows = scores(folder / "results.csv")
    old, new = read_json(path)["runs"], DecayDesign().decays(folder, rows)
    known = {(one["model"], one["seed"]) for one in old}
    runs = [*old, *(one for one in new if (one["model"], one["seed"]) not in known)]
    names = list(dict.fromkeys(one["model"] for one in runs))
    runs.sort(key=lambda one: (names.index(one["model"]), one["seed"]))
    write_json(path, {"runs": runs, "regressions": decay_regression.regressions(runs)})


def _widened(table: Table, other: Table) -> Table:
    """A table with the columns of `ADDED` that the other one has."""
    missing = [name for name in ADDED if table and other and name in other[0] and name not in table[0]]
    return [row | dict.fromkeys(missing, "") for row in table]


def _run(row: dict[str, str]) -> tuple[str, ...]:
    return row["model"], row["learning_rate"], row["seed"]


def _selected(model: str, *tables: Table) -> str | None:
    """The rate that the table with the most rates for a model selects, the first of several. None if all diverged."""
    own = [[row for row in table if row["model"] == model] for table in tables]
    most = max(own, key=lambda rows: len({row["learning_rate"] for row in rows}))
    return next((row["learning_rate"] for row in most if row["selected"] == "True"), None)


def main(arguments: Sequence[str]) -> None:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    name, *rest = arguments
    rates = dict(each.split("=") for each in rest if "=" in each)
    for table in (Path(each) for each in rest if "=" not in each):
        if name.endswith(".json"):
            add_decays(RESULTS / name, table)
        else:
            add(RESULTS / name, read_table(table), rates=rates)


if __name__ == "__main__":
    main(sys.argv[1:])
