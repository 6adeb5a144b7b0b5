"""The figure of the decay values that models use on a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from halflife.analysis.decays import half_life
from halflife.report.figures.comparison import FASTEST, SLOWEST
from halflife.report.style import (
    INK,
    REFERENCE_LINE,
    WIDTH,
    ModelStyle,
    legend,
    model_handles,
    model_styles,
    note,
    plain,
    styled,
)

FEW = 4  # models; with more, bars from quartile to quartile would cover each other
BAR: dict[str, Any] = {"linewidth": 2.5, "alpha": 0.35}


@styled
def decays(result: dict[str, Any]) -> Figure:
    """Median decay λ of every layer, and its half-life (tokens, log): a line a model, bars from quartile to quartile.

    Args:
        result: what `decay_survey.survey` gives; models without a decay are left out.
    """
    models = {model["model"]: model["layers"] for model in result["models"] if model["layers"]}
    figure = Figure(figsize=(WIDTH, 3), layout="constrained")
    values, lives = figure.subplots(1, 2)
    for i, (label, look) in enumerate(model_styles(list(models)).items()):
        shift = 0.13 * (i - (len(models) - 1) / 2) if len(models) <= FEW else 0.0
        for axes, shown in ((values, float), (lives, _shown_life)):
            _model(axes, models[label], look, shift, shown, bars=len(models) <= FEW)
    lives.axhline(result["length"], **REFERENCE_LINE)
    values.set(ylabel="median decay λ", ylim=(-0.03, 1.03))
    lives.set(ylabel="half-life (tokens)", yscale="log")
    deepest = max((layer["layer"] for layers in models.values() for layer in layers), default=0)
    for axes in (values, lives):
        axes.set(xlabel="layer", xlim=(-0.6, deepest + 0.6))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        if not models:
            note(axes, "no layer with a decay")
    legend(figure, [*model_handles(list(models)), *_handles(result, bars=len(models) <= FEW)])
    return figure


def _model(
    axes: Axes,
    layers: list[dict[str, Any]],
    look: ModelStyle,
    shift: float,
    shown: Callable[[float], float],
    bars: bool,
) -> None:
    x = np.array([layer["layer"] for layer in layers]) + shift
    low, middle, high = ([shown(layer[key]) for layer in layers] for key in ("q25", "median", "q75"))
    if bars:
        axes.vlines(x, low, high, color=look.color, **BAR, zorder=1.5)  # below all lines
    axes.plot(x, middle, **look._asdict(), linewidth=1.2)


def _shown_life(decay: float) -> float:
    """Half-life in tokens; those beyond what the time-scale figures show are drawn at its ends."""
    return float(np.clip(half_life(decay), FASTEST, SLOWEST))


def _handles(result: dict[str, Any], bars: bool) -> list[Line2D]:
    handles = [Line2D([], [], **REFERENCE_LINE, label=f"tokens read at a time, {result['length']:,}")]
    if bars:
        handles.append(Line2D([], [], color=INK, **BAR, label="from quartile to quartile"))
    return handles


@styled
def against_paper(data: dict[str, Any]) -> Figure:
    """Loss here against the paper's: a dot a variant (mean over seeds), a bar over its seeds, a colour a group.

    Args:
        data: "results", variant → seed → result, and "paper", variant → the paper's loss or None. A variant is
            called "group/name".
    """
    shown = [
        (name, data["paper"][name], [run["test"] for run in runs.values()])
        for name, runs in data["results"].items() if runs and data["paper"][name] is not None
    ]  # fmt: skip
    groups = list(dict.fromkeys(name.split("/")[0] for name, *_ in shown))
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, paper, losses in shown:
        group, _, own = name.partition("/")
        look = model_styles(groups)[group]
        axes.vlines(paper, min(losses), max(losses), color=look.color, **BAR)
        axes.plot(paper, float(np.mean(losses)), color=look.color, marker=look.marker)
        axes.annotate(
            plain(own or group), (paper, float(np.mean(losses))), xytext=(5, 3), textcoords="offset points", fontsize=7
        )
    axes.set(xlabel="paper's loss, 160M parameters (nats a token)", ylabel="test loss here (nats a byte)")
    legend(figure, [handle for handle in model_handles(groups) if not handle.set_linestyle("none")])
    return figure
