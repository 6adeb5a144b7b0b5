"""The report page of `halflife spectrum`: decays by layer on a text, base spectra, and the spectrum explorer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from halflife.analysis.model_spectrum import training_position
from halflife.files import write_text
from halflife.report.figures.decays import decays
from halflife.report.figures.spectrum import modes
from halflife.report.numbers import token_count
from halflife.report.page.comparison import listed
from halflife.report.page.render import render
from halflife.report.page.spectrum import explorer_of_measurements
from halflife.report.table import GAP, Cell, Row, Table, pairs
from halflife.report.tables.spectrum import layer_groups, table_rows
from halflife.runs.folder import REPORT_HTML
from halflife.runs.versions import versions

# Column of `table_rows` → its heading in the table. The first ones need a text.
ON_TEXT = {
    "median": "median λ", "half_life": "half-life", "slowest_half_life": "slowest half-life", "horizon": "horizon"
}  # fmt: skip
BASE = {"fastest": "fastest", "slowest": "slowest", "modes": "modes", "too_slow": "too slow", "too_fast": "too fast"}
FRACTIONS = ("too_slow", "too_fast")


def write_spectrum_page(result: dict[str, Any], folder: Path, command: str, findings: Sequence[str] = ()) -> Path:
    """Write `report.html` of `ModelMeasurements.to_dict()` into a folder, and return its path.

    The `findings` of `halflife diagnose` take the place of the page's own.
    """
    page = spectrum_page(result, command)
    if findings:
        page |= {"findings": findings, "kind": "Measured by halflife diagnose"}
    return write_text(folder / REPORT_HTML, render(page))


def spectrum_page(result: dict[str, Any], command: str) -> dict[str, Any]:
    """The variables of the page's template."""
    models = [model for model in result["models"] if model["layers"]]
    read = {"text": result["text"], "tokenizer": result["tokenizer"] or "of each model", "length": result["length"],
            "sequences": result["sequences"]}  # fmt: skip
    folders = {f"{model['model']}: folder": model["checkpoint"] for model in models}
    return {
        "title": f"Decay spectrum of {listed([model['model'] for model in models])}",
        "kind": "Measured by halflife spectrum", "finished": True,
        "findings": [finding(model) for model in models],
        "table": _table(models, bool(result["text"])), "models": [model["model"] for model in result["models"]],
        "figures": [*([decays(result)] if result["text"] else []), modes(result)],
        "spectra": explorer_of_measurements(models, result["length"]),
        "settings": pairs("Settings", (read if result["text"] else {}) | folders),
        "versions": pairs("Versions", versions()), "commands": {"Reproduce": command},
    }  # fmt: skip


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
        ["layer", *columns.values()], [row for model in models for row in [*_rows(model, columns), GAP]],
        "Each layer with a decay. Half-lives, horizons and time-scales are in tokens. The spectrum at zero "
        "input has the time-scales of the fastest and the slowest channel, the effective number of distinct ones, and "
        "the fractions that are slower than the training length or faster than a token.",
        spans=[*spans, ("spectrum at zero input", len(BASE))],
    )  # fmt: skip


def _rows(model: dict[str, Any], columns: Iterable[str]) -> list[Row]:
    return [
        [Cell(f"{model['model']}, layer {row['layer']}", note=row.get("state", "")), *(_cell(row, k) for k in columns)]
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
