"""Tables of a comparison in Markdown, with the mean and every seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from halflife.report.intervals import with_seeds
from halflife.report.table import Table
from halflife.runs.records import repeated_tests

Rows = Sequence[Mapping[str, Any]]  # of `results.csv`


def in_distribution(rows: Rows) -> str:
    """A table with one row for each model: parameters, state size, and accuracy on every test and length.

    A test whose scores are those in distribution again has no column.
    """
    repeated = repeated_tests(rows)
    tests = [key for key in dict.fromkeys((r["test"], r["length"]) for r in rows) if key not in repeated]
    heading = ["model", "parameters", "state", *(f"{test} {length}" for test, length in tests)]
    table = []
    for model in models(rows):
        of_model = [r for r in rows if r["model"] == model]
        sizes = [f"{of_model[0]['parameters']:,}", f"{of_model[0]['state_size']:,}"]
        cells = [percent([r for r in of_model if (r["test"], r["length"]) == key]) for key in tests]
        table.append([model, *sizes, *cells])
    return Table(heading, table).markdown()


def models(rows: Rows) -> list[str]:
    """The models that have a selected learning rate, in order."""
    return list(dict.fromkeys(r["model"] for r in rows if r["selected"]))


def percent(rows: Rows) -> str:
    """The mean accuracy over seeds and that of every seed at the selected learning rate: "87.5 (86.1, 88.9)".

    From three seeds on, the 95 % interval of the mean stands between them: "87.6 [86.1, 88.9] (86.1, 88.9, 87.8)".
    """
    rows = [r for r in rows if r["selected"]]
    seeds = [fmean([r["accuracy"] for r in rows if r["seed"] == s]) for s in sorted({r["seed"] for r in rows})]
    if not seeds or any(map(math.isnan, seeds)):
        return "diverged" if seeds else "–"
    return with_seeds([100 * x for x in seeds], 1)
