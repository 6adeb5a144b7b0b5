"""The time-scales of a comparison's models before and after training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from halflife.report.figures.grids import CROWDED, FASTEST, SLOWEST, layer_grid, note_missing
from halflife.report.style import INK, REFERENCE_LINE, legend, model_styles, styled
from halflife.report.tables.timescales import nearest_to
from halflife.runs.folder import Comparison

MAX_DECADES = 6  # ticks of a y-axis
PAGE_ROWS = 8  # of panels in one picture
Ends = tuple[np.ndarray, np.ndarray]  # time-scales `[N]` at the first position and at the training length


def spectrum_pages(run: Comparison) -> list[Figure]:
    """`spectrum` in pictures of at most `PAGE_ROWS` rows of panels."""
    spectra = _spectra(run, run.models)
    one_layer = all(len(found["layers"]) == 1 for found in spectra.values())
    size = PAGE_ROWS * 3 if one_layer else PAGE_ROWS
    return [spectrum(run, list(spectra)[i : i + size]) for i in range(0, len(spectra), size)] or [spectrum(run)]


def _spectra(run: Comparison, models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The saved spectrum of each model that has one: of its first seed at the selected learning rate."""
    spectra = {}
    for model in models:
        found = [one.spectrum for one in run.trainings_of(model) if one.spectrum.get("layers")]
        if found:
            spectra[model] = found[0]
    return spectra


@styled
def spectrum(run: Comparison, models: Sequence[str] | None = None) -> Figure:
    """Time-scales (tokens, log) of the channels in the model's order, initial and trained, by layer.

    The first seed at the selected learning rate is shown. Circles are time-scales at the first position. Triangles are
    those at position T, if they differ.

    Args:
        run: the comparison.
        models: which of its models; None for all.
    """
    spectra = _spectra(run, run.models if models is None else models)
    figure, panels = layer_grid([(model, found["layers"]) for model, found in spectra.items()])
    if not panels:
        return note_missing(figure, "no spectrum: no model with a decay has finished")
    limits = _limits(run)
    for axes, _, _ in panels:
        _set_log_axis(axes, *limits)
    styles = model_styles(run.models)
    moved = [
        _draw_layer(axes, layer, run.train_length, styles[model].color, spectra[model].get("channels", "channels"))
        for axes, model, layer in panels
    ]
    figure.supylabel("time-scale (tokens)", fontsize=9)
    legend(figure, _handles(run.train_length, any(moved)))
    return figure


def _limits(run: Comparison) -> tuple[float, float]:
    """The least and the greatest time-scale of all models and of the training length, with a margin."""
    layers = [layer for found in _spectra(run, run.models).values() for layer in found["layers"]]
    ends = [end for layer in layers for when in ("init", "trained") for end in _at_ends(layer[when], run.train_length)]
    values = np.concatenate([*ends, [run.train_length or math.nan]])
    return float(np.nanmin(values)) / 1.4, float(np.nanmax(values)) * 1.4


def _set_log_axis(axes: Axes, low: float, high: float) -> None:
    """Give a panel the y-axis of all panels. Axes that share it in matplotlib, or minor ticks, take far longer."""
    axes.set(yscale="log", ylim=(low, high))
    axes.yaxis.set_minor_locator(NullLocator())
    decades = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    if len(decades) > 1:
        step = math.ceil(len(decades) / MAX_DECADES)
        axes.yaxis.set_major_locator(FixedLocator([10.0**at for at in decades if at % step == 0]))
    place = axes.get_subplotspec()
    if place is not None and not place.is_first_col():
        axes.tick_params(labelleft=False)


def _draw_layer(axes: Axes, layer: dict[str, Any], train_length: int | None, color: str, channels: str) -> bool:
    """Draw one layer. Return whether its time-scales depend on the position."""
    initial, trained = (_at_ends(layer[when], train_length) for when in ("init", "trained"))
    moves = not all(np.allclose(first, last, equal_nan=True) for first, last in (initial, trained))
    numbers = np.arange(1, len(initial[0]) + 1)
    crowded = len(numbers) > CROWDED
    size = 2.2 if crowded else min(5.0, 60 / len(numbers))
    for end, marker in enumerate("o^"[: 1 + moves]):
        x = numbers + (0.14 * (2 * end - 1) if moves else 0)
        dots: dict[str, Any] = {"linestyle": "none", "marker": marker, "markersize": size, "color": color}
        if not crowded:
            axes.vlines(x, initial[end], trained[end], color=color, linewidth=0.8, alpha=0.6)
        axes.plot(x, initial[end], **dots, markerfacecolor="none", markeredgewidth=0.5 if crowded else 0.8)
        axes.plot(x, trained[end], **dots, markeredgewidth=0)
    if train_length:
        axes.axhline(train_length, **REFERENCE_LINE)
    axes.set(xlabel=channels, xlim=(0.4, len(numbers) + 0.6))
    if len(numbers) <= 8:
        axes.set_xticks(numbers)
    return moves


def _at_ends(saved: dict[str, Any], train_length: int | None) -> Ends:
    """Time-scales at the first saved position, and at the one nearest to the training length."""
    scales = {float(position): values for position, values in saved["timescales"].items()}
    ends = min(scales), nearest_to(train_length, scales)
    first, last = (np.ravel(np.array(scales[at], dtype=float)) for at in ends)
    return first.clip(FASTEST, SLOWEST), last.clip(FASTEST, SLOWEST)


def _handles(train_length: int | None, moves: bool) -> list[Line2D]:
    handles = []
    for marker, where in {"o": ", position 1", "^": ", position T"}.items() if moves else [("o", "")]:
        dots: dict[str, Any] = {"color": INK, "linestyle": "none", "marker": marker}
        handles += [Line2D([], [], **dots, markerfacecolor="none", label=f"initial{where}")]
        handles += [Line2D([], [], **dots, label=f"trained{where}")]
    if train_length:
        handles.append(Line2D([], [], **REFERENCE_LINE, label=f"training length T = {train_length:,}"))
    return handles
