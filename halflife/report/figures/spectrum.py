"""Figures of trained models' decay spectra, from the contents of `decays.json`."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from halflife.report.figures.allocation import distributions, heads
from halflife.report.figures.grids import CROWDED, FASTEST, SLOWEST, layer_grid, note_missing, panel_grid
from halflife.report.style import COLOURS, INK, REFERENCE_LINE, legend, model_handles, model_styles, note, styled

Data = dict[str, Any]

# Where time-scales are taken → the label. Their order is that of the colours and markers.
PLACES = {
    "1": "position 1", "T": "T", "16T": "16T", "text": "mean on the text", "slow text": "of the slow state, on the text"
}  # fmt: skip
PLACE_STYLES = dict(zip(PLACES, zip(COLOURS, "o^sDv", strict=False), strict=True))
IDEAL: Data = {**REFERENCE_LINE, "alpha": 1}


def spectrum_figures(data: Data) -> dict[str, Figure]:
    """The figures of what `analysis.survey.measure_models` returns, by name."""
    figures = {
        "spectrum": timescales(data), "spectrum_modes": modes(data), "spectrum_distribution": distributions(data),
        "spectrum_heads": heads(data),
    }  # fmt: skip
    has_taper = any("taper" in layer for model in data["models"] for layer in model["layers"])
    return {**figures, "spectrum_taper": tapers(data)} if has_taper else figures


# ------------------------------------------------------------------------------------------- time-scales


@styled
def timescales(data: Data) -> Figure:
    """Time-scales (tokens, log) of the channels in the model's order: a panel for each layer, a row for each model.

    They are taken at positions 1, T and 16T, and at the mean decays on the text. Time-scales that do not depend on the
    position are drawn once. The dashed line is at T.
    """
    models = {model["model"]: model for model in data["models"]}
    figure, panels = layer_grid([(name, model["layers"]) for name, model in models.items()], sharey=True)
    if not panels:
        return note_missing(figure, "no layer with a decay")
    drawn: set[str] = set()
    for axes, name, layer in panels:
        drawn |= _timescale_panel(axes, models[name], layer)
    figure.supylabel("time-scale (tokens)", fontsize=9)
    handles = [
        Line2D([], [], color=color, marker=marker, linestyle="none", label=_label(place, drawn))
        for place, (color, marker) in PLACE_STYLES.items() if place in drawn
    ]  # fmt: skip
    if any(_train_length(model) for model in data["models"]):
        handles.append(Line2D([], [], **REFERENCE_LINE, label="T"))
    legend(figure, handles)
    return figure


def _timescale_panel(axes: Axes, model: Data, layer: Data) -> set[str]:
    """Draw one layer. Return the places where its time-scales are taken."""
    by_place = _by_place(model, layer)
    count = len(next(iter(by_place.values())))
    dots = {"linestyle": "none", "markersize": 2.0 if count > CROWDED else 4.5, "markeredgewidth": 0, "alpha": 0.85}
    for place, (color, marker) in PLACE_STYLES.items():
        if place in by_place:
            y = np.clip(by_place[place], FASTEST, SLOWEST)
            axes.plot(np.arange(1, count + 1), y, color=color, marker=marker, **dots)
    if length := _train_length(model):
        axes.axhline(length, **REFERENCE_LINE)
    axes.set(yscale="log", xlabel=model["channels"], xlim=(0.4, count + 0.6))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    return set(by_place)


def _by_place(model: Data, layer: Data) -> dict[str, np.ndarray]:
    """Time-scales `[N]` at each place; only at position 1 and on the text if they do not depend on the position."""
    positions = model["positions"]
    named = dict(zip(("1", "T", "16T"), (positions[0], *positions[1:2], *positions[3:4]), strict=False))
    keys = {**{name: str(t) for name, t in named.items()}, "text": "text", "slow text": "slow text"}
    scales = {
        name: np.array(layer["spectra"][key]["timescales"], dtype=float)
        for name, key in keys.items() if key in layer["spectra"]
    }  # fmt: skip
    if all(np.array_equal(scales["1"], scales.get(name, scales["1"]), equal_nan=True) for name in ("T", "16T")):
        return {name: values for name, values in scales.items() if name not in ("T", "16T")}
    return scales


def _label(place: str, drawn: set[str]) -> str:
    if place in ("text", "slow text"):
        return PLACES[place]
    return f"base, {PLACES[place]}" if "T" in drawn else "base"


def _train_length(model: Data) -> int | None:
    """T, if it is known."""
    return model["positions"][1] if len(model["positions"]) > 1 else None


# ------------------------------------------------------------------------------------- modes, waste, taper


@styled
def modes(data: Data) -> Figure:
    """Distinct modes by layer (log2), and the fractions of channels too slow and too fast: a line for each model.

    Filled markers are base spectra at T. Hollow markers are spectra at the mean decays on the text, with the text's
    length as T. Models without a decay are left out.
    """
    models = {model["model"]: model for model in data["models"] if model["layers"]}
    figure, grid = panel_grid(3, 2.8)
    panels: dict[str, Axes] = dict(zip(("modes", "too_slow", "too_fast"), grid, strict=True))
    for name, style in model_styles(list(models)).items():
        layers = models[name]["layers"]
        position = str(_train_length(models[name]) or 1)
        filled: Data = {"linewidth": 1.2}
        hollow: Data = {"markerfacecolor": "none", "linewidth": 0.8}
        for place, changes in ((position, filled), ("text", hollow)):
            spectra = [layer["spectra"].get(place) for layer in layers]
            for key, axes in panels.items():
                if all(spectra):
                    values = np.array([spectrum[key] for spectrum in spectra], dtype=float)
                    axes.plot([layer["layer"] for layer in layers], values, **style._asdict(), **changes)
    _modes_axes(panels, models)
    dots: Data = {"color": INK, "marker": "o", "linestyle": "none"}
    handles = [Line2D([], [], **dots, label="base, at T")]
    if data["text"]:
        handles.append(Line2D([], [], **dots, markerfacecolor="none", label="mean on the text"))
    legend(figure, [*model_handles(list(models)), *handles])
    return figure


def _modes_axes(panels: dict[str, Axes], models: dict[str, Data]) -> None:
    deepest = max((layer["layer"] for model in models.values() for layer in model["layers"]), default=0)
    panels["modes"].set_ylabel("distinct modes")
    panels["modes"].set_yscale("log", base=2)
    panels["modes"].set_ylim(0.9, max(4.4, 1.1 * panels["modes"].get_ylim()[1]))
    panels["modes"].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for key, title in (("too_slow", "channels slower than T"), ("too_fast", "channels faster than 1 token")):
        panels[key].set(ylabel=title, ylim=(-0.03, 1.03))
        panels[key].yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    for axes in panels.values():
        axes.set(xlabel="layer", xlim=(-0.5, deepest + 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        if not models:
            note(axes, "no layer with a decay")


@styled
def tapers(data: Data) -> Figure:
    """PoST's exponents α of the channels: learned (dots) and ideal, (N − k)/(N − 1) (line), a panel for each layer."""
    channels = {model["model"]: model["channels"] for model in data["models"]}
    models = [(model["model"], [one for one in model["layers"] if "taper" in one]) for model in data["models"]]
    figure, panels = layer_grid(models, sharey=True)
    if not panels:
        return note_missing(figure, "no layer with PoST")
    for axes, name, layer in panels:
        ideal, learned = (np.array(layer["taper"][key], dtype=float) for key in ("ideal", "learned"))
        k = np.arange(1, len(ideal) + 1)
        axes.plot(k, ideal, **IDEAL)
        axes.plot(k, learned, "o", color=COLOURS[0], markersize=2.0 if len(k) > CROWDED else 4.5, markeredgewidth=0)
        axes.set(xlabel=f"{channels[name]}, slowest first", xlim=(0.4, len(k) + 0.6), ylim=(-0.05, 1.05))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    figure.supylabel("exponent α", fontsize=9)
    dots = Line2D([], [], color=COLOURS[0], marker="o", linestyle="none", label="learned")
    legend(figure, [dots, Line2D([], [], **IDEAL, label="ideal")])
    return figure
