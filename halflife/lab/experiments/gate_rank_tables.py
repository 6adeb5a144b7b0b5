"""What GateRank's experiments write beside the scores: state tracking by position, and statistics of the gates."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean

from halflife.files import finite, write_csv
from halflife.runs.folder import read

POSITIONS_CSV = "positions.csv"  # accuracy and loss of each seed, by span of positions
COLUMNS = ("model", "learning_rate", "seed", "first", "last", "accuracy", "loss")
GATES_CSV = "gates.csv"  # statistics of the gates of each seed and layer


def write_positions(folder: Path) -> None:
    """Write `positions.csv`: the means over spans of positions in the longest test, which end at the tested lengths."""
    run = read(folder)
    edges = sorted({found["length"] for one in run.trainings for found in one.positions})
    rows = [
        (model, one.learning_rate, one.seed, low + 1, high, *(fmean(found[name][low:high]) for name in COLUMNS[-2:]))
        for model in run.models for one in run.trainings_of(model)
        for found in one.positions if found["length"] == edges[-1]
        for low, high in pairwise([0, *edges])
    ]  # fmt: skip
    write_csv(folder / POSITIONS_CSV, COLUMNS, rows)


def write_gates(folder: Path) -> None:
    """Write `gates.csv`, if a model has gates: their statistics in the last steps, a row for each layer of each run."""
    run = read(folder)
    rows = [
        {"model": model, "learning_rate": one.learning_rate, "seed": one.seed, "layer": layer, **found}
        for model in run.models for one in run.trainings_of(model)
        for _, last in one.gates()[-1:] for layer, found in enumerate(last.values())
    ]  # fmt: skip
    if rows:
        write_csv(folder / GATES_CSV, list(rows[0]), (finite(list(row.values())) for row in rows))
