"""The figures of the page of a language model that `halflife train` made."""

from __future__ import annotations

import math

from halflife.report.page.plots import (
    Panel,
    Plot,
    decades,
    gates,
    layout,
    linear,
    logarithmic,
    model_keys,
    octaves,
    trace,
)
from halflife.report.style import INK, model_styles
from halflife.runs.folder import LanguageRun

BITS = 1 / math.log(2)


def plots(run: LanguageRun) -> list[Plot]:
    """The figures that a run has something for, but for the decay spectrum (see `page_spectrum`)."""
    measured = [lengths(run)] if "lengths" in run.result else []
    gated = [gates({run.model: [run.training]})] if run.training.gates() else []
    return [*measured, *gated, loss(run)]


def lengths(run: LanguageRun) -> Plot:
    """Perplexity at multiples of the training length, and loss (bits a token) by position."""
    names = ["whole text", "its last context"]
    look = model_styles(names)
    rows, buckets = run.result["lengths"], run.result["positions"]
    sizes = [row["length"] for row in rows]
    hover = "%{x:,} tokens: %{y:.4g}"
    perplexity = [
        trace(name, name, sizes, [row[key] for row in rows], look[name], hover)
        for name, key in zip(names, ("perplexity", "last_perplexity"), strict=True)
    ]
    x = logarithmic("length of the text (tokens)", sizes)
    ends = [bucket["last"] for bucket in buckets]
    losses = [bucket["loss"] * BITS for bucket in buckets]
    hover = "positions up to %{x:,}: %{y:.4g} bits"
    position = [trace("loss", "whole text", ends, losses, look["whole text"], hover)]
    return Plot(
        "lengths",
        "Perplexity and loss by length",
        f"Line charts of {run.model}: perplexity against the length of the text, and loss by position in it.",
        "On the validation text. Left: perplexity of texts of each length, over all of their tokens and over those of "
        "their last context alone. Right: loss by the position in the longest, each point the mean of an octave that "
        "ends there. To the right of the dashed line, the training length, the model reads further than in training.",
        [
            Panel("perplexity by length", perplexity, layout(x, decades("perplexity", perplexity), run.train_length)),
            Panel(
                "loss by position",
                position,
                layout(logarithmic("position", octaves(ends[-1])), linear("loss (bits a token)"), run.train_length),
            ),
        ],
        model_keys(names),
    )


def loss(run: LanguageRun) -> Plot:
    """Training and validation loss (bits a token) and the learning rate, against the step."""
    names = ["validation", "training"]
    look = model_styles(names)
    traces = []
    for name, key in (("training", "loss"), ("validation", "validation_loss")):
        steps, values = run.training.curve(key)
        bits = [value * BITS for value in values]
        traces.append(trace(name, name, steps, bits, look[name], "step %{x:,}: %{y:.4g} bits"))
    traces[0] |= {"mode": "lines", "opacity": 0.8}
    traces[0]["line"] |= {"width": 1.2, "dash": "solid"}
    steps, rates = run.training.curve("learning_rate")
    rate = trace("learning rate", "learning rate", steps, rates, look["training"], "step %{x:,}: %{y:.3g}")
    rate |= {"mode": "lines", "line": {"color": INK, "width": 1.4}}
    x = linear("step", rangemode="tozero")
    return Plot(
        "training",
        "Training",
        f"Line charts of training and validation loss of {run.model}, and of the learning rate, against the step.",
        "Bits a token. Training: the loss of the batches, averaged between logs. Validation: always the same rows of "
        "the held-out text.",
        [
            Panel("loss", traces, layout(x, decades("loss (bits a token)", traces))),
            Panel("learning rate", [rate], layout(x, linear("", tickformat="~g", rangemode="tozero"))),
        ],
        model_keys(names),
    )
