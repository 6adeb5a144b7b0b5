"""Tables of `halflife theory` for docs/tables.py, from the files that the command wrote."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from join import RESULTS

from halflife.files import read_json
from halflife.lab.theory.tables import TABLES, small
from halflife.report.table import Table

CHANNELS = 16
# Spectrum → what the paper says about its error.
PAPER = {
    "random": "exp(−Ω(N/log N))", "random, log-uniform": "the same", "linear": "Ω(N^−β)",
    "geometric on [1/T, 1]": "exp(−π²N/(log T + C₆))", "geometric, best ends": "the same",
}  # fmt: skip


def table(topic: str, file: str = "theory.json", number: int = 0, only: Mapping[str, Collection[str]] = {}) -> str:
    """One of the tables that the command prints for a topic.

    Args:
        topic: the topic.
        file: its file.
        number: the index of the table in the topic.
        only: heading → cells of this column, by which rows are chosen; by default all.
    """
    shown = list(TABLES[topic](read_json(RESULTS / file)[topic]))[number]
    places = {list(shown.headings).index(heading): cells for heading, cells in only.items()}
    rows = [row for row in shown.rows if all(row[i] in x for i, x in places.items())]
    return Table(shown.headings, rows).markdown()


def errors(file: str) -> str:
    """Errors of each spectrum at every other T with `CHANNELS` channels, and how fast they fall with each channel."""
    data = read_json(RESULTS / file)["errors"]
    place, lengths = data["channels"].index(CHANNELS), [f"{length:g}" for length in data["lengths"][::2]]
    slopes = {(row["spectrum"], f"{row['length']:g}"): row for row in data["slopes"]}
    lines = []
    for spectrum, paper in PAPER.items():
        found = data["errors"][spectrum]
        sizes = [small(found[length][place]) for length in lengths]
        lines.append([spectrum, paper, *sizes, *(f"{slopes[spectrum, x]['per_channel']:.2f}" for x in lengths)])
    best = [slopes["geometric, best ends", length] for length in lengths]
    empty = [""] * (1 + len(lengths))
    lines.append(["π²/log T", *empty, *(f"{row['claimed_per_channel']:.2f}" for row in best)])
    lines.append(["C₆ of the best ends", *empty, *(f"{row['offset']:.1f}" for row in best)])
    headings = [f"{name}, T = {length}" for name in ("error", "slope") for length in lengths]
    names = ["spectrum", "the paper"]
    return Table([*names, *headings], lines, left=names).markdown()
