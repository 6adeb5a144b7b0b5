"""The time-scales of a comparison's models before and after training."""

from __future__ import annotations

from typing import Any

import numpy as np

from halflife.report.figures.data import FASTEST, SLOWEST, FigureData, Key, Panel, Reference, Series, layer_rows
from halflife.report.figures.matplotlib_renderer import MAX_LARGE_DOTS
from halflife.report.figures.spectrum import TIMESCALE, channel_axis
from halflife.report.style import DOTS, REFERENCE, ModelStyle, model_styles
from halflife.report.tables.csv_files import nearest_to
from halflife.runs.records import Comparison

WHERE = {"o": ", position 1", "^": ", position T"}  # the marker of a position
POSITION_SHIFT = 0.14  # channels, between the dots of two positions


def spectrum(run: Comparison) -> FigureData:
    """Time-scales (tokens, log) of the channels in the model's order, initial and trained, by layer.

    The first seed at the selected learning rate is shown. Circles are time-scales at the first position. Triangles are
    those at position T, if they differ.
    """
    spectra = {}
    for model in run.models:
        found = [one.spectrum for one in run.trainings_of(model) if one.spectrum.get("layers")]
        if found:
            spectra[model] = found[0]
    styles, moved = model_styles(run.models), []

    def panel(title: str, model: str, layer: dict[str, Any]) -> Panel:
        initial, trained = (_at_ends(layer[when], run.train_length) for when in ("init", "trained"))
        moves = not all(np.allclose(first, last, equal_nan=True) for first, last in (initial, trained))
        moved.append(moves)
        numbers, series = range(1, len(initial[0]) + 1), []
        for end, marker in enumerate("o^"[: 1 + moves]):
            shift = POSITION_SHIFT * (2 * end - 1) if moves else 0.0
            style = ModelStyle(styles[model].color, marker, "none")
            bars = None if len(numbers) > MAX_LARGE_DOTS else (initial[end], trained[end])
            series += [
                Series("initial", "", style, numbers, initial[end], "hollow", shift=shift),
                Series("trained", "", style, numbers, trained[end], bars=bars, shift=shift),
            ]
        lines = [Reference("", y=run.train_length)] if run.train_length else []
        x_axis = channel_axis(spectra[model].get("channels", "channels"), len(numbers))
        return Panel(title, x_axis, TIMESCALE, series, lines)

    rows = layer_rows({model: found["layers"] for model, found in spectra.items()}, panel)
    keys = {}
    for marker, where in WHERE.items() if any(moved) else [("o", "")]:
        style = DOTS._replace(marker=marker)
        keys |= {f"initial{where}": Key(style, "hollow"), f"trained{where}": Key(style)}
    if run.train_length:
        keys[f"training length T = {run.train_length:,}"] = Key(REFERENCE, "level")
    return FigureData(
        "spectrum", "Time-scales", keys=keys if moved else {},
        missing="no spectrum: no model with a decay has finished", **rows,
    )  # fmt: skip


def _at_ends(saved: dict[str, Any], train_length: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Time-scales `[N]` at the first saved position, and at the one nearest to the training length."""
    scales = {float(position): values for position, values in saved["timescales"].items()}
    ends = min(scales), nearest_to(train_length, scales)
    first, last = (np.ravel(np.array(scales[at], dtype=float)) for at in ends)
    return first.clip(FASTEST, SLOWEST), last.clip(FASTEST, SLOWEST)
