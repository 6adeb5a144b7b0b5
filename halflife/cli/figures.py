"""`halflife figures`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Figures:
    """Draw the figures and report pages of finished or unfinished runs again, from their saved data.

    Nothing is trained or measured again. The command writes figures/ and report.html into each folder. It also draws
    the figures of data that `halflife spectrum`, `halflife forecast` and `halflife theory` wrote.

    examples:
      halflife figures runs/20260101-120000-mqar-smoke
      halflife figures runs/20260101-120000-mqar-smoke runs/20260102-120000-mamba2+post --formats pdf svg
    """

    runs: Positional[tuple[Path, ...]]
    """Folders that `halflife compare`, `train`, `forecast` or `theory` wrote."""
    formats: tuple[str, ...] = ("png", "svg")
    """Formats of the figures: png, svg, pdf."""

    def run(self) -> None:
        from halflife.lab.theory import figures as theory
        from halflife.report.redraw import redraw

        for folder in self.runs:
            for file in theory.redraw(folder, self.formats) or redraw(folder, self.formats):
                print(file)
