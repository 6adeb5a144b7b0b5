"""What `halflife train` prints when a run has ended."""

from __future__ import annotations

import csv
import math
import shlex
from pathlib import Path
from typing import Any

from halflife.files import PROFILE_CSV, TRACE_JSON
from halflife.report.table import Table, show
from halflife.runs.records import number


def print_language_run(result: dict[str, Any], folder: Path) -> None:
    """Print perplexities by length, bits per byte and speed, or why the run diverged."""
    if "diverged" in result:
        print(f"diverged: {result['diverged']}; try a lower --lr")
        return
    headings = ("length", "perplexity a token", "of its last context")
    rows = [
        (f"{row['length']:,}", f"{row['perplexity']:.3f}", f"{row['last_perplexity']:.3f}") for row in result["lengths"]
    ]
    show(Table(headings, rows, title=f"{result['parameters']:,} parameters, {result['tokens']:,} tokens"))
    rows, documents = result["bits_per_byte"], result["bits_per_byte_of_documents"]
    print(f"validation: {rows:.4f} bits per byte in rows as in training, {documents:.4f} of whole documents")
    speed, share = (number(result[name]) for name in ("tokens_per_second", "mfu"))
    if math.isfinite(speed):  # it is unknown after a resume from the last step
        print(f"training: {speed:,.0f} tokens/s, {share:.0%} of the fastest matrix product here (MFU)")
    if (folder / PROFILE_CSV).exists():
        with (folder / PROFILE_CSV).open(newline="", encoding="utf-8") as file:
            headings, *times = csv.reader(file)
        show(Table(headings, times, title=f"times of a step; its trace: {folder / TRACE_JSON}"))
    print(f"report: {folder / 'report.html'}")
    print(f'continue a text with: halflife generate {shlex.quote(str(folder))} "…"')
