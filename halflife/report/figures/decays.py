"""Figures of decays: their values on a text, and the losses of the Decay paper's grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from halflife.analysis.decays import half_life
from halflife.data.tokenizers import unit_of
from halflife.files import read_json
from halflife.report.figures.comparison import length, training
from halflife.report.figures.data import FASTEST, SLOWEST, Axis, FigureData, Key, Panel, Reference, Series
from halflife.report.figures.spectrum import LAYER, MISSING
from halflife.report.style import REFERENCE, label_styles, model_styles
from halflife.runs.folder import DECAY_REGRESSION_JSON, read_grid
from halflife.runs.records import Comparison, mean

MAX_WITH_BARS = 4  # models; the bars of more models would cover each other
MODEL_SHIFT = 0.13  # layers, between the bars of two models


def decays(result: dict[str, Any]) -> FigureData:
    """Median decay λ, half-life and horizon (tokens, log) of every layer: a line for each model, bars from quartiles.

    `result` is that of `analysis.survey.measure_models`. Models without a decay are left out.
    """
    models = {model["model"]: model["layers"] for model in result["models"] if model["layers"]}
    styles = label_styles(model["model"] for model in result["models"])
    bars = len(models) <= MAX_WITH_BARS
    tokens = Axis("tokens", log=True, phrase="{} tokens")
    panels = []
    for title, y, transform in (
        ("Median decay λ", Axis("λ", limits=(-0.03, 1.03)), float),
        ("Half-life at the median", tokens, lambda decay: float(np.clip(half_life(decay), FASTEST, SLOWEST))),
    ):
        series = []
        for i, name in enumerate(models):
            shift = MODEL_SHIFT * (i - (len(models) - 1) / 2) if bars else 0.0
            low, middle, high = (
                [math.nan if layer[key] is None else transform(layer[key]) for layer in models[name]]
                for key in ("q25", "median", "q75")
            )
            x = [layer["layer"] for layer in models[name]]
            series.append(Series(name, name, styles[name], x, middle, bars=(low, high) if bars else None, shift=shift))
        panels.append(Panel(title, LAYER, y, series))
    length = [Reference("", y=result["length"])]
    panels[1] = replace(panels[1], references=length)
    horizons = [
        Series(name, name, styles[name], [layer["layer"] for layer in layers], [_finite(layer) for layer in layers])
        for name, layers in models.items()
    ]
    panels.append(Panel("Horizon", LAYER, tokens, horizons, length))
    return FigureData(
        "decays", "Decays on the text", panels,
        description="Line charts of median decays, half-lives and horizons by layer.",
        caption=(
            "λ is the fraction of a memory that a token leaves. Bars go from quartile to quartile. The horizon is the "
            "lag at which 1/e of a write is left, in the slowest head. A horizon beyond the longest measured lag has "
            "no point. The dashed line is at the number of tokens of a sequence."
        ),
        keys={f"tokens of a sequence, {result['length']:,}": Key(REFERENCE, "level")}, missing=MISSING,
        size=(2.4, 2.8),
    )  # fmt: skip


def _finite(layer: dict[str, Any]) -> float:
    """The horizon of a layer, NaN if it is unknown or beyond the longest lag."""
    horizon = layer.get("horizon")
    return horizon if horizon and math.isfinite(horizon) else math.nan


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

    `data` is that of `read_grid`, and `unit` what a token is here. A variant is called "group/name", and variants of a
    group have the same colour.
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
        "results", "Loss against the paper's", [Panel("loss", x, y, series)],
        f"Dot chart of the test loss here against the paper's loss for {', '.join(shown)}.",
        "Each dot is a variant, the mean over seeds. A thin vertical line goes from its lowest to its highest seed. "
        "Variants without a loss in the paper are left out.",
    )  # fmt: skip


def loss_by_decay(runs: Sequence[Mapping[str, Any]], unit: str = "byte") -> FigureData:
    """Loss against the median decay λ before and after training: a dot for each variant, a mean over its seeds.

    `runs` are those of `decay_regression.json`, and `unit` is what a token is here.
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
        "decay_regression", "Loss by decay", panels,
        f"Dot charts of the test loss against the median decay before and after training for {', '.join(models)}.",
        "Each dot is a variant, a mean over seeds. Its place is the median of λ over channels and tokens of the test "
        "text, a mean over layers.",
        columns=1,
    )  # fmt: skip
