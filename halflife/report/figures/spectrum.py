"""Figures of trained models' decay spectra, each drawn from what `decays.json` holds."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from halflife.report.figures.allocation import distributions, heads
from halflife.report.figures.comparison import CROWDED, FASTEST, MAX_LAYERS, SLOWEST
from halflife.report.style import (
    COLOURS,
    INK,
    REFERENCE_LINE,
    WIDTH,
    legend,
    model_handles,
    model_styles,
    note,
    plain,
    styled,
)

Data = dict[str, Any]

PLACES = ("1", "T", "16T", "text", "slow text")  # in the order of their colours and markers
LABELS = {
    "1": "position 1", "T": "T", "16T": "16T", "text": "mean on the text", "slow text": "of the slow state, on the text"
}  # fmt: skip
IDEAL: Data = {"color": INK, "linewidth": 1, "linestyle": (0, (5, 3))}


def all_of(data: Data) -> dict[str, Figure]:
    """name → figure of what `decay_survey.survey` gives, as `decays.json` holds it."""
    figures = {
        "spectrum": timescales(data), "spectrum_modes": modes(data), "spectrum_distribution": distributions(data),
        "spectrum_heads": heads(data),
    }  # fmt: skip
    tapered = any("taper" in layer for model in data["models"] for layer in model["layers"])
    return {**figures, "spectrum_taper": tapers(data)} if tapered else figures


# ------------------------------------------------------------------------------------------- time-scales


@styled
def timescales(data: Data) -> Figure:
    """Time-scales (tokens, log) of the channels in their order at positions 1, T and 16T, and at the mean decays on the
    text: a panel a layer, a row a model.

    Positions are drawn apart where a decay depends on them, else once. The line is at T. At most `MAX_LAYERS` layers
    are shown, spread evenly.
    """
    panels = _panels(data, lambda layer: True)
    figure, axes = _grid(panels, "no layer with a decay")
    drawn: set[str] = set()
    for one, (model, layer) in zip(axes, panels, strict=True):
        drawn |= _timescale_panel(one, model, layer)
    if panels:
        figure.supylabel("time-scale (tokens)", fontsize=9)
        handles = [
            Line2D([], [], color=color, marker=marker, linestyle="none", label=_label(place, drawn))
            for place, color, marker in _place_looks() if place in drawn
        ]  # fmt: skip
        legend(
            figure,
            [*handles, *([Line2D([], [], **REFERENCE_LINE, label="T")] if any(map(_length, data["models"])) else [])],
        )
    return figure


def _timescale_panel(axes: Axes, model: Data, layer: Data) -> set[str]:
    """Draws one layer; returns the places that it has."""
    shown = _places(model, layer)
    count = len(next(iter(shown.values())))
    x = np.arange(1, count + 1)
    crowded = count > CROWDED
    for place, color, marker in _place_looks():
        if place in shown:
            y = np.clip(shown[place], FASTEST, SLOWEST)
            size = 2.0 if crowded else 4.5
            axes.plot(
                x, y, color=color, marker=marker, linestyle="none", markersize=size, markeredgewidth=0, alpha=0.85
            )
    if length := _length(model):
        axes.axhline(length, **REFERENCE_LINE)
    axes.set(yscale="log", xlabel=model["channels"], xlim=(0.4, count + 0.6))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    return set(shown)


def _places(model: Data, layer: Data) -> dict[str, np.ndarray]:
    """place → time-scales `[N]`; a decay that no position changes has the first alone."""
    positions = model["positions"]
    named = dict(zip(("1", "T", "16T"), (positions[0], *positions[1:2], *positions[3:4]), strict=False))
    keys = {**{name: str(t) for name, t in named.items()}, "text": "text", "slow text": "slow text"}
    found = {
        name: np.array(layer["spectra"][key]["timescales"], dtype=float)
        for name, key in keys.items() if key in layer["spectra"]
    }  # fmt: skip
    if all(np.array_equal(found["1"], found.get(name, found["1"]), equal_nan=True) for name in ("T", "16T")):
        found = {name: values for name, values in found.items() if name not in ("T", "16T")}
    return found


def _place_looks() -> list[tuple[str, str, str]]:
    return list(zip(PLACES, COLOURS, "o^sDv", strict=False))


def _label(place: str, drawn: set[str]) -> str:
    if place in ("text", "slow text"):
        return LABELS[place]
    return f"base, {LABELS[place]}" if "T" in drawn else "base"


# ------------------------------------------------------------------------------------- modes, waste, taper


@styled
def modes(data: Data) -> Figure:
    """Distinct modes by layer (log2, from 1), and the shares of channels too slow and too fast: a line a model.

    Full markers: base spectra at T; hollow ones: at the mean decays on the text, T its length. Models without a decay
    are left out.
    """
    models = {model["model"]: model for model in data["models"] if model["layers"]}
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    panels: dict[str, Axes] = dict(zip(("modes", "too_slow", "too_fast"), figure.subplots(1, 3), strict=True))
    for label, look in model_styles(list(models)).items():
        layers = [layer["layer"] for layer in models[label]["layers"]]
        for place, filled in ((str(_reference(models[label])), True), ("text", False)):
            spectra = [layer["spectra"].get(place) for layer in models[label]["layers"]]
            for key, axes in panels.items():
                if all(spectra):
                    values = np.array([spectrum[key] for spectrum in spectra], dtype=float)
                    fill = {} if filled else {"markerfacecolor": "none", "linewidth": 0.8}
                    axes.plot(layers, values, **{**look._asdict(), "linewidth": 1.2, **fill})
    _modes_axes(panels, models)
    handles = [Line2D([], [], color=INK, marker="o", linestyle="none", label="base, at T")]
    if data["text"]:
        hollow = Line2D([], [], color=INK, marker="o", linestyle="none", markerfacecolor="none")
        hollow.set_label("mean on the text")
        handles.append(hollow)
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
    """PoST's exponents α of the channels, learned (dots) and ideal, (N − k)/(N − 1) (line): a panel a layer."""
    panels = _panels(data, lambda layer: "taper" in layer)
    figure, axes = _grid(panels, "no layer with PoST")
    for one, (model, layer) in zip(axes, panels, strict=True):
        taper = layer["taper"]
        k = np.arange(1, len(taper["ideal"]) + 1)
        size = 2.0 if len(k) > CROWDED else 4.5
        one.plot(k, np.array(taper["ideal"], dtype=float), **IDEAL)
        one.plot(k, np.array(taper["learned"], dtype=float), "o", color=COLOURS[0], markersize=size, markeredgewidth=0)
        one.set(xlabel=f"{model['channels']}, slowest first", ylim=(-0.05, 1.05))
        one.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    if panels:
        figure.supylabel("exponent α", fontsize=9)
        learned = Line2D([], [], color=COLOURS[0], marker="o", linestyle="none", label="learned")
        legend(figure, [learned, Line2D([], [], **IDEAL, label="ideal")])
    return figure


