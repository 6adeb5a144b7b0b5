"""`halflife figures`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Figures:
    """Redraw the figures and report pages of finished or unfinished runs from their saved data.

    Nothing is trained or measured again. Each folder gets figures/ and report.html. The figures of `halflife spectrum`
    and `halflife forecast` are redrawn where these commands left data, and so are those of `halflife theory`.

    examples:
      halflife figures runs/20260101-120000-mqar-smoke
      halflife figures runs/20260101-120000-mqar-smoke runs/20260102-120000-mamba2+post --formats pdf svg
    """

    runs: Positional[tuple[Path, ...]]
    """Folders of `halflife compare`, `train`, `forecast` or `theory`."""
    formats: tuple[str, ...] = ("png", "svg")
    """Formats of the figures: png, svg, pdf."""

    def run(self) -> None:
        from halflife.report.redraw import redraw

        for folder in self.runs:
            for file in redraw(folder, self.formats):
                print(file)
