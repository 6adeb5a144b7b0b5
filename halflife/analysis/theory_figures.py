"""Figures of the theory of decay spectra, each drawn from the plain data of one function of the analysis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from halflife.analysis.recall_grid import SCALE
from halflife.analysis.style import GOAL, INK, WIDTH, legend, looks, model_handles, plain, styled

LAW: dict[str, Any] = {"color": INK, "linewidth": 1.1, "linestyle": (0, (1, 1.5))}  # what a formula says
LEAST = 1e-14  # errors below are drawn at this
SIMULATED: dict[str, Any] = {"linestyle": "none", "marker": ".", "markersize": 3.5, "color": INK, "alpha": 0.45}


def _panels(count: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(max(WIDTH, 2.4 * count), height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False, **options)[0])


# ----------------------------------------------------------------------------------------- approximation


@styled
def errors_by_channels(data: Mapping[str, Any]) -> Figure:
    """Minimax error against N (both log): a panel a T, a line a spectrum, dotted Theorem 4.7's slope with C₆ = 0.

    Args:
        data: what `approximation_survey.error_by_channels` gives.
    """
    figure, panels = _panels(len(data["lengths"]), 3.4, sharey=True)
    channels, names = np.array(data["channels"]), list(data["errors"])
    for axes, length in zip(panels, data["lengths"], strict=True):
        for name, look in looks(names).items():
            axes.plot(channels, np.maximum(data["errors"][name][f"{length:g}"], LEAST), **look._asdict(), linewidth=1.3)
        first = data["errors"][names[-1]][f"{length:g}"][0]
        fall = first * np.exp(-(math.pi**2) / math.log(length) * (channels - channels[0]))
        axes.plot(channels, np.where(fall > LEAST, fall, np.nan), **LAW)
        axes.set(title=f"T = {length:,.0f}", xlabel="channels N", yscale="log")
    panels[0].set_ylabel(rf"largest error of $t^{{-{data['beta']:g}}}$")
    handles = [*model_handles(names), Line2D([], [], **LAW, label=r"slope $\pi^2/\log T$")]
    legend(figure, handles)
    return figure


@styled
def errors_by_position(data: Sequence[Mapping[str, Any]]) -> Figure:
    """Minimax error on [1, t] against t (both log): a panel a choice of ends.

    Args:
        data: what `approximation_survey.error_by_position` gives, once a choice of ends.
    """
    figure, panels = _panels(len(data), 3.2, sharey=True)
    kinds = list(data[0]["errors"])
    for axes, result in zip(panels, data, strict=True):
        for kind, look in looks(kinds).items():
            axes.plot(result["positions"], np.maximum(result["errors"][kind], LEAST), **look._asdict(), linewidth=1.3)
        low, high = result["ends"]
        title = f"rates from {low * result['length']:.2g}/T to {high:.2g}"
        axes.set(title=title, xlabel="position t", xscale="log", yscale="log")
    panels[0].set_ylabel(rf"largest error of $s^{{-{data[0]['beta']:g}}}$, $s \leq t$")
    legend(figure, model_handles(kinds))
    return figure


# --------------------------------------------------------------------------------------- gaps, coherence


@styled
def gaps(data: Mapping[str, Any]) -> Figure:
    """Mean least and largest gap of random spectra against N (both log), the bound, and the gap of an even spectrum.

    Args:
        data: what `spectra.minimum_gap` gives.
    """
    figure, (axes,) = _panels(1, 3.2)
    names = ["least gap, simulated", "largest gap, simulated", "even spacing"]
    rows = dict(zip(names, ("mean", "largest", "even"), strict=True))
    for name, look in looks(names).items():
        axes.plot(data["channels"], data[rows[name]], **look._asdict())
    axes.plot(data["channels"], data["bound"], **LAW)
    axes.set(xlabel="channels N", ylabel="gap", xscale="log", yscale="log")
    legend(figure, [*model_handles(names), Line2D([], [], **LAW, label=r"bound $1/(m(N^2-1))$")])
    return figure


@styled
def coherence_maps(data: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Spectral coherence of every pair of channels, a panel a spectrum; above it the largest of two channels.

    Args:
        data: name of a spectrum → what `spectra.coherences` gives; at least one.
    """
    figure, panels = _panels(len(data), 3.0)
    for axes, (name, found) in zip(panels, data.items(), strict=True):
        edges = (0.5, len(found["matrix"]) + 0.5)
        drawn = axes.imshow(
            found["matrix"],
            vmin=0,
            vmax=1,
            cmap=SCALE,
            interpolation="nearest",
            origin="lower",
            extent=(*edges, *edges),
        )
        title = f"{plain(name)}\nlargest {found['largest']:.4f}"
        axes.set(title=title, xlabel="channel (slowest first)")
        axes.grid(visible=False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
    panels[0].set_ylabel("channel")
    figure.colorbar(drawn, ax=panels, label=r"coherence $\mu_{ij}$", shrink=0.8)
    return figure


@styled
def channels_in_use(data: Mapping[str, Any]) -> Figure:
    """Channels with time-scales in [1, t] against t (log), and the law N log t / log T.

    Args:
        data: what `spectra.effective_channels` gives.
    """
    figure, (axes,) = _panels(1, 2.8)
    (name, look), *_ = looks(["counted"]).items()
    axes.step(data["positions"], data["counted"], where="post", color=look.color)
    axes.plot(data["positions"], data["law"], **LAW)
    axes.axhline(data["channels"], **GOAL)
    axes.set(xlabel="position t", ylabel="channels in use", xscale="log")
    axes.set_ylim(0, 1.08 * data["channels"])
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    handles = [
        Line2D([], [], color=look.color, label=f"{name}: time-scale in [1, t]"),
        Line2D([], [], **LAW, label=r"$N \log t\, /\, \log T$"),
        Line2D([], [], **GOAL, label=f"all {data['channels']}"),
    ]
    legend(figure, handles)
    return figure


# ------------------------------------------------------------------------------------- responses, energy


@styled
def impulse_responses(data: Mapping[str, Any]) -> Figure:
    """Responses of the slowest, middle and fastest channel: above against the lag, below against lag / position.

    Lines are Corollary 4.13's, dotted those of the gates along the way. Where one panel's lines fall together the
    channel lives in that coordinate.

    Args:
        data: what `spectra.responses` gives.
    """
    count = len(data["rates"])
    chosen = sorted({0, (count - 1) // 2, count - 1})
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    grid = figure.subplots(2, len(chosen), squeeze=False, sharey=True)
    names = [f"t = {t:,}" for t in data["positions"]]
    for column, channel in enumerate(chosen):
        for i, look in enumerate(looks(names).values()):
            lags = np.array(data["lags"][i])
            for axes, x in zip(grid[:, column], (lags, lags / data["positions"][i]), strict=True):
                axes.plot(x, data["frozen"][i][channel], color=look.color, linestyle=look.linestyle, linewidth=1.4)
                axes.plot(x, data["as run"][i][channel], **(LAW | {"color": look.color}))
        grid[0, column].set(title=f"channel {channel + 1} of {count}, α = {data['tapers'][channel]:.2f}", xscale="log")
        grid[0, column].set_xlabel("lag s")
        grid[1, column].set(xlabel="s / t", xscale="log")
    for axes in grid[:, 0]:
        axes.set_ylabel(r"response $\psi$")
    lines = [
        Line2D([], [], color=look.color, linestyle=look.linestyle, label=name) for name, look in looks(names).items()
    ]
    legend(figure, [*lines, Line2D([], [], **LAW, label="gates along the way")])
    return figure


@styled
def energy_growth(data: Mapping[str, Any]) -> Figure:
    """Expected energy of the slowest, middle and fastest channel against t (both log), by formula and as run.

    Args:
        data: what `spectra.energies` gives.
    """
    count = len(data["rates"])
    chosen = sorted({0, (count - 1) // 2, count - 1})
    figure, panels = _panels(len(chosen), 3.0, sharey=True)
    positions = np.arange(1, data["length"] + 1)
    few = np.unique(np.geomspace(1, data["length"], 40).round().astype(int)) - 1
    names = ["continuous", "frozen", "as run"]
    for axes, channel in zip(panels, chosen, strict=True):
        for name, look in looks(names).items():
            axes.plot(positions, data[name][channel], color=look.color, linestyle=look.linestyle, linewidth=1.4)
        axes.plot(positions[few], np.array(data["simulated"][channel])[few], **SIMULATED)
        axes.set(title=f"α = {data['tapers'][channel]:.2f}", xlabel="position t", xscale="log", yscale="log")
    panels[0].set_ylabel("energy (of unit noise)")
    labels = ("gates frozen at t, continuous time", "gates frozen at t, discrete time", "gates along the way")
    lines = [
        Line2D([], [], color=look.color, linestyle=look.linestyle, label=label)
        for label, look in zip(labels, looks(names).values(), strict=True)
    ]
    legend(figure, [*lines, Line2D([], [], **SIMULATED, label=f"{data['trials']:,} runs")])
    return figure


# ----------------------------------------------------------------------------------------- taper and data


@styled
def taper_bands(data: Mapping[float, Mapping[str, Sequence[float]]]) -> Figure:
    """How far the taper may have to bend: a panel a slack ε, the paper's band and the sharp one around the line.

    Args:
        data: ε → "paper" and "sharp" of `spectra.taper_bound`, one a channel, and "best" (an optimal taper) or none.
    """
    figure, panels = _panels(len(data), 3.0, sharey=True)
    bands = {"paper": "paper's bound", "sharp": "sharp bound"}
    shown = looks(list(bands.values()))
    for axes, (slack, found) in zip(panels, data.items(), strict=True):
        count = len(found["paper"])
        channel, ideal = np.arange(1, count + 1), np.linspace(1, 0, count)
        for (key, name), alpha in zip(bands.items(), (0.18, 0.4), strict=True):
            width = np.array(found[key])
            low, high = np.clip(ideal - width, 0, 1), np.clip(ideal + width, 0, 1)
            axes.fill_between(channel, low, high, color=shown[name].color, alpha=alpha, linewidth=0)
        axes.plot(channel, ideal, **LAW)
        if "best" in found:
            axes.plot(channel, found["best"], color=INK, marker="o", markersize=3, linewidth=0.8)
        axes.set(title=f"ε = {slack:g}", xlabel="channel (slowest first)")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[0].set(ylabel="taper α", ylim=(-0.03, 1.03))
    patches = [
        Line2D([], [], color=shown[name].color, linewidth=7, alpha=alpha, label=name)
        for name, alpha in zip(bands.values(), (0.18, 0.4), strict=True)
    ]
    best = [Line2D([], [], color=INK, marker="o", markersize=3, linewidth=0.8, label="best")]
    shown_best = best if any("best" in found for found in data.values()) else []
    legend(figure, [*patches, *shown_best, Line2D([], [], **LAW, label="even information")])
    return figure


@styled
def autocovariances(data: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Autocovariance by octaves of lags (both log, relative to the first) with its slope: a look a sequence.

    Args:
        data: name of a sequence → what `correlations.power_law` gives; at least one.
    """
    figure, (axes,) = _panels(1, 3.4)
    handles = []
    for (name, found), look in zip(data.items(), looks(list(data)).values(), strict=True):
        used = np.array(found["used"])
        lags, scale = np.array(found["lags"]), found["autocovariance"][0]
        values, error = np.array(found["autocovariance"]) / scale, np.array(found["error"]) / scale
        axes.errorbar(lags[used], values[used], error[used], color=look.color, marker=look.marker, linestyle="none")
        centre = np.exp(np.log(values[used]).mean() + found["exponent"] * np.log(lags[used]).mean())
        axes.plot(lags[used], centre * lags[used] ** -found["exponent"], color=look.color, linestyle=look.linestyle)
        label = f"{plain(name)}: β = {found['exponent']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
        handles.append(Line2D([], [], **look._asdict(), label=label))
    axes.set(xlabel="lag s (mean of an octave)", ylabel="R(s), relative", xscale="log", yscale="log")
    legend(figure, handles)
    return figure


@styled
def information(data: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Information that each octave of context adds (bits a token) against its length: a line a model.

    Args:
        data: name of a model → what `correlations.octave_information` gives; at least one.
    """
    figure, (axes,) = _panels(1, 3.0)
    handles = []
    for (name, found), look in zip(data.items(), looks(list(data)).values(), strict=True):
        axes.plot(found["scales"], found["information"], **look._asdict())
        slack = f"ε = {found['slack']:.2f}" if found["slack"] < 1 else "not even"
        handles.append(Line2D([], [], **look._asdict(), label=f"{plain(name)} ({slack})"))
    axes.axhline(0, **GOAL)
    axes.set(xlabel="context σ, doubled (tokens)", ylabel="information J(σ) (bits a token)")
    axes.set_xscale("log", base=2)
    legend(figure, handles)
    return figure
