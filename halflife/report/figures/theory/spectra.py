"""Figures of PoST's decay spectra, each from the result of one function of `halflife.lab.theory`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from halflife.decay.minimax import LEAST_ERROR
from halflife.report.figures.grids import panel_grid
from halflife.report.numbers import evenly
from halflife.report.style import (
    HEAT_COLOURS,
    INK,
    escape_formula,
    legend,
    model_handles,
    model_styles,
    styled,
)

FORMULA: dict[str, Any] = {"color": INK, "linewidth": 1.1, "linestyle": (0, (1, 1.5))}  # values of a formula
SIMULATED: dict[str, Any] = {"linestyle": "none", "marker": ".", "markersize": 3.5, "color": INK, "alpha": 0.45}
RINGED: dict[str, Any] = {"linestyle": "none", "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.8}
LINE: dict[str, Any] = {"marker": "", "linewidth": 1.4}  # without markers


def _plot(axes: Axes, x: Any, curves: Mapping[str, Any], **changes: Any) -> None:
    """Draw a line for each name, in the order of the styles; `changes` replace attributes of every style."""
    for name, style in model_styles(list(curves)).items():
        axes.plot(x, curves[name], **{**style._asdict(), **changes})


def _plot_errors(axes: Axes, x: Any, errors: Mapping[str, Sequence[float]]) -> None:
    """Draw errors on a logarithmic axis. Smaller ones than float64 can resolve are drawn at that limit."""
    _plot(
        axes, x, {name: np.maximum(error, LEAST_ERROR) for name, error in errors.items()}, linewidth=1.3, markersize=3.5
    )
    axes.set_yscale("log")


def _formula_handle(label: str) -> Line2D:
    return Line2D([], [], **FORMULA, label=label)


# ----------------------------------------------------------------------------------------- approximation


@styled
def errors_by_channels(data: Mapping[str, Any]) -> Figure:
    """Minimax error (log) against N: a panel for each T, a line for each spectrum, and Theorem 4.7's slope for C₆ = 0.

    Args:
        data: what `theory.approximation_survey.error_by_channels` returns.
    """
    figure, panels = panel_grid(len(data["lengths"]), 2.5, sharey=True)
    channels, names = np.array(data["channels"]), list(data["errors"])
    for axes, length in zip(panels, data["lengths"], strict=True):
        errors = {name: data["errors"][name][f"{length:g}"] for name in names}
        _plot_errors(axes, channels, errors)
        slope = errors[names[-1]][0] * np.exp(-(math.pi**2) / math.log(length) * (channels - channels[0]))
        axes.plot(channels, np.where(slope > LEAST_ERROR, slope, np.nan), **FORMULA)
        axes.set(title=f"T = {length:,.0f}", xlabel="channels N")
    figure.supylabel(rf"largest error of $t^{{-{data['beta']:g}}}$", fontsize=9)
    legend(figure, [*model_handles(names), _formula_handle(r"slope $\pi^2/\log T$")])
    return figure


@styled
def errors_by_ends(data: Mapping[str, Any]) -> Figure:
    """Minimax error of geometric rates (log colours) against the slowest and the fastest rate, a contour each decade.

    Args:
        data: what `theory.approximation_survey.error_by_ends` returns.
    """
    figure, (axes,) = panel_grid(1, 3.6)
    errors = np.log10(np.maximum(data["errors"], LEAST_ERROR)).T
    ends = data["low"], data["high"]
    image = axes.pcolormesh(*ends, errors, cmap=HEAT_COLOURS.reversed(), shading="gouraud", rasterized=True)
    decades = np.arange(math.ceil(errors.min()), errors.max())
    axes.contour(*ends, errors, decades, colors=INK, linewidths=0.5, linestyles="-")
    styles, handles = model_styles([row["spectrum"] for row in data["rows"]]), []
    for row in data["rows"]:
        if row["low"] is not None:
            style = {**styles[row["spectrum"]]._asdict(), **RINGED}
            handles += axes.plot(row["low"], row["high"], **style, label=row["spectrum"])
    axes.set(xscale="log", yscale="log", xlabel="slowest rate × T", ylabel="fastest rate")
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label=rf"$\log_{{10}}$ of the largest error of $t^{{-{data['beta']:g}}}$")
    legend(figure, handles)
    return figure


@styled
def errors_by_position(data: Sequence[Mapping[str, Any]]) -> Figure:
    """Minimax error on [1, t] against t (both log): a panel for each choice of the slowest and fastest rate.

    Args:
        data: what `theory.approximation_survey.error_by_position` returns, for each choice.
    """
    figure, panels = panel_grid(len(data), 3.0, sharey=True)
    for axes, result in zip(panels, data, strict=True):
        _plot_errors(axes, result["positions"], result["errors"])
        low, high = result["ends"]
        axes.set(title=f"rates from {low * result['length']:.2g}/T to {high:.2g}", xlabel="position t", xscale="log")
    figure.supylabel(rf"largest error of $s^{{-{data[0]['beta']:g}}}$, $s \leq t$", fontsize=9)
    legend(figure, model_handles(list(data[0]["errors"])))
    return figure


@styled
def gaps(data: Mapping[str, Any]) -> Figure:
    """Mean smallest and largest gap of random spectra against N (both log), a bound, and the gap of an even spectrum.

    Args:
        data: what `theory.spectra.minimum_gap` returns.
    """
    figure, (axes,) = panel_grid(1, 3.2)
    names = {"smallest gap, simulated": "mean", "largest gap, simulated": "largest", "even spacing": "even"}
    _plot(axes, data["channels"], {name: data[key] for name, key in names.items()})
    axes.plot(data["channels"], data["bound"], **FORMULA)
    axes.set(xlabel="channels N", ylabel="gap", xscale="log", yscale="log")
    axes.set_xticks(data["channels"], [f"{n:,}" for n in data["channels"]])
    axes.xaxis.set_minor_locator(NullLocator())
    legend(figure, [*model_handles(list(names)), _formula_handle(r"bound $1/(m(N^2-1))$")])
    return figure


@styled
def coherence_maps(data: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Spectral coherence of every pair of channels: a panel for each spectrum, with the largest value in its title.

    Args:
        data: name of a spectrum → what `theory.spectra.coherences` returns; at least one.
    """
    figure, panels = panel_grid(len(data), 2.7)
    for axes, (name, result) in zip(panels, data.items(), strict=True):
        edges = (0.5, len(result["matrix"]) + 0.5)
        image = axes.imshow(
            result["matrix"], vmin=0, vmax=1, cmap=HEAT_COLOURS, interpolation="nearest", origin="lower",
            extent=(*edges, *edges),
        )  # fmt: skip
        axes.set(title=f"{escape_formula(name)}\nlargest {result['largest']:.5f}", xlabel="channel (slowest first)")
        axes.grid(visible=False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
    panels[0].set_ylabel("channel")
    figure.colorbar(image, ax=panels, label=r"coherence $\mu_{ij}$", shrink=0.8)
    return figure


@styled
def channels_in_use(data: Mapping[str, Any]) -> Figure:
    """Number of channels with time-scales in [1, t] against t (log), and the law N log t / log of the longest one.

    Args:
        data: what `theory.spectra.effective_channels` returns, optionally with the same for both kinds of stretching as
            "theorem" and "default".
    """
    figure, (axes,) = panel_grid(1, 2.8)
    forms = {"static": data, "t_ref = T": data.get("theorem"), "t_ref = 1": data.get("default")}
    forms = {name: one for name, one in forms.items() if one}
    counted = {name: one["counted"] for name, one in forms.items()}
    _plot(axes, data["positions"], counted, marker="", drawstyle="steps-post")
    for name, style in model_styles(list(counted)).items():
        axes.plot(data["positions"], forms[name]["law"], **{**FORMULA, "color": style.color})
    axes.set(xlabel="position t", ylabel="channels in use", xscale="log", ylim=(0, 1.08 * data["channels"]))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    law = _formula_handle(r"$N \log t\, /\, \log$ of the longest time-scale")
    legend(figure, [*model_handles(list(counted), marker=""), law])
    return figure


# ------------------------------------------------------------------------------------- responses, energy


@styled
def impulse_responses(data: Mapping[str, Any]) -> Figure:
    """Responses of the slowest, middle and fastest channel, above against the lag and below against lag / position.

    Lines are those of Corollary 4.13. Dotted lines have the gates of every step along the way. If all lines of a panel
    coincide, the channel's response is a function of that panel's x-axis.

    Args:
        data: what `theory.spectra.responses` returns, optionally with another result as "default", drawn below.
    """
    channels = evenly(range(len(data["rates"])), 3)
    forms = [one for one in (data, data.get("default")) if one]
    figure, panels = panel_grid(2 * len(forms) * len(channels), 2.3, columns=len(channels), sharey=True)
    names = [f"t = {t:,}" for t in data["positions"]]
    for row, form in enumerate(forms):
        reference = ("" if len(forms) == 1 else "t_ref = T, ", "t_ref = 1, ")[row]
        for column, channel in enumerate(channels):
            above, below = (panels[(2 * row + i) * len(channels) + column] for i in (0, 1))
            _draw_responses(above, below, form, channel)
            title = f"{reference}channel {channel + 1}, α = {form['tapers'][channel]:.2f}"
            above.set(title=title, xscale="log", xlabel="lag s")
            below.set(xlabel="s / t", xscale="log")
    for axes in panels[:: len(channels)]:
        axes.set_ylabel(r"response $\psi$")
    legend(figure, [*model_handles(names, marker=""), _formula_handle("gates along the way")])
    return figure


def _draw_responses(above: Axes, below: Axes, data: Mapping[str, Any], channel: int) -> None:
    """Draw the responses of a channel at every position against the lag, and against the lag / position."""
    for i, style in enumerate(model_styles([f"t = {t:,}" for t in data["positions"]]).values()):
        lags = np.array(data["lags"][i])
        for axes, x in ((above, lags), (below, lags / data["positions"][i])):
            axes.plot(x, data["frozen"][i][channel], **{**style._asdict(), **LINE})
            axes.plot(x, data["as run"][i][channel], **{**FORMULA, "color": style.color})


@styled
def energy_growth(data: Mapping[str, Any]) -> Figure:
    """Expected energy of the slowest, middle and fastest channel against t (both log), by formula and simulated.

    Args:
        data: what `theory.spectra.energies` returns, optionally with another result as "default", which is drawn below.
    """
    channels = evenly(range(len(data["rates"])), 3)
    forms = [one for one in (data, data.get("default")) if one]
    figure, panels = panel_grid(len(forms) * len(channels), 3.0, columns=len(channels), sharey=True)
    names = {
        "gates frozen at t, continuous time": "continuous", "gates frozen at t, discrete time": "frozen",
        "gates along the way": "as run",
    }  # fmt: skip
    for i, axes in enumerate(panels):
        form, channel = forms[i // len(channels)], channels[i % len(channels)]
        positions = np.array(form["positions"])
        few = np.searchsorted(positions, np.geomspace(1, positions[-1], 40).round())
        _plot(axes, positions, {name: form[key][channel] for name, key in names.items()}, **LINE)
        axes.plot(positions[few], np.array(form["simulated"][channel])[few], **SIMULATED)
        reference = ("" if len(forms) == 1 else "t_ref = T, ", "t_ref = 1, ")[i // len(channels)]
        title = f"{reference}α = {form['tapers'][channel]:.2f}"
        axes.set(title=title, xlabel="position t", xscale="log", yscale="log")
    for axes in panels[:: len(channels)]:
        axes.set_ylabel("energy (of unit noise)")
    simulated = Line2D([], [], **SIMULATED, label=f"{data['trials']:,} simulations")
    legend(figure, [*model_handles(list(names), marker=""), simulated])
    return figure


@styled
def relative_energies(data: Mapping[str, Any]) -> Figure:
    """Growth of the slowest channel's energy relative to the fastest, and shrinking of the fastest by a norm, beyond T.

    Args:
        data: what `theory.normalization.relative_energies` returns.
    """
    figure, (grown, shrunk) = panel_grid(2, 2.8)
    multiples = np.array(data["multiples"])
    names = {"static": "static", "t_ref = T": "theorem", "t_ref = 1": "algorithm"}
    _plot(grown, multiples, {name: data[form]["as run"] for name, form in names.items()}, markersize=4)
    _plot(shrunk, multiples, {name: data[form]["shrunk"] for name, form in names.items()}, markersize=4)
    grown.plot(multiples, multiples, **FORMULA)
    shrunk.plot(multiples, multiples**-0.5, **FORMULA)
    grown.set(title="slowest : fastest, relative to T", ylabel="growth of the energy ratio", yscale="log")
    shrunk.set(title="fastest, after a norm", ylabel="factor on its amplitude", yscale="log")
    for axes in (grown, shrunk):
        axes.set(xlabel="position / T", xscale="log")
        axes.set_xticks(multiples, [str(m) for m in multiples])
        axes.xaxis.set_minor_locator(NullLocator())
    legend(figure, [*model_handles(list(names), marker=""), _formula_handle("Prop. B.2")])
    return figure


# ------------------------------------------------------------------------------------------------- taper


@styled
def taper_bands(data: Mapping[Any, Mapping[str, Sequence[float]]]) -> Figure:
    """How far the taper may deviate from a line: a panel for each slack ε, with the paper's bound and the sharp one.

    Args:
        data: ε → "paper" and "sharp", the deviation at every channel by `theory.spectra.taper_bound`, and optionally
            "best", an optimal taper.
    """
    figure, panels = panel_grid(len(data), 3.0, sharey=True)
    best: dict[str, Any] = {"color": INK, "marker": "o", "markersize": 3, "linewidth": 0.8}
    bands = {"paper": ("paper's bound", 0.18), "sharp": ("sharp bound", 0.4)}
    styles = model_styles([name for name, _ in bands.values()])
    for axes, (slack, bounds) in zip(panels, data.items(), strict=True):
        count = len(bounds["paper"])
        channel, ideal = np.arange(1, count + 1), np.linspace(1, 0, count)
        for key, (name, alpha) in bands.items():
            low, high = (np.clip(ideal + side * np.array(bounds[key]), 0, 1) for side in (-1, 1))
            axes.fill_between(channel, low, high, color=styles[name].color, alpha=alpha, linewidth=0)
        axes.plot(channel, ideal, **FORMULA)
        if "best" in bounds:
            axes.plot(channel, bounds["best"], **best)
        axes.set(title=f"ε = {slack}", xlabel="channel (slowest first)")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[0].set(ylabel="taper α", ylim=(-0.03, 1.03))
    handles = [Line2D([], [], color=styles[name].color, linewidth=7, alpha=a, label=name) for name, a in bands.values()]
    handles += [Line2D([], [], **best, label="best for uneven information"), _formula_handle("even")]
    legend(figure, handles)
    return figure
