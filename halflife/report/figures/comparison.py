"""Data of a comparison's figures, from the files of its run alone: accuracy, recall, positions, gates, training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from halflife.report.figures.data import (
    SEEDS,
    Axis,
    Curve,
    FigureData,
    HeatMap,
    Panel,
    Reference,
    Series,
    length_ticks,
    octave_ticks,
    seed_series,
)
from halflife.report.numbers import short_count
from halflife.report.style import INK, ModelStyle
from halflife.report.tables.comparison import levels
from halflife.runs.records import IN_DISTRIBUTION, LAG, Comparison, Training, mean

SHORTCUT = ModelStyle(INK, "", (0, (1, 1.2)))
CHANCE = ModelStyle(INK, "", (0, (1, 4)))
ACCURACY = Axis("accuracy", fraction=True)
STEP = Axis("step", phrase="step {}", whole=True)


def comparison_figures(run: Comparison) -> list[FigureData]:
    """The figures that a run has data for. Accuracy and training are always there, empty at the start of a run."""
    figures = [accuracy(run)]
    if _has_grid(run):
        figures.append(recall(run))
    if any(one.positions for one in run.trainings):
        figures.append(positions(run))
    if any(one.gates() for one in run.trainings):
        figures.append(gates({model: run.trainings_of(model) for model in run.models}))
    return [*figures, training(run)]


def training_length(length: int | None) -> list[Reference]:
    """The vertical line at the training length, if it is known."""
    return [Reference("T", x=length)] if length else []


def accuracy(run: Comparison) -> FigureData:
    """Accuracy against the sequence length (tokens, log), one panel for each test."""
    if "capacity" in run.tests:
        pairs = 'In the test "capacity" the number of pairs grows with the length. '
        if LAG in run.tests:
            pairs += (
                'In the test "lag" it is constant, and only the number of tokens from a value to its question grows. '
                "The axis has its median in the test, and the vertical line marks that in training. "
            )
        if "persist" in run.tests:
            pairs += f'In the test "persist" it is constant, and most questions come early{_medians(run, "persist")}. '
    else:
        pairs = (
            "Each point is a mean over the numbers of pairs. " if any(_pairs(run, test) for test in run.tests) else ""
        )
    return FigureData(
        "accuracy", "Accuracy against length", [_accuracy_panel(run, test) for test in run.tests],
        f"Line charts of accuracy against sequence length for {', '.join(run.models)}.",
        f"{SEEDS}The vertical line marks the training length T. To its right, sequences are longer than in training. "
        f"{pairs}Dotted lines show chance and the {' or the '.join(dict.fromkeys(map(run.guess, run.tests)))}.",
    )  # fmt: skip


def _medians(run: Comparison, test: str) -> str:
    """The median lags of a test in words, "" if they are not known."""
    lags = [run.lag(test, length) for length in run.lengths(test)]
    return "" if any(map(math.isnan, lags)) else f": half of them within {', '.join(f'{lag:g}' for lag in lags)} tokens"


def _accuracy_panel(run: Comparison, test: str) -> Panel:
    lengths, pairs = run.lengths(test), _pairs(run, test)
    varied, x, references = _axis(run, test)
    title = test
    if pairs:
        every = f"pairs at every {'lag' if test == LAG else 'length'}"
        title += f": {pairs[0]:g} " + (f"to {pairs[-1]:g} pairs" if len(pairs) > 1 else every)
    curves: dict[str, dict[int, Curve]] = {
        model: {
            seed: (varied, [run.mean(model, "accuracy", test=test, length=n, seed=seed) for n in lengths])
            for seed in run.seeds(model)
        }
        for model in run.models
    }
    known = levels([vars(score) for score in run.scores if score.test == test])
    chance, shortcut = ([known[test, n][i] for n in lengths] for i in (0, 1))
    level_lines = [
        Series("shortcut", run.guess(test), SHORTCUT, varied, shortcut, "level"),
        Series("chance", "chance", CHANCE, varied, chance, "level"),
    ]
    return Panel(title, x, ACCURACY, [*seed_series(curves), *level_lines], references)


def _axis(run: Comparison, test: str) -> tuple[Sequence[float], Axis, list[Reference]]:
    """Where the points of a test stand, its axis, and the line at the training length, in `lag` at its median lag."""
    lengths = run.lengths(test)
    if test == LAG:
        lags, trained = [run.lag(LAG, n) for n in lengths], run.lag(IN_DISTRIBUTION, run.train_length or 0)
        x = Axis("lag: tokens from a value to its question", log=True, ticks=length_ticks(lags), phrase="{} tokens")
        return lags, x, [Reference("T", x=trained)] if math.isfinite(trained) else []
    ticks = {n: f"{label}\n{run.times(int(n))}".strip() for n, label in length_ticks(lengths).items()}
    x = Axis("sequence length (tokens)", log=True, ticks=ticks, phrase="{} tokens")
    return lengths, x, training_length(run.train_length)


def _pairs(run: Comparison, test: str) -> list[float]:
    """The numbers of pairs of a test, ascending. Tests of tasks without pairs have none."""
    return sorted({score.num_pairs for score in run.scores if score.test == test and math.isfinite(score.num_pairs)})


def _has_grid(run: Comparison) -> bool:
    """Whether some test has several numbers of pairs at one length."""
    scores = [one for one in run.scores if one.test != IN_DISTRIBUTION and math.isfinite(one.num_pairs)]
    places = {(one.test, one.length) for one in scores}
    return len({(one.test, one.length, one.num_pairs) for one in scores}) > len(places)


def recall(run: Comparison) -> FigureData:
    """Mean accuracy over seeds by length (tokens) and number of pairs, for each model (rows) and test (columns)."""
    tests = [test for test in run.tests if _pairs(run, test)]
    return FigureData(
        "recall", "Recall by length and pairs",
        [_recall_panel(run, model, test) for model in run.models for test in tests],
        f"Heat maps of accuracy by sequence length and number of pairs for {', '.join(run.models)}.",
        "Mean accuracy over seeds, in percent. Sequences get longer to the right, and the number of pairs grows "
        "downwards. A cell is empty where the pairs do not fit into the length.",
        columns=len(tests),
    )  # fmt: skip


def _recall_panel(run: Comparison, model: str, test: str) -> HeatMap:
    lengths, pairs = run.lengths(test), _pairs(run, test)
    x, y = Axis("length (tokens)", phrase="{} tokens"), Axis("pairs", phrase="{} pairs")
    cells = [[run.mean(model, "accuracy", test=test, length=n, num_pairs=k) for n in lengths] for k in pairs]
    return HeatMap(f"{model}\n{test}", x, y, list(map(short_count, lengths)), [f"{k:g}" for k in pairs], cells)


def positions(run: Comparison) -> FigureData:
    """Accuracy and cross-entropy (nats) against the position (log), in the longest test."""
    length = max(found["length"] for one in run.trainings for found in one.positions)
    x = Axis("position (from 1)", log=True, ticks=octave_ticks(length), phrase="position {}")
    loss = Axis("cross-entropy (nats)", from_zero=True, phrase="{} nats")
    panels = []
    for key, y in (("accuracy", ACCURACY), ("loss", loss)):
        curves: dict[str, dict[int, Curve]] = {
            model: {
                one.seed: (range(1, length + 1), found[key])
                for one in run.trainings_of(model) for found in one.positions if found["length"] == length
            }
            for model in run.models
        }  # fmt: skip
        panels.append(Panel(key, x, y, seed_series(curves), training_length(run.train_length)))
    return FigureData(
        "positions", "Accuracy and loss by position", panels,
        "Line charts of accuracy and of cross-entropy against the position in the longest test for "
        f"{', '.join(run.models)}.",
        f"{SEEDS}The dashed line marks the training length T. Positions to its right did not occur in training.",
    )  # fmt: skip


def length(run: Comparison) -> FigureData:
    """Perplexity (log) against the length of the text (tokens, log)."""
    sizes = sorted({at["length"] for one in run.trainings for at in one.lengths})
    x = Axis("length of the text (tokens)", log=True, ticks=length_ticks(sizes), phrase="{} tokens")
    panels = []
    for key, title in (("perplexity", "all tokens"), ("last_perplexity", "the last T tokens")):
        series = seed_series({
            model: {
                one.seed: ([at["length"] for at in one.lengths], [at[key] for at in one.lengths])
                for one in run.trainings_of(model)
            }
            for model in run.models
        })  # fmt: skip
        panels.append(Panel(title, x, Axis("perplexity", log=True), series, training_length(run.train_length)))
    return FigureData(
        "length", "Perplexity by length", panels,
        f"Line charts of perplexity against the length of the text for {', '.join(run.models)}.",
        f"{SEEDS}On the test text. Left: over all tokens of texts of each length. Right: over their last T "
        "tokens alone, where distant context can help most. The vertical line marks the training length T.",
    )  # fmt: skip


GATES = {
    "reset_rate": ("share of tokens that reset", Axis("", log=True, fraction=True)),
    "segment_length": ("mean segment (tokens)", Axis("", log=True, phrase="{} tokens")),
    "slow_share": ("slow state's share of energy", Axis("", fraction=True)),
}


def gates(trainings: Mapping[str, Sequence[Training]]) -> FigureData:
    """What the slow gates of the trained models of each name do during training, means over layers."""
    panels = []
    for key, (title, y) in GATES.items():
        curves = {model: {one.seed: _gate_curve(one, key) for one in own} for model, own in trainings.items()}
        panels.append(Panel(title, STEP, y, seed_series(curves)))
    return FigureData(
        "gates", "What the slow gates do", same_steps(panels),
        "Line charts of the share of resets, the mean segment length and the slow state's share of the energy "
        "during training.",
        f"{SEEDS}All values are means over layers. At a reset, the content of the fast state is added to the slow "
        "state. Values of 0 are missing on logarithmic axes.",
    )  # fmt: skip


def same_steps(panels: Sequence[Panel]) -> list[Panel]:
    """The panels with one x-axis from step 0 to the last step of all, whatever values each of them lacks."""
    last = max((step for panel in panels for series in panel.series for step in series.x), default=1)
    x = replace(STEP, limits=(0, last * 1.02))
    return [replace(panel, x=x) for panel in panels]


def _gate_curve(one: Training, key: str) -> Curve:
    """Steps and means over layers. A value of 0 becomes NaN, because a logarithmic axis cannot show it."""
    steps = [step for step, _ in one.gates()]
    return steps, [mean(layer[key] for layer in layers.values()) or math.nan for _, layers in one.gates()]


def training(
    run: Comparison,
    validation: str = "validation accuracy",
    key: str = "validation_accuracy",
    axis: Axis = ACCURACY,
    explanation: str = "accuracy on new sequences of the training distribution",
) -> FigureData:
    """Training loss (nats) and a quantity of the validations against the step, at the selected learning rate.

    The quantity is called `validation` in its panel and `key` in `metrics.jsonl`. The caption has its `explanation`.
    """
    panels = []
    loss = Axis("loss (nats)", from_zero=True, phrase="{} nats")
    for title, name, y in (("training loss", "loss", loss), (validation, key, axis)):
        # A seed with several learning rates, while none is selected, shows the last one.
        curves = {model: {one.seed: one.curve(name) for one in run.trainings_of(model)} for model in run.models}
        panels.append(Panel(title, STEP, y, seed_series(curves)))
    return FigureData(
        "training", "Training", same_steps(panels),
        f"Line charts of training loss and {validation} against the step for {', '.join(run.models)}.",
        f"{SEEDS}All runs have the selected learning rate. Left: cross-entropy at the scored positions, averaged "
        f"over the steps between two records. Right: {explanation}. Its final value selects the learning rate.",
    )  # fmt: skip
