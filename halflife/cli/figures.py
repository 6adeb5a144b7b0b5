"""`halflife figures`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Figures:
    """Draw the figures of finished or unfinished runs anew, from their saved data alone, and their report pages.

    Nothing is trained or measured again. Written are figures/ and report.html in each folder, the figures where
    `halflife spectrum` and `halflife forecast` left data in it, and those of a folder of `halflife theory`.

    examples:
      halflife figures runs/20260101-120000-mqar-smoke
      halflife figures runs/20260101-120000-mqar-smoke runs/20260102-120000-mamba2+post --formats pdf svg
    """

    runs: Positional[tuple[Path, ...]]
    """Folders of `halflife compare`, `train`, `forecast` or `theory`."""
    formats: tuple[str, ...] = ("png", "svg")
    """png, svg, pdf."""

    def run(self) -> None:
        from halflife.report.redraw import redraw

        for folder in self.runs:
            for file in redraw(folder, self.formats):
                print(file)
