"""How models spend their channels on time-scales (PoST, Figures 1 and 2), from what `decays.json` holds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from halflife.report.figures.recall import SCALE
from halflife.report.style import WIDTH, legend, model_handles, model_styles, note, plain, styled

Data = dict[str, Any]
POINTS = 200  # of a density
EDGES = (-2.0, 8.0)  # of log10 of a time-scale; those beyond count as these


@styled
def distributions(data: Data) -> Figure:
    """Left: density of log10 time-scales (tokens) over all layers, a line a model. Right: those of the middle layer.

    Base time-scales at position 1. The density is a sum of Gaussians as wide as Silverman's rule has it. On the right
    channels stand in the model's own order, spread over the same width: a geometric spectrum is a straight line.

    Args:
        data: what `decay_survey.survey` gives.
    """
    models = {model["model"]: model for model in data["models"] if model["layers"]}
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, look in model_styles(list(models)).items():
        layers = [_logs(layer) for layer in models[label]["layers"]]
        x, y = density(np.concatenate(layers))
        left.plot(10**x, y, color=look.color, linestyle=look.linestyle, linewidth=1.4)
        middle = layers[len(layers) // 2]
        place = np.linspace(0, 1, len(middle)) if len(middle) > 1 else np.array([0.5])
        right.plot(place, 10**middle, **look._asdict(), markersize=3)
    left.set(xscale="log", xlabel="time-scale (tokens)", ylabel="density, per decade", ylim=(0, None))
    right.set(yscale="log", xlabel="channel / channels, the middle layer", ylabel="time-scale (tokens)")
    for axes in (left, right):
        if not models:
            note(axes, "no layer with a decay")
    if models:
        legend(figure, model_handles(list(models)))
    return figure


def density(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A Gaussian density of numbers `[N]`, at `POINTS` points that span them; all alike are drawn a tenth wide."""
    width = max(1.06 * float(logs.std()) * len(logs) ** -0.2, 0.1)
    x = np.linspace(logs.min() - 3 * width, logs.max() + 3 * width, POINTS)
    heights = np.exp(-0.5 * ((x[:, None] - logs) / width) ** 2) / (width * math.sqrt(2 * math.pi))
    return x, heights.mean(1)


@styled
def heads(data: Data) -> Figure:
    """log10 of the base time-scale (tokens) of every channel of every layer: a heat map a model, nothing sorted.

    Args:
        data: what `decay_survey.survey` gives.
    """
    models = [model for model in data["models"] if model["layers"]]
    across = min(3, max(1, len(models)))
    rows = max(1, math.ceil(len(models) / across))
    figure = Figure(figsize=(WIDTH, 0.6 + 2.0 * rows), layout="constrained")
    grid = figure.subplots(rows, across, squeeze=False).ravel()
    maps = [np.stack(_even([_logs(layer) for layer in model["layers"]])) for model in models]
    ends = {"vmin": min(map(np.nanmin, maps)), "vmax": max(map(np.nanmax, maps))} if maps else {}
    for axes, model, values in zip(grid, models, maps, strict=False):
        drawn = axes.imshow(values, aspect="auto", cmap=SCALE, interpolation="nearest", **ends)
        axes.set(title=plain(model["model"]), xlabel=model["channels"], ylabel="layer")
        axes.set_yticks(range(len(values)), [str(layer["layer"]) for layer in model["layers"]])
        axes.grid(visible=False)
    for axes in grid[len(models) :]:
        axes.set_axis_off()
    if models:
        figure.colorbar(drawn, ax=list(grid), label="log10 of the time-scale (tokens)", shrink=0.85)
    else:
        note(grid[0], "no layer with a decay")
    return figure


def _logs(layer: Data) -> np.ndarray:
    """log10 of the base time-scales at position 1; what JSON has no word for (None, or NaN once read) is infinite."""
    scales = next(iter(layer["spectra"].values()))["timescales"]
    known = np.nan_to_num(np.array(scales, dtype=float), nan=np.inf, posinf=np.inf)
    return np.log10(np.clip(known, 10.0 ** EDGES[0], 10.0 ** EDGES[1]))


def _even(rows: list[np.ndarray]) -> list[np.ndarray]:
    """The rows, each filled up to the longest."""
    longest = max(map(len, rows))
    return [np.pad(row, (0, longest - len(row)), constant_values=np.nan) for row in rows]
