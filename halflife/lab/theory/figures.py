"""Figures of `halflife theory`, where the shape of a curve is the claim. Other topics have tables alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from halflife.decay.minimax import LEAST_ERROR
from halflife.files import THEORY_JSON, read_json, without_null
from halflife.report.figures.data import Axis, FigureData, Key, Panel, Reference, Series, Values, curves
from halflife.report.figures.matplotlib_renderer import FORMATS, save
from halflife.report.numbers import evenly
from halflife.report.style import COLOURS, FORMULA, INK, ModelStyle, model_styles

Data = Mapping[str, Any]


def formula(x: Values, y: Values, name: str = "", color: str = INK) -> Series:
    """The dotted line of a formula; without a name it has no entry in the legend."""
    return Series(name or "formula", name, FORMULA._replace(color=color), x, y, "level")


def _errors(x: Values, errors: Mapping[str, Values]) -> list[Series]:
    """Lines of errors. Smaller ones than float64 can resolve are drawn at that limit."""
    return curves(x, {name: np.maximum(error, LEAST_ERROR) for name, error in errors.items()})


def errors_by_channels(data: Data) -> FigureData:
    """Minimax error (log) against N: a panel per T, a line per spectrum, and Theorem 4.7's slope for C₆ = 0."""
    panels, channels = [], np.array(data["channels"])
    y = Axis(f"largest error of t^−{data['beta']:g}", log=True)
    for length in data["lengths"]:
        errors = {name: found[f"{length:g}"] for name, found in data["errors"].items()}
        slope = list(errors.values())[-1][0] * np.exp(-(math.pi**2) / math.log(length) * (channels - channels[0]))
        line = formula(channels, np.where(slope > LEAST_ERROR, slope, np.nan), "slope π²/log T")
        x = Axis("channels N", whole=True)
        panels.append(Panel(f"T = {length:,.0f}", x, y, [*_errors(channels, errors), line]))
    return FigureData("theory_errors", "Errors by channels", panels, size=(2.4, 2.5), shared=True)


def errors_by_position(data: Sequence[Data]) -> FigureData:
    """Minimax error on [1, t] against t (both log): a panel for each choice of the slowest and fastest rate."""
    y = Axis(f"largest error of s^−{data[0]['beta']:g}, s ≤ t", log=True)
    panels = []
    for result in data:
        low, high = result["ends"]
        title = f"rates from {low * result['length']:.2g}/T to {high:.2g}"
        panels.append(Panel(title, Axis("position t", log=True), y, _errors(result["positions"], result["errors"])))
    return FigureData("theory_positions", "Errors by position", panels, size=(2.4, 3.0), shared=True)


def impulse_responses(data: Data) -> FigureData:
    """Responses of the slowest, middle and fastest channel, above against the lag and below against lag / position.

    Lines are those of Corollary 4.13. Dotted lines have the gates of every step along the way. If all lines of a panel
    coincide, the channel's response is a function of that panel's x-axis. "default" is drawn below.
    """
    channels = evenly(range(len(data["rates"])), 3)
    styles = model_styles([f"t = {t:,}" for t in data["positions"]])
    panels = []
    for reference, form in (("t_ref = T, ", data), ("t_ref = 1, ", data["default"])):
        for label in ("lag s", "s / t"):
            for channel in channels:
                series = []
                for i, (name, style) in enumerate(styles.items()):
                    x = np.array(form["lags"][i]) / (form["positions"][i] if label == "s / t" else 1)
                    series.append(Series(name, name, style, x, form["frozen"][i][channel], "line"))
                    series.append(formula(x, form["as run"][i][channel], color=style.color))
                title = f"{reference}channel {channel + 1}, α = {form['tapers'][channel]:.2f}"
                title = title if label == "lag s" else ""
                panels.append(Panel(title, Axis(label, log=True), Axis("response ψ"), series))
    return FigureData(
        "theory_responses", "Responses", panels, columns=len(channels), size=(2.4, 2.3), shared=True,
        keys={"gates along the way": Key(FORMULA, "level")},
    )  # fmt: skip


