"""Figures as data: panels of curves or heat maps, independent of the library that draws them.

A data function returns a `FigureData`. `figures.matplotlib_renderer` draws it into a file, and `page.plotly_renderer`
makes an interactive plot of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, product
from typing import Any, Literal, NamedTuple

import numpy as np

from halflife.report.numbers import axis_number, evenly, short_count
from halflife.report.style import ModelStyle, model_styles
from halflife.runs.records import mean

MAX_TICKS = 8
FEWEST_LOG_TICKS, MOST_LOG_TICKS = 3, 8
WHOLE_STEPS = 5  # the most steps between ticks at whole numbers
MAX_LAYERS = 6  # of one model
SLOWEST, FASTEST = 1e8, 1e-2  # tokens; time-scales outside are drawn at these limits
MARGIN = 0.05  # of a logarithmic axis beyond its values, as a share of their span
NO_DATA = "no data yet"
UNFINISHED = "There are no results yet because the run has not finished."
SEEDS = "Thick lines are means over seeds, and thin lines are single seeds. "

Values = Sequence[float] | np.ndarray
Curve = tuple[Values, Values]  # x and y


@dataclass(frozen=True)
class Axis:
    """One axis of a panel."""

    label: str  # the quantity and its unit
    log: bool = False  # whether the scale is logarithmic
    fraction: bool = False  # whether values are fractions in [0, 1], which are printed in percent
    from_zero: bool = False  # whether a linear axis begins at 0
    ticks: Mapping[Any, str] = field(default_factory=dict)  # value → label; if empty, the renderer chooses the ticks
    phrase: str = "{}"  # the words around a value when it is read out, "{} tokens"
    # the ends of the axis; None where the renderer chooses them
    limits: tuple[float | None, float | None] = (None, None)
    whole: bool = False  # whether ticks stand at whole numbers alone
    write: Callable[[float], str] = axis_number  # how the value of a tick is written
    names: bool = False  # whether ticks are names, of which each needs a line


Weight = Literal["thick", "thin", "level", "line", "hollow", "ring", "bar"]


@dataclass(frozen=True)
class Series:
    """One curve, or dots where the line style is "none"."""

    name: str  # its name in tables and under the pointer
    group: str  # the entry of the legend that it belongs to; "" for none
    style: ModelStyle  # colour, marker and line style
    x: Values  # positions of its points
    y: Values  # values of its points, which may be NaN
    # "thick" has markers, "hollow" has hollow ones, "thin" and "line" have none, "level" is a dotted line to compare
    # with, "ring" has large hollow markers, and "bar" is a wide pale line
    weight: Weight = "thick"
    note: str = ""  # what is added to the name under the pointer
    label: str = ""  # what is written beside its points
    bars: tuple[Values, Values] | None = None  # the lower and upper ends of vertical bars at the points
    shift: float = 0.0  # how far a picture moves it to the right, so that bars do not cover each other


@dataclass(frozen=True)
class Reference:
    """A dashed line across a panel with a label: vertical at `x`, or horizontal at `y`."""

    label: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class Band:
    """The area between two curves."""

    x: Values
    low: Values
    high: Values
    color: str
    alpha: float


@dataclass(frozen=True)
class Panel:
    """Curves on one pair of axes."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    references: Sequence[Reference] = ()
    bands: Sequence[Band] = ()
    equal: bool = False  # whether a unit has the same length on both axes

    def ticks(self, name: Literal["x", "y"]) -> dict[float, str]:
        """The ticks of an axis with their labels; empty for a linear axis, on which every renderer has enough.

        Ticks that the axis names come first. Others stand within its limits, or within its values and a margin.
        """
        axis: Axis = getattr(self, name)
        values = [x for x in self._values(name) if math.isfinite(x) and (x > 0 or not axis.log)]
        if axis.ticks or not (axis.log or axis.whole) or not values:
            return dict(axis.ticks)
        margin = (max(values) / min(values)) ** MARGIN if axis.log else 1.0
        ends = (0 if axis.from_zero else min(values) / margin, max(values) * margin)
        low, high = (end if own is None else own for own, end in zip(axis.limits, ends, strict=True))
        return {place: axis.write(place) for place in (log_places if axis.log else whole_places)(low, high)}

    def _values(self, name: Literal["x", "y"]) -> Iterator[float]:
        for series in self.series:
            yield from getattr(series, name)
            if series.bars and name == "y":
                yield from chain(*series.bars)
        for band in self.bands:
            yield from band.x if name == "x" else chain(band.low, band.high)
        yield from (place for one in self.references if (place := getattr(one, name)) is not None)


@dataclass(frozen=True)
class HeatMap:
    """Fractions `cells[row][column]`, printed in percent. Cells that are NaN stay empty."""

    title: str
    x: Axis
    y: Axis
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Sequence[Sequence[float]]


class Key(NamedTuple):
    """The look of an entry of a legend."""

    style: ModelStyle
    weight: Weight = "thick"


