"""Figures of Echo's statements about gradients, covariances and costs, from the results of `halflife.lab.theory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from halflife.report.figures.grids import panel_grid
from halflife.report.style import INK, legend, model_handles, model_styles, styled

BOUND: dict[str, Any] = {"linewidth": 1.1, "linestyle": (0, (1, 1.5)), "marker": ""}  # values of a bound


@styled
def gradient_flow(data: Mapping[str, Any]) -> Figure:
    """Norms of the Jacobians of attention and SKA (log), by the number of tokens and by the scale of the query.

    Args:
        data: what `theory.gradients.gradient_flow` returns.
    """
    figure, panels = panel_grid(2, 3.0, sharey=True)
    names = {"softmax attention": "attention", "SKA": "ska"}
    for axes, rows, key in zip(panels, (data["by tokens"], data["by scale"]), ("tokens", "scale"), strict=True):
        x = [row[key] for row in rows]
        for name, style in model_styles(list(names)).items():
            axes.plot(x, [row[names[name]] for row in rows], **{**style._asdict(), "markersize": 4})
            if f"{names[name]} bound" in rows[0]:
                axes.plot(x, [row[f"{names[name]} bound"] for row in rows], **{**BOUND, "color": style.color})
        axes.set(xscale="log", yscale="log", xlabel={"tokens": "tokens T", "scale": "factor on the query"}[key])
    panels[0].set_ylabel("norm of the Jacobian")
    bound = Line2D([], [], **BOUND, color=INK, label="bound of Appendix J")
    legend(figure, [*model_handles(list(names)), bound])
    return figure


@styled
def phase_attenuation(data: Mapping[str, Any]) -> Figure:
    """Estimated operators against the jitter of the phase: of the keys, and of their squares with and without a mean.

    Args:
        data: what `theory.covariances.phase_attenuation` returns.
    """
    correlations = sorted({row["correlation"] for row in data["rows"]})
    figure, panels = panel_grid(len(correlations), 2.8, sharey=True)
    names = {"keys, |A|": "raw", "squares": "invariant", "squares minus their mean": "centred"}
    expected = {"raw": "expected", "invariant": "expected invariant", "centred": "expected centred"}
    for axes, rho in zip(panels, correlations, strict=True):
        rows = [row for row in data["rows"] if row["correlation"] == rho]
        x = np.arange(len(rows))
        for name, style in model_styles(list(names)).items():
            axes.plot(x, [row[names[name]] for row in rows], **{**style._asdict(), "linestyle": "none"})
            axes.plot(x, [row[expected[names[name]]] for row in rows], **{**BOUND, "color": style.color})
        axes.set_xticks(x, ["∞" if row["jitter"] is None else f"{row['jitter']:g}" for row in rows])
        axes.set(title=f"content: ρ = {rho:g}", xlabel="jitter of the phase", ylim=(-0.05, 1.0))
    panels[0].set_ylabel("operator A")
    handle = Line2D([], [], **BOUND, color=INK, label="expected")
    legend(figure, [*model_handles(list(names), linestyle="none"), handle])
    return figure


@styled
def gram_sizes(data: Mapping[str, Any]) -> Figure:
    """Largest eigenvalue of the Gram matrix against T with the bound T (both log), and the directions that it has.

    Args:
        data: what `theory.covariances.gram_bounds` returns.
    """
    figure, (largest, directions) = panel_grid(2, 2.8)
    outliers = sorted({row["outlier"] for row in data["rows"]})
    names = {f"first key × {outlier:g}": outlier for outlier in outliers}
    for name, style in model_styles(list(names)).items():
        rows = [row for row in data["rows"] if row["outlier"] == names[name]]
        x = [row["tokens"] for row in rows]
        largest.plot(x, [row["largest"] for row in rows], **{**style._asdict(), "markersize": 4})
        directions.plot(x, [row["directions"] for row in rows], **{**style._asdict(), "markersize": 4})
    largest.plot(x, x, **BOUND, color=INK)
    largest.set(xscale="log", yscale="log", xlabel="tokens T", ylabel="largest eigenvalue")
    directions.set(xscale="log", xlabel="tokens T", ylabel="directions above the ridge", ylim=(0, 1.05 * data["rank"]))
    bound = Line2D([], [], **BOUND, color=INK, label="bound T")
    legend(figure, [*model_handles(list(names)), bound])
    return figure


@styled
def layer_costs(data: Mapping[str, Any]) -> Figure:
    """Multiplications a token against T (both log), in training and while decoding: counted, and Table 1's orders.

    Args:
        data: what `theory.costs.cost_table` returns.
    """
    figure, panels = panel_grid(2, 3.2, sharey=True)
    lengths = np.array(data["lengths"], dtype=float)
    names = list(data["counts"])
    for axes, kind, divisor in zip(panels, ("train", "step"), (lengths, np.ones_like(lengths)), strict=True):
        for name, style in model_styles(names).items():
            counts = data["counts"][name]
            axes.plot(lengths, np.array(counts[kind]) / divisor, **{**style._asdict(), "markersize": 3.5})
            axes.plot(lengths, np.array(counts[f"printed {kind}"]) / divisor, **{**BOUND, "color": style.color})
        title = {"train": "training, a token", "step": "decoding, a token at T"}[kind]
        axes.set(title=title, xlabel="length T", xscale="log", yscale="log")
    panels[0].set_ylabel("multiplications")
    printed = Line2D([], [], **BOUND, color=INK, label="order of Table 1, factor 1")
    legend(figure, [*model_handles(names), printed])
    return figure