def autocovariances(data: Mapping[str, Data]) -> FigureData:
    """Autocovariance by octaves of lags (both log, relative to the first) with its slope, for each sequence."""
    series = []
    for i, (name, style) in enumerate(model_styles(list(data)).items()):
        result, shift = data[name], 1.06**i  # so that bars do not cover each other
        used, scale = np.array(result["used"]), result["autocovariance"][0]
        lags, values, errors = (np.array(result[key])[used] for key in ("lags", "autocovariance", "error"))
        values, errors = values / scale, errors / scale
        centre = np.exp(np.log(values).mean() + result["exponent"] * np.log(lags).mean())
        group = f"{name}: β = {result['exponent']:.2f} ({result['low']:.2f} to {result['high']:.2f})"
        series.append(_measured(name, style, shift * lags, values, errors))
        series.append(Series(group, group, style, lags, centre * lags ** -result["exponent"], "line"))
    x, y = Axis("lag s (mean of an octave)", log=True), Axis("R(s), relative", log=True)
    return FigureData("theory_autocovariance", "Autocovariance", [Panel("", x, y, series)])


def _measured(name: str, style: ModelStyle, x: np.ndarray, y: np.ndarray, error: np.ndarray) -> Series:
    """Dots with bars of one standard error."""
    return Series(name, "", style._replace(linestyle="none"), x, y, bars=(y - error, y + error))


def information(data: Mapping[str, Data]) -> FigureData:
    """Information that each octave of context adds (bits a token) against the context length, for each model."""
    series = []
    for name, style in model_styles(list(data)).items():
        result = data[name]
        slack = f"ε = {result['slack']:.2f}" if result["slack"] is not None and result["slack"] < 1 else "not even"
        series.append(Series(name, f"{name} ({slack})", style, result["scales"], result["information"]))
    x, y = Axis("context σ, doubled (tokens)", log=True), Axis("information J(σ) (bits a token)")
    return FigureData("theory_information", "Information", [Panel("", x, y, series, [Reference("", y=0)])])


def spectral_density(data: Data) -> FigureData:
    """Power spectrum by octaves of the frequency (both log), its fitted slope, and the slope of Corollary 3.7."""
    frequencies, density, errors = (np.array(data[key]) for key in ("frequencies", "density", "error"))
    used = np.array(data["used"])
    series = [_measured("measured", ModelStyle(COLOURS[0], "o", "none"), frequencies, density, errors)]
    centre = np.log(frequencies[used]).mean(), np.log(density[used]).mean()
    fitted, claimed = (
        np.exp(centre[1] + data[key] * (np.log(frequencies[used]) - centre[0])) for key in ("slope", "claimed slope")
    )
    name = f"fitted: {data['slope']:.2f}"
    series.append(Series(name, name, ModelStyle(COLOURS[0], "", "-"), frequencies[used], fitted, "line"))
    series.append(formula(frequencies[used], claimed, f"β − 1: {data['claimed slope']:.2f}", COLOURS[0]))
    x, y = Axis("frequency (cycles a token)", log=True), Axis("power", log=True)
    return FigureData("theory_density", "Power spectrum", [Panel("", x, y, series)])


FIGURES: dict[str, Callable[[Any], FigureData]] = {
    "errors": errors_by_channels, "positions": errors_by_position, "responses": impulse_responses,
    "autocovariance": lambda data: autocovariances(data["sequences"]), "density": spectral_density,
    "information": information,
}  # fmt: skip


def redraw(folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw the figures of the `theory.json` in a folder, if there is one, and return the files."""
    file = folder / THEORY_JSON
    return draw_all(without_null(read_json(file), math.nan), folder, formats) if file.exists() else []


def draw_all(data: Mapping[str, Any], folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw what `theory.compute.compute` returns, or its JSON, as `theory_<topic>.<format>` and return the files."""
    return [
        file for name, draw in FIGURES.items() if name in data
        for file in save(draw(data[name]), folder, formats=formats)
    ]  # fmt: skip
