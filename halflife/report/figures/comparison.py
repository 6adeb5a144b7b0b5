"""Figures of a comparison run, each drawn from the saved files alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from halflife.files import atomic_path
from halflife.report.figures.gates import gates, has_gates, has_positions, positions
from halflife.report.figures.recall import is_grid, recall_grid
from halflife.report.style import (
    INK,
    LEVELS,
    REFERENCE_LINE,
    WIDTH,
    legend,
    model_handles,
    model_styles,
    note,
    plain,
    styled,
)
from halflife.runs.folder import Comparison, Training, mean, read

SLOWEST, FASTEST = 1e8, 1e-2  # tokens; time-scales beyond are drawn at these
MAX_LAYERS = 6
FORMATS = ("png", "svg")
CROWDED = 48  # channels of a panel beyond which lines between dots would hide them


# --------------------------------------------------------------------------------------------- accuracy


@styled
def accuracy(run: Comparison) -> Figure:
    """Accuracy (fraction) against length (tokens, log2), one panel a test; a thin line a seed, the mean thick."""
    tests = run.tests or ["capacity", "persist"]
    rows, columns = -(-len(tests) // 3), min(3, len(tests))
    figure = Figure(figsize=(max(WIDTH, 3.6 * columns), 3.1 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for axes, test in zip(panels, tests, strict=False):
        _accuracy_panel(axes, run, test)
    for axes in panels[len(tests) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("accuracy")
    panels[0].set_ylim(-0.03, 1.03)
    panels[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    legend(figure, [*model_handles(run.models), *(Line2D([], [], **look) for look in LEVELS.values())])
    return figure


def _accuracy_panel(axes: Axes, run: Comparison, test: str) -> None:
    lengths = run.lengths(test)
    axes.set(title=_accuracy_title(run, test), xlabel="sequence length (tokens)")
    if not lengths:
        return note(axes, "no results yet")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}\n{run.times(length)}" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    if run.train_length:
        axes.axvline(run.train_length, color=INK, linewidth=1, alpha=0.6)
    for name, look in LEVELS.items():
        levels = [mean(getattr(s, name) for s in run.scores if (s.test, s.length) == (test, n)) for n in lengths]
        axes.plot(lengths, levels, **look)
    for model, look in model_styles(run.models).items():
        for seed in run.seeds(model):
            values = [run.mean(model, "accuracy", test=test, length=n, seed=seed) for n in lengths]
            axes.plot(lengths, values, **look._asdict(), linewidth=0.7, markersize=2.5, alpha=0.55)
        axes.plot(lengths, [run.mean(model, "accuracy", test=test, length=n) for n in lengths], **look._asdict())


def _accuracy_title(run: Comparison, test: str) -> str:
    pairs = sorted({s.num_pairs for s in run.scores if s.test == test and math.isfinite(s.num_pairs)})
    if not pairs:
        return test
    return f"{test}: {pairs[0]:g} " + (f"to {pairs[-1]:g} pairs" if len(pairs) > 1 else "pairs at every length")


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
    figure = Figure(figsize=(max(WIDTH, 2.3 * width + 0.6), 1.8 * height + 0.3), layout="constrained")
    grid = figure.subplots(height, width, sharey=True, squeeze=False)
    for line, row in zip(grid.tolist(), rows or [[]], strict=True):
        for axes, panel in zip(line, row, strict=False):
            _spectrum_panel(axes, run, panel)
        for axes in line[len(row) :]:
            axes.set_axis_off()
    if not rows:
        note(grid[0, 0], "no spectrum: no model with a decay has finished")
        return figure
    figure.supylabel("time-scale (tokens)", fontsize=9)
    legend(figure, _spectrum_handles(run, rows))
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
    color = model_styles(run.models)[panel.model].color
    init, trained = (_at_ends(panel.layer[when], run) for when in ("init", "trained"))
    channels = np.arange(1, len(init[0]) + 1)
    crowded = len(channels) > CROWDED
    size = 2.2 if crowded else min(5.0, 60 / len(channels))
    moves = _moves(run, panel)
    for where, marker in enumerate("o^"[: 1 + moves]):
        x = channels + (0.14 * (2 * where - 1) if moves else 0)
        dots: dict[str, Any] = {"linestyle": "none", "marker": marker, "markersize": size, "color": color}
        if not crowded:
            axes.vlines(x, init[where], trained[where], color=color, linewidth=0.8, alpha=0.6)
        axes.plot(x, init[where], **dots, markerfacecolor="none", markeredgewidth=0.5 if crowded else 0.8)
        axes.plot(x, trained[where], **dots, markeredgewidth=0)
    if run.train_length:
        axes.axhline(run.train_length, **REFERENCE_LINE)
    axes.set(yscale="log", title=f"{plain(panel.model)}, layer {panel.layer['layer']}", xlabel=panel.channels)
    axes.set_xlim(0.4, len(channels) + 0.6)
    if len(channels) <= 8:
        axes.set_xticks(channels)


def _at_ends(saved: dict[str, Any], run: Comparison) -> tuple[np.ndarray, np.ndarray]:
    """Time-scales `[N]` at the first position saved and at the one nearest the training length."""
    scales = {float(position): values for position, values in saved["timescales"].items()}
    end = min(scales, key=lambda position: abs(position - (run.train_length or math.inf)))
    first, last = (np.ravel(np.array(scales[at], dtype=float)) for at in (min(scales), end))
    return first.clip(FASTEST, SLOWEST), last.clip(FASTEST, SLOWEST)


def _moves(run: Comparison, panel: Panel) -> bool:
    """Whether the spectrum depends on the position."""
    ends = (_at_ends(panel.layer[when], run) for when in ("init", "trained"))
    return not all(np.allclose(first, last, equal_nan=True) for first, last in ends)


def _spectrum_handles(run: Comparison, rows: list[list[Panel]]) -> list[Line2D]:
    moves = any(_moves(run, panel) for row in rows for panel in row)
    handles = []
    for marker, where in {"o": ", position 1", "^": ", position T"}.items() if moves else [("o", "")]:
        dots: dict[str, Any] = {"color": INK, "linestyle": "none", "marker": marker}
        handles += [Line2D([], [], **dots, markerfacecolor="none", label=f"initial{where}")]
        handles += [Line2D([], [], **dots, label=f"trained{where}")]
    if run.train_length:
        handles.append(Line2D([], [], **REFERENCE_LINE, label=f"training length T = {run.train_length:,}"))
    return handles


# --------------------------------------------------------------------------------------------- training


@styled
def training(run: Comparison) -> Figure:
    """Loss (nats) and validation accuracy (fraction) against the step, a colour a model, a line a seed."""
    figure = Figure(figsize=(WIDTH, 3), layout="constrained")
    loss, validation = figure.subplots(1, 2)
    _curves(loss, run, "loss")
    _curves(validation, run, "validation_accuracy")
    loss.set_ylabel("training loss (nats)")
    loss.set_ylim(bottom=0)
    validation.set(ylabel="validation accuracy", ylim=(-0.03, 1.03))
    validation.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    legend(figure, model_handles(run.models))
    return figure


def _curves(axes: Axes, run: Comparison, key: str) -> None:
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("step")
    for i, (model, look) in enumerate(model_styles(run.models).items()):
        for one in run.trainings_of(model):
            steps, values = one.curve(key)
            every = max(1, len(steps) // 5)
            marks = (i * every // max(1, len(run.models)), every)  # staggered, so that they seldom cover each other
            if steps:
                axes.plot(steps, values, **look._asdict(), linewidth=1, markersize=4, markevery=marks, alpha=0.85)
    axes.set_xlim(left=0)
    if not axes.lines:
        note(axes, "nothing recorded yet")


# ------------------------------------------------------------------------------------------ all of them

FIGURES: dict[str, Callable[[Comparison], Figure]] = {
    "accuracy": accuracy, "recall": recall_grid, "positions": positions, "gates": gates, "spectrum": spectrum,
    "training": training,
}  # fmt: skip


# Those that not every run has something for.
IF_ANY: dict[str, Callable[[Comparison], bool]] = {"recall": is_grid, "positions": has_positions, "gates": has_gates}


def figures_of(run: Comparison) -> list[str]:
    """The names of the figures that a run has something for."""
    return [name for name in FIGURES if name not in IF_ANY or IF_ANY[name](run)]


@styled
def save_all(run_dir: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draws every figure of a comparison's folder into its `figures/`; returns the files.

    Raises:
        FileNotFoundError, ValueError: as `results.read` and `save`.
    """
    run = read(run_dir)
    return [file for name in figures_of(run) for file in save(FIGURES[name](run), run.path / "figures", name, formats)]


@styled
def save(figure: Figure, folder: Path, name: str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Writes `name.png` (150 dpi), `name.svg`, … into the folder, each whole or not at all; returns the files.

    Raises:
        ValueError: an unknown format; the message names the choices.
    """
    files = [folder / f"{name}.{check_format(suffix)}" for suffix in formats]
    for file, suffix in zip(files, formats, strict=True):
        with atomic_path(file) as temporary:
            figure.savefig(temporary, format=suffix, dpi=150, metadata=_METADATA[suffix])
    return files


# Without a date, so that the same data give the same file.
_METADATA: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


def check_format(suffix: str) -> str:
    """The format of a figure's file.

    Raises:
        ValueError: it is none of those known.
    """
    if suffix not in _METADATA:
        raise ValueError(f"unknown format {suffix!r}; choose from {', '.join(_METADATA)}")
    return suffix
