"""Figures of spectral Koopman attention (SKA): its operators after a text, and what each power of them recalls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle

from halflife.report.figures.grids import layer_grid
from halflife.report.figures.matplotlib_renderer import draw_heat_map
from halflife.report.style import INK, REFERENCE_LINE, WIDTH, legend, model_handles, model_styles, styled

LIMIT = 1.12  # of both axes; the unit circle has radius 1


@styled
def operators(result: dict[str, Any]) -> Figure:
    """Eigenvalues of A_w in the complex unit disc, after the first sequence: a panel for each layer.

    Every head has a colour and a marker. On the dashed circle, the power filter halves a mode at γ = 1.

    Args:
        result: what `report.tables.operators.operators_of` returns, with at least one model.
    """
    models = [(model["model"], model["layers"]) for model in result["models"]]
    figure, panels = layer_grid(models, 2.4, layout="compressed")
    for axes, _, layer in panels:
        _disc(axes, layer)
    layers = [layer for _, own in models for layer in own]
    heads = max(len(layer["heads"]) for layer in layers)
    handles = model_handles([f"head {h}" for h in range(heads)], linestyle="none")
    if powers := sorted({layer["power"] for layer in layers} - {0}):
        label = f"the filter keeps half (K = {', '.join(map(str, powers))})"
        handles.append(Line2D([], [], **REFERENCE_LINE, label=label))
    legend(figure, handles)
    return figure


def _disc(axes: Axes, layer: dict[str, Any]) -> None:
    axes.add_patch(Circle((0, 0), 1, fill=False, edgecolor=INK, linewidth=0.8))
    if layer["power"]:
        axes.add_patch(Circle((0, 0), 0.5 ** (1 / layer["power"]), fill=False, **REFERENCE_LINE))
    styles = model_styles([str(h) for h in range(len(layer["heads"]))]).values()
    dots: dict[str, Any] = {"linestyle": "none", "markersize": 3.5, "markeredgewidth": 0, "alpha": 0.75}
    for head, style in zip(layer["heads"], styles, strict=True):
        points = np.array(head["eigenvalues"], dtype=float)
        axes.plot(points[:, 0], points[:, 1], color=style.color, marker=style.marker, **dots)
    axes.set(xlim=(-LIMIT, LIMIT), ylim=(-LIMIT, LIMIT), aspect="equal", xlabel="Re λ", ylabel="Im λ")
    axes.set_xticks([-1, 0, 1])
    axes.set_yticks([-1, 0, 1])


@styled
def power_map(panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure:
    """One panel above the other with the share of answers that is recalled, in percent.

    Args:
        panels: title → row → column → fraction, with the same columns everywhere. A cell that a row lacks stays empty.
    """
    columns = list(dict.fromkeys(column for rows in panels.values() for row in rows.values() for column in row))
    heights = [len(rows) for rows in panels.values()]
    figure = Figure(figsize=(WIDTH, 0.22 * sum(heights) + 0.5 * len(heights)), layout="constrained")
    all_axes = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, (title, rows) in zip(all_axes, panels.items(), strict=True):
        cells = [[row.get(column, np.nan) for column in columns] for row in rows.values()]
        draw_heat_map(axes, np.array(cells, dtype=float), list(rows), columns)
        axes.set_title(title, loc="left")
    all_axes[-1].tick_params(axis="x", labelrotation=90 if max(map(len, columns)) > 3 else 0)
    return figure
