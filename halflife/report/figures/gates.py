"""Figures of a comparison's words and gates: accuracy and loss by position, and how often GateRank resets."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from halflife.report.style import REFERENCE_LINE, WIDTH, legend, model_handles, model_styles, styled
from halflife.runs.folder import Comparison, mean

GATES = {
    "reset_rate": "share of tokens that reset",
    "segment_length": "mean segment (tokens)",
    "slow_share": "slow state's share of energy",
}


def has_positions(run: Comparison) -> bool:
    """Whether the tests were scored at every position."""
    return any(one.positions for one in run.trainings)


def has_gates(run: Comparison) -> bool:
    """Whether a model has slow gates."""
    return any(one.gates() for one in run.trainings)


@styled
def positions(run: Comparison) -> Figure:
    """Accuracy (fraction) and cross-entropy (nats) against the position (log2), in the longest test; a thin line a
    seed, the mean thick. The vertical line is the training length."""
    figure = Figure(figsize=(WIDTH, 3), layout="constrained")
    panels = dict(zip(("accuracy", "loss"), figure.subplots(1, 2), strict=True))
    length = max(found["length"] for one in run.trainings for found in one.positions)
    for name, axes in panels.items():
        for model, look in model_styles(run.models).items():
            lines = [f[name] for one in run.trainings_of(model) for f in one.positions if f["length"] == length]
            x, style = np.arange(1, length + 1), {"color": look.color, "linestyle": look.linestyle}
            for line in lines:
                axes.plot(x, line, **style, linewidth=0.6, alpha=0.4)
            if lines:
                axes.plot(x, np.mean(lines, 0), **look._asdict(), markevery=_marks(length))
        if run.train_length:
            axes.axvline(run.train_length, **REFERENCE_LINE)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda position, _: f"{position:,.0f}"))
        axes.set(xlabel="position (from 1)")
    panels["accuracy"].set(ylabel="accuracy", ylim=(-0.03, 1.03))
    panels["accuracy"].yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    panels["loss"].set(ylabel="cross-entropy (nats)")
    panels["loss"].set_ylim(bottom=0)
    legend(figure, model_handles(run.models))
    return figure


def _marks(length: int) -> list[int]:
    """Positions 1, 2, 4, …, counted from 0."""
    return [2**i - 1 for i in range(int(length).bit_length()) if 2**i <= length]


@styled
def gates(run: Comparison) -> Figure:
    """What the slow gates do while they train: the share of resets (log), the mean segment, the slow state's share of
    energy; means over layers, a line a seed."""
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    gated = []
    for (name, label), axes in zip(GATES.items(), figure.subplots(1, 3), strict=True):
        for model, look in model_styles(run.models).items():
            for one in run.trainings_of(model):
                if not one.gates():
                    continue
                gated.append(model)
                steps, found = zip(*one.gates(), strict=True)
                values = [mean(layer[name] for layer in layers.values()) for layers in found]
                axes.plot(steps, values, color=look.color, linestyle=look.linestyle, linewidth=1, alpha=0.85)
        axes.set(xlabel="step", title=label)
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=4)
        if name == "slow_share":
            axes.set_ylim(-0.03, 1.03)
        else:
            axes.set_yscale("log")
    shown = [handle for handle in model_handles(run.models) if handle.get_label() in gated]
    for handle in shown:
        handle.set_marker("")
    legend(figure, shown)
    return figure
