"""Figures of the theory of decay spectra, each drawn from the plain data of one function of the analysis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from halflife.decay.minimax import MEASURABLE
from halflife.report.figures.comparison import FORMATS, save
from halflife.report.figures.recall import SCALE
from halflife.report.style import INK, REFERENCE_LINE, WIDTH, legend, model_handles, model_styles, plain, styled

LAW: dict[str, Any] = {"color": INK, "linewidth": 1.1, "linestyle": (0, (1, 1.5))}  # what a formula says
SIMULATED: dict[str, Any] = {"linestyle": "none", "marker": ".", "markersize": 3.5, "color": INK, "alpha": 0.45}
RINGED: dict[str, Any] = {"linestyle": "none", "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.8}


def _panels(count: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """`count` panels on the width of a page, at most three (of four: two) to a row of `height` inches."""
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, rows * height), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in grid[count:]:
        axes.remove()
    return figure, grid[:count]


def _line_handles(labels: Sequence[str]) -> list[Line2D]:
    """Legend entries of lines without markers."""
    shown = model_styles(labels).items()
    return [Line2D([], [], color=look.color, linestyle=look.linestyle, label=plain(label)) for label, look in shown]


# ----------------------------------------------------------------------------------------- approximation


def _errors(axes: Axes, x: Any, errors: Mapping[str, Sequence[float]]) -> None:
    """A line a name, down to what float64 tells from 0."""
    for name, look in model_styles(list(errors)).items():
        axes.plot(x, np.maximum(errors[name], MEASURABLE), **look._asdict(), linewidth=1.3, markersize=3.5)
    axes.set_yscale("log")


@styled
def errors_by_channels(data: Mapping[str, Any]) -> Figure:
    """Minimax error (log) against N: a panel a T, a line a spectrum, dotted Theorem 4.7's slope with C₆ = 0.

    Args:
        data: what `approximation_survey.error_by_channels` gives.
    """
    figure, panels = _panels(len(data["lengths"]), 2.5, sharey=True)
    channels, names = np.array(data["channels"]), list(data["errors"])
    for axes, length in zip(panels, data["lengths"], strict=True):
        errors = {name: data["errors"][name][f"{length:g}"] for name in names}
        _errors(axes, channels, errors)
        fall = errors[names[-1]][0] * np.exp(-(math.pi**2) / math.log(length) * (channels - channels[0]))
        axes.plot(channels, np.where(fall > MEASURABLE, fall, np.nan), **LAW)
        axes.set(title=f"T = {length:,.0f}", xlabel="channels N")
    figure.supylabel(rf"largest error of $t^{{-{data['beta']:g}}}$", fontsize=9)
    legend(figure, [*model_handles(names), Line2D([], [], **LAW, label=r"slope $\pi^2/\log T$")])
    return figure


@styled
def errors_by_ends(data: Mapping[str, Any]) -> Figure:
    """Minimax error of geometric rates (log) against the slowest and the fastest of them, with contours a decade.

    Args:
        data: what `approximation_survey.error_by_ends` gives.
    """
    figure, (axes,) = _panels(1, 3.6)
    errors = np.log10(np.maximum(data["errors"], MEASURABLE)).T
    ends = data["low"], data["high"]
    drawn = axes.pcolormesh(*ends, errors, cmap=SCALE.reversed(), shading="gouraud", rasterized=True)
    decades = np.arange(math.ceil(errors.min()), errors.max())
    axes.contour(*ends, errors, decades, colors=INK, linewidths=0.5, linestyles="-")
    handles = []
    for row, look in zip(data["rows"], model_styles([row["spectrum"] for row in data["rows"]]).values(), strict=True):
        if row["low"] is not None:
            style = RINGED | {"marker": look.marker, "color": look.color, "label": row["spectrum"]}
            handles += axes.plot(row["low"], row["high"], **style)
    axes.set(xscale="log", yscale="log", xlabel="slowest rate × T", ylabel="fastest rate")
    axes.grid(visible=False)
    figure.colorbar(drawn, ax=axes, label=rf"$\log_{{10}}$ of the largest error of $t^{{-{data['beta']:g}}}$")
    legend(figure, handles)
    return figure


@styled
def errors_by_position(data: Sequence[Mapping[str, Any]]) -> Figure:
    """Minimax error on [1, t] against t (both log): a panel a choice of ends.

    Args:
        data: what `approximation_survey.error_by_position` gives, once a choice of ends.
    """
    figure, panels = _panels(len(data), 3.0, sharey=True)
    for axes, result in zip(panels, data, strict=True):
        _errors(axes, result["positions"], result["errors"])
        low, high = result["ends"]
        axes.set(title=f"rates from {low * result['length']:.2g}/T to {high:.2g}", xlabel="position t", xscale="log")
    figure.supylabel(rf"largest error of $s^{{-{data[0]['beta']:g}}}$, $s \leq t$", fontsize=9)
    legend(figure, model_handles(list(data[0]["errors"])))
    return figure


# --------------------------------------------------------------------------------------- gaps, coherence


@styled
def gaps(data: Mapping[str, Any]) -> Figure:
    """Mean least and largest gap of random spectra against N (both log), the bound, and the gap of an even spectrum.

    Args:
        data: what `spectra.minimum_gap` gives.
    """
    figure, (axes,) = _panels(1, 3.2)
    names = {"least gap, simulated": "mean", "largest gap, simulated": "largest", "even spacing": "even"}
    for name, look in model_styles(list(names)).items():
        axes.plot(data["channels"], data[names[name]], **look._asdict())
    axes.plot(data["channels"], data["bound"], **LAW)
    axes.set(xlabel="channels N", ylabel="gap", xscale="log", yscale="log")
    axes.set_xticks(data["channels"], [f"{n:,}" for n in data["channels"]])
    axes.xaxis.set_minor_locator(NullLocator())
    legend(figure, [*model_handles(list(names)), Line2D([], [], **LAW, label=r"bound $1/(m(N^2-1))$")])
    return figure


@styled
def coherence_maps(data: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Spectral coherence of every pair of channels, a panel a spectrum; above it the largest of two channels.

    Args:
        data: name of a spectrum → what `spectra.coherences` gives; at least one.
    """
    figure, panels = _panels(len(data), 2.7)
    for axes, (name, found) in zip(panels, data.items(), strict=True):
        edges = (0.5, len(found["matrix"]) + 0.5)
        drawn = axes.imshow(
            found["matrix"], vmin=0, vmax=1, cmap=SCALE, interpolation="nearest", origin="lower",
            extent=(*edges, *edges),
        )  # fmt: skip
        axes.set(title=f"{plain(name)}\nlargest {found['largest']:.5f}", xlabel="channel (slowest first)")
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
    (name, look), *_ = model_styles(["counted: time-scale in [1, t]"]).items()
    axes.step(data["positions"], data["counted"], where="post", color=look.color)
    axes.plot(data["positions"], data["law"], **LAW)
    axes.set(xlabel="position t", ylabel="channels in use", xscale="log", ylim=(0, 1.08 * data["channels"]))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    legend(figure, [*_line_handles([name]), Line2D([], [], **LAW, label=r"$N \log t\, /\, \log T$")])
    return figure


