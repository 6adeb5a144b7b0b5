"""Data of the figures of language models that `halflife train` made: the loss, and perplexity by length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from halflife.report.figures.comparison import gates, training_length
from halflife.report.figures.data import Axis, FigureData, Panel, Reference, Series, length_ticks, octave_ticks
from halflife.report.style import model_styles
from halflife.runs.records import LanguageRun, Training

NAT_BITS = 1 / math.log(2)  # bits of a nat
BITS_A_TOKEN = "loss (bits a token)"


def language_figures(run: LanguageRun) -> list[FigureData]:
    """The figures that a run has data for."""
    figures = [length({run.model: run.result})] if "lengths" in run.result else []
    if run.training.gates():
        figures.append(gates({run.model: [run.training]}))
    return [*figures, loss({run.model: run.training})]


def length(results: Mapping[str, Mapping[str, Any]]) -> FigureData:
    """Perplexity against the length of the text, and loss (bits a token) against the position in it, both tokens, log.

    `results` are the `result.json` of each model.
    """
    first = next(iter(results.values()))
    sizes = [row["length"] for row in first["lengths"]]
    perplexity, by_position = [], []
    for name, style in model_styles(list(results)).items():
        rows, buckets = results[name]["lengths"], results[name]["positions"]
        lengths, ends = [row["length"] for row in rows], [bucket["last"] for bucket in buckets]
        recent = [row["last_perplexity"] for row in rows]
        perplexity += [
            Series(f"{name}, last context", name, style, lengths, recent, "thin"),
            Series(name, name, style, lengths, [row["perplexity"] for row in rows]),
        ]
        by_position.append(Series(name, name, style, ends, [NAT_BITS * bucket["loss"] for bucket in buckets]))
    x = Axis("length of the text (tokens)", log=True, ticks=length_ticks(sizes), phrase="{} tokens")
    last = first["positions"][-1]["last"]
    position = Axis("position (tokens)", log=True, ticks=octave_ticks(last), phrase="positions up to {}")
    bits = Axis(BITS_A_TOKEN, phrase="{} bits")
    line = training_length(min(sizes))
    panels = [
        Panel("perplexity by length", x, Axis("perplexity", log=True), perplexity, line),
        Panel("loss by position", position, bits, by_position, line),
    ]
    return FigureData(
        "length", "Perplexity and loss by length", panels,
        f"Line charts of {', '.join(results)}: perplexity against the length of the text, and loss by position in it.",
        "On the validation text. Left: perplexity of texts of each length, over all of their tokens (thick) and over "
        "those of the last context alone (thin). Right: loss by position in the longest text. Each point is the mean "
        "over an octave of positions, drawn at its end. To the right of the dashed line, the model reads further than "
        "in training.",
    )  # fmt: skip


def loss(runs: Mapping[str, Training], baselines: Mapping[str, float] | None = None) -> FigureData:
    """Training and validation loss (bits a token, log) and the learning rate, against the step (log).

    `baselines` are losses of other models (bits a token), drawn as horizontal lines.
    """
    losses, rates = [], []
    for name, style in model_styles(list(runs)).items():
        curves = {key: runs[name].curve(key) for key in ("loss", "validation_loss", "learning_rate")}
        bits = {key: [NAT_BITS * value for value in values] for key, (_, values) in curves.items()}
        losses += [
            Series(f"{name}, training", name, style, curves["loss"][0], bits["loss"], "thin"),
            Series(f"{name}, validation", name, style, curves["validation_loss"][0], bits["validation_loss"]),
        ]
        rates.append(Series(name, name, style, *curves["learning_rate"]))
    x = Axis("step", log=True, phrase="step {}")
    lines = [Reference(name, y=value) for name, value in (baselines or {}).items()]
    panels = [
        Panel("loss", x, Axis(BITS_A_TOKEN, log=True, phrase="{} bits"), [one for one in losses if len(one.x)], lines),
        Panel("learning rate", x, Axis("", from_zero=True), [one for one in rates if len(one.x)]),
    ]
    return FigureData(
        "loss", "Training", panels,
        f"Line charts of the loss of {', '.join(runs)} in training and validation, and of the learning rate, by step.",
        "Left: the thin line is the loss of the training batches, averaged over the steps between two "
        "records. The thick line is the loss on the validation text, always on the same rows.",
    )  # fmt: skip
