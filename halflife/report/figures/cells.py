"""Draws heat maps and images with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, MaxNLocator

from halflife.report.figures.data import Colours, Image
from halflife.report.style import HEAT_COLOURS, INK, PAPER, escape_formula


def draw_heat_map(axes: Axes, cells: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Draw fractions `[rows, columns]` as coloured cells with percentages. Cells that are NaN stay empty."""
    axes.imshow(cells, vmin=0, vmax=1, cmap=HEAT_COLOURS, aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(columns)), columns, fontsize=7, rotation=90 if max(map(len, columns)) > 5 else 0)
    axes.set_yticks(range(len(rows)), list(map(escape_formula, rows)), fontsize=7)
    for (i, j), value in np.ndenumerate(cells):
        if math.isfinite(value):
            colour = PAPER if value > 0.55 else INK
            axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=6.5, color=colour)


def draw_image(axes: Axes, panel: Image, colours: Colours) -> AxesImage:
    norm = (LogNorm if colours.log else Normalize)(colours.low, colours.high, clip=True)
    image = axes.imshow(panel.cells, norm=norm, cmap=HEAT_COLOURS, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    for axis, given in ((axes.xaxis, panel.x), (axes.yaxis, panel.y)):
        axis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        axis.set_major_formatter(FuncFormatter(lambda value, _, given=given: given.write(value)))
        if given.ticks:
            axis.set_ticks(list(given.ticks), labels=list(given.ticks.values()))
    for series in panel.series:
        axes.plot(series.x, series.y, **series.style._asdict(), markeredgecolor=PAPER, markersize=7)
    return image
