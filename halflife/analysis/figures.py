"""Figures of a comparison run, each drawn from the saved files alone.

They read in grey print and by colour-blind eyes: every model has a colour of Okabe and Ito, a marker and a line style,
the same in all figures. All else is drawn in `INK` on `PAPER`, so that a page can swap the two for a dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from halflife.analysis.results import Comparison, Training, mean, read

INK, PAPER = "#1f2328", "#ffffff"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)  # Okabe–Ito without its yellow
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (6, 2, 1, 2)), (0, (3, 1.5)), (0, (5, 1.5, 1, 1.5, 1, 1.5)))

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "svg.hashsalt": "halflife",  # the same data give the same file
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), PAPER),
}
styled = matplotlib.style.context(["default", STYLE])  # also a decorator; whatever the user's own style is

SLOWEST, FASTEST = 1e8, 1e-2  # tokens; time-scales beyond are drawn at these
MAX_LAYERS = 6


class Look(NamedTuple):
    """How a model is drawn in every figure."""

    color: str
    marker: str
    linestyle: Any


def looks(models: Sequence[str]) -> dict[str, Look]:
    """One look a model, by its place in the command; no two are alike before the 280th."""
    return {
        model: Look(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], LINES[i % len(LINES)])
        for i, model in enumerate(models)
    }


# --------------------------------------------------------------------------------------------- accuracy


@styled
def accuracy(run: Comparison) -> Figure:
    """Accuracy (fraction) against length (tokens, log2), one panel a test; a thin line a seed, the mean thick."""
    tests = run.tests or ["capacity", "persist"]
    figure = Figure(figsize=(3.6 * len(tests), 3.5), layout="constrained")
    panels = figure.subplots(1, len(tests), sharey=True, squeeze=False)[0]
    for axes, test in zip(panels, tests, strict=True):
        _accuracy_panel(axes, run, test)
    panels[0].set(ylabel="accuracy", ylim=(-0.03, 1.03))
    panels[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    _legend(figure, [*_model_handles(run), *_level_handles()])
    return figure


def _accuracy_panel(axes: Axes, run: Comparison, test: str) -> None:
    lengths = run.lengths(test)
    axes.set(title=_accuracy_title(run, test), xlabel="sequence length (tokens)")
    if not lengths:
        return _note(axes, "no results yet")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}\n{run.times(length)}" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    if run.train_length:
        axes.axvline(run.train_length, color=INK, linewidth=1, alpha=0.6)
    for handle in _level_handles():
        name = str(handle.get_label()).split()[0]
        levels = [mean(getattr(s, name) for s in run.scores if (s.test, s.length) == (test, n)) for n in lengths]
        axes.plot(lengths, levels, color=INK, linestyle=handle.get_linestyle(), linewidth=1.2)
    for model, look in looks(run.models).items():
        for seed in run.seeds(model):
            values = [run.mean(model, "accuracy", test=test, length=n, seed=seed) for n in lengths]
            axes.plot(lengths, values, **look._asdict(), linewidth=0.7, markersize=2.5, alpha=0.55)
        axes.plot(lengths, [run.mean(model, "accuracy", test=test, length=n) for n in lengths], **look._asdict())


def _accuracy_title(run: Comparison, test: str) -> str:
    pairs = sorted({s.num_pairs for s in run.scores if s.test == test and math.isfinite(s.num_pairs)})
    if not pairs:
        return test
    return f"{test}: {pairs[0]:g} pairs" + (f" to {pairs[-1]:g} pairs" if len(pairs) > 1 else " at every length")


def _level_handles() -> list[Line2D]:
    """Legend entries of the levels; the first word of each is its column in the results."""
    return [
        Line2D([], [], color=INK, linewidth=1.2, linestyle=(0, (1, 1.2)), label="guess (ignoring the key)"),
        Line2D([], [], color=INK, linewidth=1.2, linestyle=(0, (1, 4)), label="chance"),
    ]


# --------------------------------------------------------------------------------------------- spectrum


class Panel(NamedTuple):
    """One layer of one model in the spectrum figure."""

    model: str
    layer: dict[str, Any]
    channels: str


@styled
def spectrum(run: Comparison) -> Figure:
    """Time-scales (tokens, log) of the channels in their order, at the start and trained, a row of layers a model.

    The first seed at the selected learning rate is drawn. Dots are the time-scales at the first position, triangles
    those at position T where they differ. At most `MAX_LAYERS` layers are shown, spread evenly.
    """
    rows = [row for model in run.models if (row := _panels_of(run, model))]
    width = max(map(len, rows), default=1)
    if width == 1:  # models side by side rather than a tall column
        flat = [row[0] for row in rows]
        width = min(3, max(1, len(flat)))
        rows = [flat[i : i + width] for i in range(0, len(flat), width)]
    height = max(1, len(rows))
    figure = Figure(figsize=(max(4.8, 2.3 * width + 0.6), 1.9 * height + 0.9), layout="constrained")
    grid = figure.subplots(height, width, sharey=True, squeeze=False)
    for i, j in np.ndindex(grid.shape):
        if i < len(rows) and j < len(rows[i]):
            _spectrum_panel(grid[i, j], run, rows[i][j])
        else:
            grid[i, j].set_axis_off()
    if not rows:
        _note(grid[0, 0], "no spectrum: no model with a decay has finished")
        return figure
    figure.supylabel("time-scale (tokens to decay by 1/e)", fontsize=9)
    _legend(figure, _spectrum_handles(run, rows), columns=3)
    return figure


def spectrum_of(run: Comparison, model: str) -> Training | None:
    """The training whose spectrum is drawn for a model: the first that has one with layers."""
    return next((one for one in run.trainings_of(model) if one.spectrum.get("layers")), None)


def _panels_of(run: Comparison, model: str) -> list[Panel]:
    one = spectrum_of(run, model)
    if one is None:
        return []
    layers = one.spectrum["layers"]
    if len(layers) > MAX_LAYERS:
        layers = [layers[i] for i in np.linspace(0, len(layers) - 1, MAX_LAYERS).round().astype(int)]
    return [Panel(model, layer, one.spectrum.get("channels", "channels")) for layer in layers]


def _spectrum_panel(axes: Axes, run: Comparison, panel: Panel) -> None:
    look = looks(run.models)[panel.model]
    first, last = _at_ends(panel.layer["init"], run), _at_ends(panel.layer["trained"], run)
    channel = np.arange(1, len(first[0]) + 1)
    moves = not np.allclose(first[0], first[1], equal_nan=True) or not np.allclose(last[0], last[1], equal_nan=True)
    size = min(5.0, max(1.5, 60 / len(channel)))
    for where, marker in enumerate("o^"[: 1 + moves]):
        x = channel + (0.14 * (2 * where - 1) if moves else 0)
        axes.vlines(x, first[where], last[where], color=look.color, linewidth=0.8, alpha=0.6)
        dots = {"linestyle": "none", "marker": marker, "markersize": size, "color": look.color}
        axes.plot(x, first[where], **dots, markerfacecolor="none", markeredgewidth=0.8)
        axes.plot(x, last[where], **dots, markeredgewidth=0)
    if run.train_length:
        axes.axhline(run.train_length, color=INK, linewidth=1, linestyle=(0, (5, 3)), alpha=0.7)
    axes.set(yscale="log", title=f"{_plain(panel.model)}, layer {panel.layer['layer']}", xlabel=panel.channels)
    axes.set_xlim(0.4, len(channel) + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 4, 5, 8, 10], min_n_ticks=1))


def _at_ends(saved: dict[str, Any], run: Comparison) -> tuple[np.ndarray, np.ndarray]:
    """Time-scales `[N]` at the first position saved and at the one nearest the training length."""
    scales = {float(position): values for position, values in saved["timescales"].items()}
    end = min(scales, key=lambda position: abs(position - (run.train_length or math.inf)))
    first, last = (np.ravel(np.array(scales[at], dtype=float)) for at in (min(scales), end))
    return first.clip(FASTEST, SLOWEST), last.clip(FASTEST, SLOWEST)


def _spectrum_handles(run: Comparison, rows: list[list[Panel]]) -> list[Line2D]:
    def dots(marker: str, label: str, **more: Any) -> Line2D:
        return Line2D([], [], color=INK, linestyle="none", marker=marker, label=label, **more)

    handles = [dots("o", "at position 1, at the start", markerfacecolor="none"), dots("o", "at position 1, trained")]
    handles += [dots("^", "at position T, at the start", markerfacecolor="none"), dots("^", "at position T, trained")]
    if run.train_length:
        label = f"training length T = {run.train_length:,}"
        handles.append(Line2D([], [], color=INK, linewidth=1, linestyle=(0, (5, 3)), label=label))
    return handles


# --------------------------------------------------------------------------------------------- training


@styled
def training(run: Comparison) -> Figure:
    """Loss (nats) and validation accuracy (fraction) against the step, a colour a model, a line a seed."""
    figure = Figure(figsize=(7.2, 3.3), layout="constrained")
    loss, validation = figure.subplots(1, 2)
    _curves(loss, run, "loss")
    _curves(validation, run, "validation_accuracy")
    loss.set(xlabel="step", ylabel="training loss (nats)")
    loss.set_ylim(bottom=0)
    validation.set(xlabel="step", ylabel="validation accuracy", ylim=(-0.03, 1.03))
    validation.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    _legend(figure, _model_handles(run))
    return figure


def _curves(axes: Axes, run: Comparison, key: str) -> None:
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for i, (model, look) in enumerate(looks(run.models).items()):
        for one in run.trainings_of(model):
            steps, values = one.curve(key)
            every = max(1, len(steps) // 5)
            marks = (i * every // max(1, len(run.models)), every)  # staggered, so that they seldom cover each other
            axes.plot(steps, values, **look._asdict(), linewidth=1, markersize=4, markevery=marks, alpha=0.85)
    if not axes.lines:
        _note(axes, "nothing recorded yet")


# ------------------------------------------------------------------------------------------ all of them

FIGURES: dict[str, Callable[[Comparison], Figure]] = {"accuracy": accuracy, "spectrum": spectrum, "training": training}


@styled
def save_all(run_dir: str | Path) -> list[Path]:
    """Draws every figure of a run folder into its `figures/`, as PNG (150 dpi) and SVG; returns the files.

    Raises:
        FileNotFoundError, ValueError: as `results.read`.
    """
    run = read(run_dir)
    folder = run.path / "figures"
    folder.mkdir(exist_ok=True)
    files = []
    for name, draw in FIGURES.items():
        figure = draw(run)
        for suffix, options in {"png": {"dpi": 150}, "svg": {"metadata": {"Date": None}}}.items():
            files.append(folder / f"{name}.{suffix}")
            figure.savefig(files[-1], **options)
    return files


def _model_handles(run: Comparison) -> list[Line2D]:
    return [Line2D([], [], **look._asdict(), label=_plain(model)) for model, look in looks(run.models).items()]


def _legend(figure: Figure, handles: list[Line2D], columns: int = 4) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)))


def _note(axes: Axes, text: str) -> None:
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", alpha=0.7)


def _plain(name: str) -> str:
    """A name in which matplotlib sees no formula."""
    return name.replace("$", r"\$")
