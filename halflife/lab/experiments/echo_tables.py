"""Tables of the Echo paper beside our measurements, in Markdown."""

from __future__ import annotations

from typing import Any

from halflife.report.markdown import Rows, models, percent
from halflife.report.table import Table

COLUMNS = ("SSM", "SSM+Attn", "SSM+SKA")  # models of the paper
# Table 3: means over lengths and KV, percent.
TABLE_3 = {
    "mqar": (55.1, 76.0, 82.2), "sysprompt": (64.2, 81.3, 85.3), "tooltrace": (56.5, 76.2, 80.5),
    "niah": (52.0, 81.1, 84.2), "multihop": (39.3, 71.1, 76.7), "commonword": (52.9, 68.2, 74.1),
}  # fmt: skip
# Table 2: needle in a haystack, KV 1, trained at 64, percent.
TABLE_2 = {
    64: (88.6, 88.5, 94.5), 128: (82.1, 97.4, 89.4), 256: (75.8, 92.9, 93.3), 512: (66.9, 78.1, 95.6),
    1024: (37.3, 64.8, 86.4), 2048: (2.0, 42.5, 81.2), 4096: (2.0, 5.0, 65.1),
}  # fmt: skip


def transfer(rows: Rows) -> str:
    """Tables 3 and 2 with the paper's numbers and ours: the mean over seeds and, in brackets, every seed."""
    niah = [r for r in rows if r["test"] == "niah" and r["num_pairs"] == 1]
    by_task = [(name, paper, [r for r in rows if r["test"] == name]) for name, paper in TABLE_3.items()]
    by_length = [(f"{n:,}", paper, [r for r in niah if r["length"] == n]) for n, paper in TABLE_2.items()]
    return "\n\n".join([
        "### Table 3: mean accuracy over all lengths and numbers of pairs, percent",
        _beside("task", by_task, models(rows)),
        "### Table 2: needle in a haystack, one pair, percent",
        _beside("length", by_length, models(rows)),
    ])  # fmt: skip


def _beside(first: str, table: list[tuple[str, tuple[float, ...], list[Any]]], names: list[str]) -> str:
    heading = [first, *(f"paper: {column}" for column in COLUMNS), *names]
    body = [
        [name, *(f"{x:.1f}" for x in paper), *(percent([r for r in own if r["model"] == m]) for m in names)]
        for name, paper, own in table
        if own
    ]
    return Table(heading, body).markdown()
