"""Figures of Echo's statements about gradients, covariances and costs, and of identities and bounds on random draws.

Each takes the data of one topic of `halflife.lab.theory.compute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from halflife.lab.theory.figures.spectra import formula
from halflife.report.figures.data import Axis, FigureData, Key, Panel, Reference, Series, curves
from halflife.report.style import COLOURS, DOTS, FORMULA, PAGE_WIDTH, model_styles

ROUNDING = 1e-9  # an identity whose error is above this is none
LEAST_ERROR = 1e-17  # where an error of 0 is drawn
Data = Mapping[str, Any]


def gradient_flow(data: Data) -> FigureData:
    """Norms of the Jacobians of attention and SKA (log), by the number of tokens and by the scale of the query."""
    names = {"softmax attention": "attention", "SKA": "ska"}
    panels = []
    for rows, key, label in (
        (data["by tokens"], "tokens", "tokens T"), (data["by scale"], "scale", "factor on the query")
    ):  # fmt: skip
        x = [row[key] for row in rows]
        series = curves(x, {name: [row[each] for row in rows] for name, each in names.items()})
        for each, color in zip(names.values(), COLOURS, strict=False):
            if f"{each} bound" in rows[0]:
                series.append(formula(x, [row[f"{each} bound"] for row in rows], color=color))
        panels.append(Panel("", Axis(label, log=True), Axis("norm of the Jacobian", log=True), series))
    keys = {"bound of Appendix J": Key(FORMULA, "level")}
    return FigureData("theory_gradients", "Gradients", panels, keys=keys, shared=True)


def phase_attenuation(data: Data) -> FigureData:
    """Estimated operators against the jitter of the phase: of keys, and of their squares with and without a mean."""
    names = {
        "keys, |A|": ("raw", "expected"), "squares": ("invariant", "expected invariant"),
        "squares minus their mean": ("centred", "expected centred"),
    }  # fmt: skip
    panels = []
    for rho in sorted({row["correlation"] for row in data["rows"]}):
        rows = [row for row in data["rows"] if row["correlation"] == rho]
        series, places = [], range(len(rows))
        for name, style in model_styles(list(names)).items():
            measured, expected = ([row[key] for row in rows] for key in names[name])
            series.append(Series(name, name, style._replace(linestyle="none"), places, measured))
            series.append(formula(places, expected, color=style.color))
        ticks = {i: "∞" if row["jitter"] is None else f"{row['jitter']:g}" for i, row in enumerate(rows)}
        x, y = Axis("jitter of the phase", ticks=ticks), Axis("operator A", limits=(-0.05, 1.0))
        panels.append(Panel(f"content: ρ = {rho:g}", x, y, series))
    return FigureData(
        "theory_phases", "Phases", panels, keys={"expected": Key(FORMULA, "level")}, size=(2.4, 2.8), shared=True
    )  # fmt: skip


def gram_sizes(data: Data) -> FigureData:
    """Largest eigenvalue of the Gram matrix against T with the bound T (both log), and the directions that it has."""
    found = {
        f"first key × {outlier:g}": [row for row in data["rows"] if row["outlier"] == outlier]
        for outlier in sorted({row["outlier"] for row in data["rows"]})
    }
    tokens = sorted({row["tokens"] for row in data["rows"]})
    x, panels = Axis("tokens T", log=True), []
    for key, y in (
        ("largest", Axis("largest eigenvalue", log=True)),
        ("directions", Axis("directions above the ridge", limits=(0, 1.05 * data["rank"]))),
    ):
        series = curves(tokens, {name: [row[key] for row in rows] for name, rows in found.items()})
        panels.append(Panel("", x, y, [*series, formula(tokens, tokens, "bound T")] if key == "largest" else series))
    return FigureData("theory_gram", "Gram matrices", panels)


def layer_costs(data: Data) -> FigureData:
    """Multiplications a token against T (both log), in training and while decoding: counted, and Table 1's orders."""
    lengths, panels = np.array(data["lengths"], dtype=float), []
    for title, kind, divisor in (("training, a token", "train", lengths), ("decoding, a token at T", "step", 1.0)):
        series = curves(lengths, {name: np.array(own[kind]) / divisor for name, own in data["counts"].items()})
        for one, own in zip(list(series), data["counts"].values(), strict=True):
            printed = np.array(own[f"printed {kind}"]) / divisor
            series.append(formula(lengths, printed, color=one.style.color))
        panels.append(Panel(title, Axis("length T", log=True), Axis("multiplications", log=True), series))
    keys = {"order of Table 1, factor 1": Key(FORMULA, "level")}
    return FigureData("theory_costs", "Costs", panels, keys=keys, shared=True)


def statement_values(data: Data) -> FigureData:
    """Errors of identities with the limit of rounding, and quotients of values and bounds with the limit 1 (log)."""
    panels = []
    for kind, label, limit in (
        ("identity", "relative error of an identity", ROUNDING), ("bound", "value / bound", 1)
    ):  # fmt: skip
        rows = [one for one in data.values() if one["kind"] == kind][::-1]
        dots = Series(kind, "", DOTS, [max(one["value"], LEAST_ERROR) for one in rows], range(len(rows)))
        y = Axis("", ticks={i: f"{one['source']}: {one['what']}" for i, one in enumerate(rows)}, names=True)
        panels.append(Panel("", Axis(label, log=True), y, [dots], [Reference("", x=limit)]))
    return FigureData("theory_statements", "Statements", panels, columns=1, size=(PAGE_WIDTH, 3.0))
