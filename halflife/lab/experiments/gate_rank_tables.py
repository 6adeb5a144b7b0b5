"""GateRank's results in Markdown: state tracking by position, recall by test, and statistics of the gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from halflife.files import write_csv
from halflife.report.intervals import has_learned, with_seeds
from halflife.report.markdown import Rows, in_distribution
from halflife.report.table import Table
from halflife.runs.folder import read
from halflife.runs.records import Comparison

POSITIONS_CSV = "positions.csv"  # accuracy and loss of each seed, by span of positions
COLUMNS = ("model", "learning_rate", "seed", "first", "last", "accuracy", "loss")
GATES_CSV = "gates.csv"  # statistics of the gates of each seed and layer
STATISTICS = {  # heading → statistic, and its factor
    "resets, %": ("reset_rate", 100), "mean segment, tokens": ("segment_length", 1),
    "slow state's share of energy, %": ("slow_share", 100),
}  # fmt: skip


def tracking(folder: Path, rows: Rows) -> str:
    """Accuracy and cross-entropy at the positions of training and beyond, as means and by seed; then the gates.

    Writes `positions.csv` and `gates.csv`, from which the tables are made.
    """
    run = read(folder)
    spans = list(_spans(run))
    write_csv(folder / POSITIONS_CSV, COLUMNS, (list(row.values()) for row in spans))
    caption = "Accuracy in percent and loss in nats, by position in the longest test: the mean, and every seed."
    return "\n\n".join(filter(None, [caption, by_position(spans), gates(folder, run)]))


def _spans(run: Comparison) -> Iterator[dict[str, Any]]:
    """The means of each training over spans of positions, which end at the lengths of the tests."""
    edges = sorted({found["length"] for one in run.trainings for found in one.positions})
    for model in run.models:
        for one in run.trainings_of(model):
            for found in one.positions:
                if found["length"] == edges[-1]:
                    for low, high in pairwise([0, *edges]):
                        means = [fmean(found[name][low:high]) for name in COLUMNS[-2:]]
                        cells = (model, one.learning_rate, one.seed, low + 1, high, *means)
                        yield dict(zip(COLUMNS, cells, strict=True))


def by_position(spans: Sequence[Mapping[str, Any]]) -> str:
    """The table of the rows of `positions.csv`, in Markdown: a row for each model.

    A model below `LEARNED` at the positions of training says "not learned".
    """
    if not spans:  # all runs diverged
        return ""
    cells: dict[str, dict[str, list[float]]] = {}
    for name, scale in (("accuracy", 100), ("loss", 1)):
        for row in spans:
            columns = cells.setdefault(row["model"], {})
            columns.setdefault(f"{name} {row['first']}–{row['last']}", []).append(scale * float(row[name]))
    lines = []
    for model, columns in cells.items():
        within, *_ = columns.values()
        mark = "" if has_learned([value / 100 for value in within]) else " (not learned)"
        texts = (
            with_seeds(values, 1 if "accuracy" in name else 2) if values else "–" for name, values in columns.items()
        )
        lines.append([f"`{model}`{mark}", *texts])
    return Table(["model", *next(iter(cells.values()))], lines).markdown()


def recall(folder: Path, rows: Rows) -> str:
    """One row per model with its sizes and all tests; then the gates."""
    return "\n\n".join(filter(None, [in_distribution(rows), gates(folder, read(folder))]))


def gates(folder: Path, run: Comparison) -> str:
    """Statistics of the slow gates in the last steps of training, by model and layer.

    Writes `gates.csv`, from which the table is made, if a model has gates.
    """
    rows = list(_last_gates(run))
    if rows:
        write_csv(folder / GATES_CSV, list(rows[0]), (list(row.values()) for row in rows))
    return by_layer(rows)


def _last_gates(run: Comparison) -> Iterator[dict[str, Any]]:
    """A row for each layer of each training at the selected rate."""
    for model in run.models:
        for one in run.trainings_of(model):
            run_of = {"model": model, "learning_rate": one.learning_rate, "seed": one.seed}
            for _, last in one.gates()[-1:]:
                yield from ({**run_of, "layer": layer, **found} for layer, found in enumerate(last.values()))


def by_layer(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of the rows of `gates.csv`, in Markdown: a row for each model and layer; "" without rows."""
    if not rows:
        return ""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], str(row["layer"])), []).append(row)
    lines = [
        [
            f"`{model}`", layer,
            *(with_seeds([scale * float(row[name]) for row in seeds], 1) for name, scale in STATISTICS.values()),
        ]
        for (model, layer), seeds in found.items()
    ]  # fmt: skip
    return Table(["model", "layer", *STATISTICS], lines).markdown()
