"""The figure of the operators that spectral Koopman attention holds after a text."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle

from halflife.report.figures.comparison import MAX_LAYERS
from halflife.report.style import INK, REFERENCE_LINE, WIDTH, legend, model_styles, plain, styled

EDGE = 1.12  # of the panels, around the unit circle
DOTS: dict[str, Any] = {"linestyle": "none", "markersize": 3.5, "markeredgewidth": 0, "alpha": 0.75}


@styled
def operators(result: dict[str, Any]) -> Figure:
    """Eigenvalues of A_w in the complex unit disc, after the first sequence: a panel a layer, a row a model.

    A colour and a marker a head; the dashed circle is where the filter keeps half of a mode at γ = 1. At most
    `MAX_LAYERS` layers are shown, spread evenly.

    Args:
        result: what `koopman_report.survey` gives, with one model or more.
    """
    rows = [[(model["model"], layer) for layer in _shown(model["layers"])] for model in result["models"]]
    width = max(map(len, rows))
    if width == 1:  # models side by side rather than a tall column
        flat = [row[0] for row in rows]
        width = min(3, len(flat))
        rows = [flat[i : i + width] for i in range(0, len(flat), width)]
    size = max(2.2, min(3.2, WIDTH / width))
    figure = Figure(figsize=(max(WIDTH, size * width), (size + 0.25) * len(rows)), layout="compressed")
    grid = figure.subplots(len(rows), width, squeeze=False)
    for line, row in zip(grid.tolist(), rows, strict=True):
        for axes, (name, layer) in zip(line, row, strict=False):
            _disc(axes, f"{plain(name)}, layer {layer['layer']}", layer)
        for axes in line[len(row) :]:
            axes.set_axis_off()
    legend(figure, _handles(result))
    return figure


def _shown(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(layers) <= MAX_LAYERS:
        return layers
    return [layers[i] for i in np.linspace(0, len(layers) - 1, MAX_LAYERS).round().astype(int)]


def _disc(axes: Axes, title: str, layer: dict[str, Any]) -> None:
    axes.add_patch(Circle((0, 0), 1, fill=False, edgecolor=INK, linewidth=0.8))
    if layer["power"]:
        axes.add_patch(Circle((0, 0), 0.5 ** (1 / layer["power"]), fill=False, **REFERENCE_LINE))
    for head, look in zip(layer["heads"], _looks(len(layer["heads"])), strict=True):
        points = np.array(head["eigenvalues"], dtype=float)
        axes.plot(points[:, 0], points[:, 1], color=look.color, marker=look.marker, **DOTS)
    axes.set(title=title, xlim=(-EDGE, EDGE), ylim=(-EDGE, EDGE), aspect="equal", xlabel="Re λ", ylabel="Im λ")
    axes.set_xticks([-1, 0, 1])
    axes.set_yticks([-1, 0, 1])


def _looks(heads: int) -> list[Any]:
    return list(model_styles([str(h) for h in range(heads)]).values())


def _handles(result: dict[str, Any]) -> list[Line2D]:
    heads = max(len(layer["heads"]) for model in result["models"] for layer in model["layers"])
    handles = [
        Line2D([], [], color=look.color, marker=look.marker, linestyle="none", label=f"head {h}")
        for h, look in enumerate(_looks(heads))
    ]
    powers = {layer["power"] for model in result["models"] for layer in model["layers"]} - {0}
    if powers:
        which = ", ".join(str(power) for power in sorted(powers))
        handles.append(Line2D([], [], **REFERENCE_LINE, label=f"half is kept (K = {which})"))
    return handles
