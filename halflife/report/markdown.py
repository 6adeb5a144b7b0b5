"""Tables of a comparison in Markdown, with the mean and every seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from halflife.report.intervals import with_interval

Rows = Sequence[Mapping[str, Any]]  # of `results.csv`


def models(rows: Rows) -> list[str]:
    """The models that have a selected learning rate, in order."""
    return list(dict.fromkeys(r["model"] for r in rows if r["selected"]))


def percent(rows: Rows) -> str:
    """The mean accuracy over seeds and that of every seed at the selected learning rate: "87.5 (86.1, 88.9)".

    From three seeds on, the 95 % interval of the mean stands between them: "87.6 [86.1, 88.9] (86.1, 88.9, 87.8)".
    """
    rows = [r for r in rows if r["selected"]]
    seeds = [100 * fmean([r["accuracy"] for r in rows if r["seed"] == s]) for s in sorted({r["seed"] for r in rows})]
    if not seeds or any(map(math.isnan, seeds)):
        return "diverged" if seeds else "–"
    every = f" ({', '.join(f'{x:.1f}' for x in seeds)})" if len(seeds) > 1 else ""
    return f"{with_interval(seeds, 1)}{every}"
