"""The decays of models as files, `decays.json` and `decays.csv`, and numbers that JSON cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halflife.analysis.decays import QUANTILES
from halflife.analysis.model_spectrum import training_position
from halflife.files import DECAYS_JSON, write_with_table

# Fields of a model in decays.json.
SAVED_FIELDS = ("model", "checkpoint", "channels", "train_length", "positions", "mixers", "layers")
COLUMNS = (
    "model", "layer", "state", "mean", *QUANTILES, "half_life", "slowest_half_life", "erased", "horizon", "position",
    "fastest", "slowest", "modes", "too_slow", "too_fast",
)  # fmt: skip


def write_tables(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `decays.json` and `decays.csv`, which has a row for each layer and state with the base spectrum at T.

    `result` is `ModelMeasurements.to_dict()`. Operators are left out. Numbers that are not finite become null.
    """
    models = [{key: model[key] for key in SAVED_FIELDS if key in model} for model in result["models"]]
    rows = ({**row, "model": model["model"]} for model in models for row in table_rows(model))
    cells = ([row.get(name) for name in COLUMNS] for row in rows)
    return write_with_table({**result, "models": models}, COLUMNS, cells, folder / DECAYS_JSON)


def table_rows(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each layer of one model in one dict, and under GateRank those of its slow state as well."""
    position = training_position(model["positions"])
    for layer in model["layers"]:
        spectrum = layer["spectra"][str(position)]
        ends = {"position": position, "fastest": min(spectrum["timescales"]), "slowest": max(spectrum["timescales"])}
        yield {**layer, "state": "fast" if "slow" in layer else "", **spectrum, **ends}
        if "slow" in layer:
            yield {"layer": layer["layer"], "state": "slow", **layer["slow"]}
