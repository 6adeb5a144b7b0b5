"""The Koopman operators of several trained models on one text: their table and their files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halflife.analysis.operators import PERSISTENT_DELTA
from halflife.files import KOOPMAN_JSON, write_json
from halflife.report.table import Table, grouped

HEADINGS = ("layer", "head", "σ max", "|λ|", "lasts", "kept", "κ(G̃)", "left", "bias", "linear", "γ", "μ", "η")


def operators_of(measured: dict[str, Any]) -> dict[str, Any]:
    """The models of `ModelMeasurements.to_dict()` that have an SKA layer, as `{…, "delta", "models": [{"model",
    "checkpoint", "layers"}]}`.

    "layers" are those of `measure_operators`, and "delta" is the limit of persistent modes, `koopman.modes`.
    """
    models = [
        {"model": model["model"], "checkpoint": model["checkpoint"], "layers": model["operators"]}
        for model in measured["models"] if model["operators"]
    ]  # fmt: skip
    return {**measured, "delta": PERSISTENT_DELTA, "models": models}


def write_data(result: dict[str, Any], folder: Path) -> Path:
    """Write the result of `operators_of` as `koopman.json`, in which null stands for what is not finite."""
    file = folder / KOOPMAN_JSON
    write_json(file, result)
    return file


def operator_tables(result: dict[str, Any]) -> Iterator[Table]:
    """A table for each model of the result of `operators_of` that fits 80 columns, with a row for each head."""
    legend = (
        f"text: {result['sequences']} × {result['length']:,} tokens. Numbers are medians over sequences.\n"
        f"|λ|: median and 95 % quantile of the modes. lasts: modes with |1 − γλ| ≤ {result['delta']:g}.\n"
        "kept: mean of |γλ|². left: fraction of the values' energy that ridge regression\n"
        "leaves. bias: what the filter adds. linear: distance from linear attention."
    )
    for i, model in enumerate(result["models"], 1):
        layers = model["layers"]
        rows = grouped((str(layer["layer"]), [_cells(layer, head) for head in layer["heads"]]) for layer in layers)
        note = "\n".join([*map(_sentence, layers), *([legend] if i == len(result["models"]) else [])])
        yield Table(HEADINGS, rows, note, f"Koopman operators of {model['model']}")


def _cells(layer: dict[str, Any], head: dict[str, Any]) -> list[str]:
    return [
        str(head["head"]), f"{head['sigma_max']:.2f}", f"{head['median']:.2f}–{head['q95']:.2f}",
        f"{head['persistent']}/{layer['rank']}", f"{head['kept_2']:.2f}", f"{head['condition']:.0e}",
        f"{head['unexplained']:.2f}", f"{head['filter_bias']:.2g}", f"{head['linear_distance']:.2f}",
        *(f"{head[name]:.2f}" for name in ("gamma", "mix", "eta")),
    ]  # fmt: skip


def _sentence(layer: dict[str, Any]) -> str:
    retries = f"\n  {layer['retries']:,} factorisations repeated with a larger ridge" if layer["retries"] else ""
    return (
        f"layer {layer['layer']}: {layer['tokens']:,} tokens in {layer['state_size']:,} numbers per head "
        f"(a cache is larger from {math.floor(layer['crossover']) + 1:,} on){retries}"
    )
