"""The tables of docs/results/speed.md, for docs/tables.py."""

from __future__ import annotations

from join import RESULTS

from halflife.files import read_json
from halflife.report.table import Table

SOFTMAX, ATTENTION = "softmax attention", "llama"


def steps(file: str) -> str:
    """Milliseconds of a training step of each model by length, from a file of `halflife throughput`.

    Where Llama is among the models, every time is also divided by its time.
    """
    data = read_json(RESULTS / file)
    own = {row["model"]: row["seconds"] for row in data["models"]}
    against = own.get(ATTENTION)
    lines = []
    for model, seconds in own.items():
        cells = [f"{1e3 * x:.1f}" for x in seconds]
        if against and model != ATTENTION:
            cells = [f"{cell} ({x / y:.2f})" for cell, x, y in zip(cells, seconds, against, strict=True)]
        lines.append([model, *cells])
    return Table(["model", *(f"T = {length:,}" for length in data["lengths"])], lines).markdown()


def ops(file: str) -> str:
    """Milliseconds of ops at the greatest length, over the floor and over softmax attention."""
    rows = read_json(RESULTS / file)["ops"]
    rates = {row["K"]: row for row in rows if "gemm" in row}
    timed = [row for row in rows if "forward" in row]
    timed = [row for row in timed if row["T"] == max(row["T"] for row in timed)]
    softmax = {(row["K"], row["T"]): row for row in timed if row["name"] == SOFTMAX}
    lines = []
    for row in timed:
        rate, against = rates[row["K"]], softmax[row["K"], row["T"]]
        cells = []
        for way, passes, flops in zip(("forward", "both"), (1, 3), row["flops"], strict=True):
            floor = max(flops / rate["gemm"], passes * row["bytes"] / rate["copy"])
            cells += [f"{1e3 * row[way]:.2f}", f"{row[way] / floor:.1f}", f"{row[way] / against[way]:.2f}"]
        lines.append([row["name"], f"{row['T']:,}", *cells])
    ways = [f"{way}, {unit}" for way in ("forward", "with backward") for unit in ("ms", "÷ floor", "÷ softmax")]
    return Table(["op", "T", *ways], lines).markdown()
