"""Figures of what a text shows of PoST's assumptions. Each takes the data of one topic of `lab.theory.compute`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from halflife.lab.theory.figures.spectra import formula
from halflife.report.figures.data import Axis, FigureData, Key, Panel, Reference, Series
from halflife.report.style import COLOURS, REFERENCE, ModelStyle, model_styles

Data = Mapping[str, Any]


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


def block_exponents(data: Data) -> FigureData:
    """Exponents of Condition 3.2 against the size of a block, a line for each lag, and β of the autocovariance."""
    columns = {key: np.array(data[key], dtype=float) for key in ("exponents", "low", "high")}  # None becomes NaN
    series = []
    for i, (name, style) in enumerate(model_styles([f"lag {s}" for s in data["lags"]]).items()):
        factors = np.array(data["factors"]) * 1.03**i  # so that bars do not cover each other
        value, low, high = (columns[key][:, i] for key in ("exponents", "low", "high"))
        series.append(Series(name, name, style, factors, value, bars=(low, high)))
    x = Axis("tokens in a block", log=True, ticks={b: str(b) for b in data["factors"]})
    panel = Panel("", x, Axis("−log(R_b(s)/R(s)) / log b"), series, [Reference("", y=data["beta"])])
    keys = {f"β = {data['beta']:.2f} of the autocovariance": Key(REFERENCE, "level")}
    return FigureData("theory_blocks", "Blocks", [panel], keys=keys)


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
