"""Figures of trained models' decay spectra, from the contents of `decays.json`: time-scales, modes, tapers.

`distributions` shows how models distribute their channels over time-scales (PoST, Figure 1). All functions take what
`analysis.survey.measure_models` returns.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from halflife.report.figures.data import (
    FASTEST,
    SLOWEST,
    Axis,
    FigureData,
    Key,
    Panel,
    Reference,
    Series,
    Weight,
    layer_rows,
)
from halflife.report.style import COLOURS, DOTS, REFERENCE, ModelStyle, label_styles

Data = dict[str, Any]

MISSING = "no layer with a decay"
LAYER = Axis("layer", phrase="layer {}", whole=True)
TIMESCALE = Axis("time-scale (tokens)", log=True, phrase="{} tokens")
# Where time-scales are taken → the label. Their order is that of the colours and markers.
PLACES = {
    "1": "position 1", "T": "T", "16T": "16T", "text": "mean on the text", "slow text": "of the slow state, on the text"
}  # fmt: skip
PLACE_STYLES = {
    place: ModelStyle(color, marker, "none") for place, color, marker in zip(PLACES, COLOURS, "o^sDv", strict=False)
}
NUM_POINTS = 200  # of a density


def spectrum_figures(data: Data) -> list[FigureData]:
    """All figures of this module; that of tapers only if a layer has one."""
    figures = [timescales(data), modes(data), distributions(data)]
    has_taper = any("taper" in layer for model in data["models"] for layer in model["layers"])
    return [*figures, tapers(data)] if has_taper else figures


def channel_axis(label: str, count: int) -> Axis:
    """The axis of the numbers of channels, from 1."""
    return Axis(label, limits=(0.4, count + 0.6), whole=True)


def timescales(data: Data) -> FigureData:
    """Time-scales (tokens, log) of the channels in the model's order: a panel for each layer, a row for each model.

    They are taken at positions 1, T and 16T, and at the mean decays on the text. Time-scales that do not depend on the
    position are drawn once. The dashed line is at T.
    """
    models = {model["model"]: model for model in data["models"]}
    drawn: set[str] = set()

    def panel(title: str, name: str, layer: Data) -> Panel:
        found, length = _by_place(models[name], layer), _train_length(models[name])
        drawn.update(found)
        count = len(next(iter(found.values())))
        series = [
            Series(place, "", style, range(1, count + 1), found[place].clip(FASTEST, SLOWEST))
            for place, style in PLACE_STYLES.items() if place in found
        ]  # fmt: skip
        lines = [Reference("", y=length)] if length else []
        return Panel(title, channel_axis(models[name]["channels"], count), TIMESCALE, series, lines)

    rows = layer_rows({name: model["layers"] for name, model in models.items()}, panel)
    keys = {_label(place, drawn): Key(style) for place, style in PLACE_STYLES.items() if place in drawn}
    if drawn and any(map(_train_length, data["models"])):
        keys["T"] = Key(REFERENCE, "level")
    return FigureData("spectrum", "Time-scales", keys=keys, missing=MISSING, **rows)


def _by_place(model: Data, layer: Data) -> dict[str, np.ndarray]:
    """Time-scales `[N]` at each place; only at position 1 and on the text if they do not depend on the position."""
    positions = model["positions"]
    named = dict(zip(("1", "T", "16T"), (positions[0], *positions[1:2], *positions[3:4]), strict=False))
    keys = {**{name: str(t) for name, t in named.items()}, "text": "text", "slow text": "slow text"}
    scales = {name: _scales(layer["spectra"][key]) for name, key in keys.items() if key in layer["spectra"]}
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


def modes(data: Data) -> FigureData:
    """Distinct modes by layer (log), and the fractions of channels too slow and too fast: a line for each model.

    Filled markers are base spectra at T. Hollow markers are spectra at the mean decays on the text, with the text's
    length as T. Models without a decay are left out.
    """
    models = {model["model"]: model for model in data["models"] if model["layers"]}
    styles = label_styles(model["model"] for model in data["models"])
    fraction = Axis("fraction of channels", fraction=True)
    panels = []
    for key, title, y in (
        ("modes", "Distinct time-scales", Axis("effective modes", log=True)), ("too_slow", "Too slow", fraction),
        ("too_fast", "Too fast", fraction),
    ):  # fmt: skip
        series: list[Series] = []
        for name, model in models.items():
            layers, style = model["layers"], styles[name]
            looks: dict[str, Weight] = {str(_train_length(models[name]) or 1): "thick", "text": "hollow"}
            for place, weight in looks.items():
                if all(place in layer["spectra"] for layer in layers):
                    values = [layer["spectra"][place][key] for layer in layers]
                    y_values = [math.nan if value is None else value for value in values]
                    label = name if weight == "thick" else f"{name}, on the text"
                    series.append(Series(label, name, style, [one["layer"] for one in layers], y_values, weight))
        panels.append(Panel(title, LAYER, y, series))
    keys = {"base, at T": Key(DOTS), **({"mean on the text": Key(DOTS, "hollow")} if data["text"] else {})}
    return FigureData(
        "spectrum_modes", "Distinct time-scales and wasted channels", panels,
        description="Line chart of distinct time-scales and of wasted channels by layer.",
        caption=(
            "A channel is too slow if its time-scale is beyond the training length, or the length of the text if that "
            "is unknown. It is too fast if its time-scale is below one token. Filled markers are the spectrum at zero "
            "input. Hollow markers are that of the mean log-decays on the text, with the text's length as T."
        ),
        keys=keys if models else {}, size=(2.4, 2.8), missing=MISSING,
    )  # fmt: skip


def tapers(data: Data) -> FigureData:
    """PoST's exponents α of the channels: learned (dots) and ideal, (N − k)/(N − 1) (line), a panel for each layer."""
    channels = {model["model"]: model["channels"] for model in data["models"]}
    models = {model["model"]: [one for one in model["layers"] if "taper" in one] for model in data["models"]}
    learned = ModelStyle(COLOURS[0], "o", "none")

    def panel(title: str, name: str, layer: Data) -> Panel:
        numbers = range(1, len(layer["taper"]["ideal"]) + 1)
        series = [
            Series("ideal", "ideal", REFERENCE, numbers, layer["taper"]["ideal"], "level"),
            Series("learned", "learned", learned, numbers, layer["taper"]["learned"]),
        ]
        x = channel_axis(f"{channels[name]}, slowest first", len(numbers))
        return Panel(title, x, Axis("exponent α", limits=(-0.05, 1.05)), series)

    rows = layer_rows(models, panel)
    return FigureData("spectrum_taper", "Tapers", missing="no layer with PoST", **rows)


