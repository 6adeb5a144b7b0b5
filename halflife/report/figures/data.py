"""Figures as data: panels of curves or heat maps, with titles and labels, independent of the library that draws them.

A data function returns a `FigureData`. `figures.matplotlib_renderer` draws it into a file, and `page.plotly_renderer`
makes an interactive plot of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from halflife.report.numbers import short_count
from halflife.report.style import ModelStyle
from halflife.runs.folder import mean

MAX_TICKS = 8
NO_DATA = "no data yet"
UNFINISHED = "There are no results yet because the run has not finished."
SEEDS = "Thick lines are means over seeds, and thin lines are single seeds. "

Curve = tuple[Sequence[float], Sequence[float]]  # x and y


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Attributes:
        label: the quantity and its unit.
        log: whether the scale is logarithmic.
        fraction: whether values are fractions in [0, 1], which are printed in percent.
        from_zero: whether a linear axis begins at 0.
        ticks: value → label; if empty, the renderer chooses the ticks.
        phrase: the words around a value when it is read out, "{} tokens".
    """

    label: str
    log: bool = False
    fraction: bool = False
    from_zero: bool = False
    ticks: Mapping[float, str] = field(default_factory=dict)
    phrase: str = "{}"


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: its name in tables and under the pointer.
        group: the entry of the legend that it belongs to.
        style: colour, marker and line style.
        x: positions of its points.
        y: values of its points, which may be NaN.
        weight: "thick" has markers, "thin" has none, and "level" is a dotted line to compare with.
        note: what is added to the name under the pointer.
        label: what is written beside its points.
    """

    name: str
    group: str
    style: ModelStyle
    x: Sequence[float]
    y: Sequence[float]
    weight: Literal["thick", "thin", "level"] = "thick"
    note: str = ""
    label: str = ""


@dataclass(frozen=True)
class Reference:
    """A dashed line across a panel with a label: vertical at `x`, or horizontal at `y`."""

    label: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class Panel:
    """Curves on one pair of axes."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    references: Sequence[Reference] = ()


@dataclass(frozen=True)
class HeatMap:
    """Fractions `cells[row][column]`, printed in percent. Cells that are NaN stay empty."""

    title: str
    x: Axis
    y: Axis
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Sequence[Sequence[float]]


@dataclass(frozen=True)
class FigureData:
    """A figure.

    Attributes:
        name: the name of its file, and of its place in the page.
        title: its heading.
        description: what it shows, for readers who cannot see it.
        caption: how to read it.
        panels: either curves or heat maps, in rows.
        columns: the largest number of panels in a row.
    """

    name: str
    title: str
    description: str
    caption: str
    panels: Sequence[Panel | HeatMap]
    columns: int = 3

    @property
    def legend(self) -> dict[str, ModelStyle]:
        """The style of each group of series, in order."""
        curves = [series for panel in self.panels if isinstance(panel, Panel) for series in panel.series]
        return {series.group: series.style for series in curves}

    @property
    def empty(self) -> bool:
        """Whether no panel has anything to show."""
        return not any(isinstance(panel, HeatMap) or panel.series for panel in self.panels)


def seed_series(model: str, style: ModelStyle, curves: Mapping[int, Curve]) -> list[Series]:
    """A model's curves: a thin one for each seed, and their mean where all seeds have values.

    Args:
        model: the model's name.
        style: its style.
        curves: the curve of each seed. Curves without points are left out.
    """
    curves = {seed: curve for seed, curve in curves.items() if len(curve[0])}
    if not curves:
        return []
    if len(curves) == 1:
        [(seed, (x, y))] = curves.items()
        return [Series(model, model, style, x, y, note=f", seed {seed}")]
    values = [dict(zip(*curve, strict=True)) for curve in curves.values()]
    shared = sorted(set.intersection(*map(set, values)))
    average = [mean(at[x] for at in values) for x in shared]
    thin = [Series(f"{model}, seed {seed}", model, style, *curve, weight="thin") for seed, curve in curves.items()]
    return [*thin, Series(model, model, style, shared, average, note=f", mean of {len(curves)} seeds")]


def length_ticks(lengths: Sequence[int]) -> dict[float, str]:
    """Ticks at some of the lengths, at most `MAX_TICKS`, labelled "512", "1K", …"""
    return {length: short_count(length) for length in lengths[:: -(-len(lengths) // MAX_TICKS) or 1]}


def octave_ticks(last: int) -> dict[float, str]:
    """Ticks at powers of two from 1 to `last`, at most `MAX_TICKS`."""
    return length_ticks([2**i for i in range(int(last).bit_length())])


def log_tick_digits(values: Sequence[float]) -> tuple[int, ...]:
    """The leading digits of the ticks on a logarithmic axis: the shorter the span of the values, the more."""
    positive = [value for value in values if value > 0] or [1]
    span = max(positive) / min(positive)
    return tuple(range(1, 10)) if span < 5 else (1, 2, 5) if span < 300 else (1,)
