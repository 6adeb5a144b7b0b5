"""How models distribute their channels over time-scales (PoST, Figures 1 and 2), from the contents of `decays.json`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from halflife.report.figures.grids import FASTEST, SLOWEST, note_missing, panel_grid
from halflife.report.style import HEAT_COLOURS, escape_formula, legend, model_handles, model_styles, note, styled

Data = dict[str, Any]
POINTS = 200  # of a density


@styled
def distributions(data: Data) -> Figure:
    """Base time-scales (tokens) at position 1. Left: density of their log10. Right: those of the middle layer.

    The density is a sum of Gaussians over all layers, whose width follows Silverman's rule. On the right, channels
    stand in the model's order and are spread over the same width. A geometric spectrum is a straight line.

    Args:
        data: what `analysis.survey.measure_models` returns.
    """
    models = {model["model"]: model for model in data["models"] if model["layers"]}
    figure, (left, right) = panel_grid(2, 3.0)
    for name, style in model_styles(list(models)).items():
        layers = [_log_timescales(layer) for layer in models[name]["layers"]]
        x, y = density(np.concatenate(layers))
        left.plot(10**x, y, color=style.color, linestyle=style.linestyle, linewidth=1.4)
        middle = layers[len(layers) // 2]
        place = np.linspace(0, 1, len(middle)) if len(middle) > 1 else np.array([0.5])
        right.plot(place, 10**middle, **style._asdict(), markersize=3)
    left.set(xscale="log", xlabel="time-scale (tokens)", ylabel="density, per decade", ylim=(0, None))
    right.set(yscale="log", xlabel="channel / number of channels, middle layer", ylabel="time-scale (tokens)")
    if not models:
        for axes in (left, right):
            note(axes, "no layer with a decay")
    legend(figure, model_handles(list(models)))
    return figure


def density(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points and values `[POINTS]` of a Gaussian density of numbers `[N]`. Its Gaussians are at least 0.1 wide."""
    width = max(1.06 * float(logs.std()) * len(logs) ** -0.2, 0.1)
    x = np.linspace(logs.min() - 3 * width, logs.max() + 3 * width, POINTS)
    heights = np.exp(-0.5 * ((x[:, None] - logs) / width) ** 2) / (width * math.sqrt(2 * math.pi))
    return x, heights.mean(1)


@styled
def heads(data: Data) -> Figure:
    """log10 of the base time-scale (tokens) of every channel, in the model's order: a heat map for each model.

    Args:
        data: what `analysis.survey.measure_models` returns.
    """
    models = [model for model in data["models"] if model["layers"]]
    figure, grid = panel_grid(max(1, len(models)), 2.2)
    if not models:
        return note_missing(figure, "no layer with a decay")
    maps = [np.stack(_pad_rows([_log_timescales(layer) for layer in model["layers"]])) for model in models]
    limits = {"vmin": min(map(np.nanmin, maps)), "vmax": max(map(np.nanmax, maps))}
    for axes, model, values in zip(grid, models, maps, strict=True):
        image = axes.imshow(values, aspect="auto", cmap=HEAT_COLOURS, interpolation="nearest", **limits)
        axes.set(title=escape_formula(model["model"]), xlabel=model["channels"], ylabel="layer")
        axes.set_yticks(range(len(values)), [str(layer["layer"]) for layer in model["layers"]])
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        axes.grid(visible=False)
    figure.colorbar(image, ax=grid, label="log10 of the time-scale (tokens)", shrink=0.85)
    return figure


def _log_timescales(layer: Data) -> np.ndarray:
    """log10 of the base time-scales at position 1. None and NaN, which files have for infinity, are infinite."""
    scales = next(iter(layer["spectra"].values()))["timescales"]
    known = np.nan_to_num(np.array(scales, dtype=float), nan=np.inf, posinf=np.inf)
    return np.log10(np.clip(known, FASTEST, SLOWEST))


def _pad_rows(rows: list[np.ndarray]) -> list[np.ndarray]:
    """The rows, filled up with NaN to the length of the longest."""
    longest = max(map(len, rows))
    return [np.pad(row, (0, longest - len(row)), constant_values=np.nan) for row in rows]