# -------------------------------------------------------------------------------------------------- grid


def _panels(data: Data, wanted: Any) -> list[tuple[Data, Data]]:
    """(model, layer) of the layers to show."""
    panels = []
    for model in data["models"]:
        layers = [layer for layer in model["layers"] if wanted(layer)]
        if len(layers) > MAX_LAYERS:
            layers = [layers[i] for i in np.linspace(0, len(layers) - 1, MAX_LAYERS).round().astype(int)]
        panels += [(model, layer) for layer in layers]
    return panels


def _grid(panels: list[tuple[Data, Data]], missing: str) -> tuple[Figure, list[Axes]]:
    """A figure with a row a model, titles set; with one layer each, models stand side by side."""
    models = [model["model"] for model, _ in panels]
    rows = [models.count(model) for model in dict.fromkeys(models)] or [1]
    width = max(rows)
    if width == 1:
        width = min(3, len(rows))
        rows = [min(width, len(rows) - i) for i in range(0, len(rows), width)]
    figure = Figure(figsize=(max(WIDTH, 2.1 * width), 2.1 * len(rows) + 0.3), layout="constrained")
    grid = figure.subplots(len(rows), width, sharey=True, squeeze=False)
    used = [axes for line, count in zip(grid.tolist(), rows, strict=True) for axes in line[:count]]
    for line, count in zip(grid.tolist(), rows, strict=True):
        for axes in line[count:]:
            axes.set_axis_off()
    if not panels:
        note(used[0], missing)
        return figure, []
    for i, (axes, (model, layer)) in enumerate(zip(used, panels, strict=True)):
        # A long name runs on above the panels to its right.
        name = "" if i and panels[i - 1][0] is model else f"{plain(model['model'])}\n"
        axes.set_title(f"{name}layer {layer['layer']}", loc="left")
    return figure, used


def _reference(model: Data) -> int:
    return model["positions"][:2][-1]


def _length(model: Data) -> int | None:
    """T, if it is known."""
    return model["positions"][1] if len(model["positions"]) > 1 else None
