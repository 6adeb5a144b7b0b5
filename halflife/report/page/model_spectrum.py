"""The report page of `halflife spectrum`: decays by layer on a text, base spectra, and the spectrum explorer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from halflife.analysis.model_spectrum import training_position
from halflife.analysis.tables import table_rows
from halflife.files import write_text
from halflife.report.figures.data import Axis, FigureData, Panel, Series
from halflife.report.numbers import token_count
from halflife.report.page.render import render
from halflife.report.page.spectrum import explorer_of_measurements, opened
from halflife.report.style import ModelStyle, model_styles
from halflife.report.table import GAP, Cell, Row, Table, pairs
from halflife.report.tables.spectrum import layer_groups
from halflife.runs.folder import REPORT_HTML
from halflife.versions import versions

# Column of `table_rows` → its heading in the table. The first ones need a text.
ON_TEXT = {
    "median": "median λ", "half_life": "half-life", "slowest_half_life": "slowest half-life", "horizon": "horizon"
}  # fmt: skip
BASE = {"fastest": "fastest", "slowest": "slowest", "modes": "modes", "too_slow": "too slow", "too_fast": "too fast"}
FRACTIONS = ("too_slow", "too_fast")
LAYER = Axis("layer", phrase="layer {}")


def write_spectrum_page(result: dict[str, Any], folder: Path, command: str) -> Path:
    """Write `report.html` into a folder and return its path.

    Args:
        result: `ModelMeasurements.to_dict()`.
        folder: where to write.
        command: the command line that measured the models.
    """
    path = folder / REPORT_HTML
    write_text(path, render(spectrum_page(result, command)))
    return path


def spectrum_page(result: dict[str, Any], command: str) -> dict[str, Any]:
    """The variables of the page's template."""
    models = [model for model in result["models"] if model["layers"]]
    spectra = explorer_of_measurements(models, result["length"])
    read = {"text": result["text"], "tokenizer": result["tokenizer"] or "of each model", "length": result["length"],
            "sequences": result["sequences"]}  # fmt: skip
    return {
        "title": f"Decay spectrum of {', '.join(model['model'] for model in models)}",
        "kind": "Measured by halflife spectrum",
        "finished": True,
        "findings": [finding(model) for model in models],
        "table": _table(models, bool(result["text"])),
        "numbers": None,
        "figures": _figures(models, bool(result["text"])),
        "spectra": spectra,
        "opened": opened(spectra),
        "without": [model["model"] for model in result["models"] if not model["layers"]],
        "settings": pairs(
            "Settings",
            {**(read if result["text"] else {}), **{f"{m['model']}: folder": m["checkpoint"] for m in models}},
        ),
        "versions": pairs("Versions", versions()),
        "commands": {"Reproduce": command},
    }


def finding(model: dict[str, Any]) -> str:
    """Say what the layers are, and how far the layer with the longest memory reaches."""
    groups = layer_groups(model) or f"{len(model['layers'])} layers with a decay"
    position = training_position(model["positions"])
    slowest = max(model["layers"], key=lambda layer: max(layer["spectra"][str(position)]["timescales"]))
    scale = token_count(max(slowest["spectra"][str(position)]["timescales"]))
    text = (
        f"{model['model']} has {groups}. The slowest channel, in layer {slowest['layer']}, has a time-scale of {scale} "
        "tokens at zero input."
    )
    if "horizon" not in slowest:
        return text
    furthest = max(model["layers"], key=lambda layer: layer["horizon"])
    reach = token_count(furthest["horizon"], furthest["longest_lag"])
    return f"{text} On the text, layer {furthest['layer']} has the longest horizon, {reach} tokens."


def _table(models: Sequence[dict[str, Any]], with_text: bool) -> Table:
    columns = {**(ON_TEXT if with_text else {}), **BASE}
    spans = [("on the text", len(ON_TEXT))] if with_text else []
    return Table(
        ["layer", *columns.values()],
        [row for model in models for row in [*_rows(model, columns), GAP]],
        "Each layer with a decay. Half-lives, horizons and time-scales are in tokens. The spectrum at zero "
        "input has the time-scales of the fastest and the slowest channel, the effective number of distinct ones, and "
        "the fractions that are slower than the training length or faster than a token.",
        spans=[*spans, ("spectrum at zero input", len(BASE))],
    )


def _rows(model: dict[str, Any], columns: Iterable[str]) -> list[Row]:
    return [
        [
            Cell(f"{model['model']}, layer {row['layer']}", note=row.get("state", "")),
            *(_cell(row, key) for key in columns),
        ]
        for row in table_rows(model)
    ]


def _cell(row: dict[str, Any], key: str) -> Cell:
    value = row.get(key)
    if value is None:
        return Cell("–")
    if key in FRACTIONS:
        return Cell(f"{value:.0%}", value)
    if key in ("median", "modes"):
        return Cell(f"{value:.4f}" if key == "median" else f"{value:.1f}", value)
    return Cell(token_count(value, row["longest_lag"] if key == "horizon" else None), min(value, 1e300))


def _figures(models: Sequence[dict[str, Any]], with_text: bool) -> list[FigureData]:
    base = FigureData(
        "modes", "Distinct time-scales and wasted channels",
        "Line chart of distinct time-scales and of wasted channels by layer.",
        "From the spectrum at zero input. A channel is too slow if its time-scale is beyond the training length, or "
        "the length of the text if that is unknown. It is too fast if its time-scale is below one token.",
        [
            _panel(models, "Distinct time-scales", Axis("effective modes", log=True), lambda row: row.get("modes")),
            _panel(models, "Too slow", Axis("fraction of channels", fraction=True), lambda row: row.get("too_slow")),
            _panel(models, "Too fast", Axis("fraction of channels", fraction=True), lambda row: row.get("too_fast")),
        ],
    )  # fmt: skip
    if not with_text:
        return [base]
    tokens = Axis("tokens", log=True, phrase="{} tokens")
    on_text = FigureData(
        "decays", "Decays on the text", "Line chart of median decays, half-lives and horizons by layer.",
        "λ is the fraction of a memory that a token leaves. The horizon is the lag at which 1/e of a write is left, in "
        "the slowest head. A horizon beyond the longest measured lag has no point.",
        [
            _panel(models, "Median decay λ", Axis("λ"), lambda row: row["median"]),
            _panel(models, "Half-life at the median", tokens, lambda row: row["half_life"]),
            _panel(models, "Horizon", tokens, lambda row: row["horizon"]),
        ],
    )  # fmt: skip
    return [on_text, base]


def _panel(
    models: Sequence[dict[str, Any]], title: str, y: Axis, value: Callable[[dict[str, Any]], float | None]
) -> Panel:
    styles = model_styles([model["model"] for model in models])
    return Panel(title, LAYER, y, [_series(model, styles[model["model"]], value, y.log) for model in models])


def _series(
    model: dict[str, Any], style: ModelStyle, value: Callable[[dict[str, Any]], float | None], log: bool
) -> Series:
    """The curve of one model over its layers. A logarithmic axis has no point for zero."""
    points = [(row["layer"], value(row)) for row in table_rows(model) if row.get("state") != "slow"]
    drawn = [(x, y) for x, y in points if y is not None and math.isfinite(y) and (y > 0 or not log)]
    return Series(model["model"], model["model"], style, [x for x, _ in drawn], [y for _, y in drawn])
