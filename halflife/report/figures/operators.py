"""Figures of spectral Koopman attention (SKA): its operators after a text, and what each power of them recalls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from halflife.report.figures.data import Axis, FigureData, HeatMap, Key, Panel, Series, layer_rows
from halflife.report.style import INK, REFERENCE, ModelStyle, model_styles

AXIS_LIMIT = 1.12  # of both axes; the unit circle has radius 1
TICKS = {-1.0: "−1", 0.0: "0", 1.0: "1"}
ANGLES = np.linspace(0, 2 * math.pi, 100)


def operators(result: dict[str, Any]) -> FigureData:
    """Eigenvalues of A_w in the complex unit disc, after the first sequence: a panel for each layer.

    Every head has a colour and a marker. On the dashed circle, the power filter halves a mode at γ = 1. `result` is
    that of `report.tables.spectrum.operators_of`, with at least one model.
    """
    models = {model["model"]: model["layers"] for model in result["models"]}
    layers = [layer for own in models.values() for layer in own]
    styles = model_styles([f"head {h}" for h in range(max(len(layer["heads"]) for layer in layers))])
    x, y = (Axis(label, ticks=TICKS, limits=(-AXIS_LIMIT, AXIS_LIMIT)) for label in ("Re λ", "Im λ"))

    def panel(title: str, _: str, layer: Mapping[str, Any]) -> Panel:
        series = [_circle(1, ModelStyle(INK, "", "-"))]
        if layer["power"]:
            series.append(_circle(0.5 ** (1 / layer["power"]), REFERENCE))
        for head, (name, style) in zip(layer["heads"], styles.items(), strict=False):
            points = np.array(head["eigenvalues"], dtype=float)
            series.append(Series(name, name, style._replace(linestyle="none"), points[:, 0], points[:, 1]))
        return Panel(title, x, y, series, equal=True)

    rows = {**layer_rows(models, panel), "size": (2.4, 2.55)}
    powers = sorted({layer["power"] for layer in layers} - {0})
    keys = {f"the filter keeps half (K = {', '.join(map(str, powers))})": Key(REFERENCE, "level")} if powers else {}
    return FigureData("koopman", "Koopman operators", keys=keys, **rows)


def _circle(radius: float, style: ModelStyle) -> Series:
    return Series(f"|λ| = {radius:.3g}", "", style, radius * np.cos(ANGLES), radius * np.sin(ANGLES), "thin")


def power_map(panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> FigureData:
    """Panels, title → row → column → share of answers recalled, one above the other. Missing cells stay empty."""
    columns = list(dict.fromkeys(column for rows in panels.values() for row in rows.values() for column in row))
    maps = [
        HeatMap(
            title, Axis(""), Axis(""), columns, list(rows),
            [[row.get(column, math.nan) for column in columns] for row in rows.values()],
        )
        for title, rows in panels.items()
    ]  # fmt: skip
    return FigureData("powers", "Koopman powers", maps, columns=1)
