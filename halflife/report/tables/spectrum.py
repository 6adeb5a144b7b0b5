"""The tables of `halflife spectrum`, decays on a text, base spectra, heads and Koopman operators, and its files.

All functions take `ModelMeasurements.to_dict()` or a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halflife.analysis.decays import QUANTILES
from halflife.analysis.model_spectrum import training_position
from halflife.analysis.operators import PERSISTENT_DELTA
from halflife.files import DECAYS_JSON, write_with_table
from halflife.report.numbers import token_count
from halflife.report.table import GAP, Row, Table, grouped

Rows = list[tuple[str, ...]]
# Fields of a model in decays.json.
SAVED_FIELDS = ("model", "checkpoint", "channels", "train_length", "positions", "mixers", "layers")
COLUMNS = (
    "model", "layer", "state", "mean", *QUANTILES, "half_life", "slowest_half_life", "erased", "horizon", "position",
    "fastest", "slowest", "modes", "too_slow", "too_fast",
)  # fmt: skip
OPERATORS = ("layer", "head", "σ max", "|λ|", "lasts", "kept", "κ(G̃)", "left", "bias", "linear", "γ", "μ", "η")


def spectrum_tables(result: dict[str, Any], *, heads: bool = False) -> Iterator[Table]:
    """The tables: decays if a text was read, base spectra, and if asked for, one of the heads of each model."""
    if result["text"]:
        yield decay_table(result)
    yield base_table(result)
    if heads:
        yield from head_tables(result)


def layer_groups(model: dict[str, Any]) -> str:
    """Say which layers mix tokens how, if some have no decay or more than one mixer; otherwise an empty text."""
    mixers = model.get("mixers", [])
    if len(model["layers"]) == len(mixers) and not any("+" in kind for kind in mixers):
        return ""
    layers = {kind: [i for i, other in enumerate(mixers) if other == kind] for kind in dict.fromkeys(mixers)}
    return "; ".join(f"{kind} in {'layer' if len(at) == 1 else 'layers'} {_ranges(at)}" for kind, at in layers.items())


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as text, with runs of three or more shortened: "0–2, 5, 6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def decay_table(result: dict[str, Any]) -> Table:
    """The decays on the text, a row for each layer, two under GateRank."""
    headings = ("model", "layer", "median", "quartiles", "half-life", "slowest", "horizon")
    rows = [[_decay_cells(row) for row in table_rows(model)] for model in result["models"]]
    note = (
        f"text: {result['sequences']} × {result['length']:,} tokens. half-life: tokens, at the median decay.\n"
        "slowest: half-life of the slowest channel, from its mean log-decay.\n"
        "horizon: lag at which 1/e of a write is left (RMS), in the slowest head."
    )
    if any("slow" in layer for model in result["models"] for layer in model["layers"]):
        note += "\nGateRank: the horizon beside the fast state is that of both states."
        note += "\nThe slow state has λ = 1 at tokens that do not reset."
    return Table(headings, _labelled(result, rows), note, "decay λ")


def _decay_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['layer']} {row['state']}".strip(), f"{row['median']:.4f}", f"{row['q25']:.4f}–{row['q75']:.4f}",
        token_count(row["half_life"]), token_count(row["slowest_half_life"]),
        token_count(row["horizon"], row["longest_lag"]),
    )  # fmt: skip


def base_table(result: dict[str, Any]) -> Table:
    """The base spectra at T, a row for each layer, and how layers mix and taper below."""
    headings = ("model", "layer", "T", "N", "time-scales", "modes", "text", "slow", "fast")
    rows = [_spectrum_rows(model) for model in result["models"]]
    notes = [
        "time-scales: tokens to 1/e, of N channels at position T, at zero input.",
        "modes: effective number of distinct time-scales. text: the same on the text.",
        "slow, fast: wasted channels, with a time-scale beyond T, or below 1 token.",
    ]
    for model in result["models"]:
        if tapers := [layer["taper"] for layer in model["layers"] if "taper" in layer]:
            worst = max(tapers, key=lambda taper: taper["deviation"])
            notes.append(
                f"{model['model']}: taper up to {worst['deviation']:.3f} from the ideal one "
                f"(octaves uneven by ε = {worst['sharp_slack']:.2f})."
            )
    notes += [f"{model['model']}: {kinds}." for model in result["models"] if (kinds := layer_groups(model))]
    return Table(headings, _labelled(result, rows), "\n".join(notes), "base spectrum")


def _spectrum_rows(model: dict[str, Any]) -> Rows:
    position = training_position(model["positions"])
    known, rows = position > 1, []
    for layer in model["layers"]:
        base, text = layer["spectra"][str(position)], layer["spectra"].get("text")
        rows.append((
            str(layer["layer"]), f"{position:,}" if known else "–", str(len(base["timescales"])),
            _range(base["timescales"]), f"{base['modes']:.1f}", f"{text['modes']:.1f}" if text else "–",
            f"{base['too_slow']:.0%}" if known else "–", f"{base['too_fast']:.0%}",
        ))  # fmt: skip
    return rows


def head_tables(result: dict[str, Any]) -> Iterator[Table]:
    """The base time-scales at T of every head and, with a text, its decays. Slow states follow the fast ones."""
    headings = ("layer", "head", "time-scales", "median", "quartiles", "erased", "horizon")
    headings = headings if result["text"] else headings[:3]
    note = "erased: fraction of tokens that leave less than half of the memory, λ < 0.5." if result["text"] else ""
    for model in result["models"]:
        if model["layers"]:
            rows = [row for layer in model["layers"] for row in [*_head_rows(model, layer), GAP]]
            yield Table(headings, rows, note, f"heads of {model['model']}")


def _head_rows(model: dict[str, Any], layer: dict[str, Any]) -> Rows:
    scales = layer["spectra"][str(training_position(model["positions"]))]["timescales"]
    count = layer["num_heads"]
    size = len(scales) // count
    first = [(str(layer["layer"]), str(h), _range(scales[h * size : (h + 1) * size])) for h in range(count)]
    if "heads" not in layer:
        return first
    first = [(*row, *_head_cells(layer, head)) for row, head in zip(first, layer["heads"], strict=True)]
    slow = layer.get("slow", {}).get("heads", [])
    return first + [(f"{layer['layer']} slow", str(h), "–", *_head_cells(layer, head)) for h, head in enumerate(slow)]


def _head_cells(layer: dict[str, Any], head: dict[str, Any]) -> tuple[str, ...]:
    quartiles, horizon = f"{head['q25']:.4f}–{head['q75']:.4f}", token_count(head["horizon"], layer["longest_lag"])
    return f"{head['median']:.4f}", quartiles, f"{head['erased']:.1%}", horizon


def _labelled(result: dict[str, Any], rows: list[Rows]) -> list[Row]:
    names = [model["model"] for model in result["models"]]
    return grouped((name, own or [("", "no decay")]) for name, own in zip(names, rows, strict=True))


def _range(scales: list[float]) -> str:
    low, high = token_count(min(scales)), token_count(max(scales))
    return low if low == high else f"{low}–{high}"


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
        rows = grouped((str(layer["layer"]), [_of_head(layer, head) for head in layer["heads"]]) for layer in layers)
        note = "\n".join([*map(_sentence, layers), *([legend] if i == len(result["models"]) else [])])
        yield Table(OPERATORS, rows, note, f"Koopman operators of {model['model']}")


def _of_head(layer: dict[str, Any], head: dict[str, Any]) -> list[str]:
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