def distributions(data: Data) -> FigureData:
    """Base time-scales (tokens) at position 1. Left: density of their log10. Right: those of the middle layer.

    The density is a sum of Gaussians over all layers, whose width follows Silverman's rule. On the right, channels
    stand in the model's order and are spread over the same width. A geometric spectrum is a straight line.
    """
    models = {model["model"]: model for model in data["models"] if model["layers"]}
    left, right = [], []
    styles = label_styles(model["model"] for model in data["models"])
    for name, model in models.items():
        base = [_scales(next(iter(layer["spectra"].values()))).clip(FASTEST, SLOWEST) for layer in model["layers"]]
        layers, style = list(map(np.log10, base)), styles[name]
        x, y = density(np.concatenate(layers))
        left.append(Series(name, "", style, 10**x, y, "line"))
        middle = layers[len(layers) // 2]
        place = np.linspace(0, 1, len(middle)) if len(middle) > 1 else np.array([0.5])
        right.append(Series(name, name, style, place, 10**middle))
    panels = [
        Panel("all layers", TIMESCALE, Axis("density, per decade", from_zero=True), left),
        Panel("middle layer", Axis("channel / number of channels"), TIMESCALE, right),
    ]
    return FigureData("spectrum_distribution", "Distribution of time-scales", panels, missing=MISSING)


def density(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points and values `[NUM_POINTS]` of a Gaussian density of numbers `[N]`. Its Gaussians are at least 0.1 wide."""
    width = max(1.06 * float(logs.std()) * len(logs) ** -0.2, 0.1)
    x = np.linspace(logs.min() - 3 * width, logs.max() + 3 * width, NUM_POINTS)
    heights = np.exp(-0.5 * ((x[:, None] - logs) / width) ** 2) / (width * math.sqrt(2 * math.pi))
    return x, heights.mean(1)


def _scales(spectrum: Data) -> np.ndarray:
    """Time-scales `[N]`. None and NaN, which files have for infinity, are infinite."""
    return np.nan_to_num(np.array(spectrum["timescales"], dtype=float), nan=np.inf, posinf=np.inf)
