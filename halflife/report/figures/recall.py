"""Recall grids as heat maps: accuracy by sequence length and number of pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure

from halflife.report.style import INK, PAPER, WIDTH, note, plain, styled
from halflife.runs.folder import Comparison, mean

# One hue from paper to dark blue: grey print and colour-blind eyes read it by lightness alone.
SCALE: Colormap = LinearSegmentedColormap.from_list("recall", ["#eef4f9", "#56a0cf", "#08306b"])


def is_grid(run: Comparison) -> bool:
    """Whether some test was made with several numbers of pairs at one length."""
    cells = [
        {(s.length, s.num_pairs) for s in run.scores if s.test == test and math.isfinite(s.num_pairs)}
        for test in run.tests
    ]
    return any(len(own) > len({length for length, _ in own}) for own in cells)


@styled
def recall_grid(run: Comparison) -> Figure:
    """Mean accuracy over seeds of every cell, length (tokens) × pairs: a row of panels a model, a column a test."""
    tests = run.tests
    widths = [len(run.lengths(test)) for test in tests]
    heights = [max(len(_pairs(run, test)) for test in tests)] * len(run.models)
    size = (max(WIDTH, 0.38 * sum(widths) + 0.5 * len(tests) + 1), 0.3 * sum(heights) + 0.75 * len(run.models) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(run.models), len(tests), squeeze=False, width_ratios=widths)
    for row, model in zip(panels, run.models, strict=True):
        for axes, test in zip(row, tests, strict=True):
            _panel(axes, run, model, test)
        row[0].set_ylabel(f"{plain(model)}\npairs")
    for axes, test in zip(panels[0], tests, strict=True):
        axes.set_title(test)
    for axes in panels[-1]:
        axes.set_xlabel("length (tokens)")
    return figure


def _pairs(run: Comparison, test: str) -> list[float]:
    return sorted({s.num_pairs for s in run.scores if s.test == test and math.isfinite(s.num_pairs)})


def _panel(axes: Axes, run: Comparison, model: str, test: str) -> None:
    """One heat map, every cell with its percentage; cells that the task has no room for stay empty."""
    lengths, pairs = run.lengths(test), _pairs(run, test)
    if not pairs:
        return note(axes, "no pairs")
    cells = np.array(
        [
            [mean(s.accuracy for s in run.select(model, test=test, length=n, num_pairs=k)) for n in lengths]
            for k in pairs
        ]
    )
    heat_map(axes, cells, [f"{k:g}" for k in pairs], lengths)


def heat_map(axes: Axes, cells: np.ndarray, labels: Sequence[str], lengths: Sequence[int]) -> None:
    """Shares `[labels, lengths]` as percentages in coloured cells; those that are NaN stay empty."""
    axes.imshow(cells, vmin=0, vmax=1, cmap=SCALE, aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(lengths)), [_short(n) for n in lengths], fontsize=7)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    for (i, j), value in np.ndenumerate(cells):
        if math.isfinite(value):
            ink = PAPER if value > 0.55 else INK
            axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=6.5, color=ink)


def _short(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else str(length)
