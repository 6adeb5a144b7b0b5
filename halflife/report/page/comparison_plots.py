"""The figures of a comparison's page, each drawn from the saved files alone; their twins in files are in `figures`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from halflife.report.figures.comparison import figures_of
from halflife.report.page.plots import (
    Curve,
    Panel,
    Plot,
    bundle,
    gates,
    layout,
    level_keys,
    levels,
    linear,
    logarithmic,
    model_keys,
    octaves,
    percentages,
    rounded,
    short,
)
from halflife.report.style import model_styles
from halflife.runs.folder import Comparison, Training, mean

SEEDS = "Thick lines are means over seeds, thin lines single seeds. "


def plots(run: Comparison) -> list[Plot]:
    """The figures that a run has something for, but for the decay spectrum (see `page_spectrum`)."""
    found = [PLOTS[name](run) for name in figures_of(run) if name in PLOTS]
    return [plot for plot in found if any(panel.data for panel in plot.panels)]


def accuracy(run: Comparison) -> Plot:
    """Accuracy (fraction) against length (tokens, log), one panel a test."""
    if "capacity" in run.tests:
        pairs = (
            "With capacity the pairs to be remembered grow with the length; with persist their number stays and only "
            "the time between grows. "
        )
    else:
        pairs = "Means over the numbers of pairs. "
    return Plot(
        "accuracy",
        "Accuracy against length",
        f"Line charts of accuracy against sequence length for {', '.join(run.models)}.",
        f"{SEEDS}The vertical line marks the training length T: to its right the models read longer sequences than "
        f"they were trained on. {pairs}Dotted lines: the best answer that ignores the key (guess), and chance.",
        [_accuracy(run, test) for test in run.tests],
        [*model_keys(run.models), *level_keys()],
    )


def _accuracy(run: Comparison, test: str) -> Panel:
    lengths = run.lengths(test)
    hover = "%{x:,} tokens: %{y:.2%}"
    traces = []
    for name in ("shortcut_accuracy", "chance"):
        found = [mean(getattr(s, name) for s in run.scores if (s.test, s.length) == (test, n)) for n in lengths]
        traces.append(levels(name, lengths, found, f"at {hover}"))
    for model, look in model_styles(run.models).items():
        seeds: dict[int, Curve] = {
            seed: (lengths, [run.mean(model, "accuracy", test=test, length=n, seed=seed) for n in lengths])
            for seed in run.seeds(model)
        }
        traces += bundle(model, look, seeds, hover)
    x = logarithmic("sequence length (tokens)", lengths)
    return Panel(_title(run, test), traces, layout(x, percentages("accuracy"), run.train_length))


def _title(run: Comparison, test: str) -> str:
    pairs = _pairs(run, test)
    if not pairs:
        return test
    return f"{test}: {pairs[0]:g} " + (f"to {pairs[-1]:g} pairs" if len(pairs) > 1 else "pairs at every length")


def _pairs(run: Comparison, test: str) -> list[float]:
    return sorted({s.num_pairs for s in run.scores if s.test == test and math.isfinite(s.num_pairs)})


def recall(run: Comparison) -> Plot:
    """Mean accuracy over seeds of every cell, length (tokens) × pairs: a panel a model and test."""
    return Plot(
        "recall",
        "Recall by length and pairs",
        f"Heat maps of accuracy by sequence length and number of pairs for {', '.join(run.models)}.",
        "Means over seeds, in percent. To the right sequences get longer, downwards there are more pairs to tell "
        "apart. Cells for which a task has no room are empty.",
        [_grid(run, model, test) for model in run.models for test in run.tests if _pairs(run, test)],
        [],
    )


def _grid(run: Comparison, model: str, test: str) -> Panel:
    lengths, pairs = run.lengths(test), _pairs(run, test)
    cells = [[run.mean(model, "accuracy", test=test, length=n, num_pairs=k) for n in lengths] for k in pairs]
    heat: dict[str, Any] = {
        "type": "heatmap", "x": [short(n) for n in lengths], "y": [f"{k:g}" for k in pairs],
        "z": [[rounded(value) for value in row] for row in cells], "zmin": 0, "zmax": 1,
        "text": [[f"{100 * value:.0f}" if math.isfinite(value) else "" for value in row] for row in cells],
        "texttemplate": "%{text}", "xgap": 2, "ygap": 2, "showscale": False, "colorscale": "recall",
        "hoverongaps": False, "hovertemplate": "%{x} tokens, %{y} pairs: %{z:.2%}<extra></extra>",
    }  # fmt: skip
    x = {"title": {"text": "length (tokens)"}, "type": "category", "showgrid": False}
    y = {"title": {"text": "pairs"}, "type": "category", "autorange": "reversed", "showgrid": False}
    return Panel(f"{model}, {test}", [heat], {"xaxis": x, "yaxis": y, "height": 90 + 34 * len(pairs)})


def positions(run: Comparison) -> Plot:
    """Accuracy (fraction) and cross-entropy (nats) against the position (log), in the longest test."""
    length = max(found["length"] for one in run.trainings for found in one.positions)
    panels = []
    for name, axis, hover in (
        ("accuracy", percentages("accuracy"), "%{y:.2%}"),
        ("loss", linear("cross-entropy (nats)", rangemode="tozero"), "%{y:.4g} nats"),
    ):
        traces = []
        for model, look in model_styles(run.models).items():
            seeds = {
                one.seed: (range(1, length + 1), found[name])
                for one in run.trainings_of(model) for found in one.positions if found["length"] == length
            }  # fmt: skip
            traces += bundle(model, look, seeds, f"position %{{x:,}}: {hover}")
        x = logarithmic("position (from 1)", octaves(length))
        panels.append(Panel(name, traces, layout(x, axis, run.train_length)))
    return Plot(
        "positions",
        "Accuracy and loss by position",
        "Line charts of accuracy and of cross-entropy against the position in the longest test for "
        f"{', '.join(run.models)}.",
        f"{SEEDS}To the right of the dashed line, the training length, positions are ones that training never scored.",
        panels,
        model_keys(run.models),
    )


def training(run: Comparison) -> Plot:
    """Loss (nats) and validation accuracy (fraction) against the step."""
    panels = []
    for title, key, axis, hover in (
        ("training loss", "loss", linear("loss (nats)", rangemode="tozero"), "%{y:.4g} nats"),
        ("validation accuracy", "validation_accuracy", percentages("accuracy"), "%{y:.2%}"),
    ):
        traces = []
        for model, look in model_styles(run.models).items():
            seeds = _seeds(run.trainings_of(model), key)
            traces += bundle(model, look, seeds, f"step %{{x:,}}: {hover}")
        panels.append(Panel(title, traces, layout(linear("step", rangemode="tozero"), axis)))
    return Plot(
        "training",
        "Training",
        f"Line charts of training loss and validation accuracy against the step for {', '.join(run.models)}.",
        f"{SEEDS}At the selected learning rate. Left: cross-entropy at the scored positions, averaged between logs. "
        "Right: accuracy on unseen sequences of the training distribution; the learning rate was selected by its end.",
        panels,
        model_keys(run.models),
    )


def _seeds(trainings: list[Training], key: str) -> dict[int, Curve]:
    """The curve of each seed; of several learning rates, while none is selected, the last one's."""
    return {one.seed: one.curve(key) for one in trainings}


PLOTS: dict[str, Callable[[Comparison], Plot]] = {
    "accuracy": accuracy, "recall": recall, "positions": positions,
    "gates": lambda run: gates({model: run.trainings_of(model) for model in run.models}), "training": training,
}  # fmt: skip