@dataclass(frozen=True)
class FigureData:
    """A figure."""

    name: str  # the name of its file, and of its place in the page
    title: str  # its heading
    panels: Sequence[Panel | HeatMap | None]  # curves or heat maps, in rows; None leaves a place empty
    description: str = ""  # what it shows, for readers of a page who cannot see it
    caption: str = ""  # how to read it, in a page
    columns: int = 3  # the largest number of panels in a row
    keys: Mapping[str, Key] = field(default_factory=dict)  # entries of the legend below those of the series
    missing: str = NO_DATA  # what a panel says that has nothing to show
    size: tuple[float, float] = (3.0, 3.0)  # width and height of a panel of curves, inches
    shared: bool = False  # whether all panels have the same y-axis, which is labelled at the left alone

    @property
    def legend(self) -> dict[str, Key]:
        """The look of each group of series, in order, and the other entries."""
        found: dict[str, Key] = {}
        for panel in self.panels:
            for series in panel.series if isinstance(panel, Panel) else ():
                if series.group and (series.group not in found or series.weight == "thick"):
                    found[series.group] = Key(series.style, series.weight)
        return found | dict(self.keys)

    @property
    def empty(self) -> bool:
        """Whether no panel has anything to show."""
        return not any(panel and (not isinstance(panel, Panel) or panel.series) for panel in self.panels)


def curves(x: Values, values: Mapping[str, Values]) -> list[Series]:
    """A series for each name, all at the same positions."""
    styles = model_styles(list(values))
    return [Series(name, name, styles[name], x, y) for name, y in values.items()]


def layer_rows(
    models: Mapping[str, Sequence[Mapping[str, Any]]], draw: Callable[[str, str, Any], Panel]
) -> dict[str, Any]:
    """The arguments of a `FigureData` with a row for each model that has layers, and a panel for each layer.

    `draw` makes the panel of a title, the model's name and the layer. At most `MAX_LAYERS` layers are shown, evenly
    spaced. Models with a single layer each stand side by side.
    """
    rows = [[(name, layer) for layer in evenly(layers, MAX_LAYERS)] for name, layers in models.items() if layers]
    width = max(map(len, rows), default=1)
    panels: list[Panel | None] = []
    for row in rows:
        for i, (name, layer) in enumerate(row):
            # A long name extends over the panels to its right, which have the same model.
            panels.append(draw(f"{name}\n" * (i == 0) + f"layer {layer['layer']}", name, layer))
        panels += [None] * (width - len(row))
    return {"panels": panels, "columns": width if width > 1 else 3, "size": (2.1, 2.25), "shared": True}


def seed_series(models: Mapping[str, Mapping[int, Curve]]) -> list[Series]:
    """The curves of models by seed: a thin one for each that has points, and their mean where all seeds have values."""
    styles = model_styles(list(models))
    return [one for model, curves in models.items() for one in _of_seeds(model, styles[model], curves)]


def _of_seeds(model: str, style: ModelStyle, curves: Mapping[int, Curve]) -> list[Series]:
    curves = {seed: curve for seed, curve in curves.items() if len(curve[0])}
    if not curves:
        return []
    if len(curves) == 1:
        [(seed, (x, y))] = curves.items()
        return [Series(model, model, style, x, y, note=f", seed {seed}")]
    values = [dict(zip(*curve, strict=True)) for curve in curves.values()]
    shared = sorted(set.intersection(*map(set, values)))
    average = [mean(at[x] for at in values) for x in shared]
    whole = sum(any(map(math.isfinite, y)) for _, y in curves.values())  # the others diverged
    of = f"{len(curves)}" if whole == len(curves) else f"{whole} of {len(curves)}"
    thin = [Series(f"{model}, seed {seed}", model, style, *curve, weight="thin") for seed, curve in curves.items()]
    return [*thin, Series(model, model, style, shared, average, note=f", mean of {of} seeds")]


def length_ticks(lengths: Sequence[float]) -> dict[float, str]:
    """Ticks at some of the lengths, at most `MAX_TICKS`, labelled "512", "1K", …"""
    return {length: short_count(length) for length in lengths[:: -(-len(lengths) // MAX_TICKS) or 1]}


def octave_ticks(last: int) -> dict[float, str]:
    """Ticks at powers of two from 1 to `last`, at most `MAX_TICKS`."""
    return length_ticks([2**i for i in range(int(last).bit_length())])


def log_places(low: float, high: float) -> list[float]:
    """The first that has enough in the range: powers of ten, 1, 2 and 5 times each, all digits, or equal steps."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 2, 5), range(1, 10)):
        places = [float(f"{digit}e{power}") for power in powers for digit in digits]
        inside = [place for place in places if low <= place <= high]
        if len(inside) >= FEWEST_LOG_TICKS:
            return inside[:: math.ceil(len(inside) / MOST_LOG_TICKS)]
    return _steps(low, high)


def _steps(low: float, high: float) -> list[float]:
    """Multiples of the largest round step of which there are enough; one number for a range without width."""
    if math.isclose(low, high):
        return [low]
    power = math.floor(math.log10(high - low))
    for scale, digit in product((power, power - 1), (5, 2, 1)):
        step = float(f"{digit}e{scale}")
        inside = [float(f"{i * step:.12g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(inside) >= FEWEST_LOG_TICKS:
            break
    return inside


def whole_places(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most `WHOLE_STEPS` steps."""
    sizes = (digit * 10**power for power in count() for digit in (1, 2, 5))
    step = next(size for size in sizes if high - low <= WHOLE_STEPS * size)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
