"""Figures of PoST's decay spectra. Each takes the data of one topic of `halflife.lab.theory.compute`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from halflife.decay.minimax import LEAST_ERROR
from halflife.report.figures.data import Axis, Band, Colours, FigureData, Image, Key, Panel, Series, Values, curves
from halflife.report.numbers import evenly
from halflife.report.style import COLOURS, DOTS, FORMULA, INK, ModelStyle, model_styles

BANDS = {"paper": ("paper's bound", COLOURS[0], 0.18), "sharp": ("sharp bound", COLOURS[1], 0.4)}
CHANNEL = Axis("channel (slowest first)", write=lambda index: f"{index + 1:g}")
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


def errors_by_ends(data: Data) -> FigureData:
    """Minimax error of geometric rates (log colours) against the slowest and the fastest rate (both log)."""
    errors = np.maximum(np.array(data["errors"]), LEAST_ERROR).T[::-1]
    low, high = np.array(data["low"]), np.array(data["high"])[::-1]

    def place(value: float, ends: np.ndarray) -> float:
        """The cell in which a rate is."""
        logs, cells = np.log(ends), np.arange(len(ends), dtype=float)
        return float(np.interp(math.log(value), logs, cells) if logs[0] < logs[-1] else np.interp(
            math.log(value), logs[::-1], cells[::-1]))  # fmt: skip

    def ticks(ends: np.ndarray) -> dict[float, str]:
        decades = range(math.ceil(math.log10(min(ends))), math.floor(math.log10(max(ends))) + 1)
        return {place(10.0**i, ends): f"{10.0**i:g}" for i in decades}

    styles = model_styles([row["spectrum"] for row in data["rows"]])
    dots = [
        Series(row["spectrum"], row["spectrum"], styles[row["spectrum"]]._replace(linestyle="none"),
               [place(row["low"], low)], [place(row["high"], high)])
        for row in data["rows"] if row["low"] is not None
    ]  # fmt: skip
    x, y = Axis("slowest rate × T", ticks=ticks(low)), Axis("fastest rate", ticks=ticks(high))
    colours = Colours(f"largest error of t^−{data['beta']:g}", errors.min(), errors.max(), log=True)
    image = Image("", x, y, errors, series=dots)
    return FigureData("theory_ends", "Errors by ends", [image], size=(7.2, 3.6), colours=colours)


def errors_by_position(data: Sequence[Data]) -> FigureData:
    """Minimax error on [1, t] against t (both log): a panel for each choice of the slowest and fastest rate."""
    y = Axis(f"largest error of s^−{data[0]['beta']:g}, s ≤ t", log=True)
    panels = []
    for result in data:
        low, high = result["ends"]
        title = f"rates from {low * result['length']:.2g}/T to {high:.2g}"
        panels.append(Panel(title, Axis("position t", log=True), y, _errors(result["positions"], result["errors"])))
    return FigureData("theory_positions", "Errors by position", panels, size=(2.4, 3.0), shared=True)


def gaps(data: Data) -> FigureData:
    """Mean smallest and largest gap of random spectra against N (both log), a bound, and that of an even spectrum."""
    names = {"smallest gap, simulated": "mean", "largest gap, simulated": "largest", "even spacing": "even"}
    series = curves(data["channels"], {name: data[key] for name, key in names.items()})
    x = Axis("channels N", log=True, ticks={n: f"{n:,}" for n in data["channels"]})
    bound = formula(data["channels"], data["bound"], "bound 1/(m(N² − 1))")
    return FigureData("theory_gaps", "Gaps", [Panel("", x, Axis("gap", log=True), [*series, bound])])


def coherence_maps(data: Mapping[str, Data]) -> FigureData:
    """Spectral coherence of every pair of channels: a panel for each spectrum, with the largest value in its title."""
    panels = [
        Image(f"{name}\nlargest {result['largest']:.5f}", CHANNEL, CHANNEL, np.array(result["matrix"]))
        for name, result in data.items()
    ]
    return FigureData("theory_coherence", "Coherence", panels, size=(2.7, 2.7), colours=Colours("coherence μ_ij", 0, 1))


def channels_in_use(data: Data) -> FigureData:
    """Number of channels with time-scales in [1, t] against t (log), and the law N log t / log of the longest one."""
    forms = {"static": data, "t_ref = T": data["theorem"], "t_ref = 1": data["default"]}
    series = curves(data["positions"], {name: one["counted"] for name, one in forms.items()}, "line")
    for one, color in zip(forms.values(), COLOURS, strict=False):
        series.append(formula(data["positions"], one["law"], color=color))
    y = Axis("channels in use", limits=(0, 1.08 * data["channels"]), whole=True)
    return FigureData(
        "theory_channels", "Channels in use", [Panel("", Axis("position t", log=True), y, series)],
        keys={"N log t / log of the longest time-scale": Key(FORMULA, "level")},
    )  # fmt: skip


def _forms(data: Data) -> list[tuple[str, Data]]:
    """The result and its "default", each with what stands in front of titles."""
    return [("t_ref = T, ", data), ("t_ref = 1, ", data["default"])]


def impulse_responses(data: Data) -> FigureData:
    """Responses of the slowest, middle and fastest channel, above against the lag and below against lag / position.

    Lines are those of Corollary 4.13. Dotted lines have the gates of every step along the way. If all lines of a panel
    coincide, the channel's response is a function of that panel's x-axis. "default" is drawn below.
    """
    channels = evenly(range(len(data["rates"])), 3)
    styles = model_styles([f"t = {t:,}" for t in data["positions"]])
    panels = []
    for reference, form in _forms(data):
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


def energy_growth(data: Data) -> FigureData:
    """Expected energy of the slowest, middle and fastest channel against t (both log), by formula and simulated."""
    channels = evenly(range(len(data["rates"])), 3)
    names = {
        "gates frozen at t, continuous time": "continuous", "gates frozen at t, discrete time": "frozen",
        "gates along the way": "as run",
    }  # fmt: skip
    simulated, panels = f"{data['trials']:,} simulations", []
    for reference, form in _forms(data):
        for channel in channels:
            positions = np.array(form["positions"])
            few = np.searchsorted(positions, np.geomspace(1, positions[-1], 40).round())
            series = curves(positions, {name: form[key][channel] for name, key in names.items()}, "line")
            y = np.array(form["simulated"][channel])[few]
            series.append(Series(simulated, simulated, DOTS._replace(marker="."), positions[few], y, "hollow"))
            title = f"{reference}α = {form['tapers'][channel]:.2f}"
            panels.append(Panel(title, Axis("position t", log=True), Axis("energy (of unit noise)", log=True), series))
    return FigureData("theory_energy", "Energy", panels, columns=len(channels), size=(2.4, 3.0), shared=True)


def relative_energies(data: Data) -> FigureData:
    """Growth of the slowest channel's energy over the fastest, and shrinking of the fastest by a norm, beyond T."""
    multiples = np.array(data["multiples"])
    names = {"static": "static", "t_ref = T": "theorem", "t_ref = 1": "algorithm"}
    x = Axis("position / T", log=True, ticks={m: str(m) for m in data["multiples"]})
    panels = []
    for title, label, key, claim in (
        ("slowest : fastest, relative to T", "growth of the energy ratio", "as run", multiples),
        ("fastest, after a norm", "factor on its amplitude", "shrunk", multiples**-0.5),
    ):
        series = curves(multiples, {name: data[form][key] for name, form in names.items()})
        panels.append(Panel(title, x, Axis(label, log=True), [*series, formula(multiples, claim, "Prop. B.2")]))
    return FigureData("theory_normalization", "Energies after a norm", panels)


def taper_bands(data: Mapping[Any, Mapping[str, Sequence[float]]]) -> FigureData:
    """How far the taper may deviate from a line: a panel for each slack ε, with the paper's bound and the sharp one."""
    panels = []
    for slack, bounds in data.items():
        count = len(bounds["paper"])
        channel, ideal = np.arange(1, count + 1), np.linspace(1, 0, count)
        bands = []
        for key, (_, color, alpha) in BANDS.items():
            low, high = (np.clip(ideal + side * np.array(bounds[key]), 0, 1) for side in (-1, 1))
            bands.append(Band(channel, low, high, color, alpha))
        name = "best for uneven information"
        best = Series(name, name, DOTS._replace(linestyle="-"), channel, bounds["best"])
        y = Axis("taper α", limits=(-0.03, 1.03))
        x, series = Axis("channel (slowest first)", whole=True), [formula(channel, ideal, "even"), best]
        panels.append(Panel(f"ε = {slack}", x, y, series, bands=bands))
    keys = {name: Key(ModelStyle(color, "", "-"), "bar") for name, color, _ in BANDS.values()}
    return FigureData("theory_taper", "Tapers", panels, keys=keys, size=(2.4, 3.0), shared=True)
