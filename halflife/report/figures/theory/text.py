"""Figures of what a text shows of PoST's assumptions, each from the result of one function of `halflife.lab.theory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from halflife.report.figures.grids import panel_grid
from halflife.report.style import REFERENCE_LINE, escape_formula, legend, model_handles, model_styles, styled


@styled
def autocovariances(data: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Autocovariance by octaves of lags (both log, relative to the first) with its slope, for each sequence.

    Args:
        data: name of a sequence → what `theory.correlations.power_law` returns; at least one.
    """
    figure, (axes,) = panel_grid(1, 3.4)
    handles = []
    for i, (name, style) in enumerate(model_styles(list(data)).items()):
        result, shift = data[name], 1.06**i  # so that bars do not cover each other
        used, scale = np.array(result["used"]), result["autocovariance"][0]
        lags, values, errors = (np.array(result[key])[used] for key in ("lags", "autocovariance", "error"))
        values, errors = values / scale, errors / scale
        bars = {"color": style.color, "marker": style.marker, "linestyle": "none", "elinewidth": 1}
        axes.errorbar(shift * lags, values, errors, **bars)
        centre = np.exp(np.log(values).mean() + result["exponent"] * np.log(lags).mean())
        axes.plot(lags, centre * lags ** -result["exponent"], color=style.color, linestyle=style.linestyle)
        label = f"{escape_formula(name)}: β = {result['exponent']:.2f} ({result['low']:.2f} to {result['high']:.2f})"
        handles.append(Line2D([], [], **style._asdict(), label=label))
    axes.set(xlabel="lag s (mean of an octave)", ylabel="R(s), relative", xscale="log", yscale="log")
    legend(figure, handles)
    return figure


@styled
def information(data: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Information that each octave of context adds (bits a token) against the context length, for each model.

    Args:
        data: name of a model → what `theory.correlations.octave_information` returns; at least one.
    """
    figure, (axes,) = panel_grid(1, 3.0)
    handles = []
    for name, style in model_styles(list(data)).items():
        result = data[name]
        axes.plot(result["scales"], result["information"], **style._asdict())
        slack = f"ε = {result['slack']:.2f}" if result["slack"] is not None and result["slack"] < 1 else "not even"
        handles.append(Line2D([], [], **style._asdict(), label=f"{escape_formula(name)} ({slack})"))
    axes.axhline(0, **REFERENCE_LINE)
    axes.set(xlabel="context σ, doubled (tokens)", ylabel="information J(σ) (bits a token)")
    axes.set_xscale("log", base=2)
    legend(figure, handles)
    return figure


@styled
def block_exponents(data: Mapping[str, Any]) -> Figure:
    """Exponents of Condition 3.2 against the size of a block, a line for each lag, and β of the autocovariance.

    Args:
        data: what `theory.stationarity.block_exponents` returns.
    """
    figure, (axes,) = panel_grid(1, 3.0)
    names = [f"lag {s}" for s in data["lags"]]
    columns = {key: np.array(data[key], dtype=float) for key in ("exponents", "low", "high")}  # None becomes NaN
    for i, style in enumerate(model_styles(names).values()):
        factors = np.array(data["factors"]) * 1.03**i  # so that bars do not cover each other
        value = columns["exponents"][:, i]
        bars = np.abs(np.stack([value - columns["low"][:, i], columns["high"][:, i] - value]))
        axes.errorbar(factors, value, bars, **{**style._asdict(), "elinewidth": 0.8, "linewidth": 1})
    axes.axhline(data["beta"], **REFERENCE_LINE)
    axes.set(xlabel="tokens in a block", ylabel=r"$-\log(R_b(s)/R(s))\,/\,\log b$", xscale="log")
    axes.set_xticks(data["factors"], [str(b) for b in data["factors"]])
    axes.xaxis.set_minor_locator(NullLocator())
    handle = Line2D([], [], **REFERENCE_LINE, label=f"β = {data['beta']:.2f} of the autocovariance")
    legend(figure, [*model_handles(names), handle])
    return figure


@styled
def spectral_density(data: Mapping[str, Any]) -> Figure:
    """Power spectrum by octaves of the frequency (both log), its fitted slope, and the slope of Corollary 3.7.

    Args:
        data: what `theory.stationarity.spectral_density` returns, and "claimed slope".
    """
    figure, (axes,) = panel_grid(1, 3.0)
    frequencies, density, errors = (np.array(data[key]) for key in ("frequencies", "density", "error"))
    used = np.array(data["used"])
    (style,) = model_styles(["measured"]).values()
    axes.errorbar(frequencies, density, errors, color=style.color, marker=style.marker, linestyle="none", elinewidth=1)
    centre = np.log(frequencies[used]).mean(), np.log(density[used]).mean()
    slopes = {"fitted": ("-", data["slope"]), "β − 1": (":", data["claimed slope"])}
    handles = []
    for name, (line, slope) in slopes.items():
        y = np.exp(centre[1] + slope * (np.log(frequencies[used]) - centre[0]))
        handles += axes.plot(frequencies[used], y, color=style.color, linestyle=line, label=f"{name}: {slope:.2f}")
    axes.set(xlabel="frequency (cycles a token)", ylabel="power", xscale="log", yscale="log")
    legend(figure, handles)
    return figure
