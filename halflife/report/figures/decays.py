"""Figures of decays: their values on a text, and the losses of the Decay paper's grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from halflife.analysis.decays import half_life
from halflife.data.tokenizers import unit_of
from halflife.files import read_json
from halflife.report.figures.comparison import length, training
from halflife.report.figures.data import Axis, FigureData, Panel, Series
from halflife.report.figures.grids import FASTEST, SLOWEST, panel_grid
from halflife.report.style import (
    INK,
    REFERENCE_LINE,
    ModelStyle,
    legend,
    model_handles,
    model_styles,
    note,
    styled,
)
from halflife.runs.folder import DECAY_REGRESSION_JSON, Comparison, mean, read_grid

MAX_WITH_BARS = 4  # models; the bars of more models would cover each other
BAR: dict[str, Any] = {"linewidth": 2.5, "alpha": 0.35}


@styled
def decays(result: dict[str, Any]) -> Figure:
    """Median decay λ of every layer, and its half-life (tokens, log): a line for each model, bars between quartiles.

    Args:
        result: what `analysis.survey.measure_models` returns. Models without a decay are left out.
    """
    models = {model["model"]: model["layers"] for model in result["models"] if model["layers"]}
    bars = len(models) <= MAX_WITH_BARS
    figure, (values, lives) = panel_grid(2, 3.0)
    for i, (name, style) in enumerate(model_styles(list(models)).items()):
        shift = 0.13 * (i - (len(models) - 1) / 2) if bars else 0.0
        _draw_model(values, models[name], style, shift, float, bars)
        _draw_model(lives, models[name], style, shift, _clipped_half_life, bars)
    lives.axhline(result["length"], **REFERENCE_LINE)
    values.set(ylabel="median decay λ", ylim=(-0.03, 1.03))
    lives.set(ylabel="half-life (tokens)", yscale="log")
    deepest = max((layer["layer"] for layers in models.values() for layer in layers), default=0)
    for axes in (values, lives):
        axes.set(xlabel="layer", xlim=(-0.6, deepest + 0.6))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        if not models:
            note(axes, "no layer with a decay")
    handles = [Line2D([], [], **REFERENCE_LINE, label=f"tokens of a sequence, {result['length']:,}")]
    if bars:
        handles.append(Line2D([], [], color=INK, **BAR, label="from quartile to quartile"))
    legend(figure, [*model_handles(list(models)), *handles])
    return figure


def _draw_model(
    axes: Axes,
    layers: list[dict[str, Any]],
    style: ModelStyle,
    shift: float,
    transform: Callable[[float], float],
    bars: bool,
) -> None:
    """Draw a transform of the median decay by layer, moved to the right by `shift` layers."""
    x = np.array([layer["layer"] for layer in layers]) + shift
    low, middle, high = ([transform(layer[key]) for layer in layers] for key in ("q25", "median", "q75"))
    if bars:
        axes.vlines(x, low, high, color=style.color, **BAR, zorder=1.5)  # below all lines
    axes.plot(x, middle, **style._asdict(), linewidth=1.2)


def _clipped_half_life(decay: float) -> float:
    """The half-life in tokens, within the limits of all figures of time-scales."""
    return float(np.clip(half_life(decay), FASTEST, SLOWEST))


def unit(run: Comparison) -> str:
    """What a token of a comparison on text is: "byte" or "token"."""
    return unit_of(run.config["settings"].get("tokenizer", "bytes"))


def grid_figures(run: Comparison) -> list[FigureData]:
    """The figures of a comparison on text. The loss against the paper's has no curves before a run has finished.

    A comparison whose paper prints no loss has no figure of it.
    """
    validation = ("validation loss", "validation_loss", Axis("loss (nats)", phrase="{} nats"))
    data = read_grid(run.path)
    printed = not data["paper"] or any(loss is not None for loss in data["paper"].values())
    beside = [against_paper(data, unit(run))] if printed else []
    if (run.path / DECAY_REGRESSION_JSON).exists():
        beside.append(loss_by_decay(read_json(run.path / DECAY_REGRESSION_JSON)["runs"], unit(run)))
    if any(one.lengths for one in run.trainings):
        beside.append(length(run))
    return [*beside, training(run, *validation, "cross-entropy on the validation text")]


def against_paper(data: dict[str, Any], unit: str = "byte") -> FigureData:
    """Loss here against the paper's: a dot for each variant (mean over seeds), a line over its seeds.

    Args:
        data: "results", variant → seed → result, and "paper", variant → the paper's loss or None. A variant is
            called "group/name"; variants of a group have the same colour.
        unit: what a token is here.
    """
    shown = {
        name: (data["paper"][name], [run["test"] for run in runs.values()])
        for name, runs in data["results"].items() if runs and data["paper"][name] is not None
    }  # fmt: skip
    styles = model_styles(list(dict.fromkeys(name.split("/")[0] for name in shown)))
    series = []
    for name, (paper, losses) in shown.items():
        group, _, variant = name.partition("/")
        style = styles[group]._replace(linestyle="-")
        series.append(Series(name, group, style, [paper], [mean(losses)], label=variant or group))
        if len(losses) > 1:
            series.append(Series(f"{name}, seeds", group, style, [paper] * 2, [min(losses), max(losses)], "thin"))
    papers = [20 * paper for paper, _ in shown.values()] or [0.0]
    ticks = {i / 20: f"{i / 20:.2f}" for i in range(math.floor(min(papers)), math.ceil(max(papers)) + 1)}
    x = Axis("paper's loss (nats a token)", ticks=ticks, phrase="paper {}")
    y = Axis(f"test loss here (nats a {unit})", phrase="here {}")
    return FigureData(
        "results",
        "Loss against the paper's",
        f"Dot chart of the test loss here against the paper's loss for {', '.join(shown)}.",
        "Each dot is a variant, the mean over seeds. A thin vertical line goes from its lowest to its highest seed. "
        "Variants without a loss in the paper are left out.",
        [Panel("loss", x, y, series)],
    )


def loss_by_decay(runs: Sequence[Mapping[str, Any]], unit: str = "byte") -> FigureData:
    """Loss against the median decay λ before and after training: a dot for each variant, a mean over its seeds.

    Args:
        runs: "runs" of `decay_regression.json`: "model", "loss", and "init" and "trained" with "median".
        unit: what a token is here.
    """
    models = {one["model"]: [other for other in runs if other["model"] == one["model"]] for one in runs}
    styles = model_styles(list(dict.fromkeys(name.split("/")[0] for name in models)))
    x = Axis("median decay λ", ticks={i / 5: f"{i / 5:g}" for i in range(6)}, phrase="λ {}")
    y, panels = Axis(f"test loss (nats a {unit})", phrase="loss {}"), []
    for when, title in (("init", "before training"), ("trained", "after training")):
        series = []
        for name, own in models.items():
            group, _, variant = name.partition("/")
            median, loss = mean([one[when]["median"] for one in own]), mean([one["loss"] for one in own])
            style = styles[group]._replace(linestyle="-")
            series.append(Series(name, group, style, [median], [loss], label=variant or group))
        panels.append(Panel(title, x, y, series))
    return FigureData(
        "decay_regression",
        "Loss by decay",
        f"Dot charts of the test loss against the median decay before and after training for {', '.join(models)}.",
        "Each dot is a variant, a mean over seeds. Its place is the median of λ over channels and tokens of the test "
        "text, a mean over layers.",
        panels,
        columns=1,
    )