# ------------------------------------------------------------------------------------- responses, energy


def _ends_and_middle(channels: Sequence[float]) -> list[int]:
    return sorted({0, (len(channels) - 1) // 2, len(channels) - 1})


@styled
def impulse_responses(data: Mapping[str, Any]) -> Figure:
    """Responses of the slowest, middle and fastest channel: above against the lag, below against lag / position.

    Lines are Corollary 4.13's, dotted those of the gates along the way. Where one panel's lines fall together the
    channel lives in that coordinate.

    Args:
        data: what `spectra.responses` gives.
    """
    count, chosen = len(data["rates"]), _ends_and_middle(data["rates"])
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    grid = figure.subplots(2, len(chosen), squeeze=False, sharey=True)
    names = [f"t = {t:,}" for t in data["positions"]]
    for column, channel in enumerate(chosen):
        for i, look in enumerate(model_styles(names).values()):
            lags = np.array(data["lags"][i])
            for axes, x in zip(grid[:, column], (lags, lags / data["positions"][i]), strict=True):
                axes.plot(x, data["frozen"][i][channel], color=look.color, linestyle=look.linestyle, linewidth=1.4)
                axes.plot(x, data["as run"][i][channel], **(LAW | {"color": look.color}))
        grid[0, column].set(title=f"channel {channel + 1} of {count}, α = {data['tapers'][channel]:.2f}", xscale="log")
        grid[0, column].set_xlabel("lag s")
        grid[1, column].set(xlabel="s / t", xscale="log")
    for axes in grid[:, 0]:
        axes.set_ylabel(r"response $\psi$")
    legend(figure, [*_line_handles(names), Line2D([], [], **LAW, label="gates along the way")])
    return figure


@styled
def energy_growth(data: Mapping[str, Any]) -> Figure:
    """Expected energy of the slowest, middle and fastest channel against t (both log), by formula and as run.

    Args:
        data: what `spectra.energies` gives.
    """
    chosen = _ends_and_middle(data["rates"])
    figure, panels = _panels(len(chosen), 3.0, sharey=True)
    positions = np.array(data["positions"])
    few = np.searchsorted(positions, np.geomspace(1, positions[-1], 40).round())
    names = ["continuous", "frozen", "as run"]
    for axes, channel in zip(panels, chosen, strict=True):
        for name, look in model_styles(names).items():
            axes.plot(positions, data[name][channel], color=look.color, linestyle=look.linestyle, linewidth=1.4)
        axes.plot(positions[few], np.array(data["simulated"][channel])[few], **SIMULATED)
        axes.set(title=f"α = {data['tapers'][channel]:.2f}", xlabel="position t", xscale="log", yscale="log")
    panels[0].set_ylabel("energy (of unit noise)")
    labels = ("gates frozen at t, continuous time", "gates frozen at t, discrete time", "gates along the way")
    legend(figure, [*_line_handles(labels), Line2D([], [], **SIMULATED, label=f"{data['trials']:,} runs")])
    return figure


# ----------------------------------------------------------------------------------------- taper and data


@styled
def taper_bands(data: Mapping[Any, Mapping[str, Sequence[float]]]) -> Figure:
    """How far the taper may have to bend: a panel a slack ε, the paper's band and the sharp one around the line.

    Args:
        data: ε → "paper" and "sharp" of `spectra.taper_bound`, one a channel, and "best" (an optimal taper) or none.
    """
    figure, panels = _panels(len(data), 3.0, sharey=True)
    best: dict[str, Any] = {"color": INK, "marker": "o", "markersize": 3, "linewidth": 0.8}
    bands = {"paper": ("paper's bound", 0.18), "sharp": ("sharp bound", 0.4)}
    shown = model_styles([name for name, _ in bands.values()])
    for axes, (slack, found) in zip(panels, data.items(), strict=True):
        count = len(found["paper"])
        channel, ideal = np.arange(1, count + 1), np.linspace(1, 0, count)
        for key, (name, alpha) in bands.items():
            low, high = (np.clip(ideal + side * np.array(found[key]), 0, 1) for side in (-1, 1))
            axes.fill_between(channel, low, high, color=shown[name].color, alpha=alpha, linewidth=0)
        axes.plot(channel, ideal, **LAW)
        if "best" in found:
            axes.plot(channel, found["best"], **best)
        axes.set(title=f"ε = {slack}", xlabel="channel (slowest first)")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[0].set(ylabel="taper α", ylim=(-0.03, 1.03))
    handles = [Line2D([], [], color=shown[name].color, linewidth=7, alpha=a, label=name) for name, a in bands.values()]
    handles += [Line2D([], [], **best, label="best for uneven information"), Line2D([], [], **LAW, label="even")]
    legend(figure, handles)
    return figure


@styled
def autocovariances(data: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Autocovariance by octaves of lags (both log, relative to the first) with its slope: a look a sequence.

    Args:
        data: name of a sequence → what `correlations.power_law` gives; at least one.
    """
    figure, (axes,) = _panels(1, 3.4)
    handles = []
    for i, ((name, found), look) in enumerate(zip(data.items(), model_styles(list(data)).values(), strict=True)):
        used, aside = np.array(found["used"]), 1.06**i  # so that bars do not cover each other
        lags, scale = np.array(found["lags"]), found["autocovariance"][0]
        values, error = np.array(found["autocovariance"]) / scale, np.array(found["error"]) / scale
        style = {"color": look.color, "marker": look.marker, "linestyle": "none", "elinewidth": 1}
        axes.errorbar(aside * lags[used], values[used], error[used], **style)
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
    for (name, found), look in zip(data.items(), model_styles(list(data)).values(), strict=True):
        axes.plot(found["scales"], found["information"], **look._asdict())
        slack = f"ε = {found['slack']:.2f}" if found["slack"] is not None and found["slack"] < 1 else "not even"
        handles.append(Line2D([], [], **look._asdict(), label=f"{plain(name)} ({slack})"))
    axes.axhline(0, **REFERENCE_LINE)
    axes.set(xlabel="context σ, doubled (tokens)", ylabel="information J(σ) (bits a token)")
    axes.set_xscale("log", base=2)
    legend(figure, handles)
    return figure


# ------------------------------------------------------------------------------------------- all of them

FIGURES: dict[str, Callable[[Any], Figure]] = {
    "errors": errors_by_channels, "ends": errors_by_ends, "positions": errors_by_position, "gaps": gaps,
    "coherence": coherence_maps, "channels": channels_in_use, "responses": impulse_responses, "energy": energy_growth,
    "taper": taper_bands, "autocovariance": lambda data: autocovariances(data["sequences"]),
    "information": information,
}  # fmt: skip


def draw_all(data: Mapping[str, Any], folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draws what `theory_report.compute` gives, or its JSON, as `theory_<topic>.<format>`; returns the files."""
    return [
        file for name, draw in FIGURES.items() if name in data
        for file in save(draw(data[name]), folder, f"theory_{name}", formats)
    ]  # fmt: skip
