"""Join comparisons into the files of docs/results/overview.md.

    python docs/overview.py                  overview.json and the pictures again
    python docs/overview.py FOLDER …         first add the models of finished comparisons, on recall or on text
    python docs/overview.py --speeds         measure speeds again, on an idle machine

Models stand in the order of the experiment, each before its hybrids and controls. If there are new models, speeds are
measured again anyway.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from join import RESULTS, add, read_table, scores  # these two beside this file
from overview_picture import CHOSEN, overview

from halflife.evaluation.memory import format_bytes, layer_states, model_state_size
from halflife.evaluation.throughput import Decoder, device_name, interleaved, train_step
from halflife.files import CONFIG_JSON, read_json, write_json
from halflife.lab.experiments.evidence.overview import Overview
from halflife.models import LanguageModel, ModelConfig
from halflife.report.figures.matplotlib_renderer import save
from halflife.report.intervals import has_learned, with_interval
from halflife.report.markdown import Rows, models
from halflife.report.table import Table
from halflife.runs.sweep import Cell

RECALL, TEXT, LENGTHS = (RESULTS / name for name in ("overview.csv", "overview_text.csv", "overview_text_lengths.csv"))
DATA, SPEEDS = RESULTS / "overview.json", "--speeds"
TOKENS, DECODED = 4096, 32  # of a timed training step, and of timed decoding
# Column → its test; "trained" has the most pairs of the training, "most" those of the largest test, and "all" the mean.
COLUMNS = {
    "persistence": ("mqar", "trained"), "capacity": ("mqar", "most"), "decoys": ("niah:hard", "all"),
    "tracking": ("s5:s3", "all"),
}  # fmt: skip
NOT_MEASURED: dict[str, Any] = {"lengths": [], "values": {}}  # a column without measurements
SPEED_COLUMNS = {"training": "tokens/s", "decoding": "tokens/s"}  # columns with one number for each model


def place(model: str) -> tuple[int, str]:
    """A key that sorts models."""
    return Overview.models.index(model.split("@")[0].split("+")[0]), model


def add_folder(folder: Path) -> None:
    """Add a comparison to the files of recall, or to those of text."""
    if read_json(folder / CONFIG_JSON)["experiment"] == "overview":
        add(RECALL, read_table(folder / "results.csv"), place)
    else:
        add(TEXT, read_table(folder / "results.csv"), place)
        add(LENGTHS, read_table(folder / "lengths.csv"), place)


def recall(rows: Rows, train_length: int, pairs: int) -> dict[str, dict[str, Any]]:
    """Column → "lengths", the shortest from T on and the longest, and "values", model → accuracies by seed at both.

    "learned" are the models that have learned the task of the column at T, with as many pairs as in training.
    """
    found = {}
    for column, (test, kind) in COLUMNS.items():
        own = [row for row in rows if row["test"] == test and row["selected"] and row["length"] >= train_length]
        if own:
            trained = own if kind == "all" else _with_most_pairs(own, pairs)
            shown = _with_most_pairs(own) if kind == "most" else trained
            (shortest, _), lengths = _ends(trained), _ends(shown)
            found[column] = {
                "lengths": lengths,
                "values": {model: [_by_seed(shown, model, length) for length in lengths] for model in models(rows)},
                "learned": [model for model in models(trained) if has_learned(_by_seed(trained, model, shortest))],
            }
    return found


def _with_most_pairs(rows: Rows, limit: float = math.inf) -> list[Mapping[str, Any]]:
    """The tests with the most pairs up to a limit; if all have more, those with the fewest."""
    counts = {_pairs(row) for row in rows}
    chosen = max((n for n in counts if n <= limit), default=min(counts))
    return [row for row in rows if _pairs(row) == chosen]


def _ends(rows: Rows) -> list[int]:
    """The shortest and the longest length."""
    lengths = [row["length"] for row in rows]
    return [min(lengths), max(lengths)]


def _pairs(row: Mapping[str, Any]) -> float:
    """The pairs of a test; 0 of a test without pairs, whose row has NaN."""
    return 0 if math.isnan(row["num_pairs"]) else row["num_pairs"]


def _by_seed(rows: Rows, model: str, length: int) -> list[float]:
    cells: dict[int, list[float]] = {}
    for row in rows:
        if row["model"] == model and row["length"] == length:
            cells.setdefault(row["seed"], []).append(row["accuracy"])
    return [fmean(values) for values in cells.values()]


def speeds(configs: Mapping[str, ModelConfig], length: int, context: int) -> dict[str, dict[str, float]]:
    """Measure tokens a second of a training step at a length, and of decoding one sequence after a context.

    Returns:
        "training" and "decoding", model → tokens/s. The models take turns.
    """
    built = {name: LanguageModel(config) for name, config in configs.items()}
    rows, size = max(1, TOKENS // length), min(config.vocab_size for config in configs.values())
    ids = torch.randint(size, (rows, length))
    steps = {name: partial(train_step(model), ids) for name, model in built.items()}
    for step in steps.values():
        step()  # the first call does extra work
    training = interleaved(steps)
    decoders = {name: Decoder(model).read(torch.randint(size, (1, context))) for name, model in built.items()}
    for decode in decoders.values():
        decode()
    decoding = interleaved(decoders, rounds=DECODED)
    return {
        "training": {name: rows * length / seconds for name, seconds in training.items()},
        "decoding": {name: 1 / seconds for name, seconds in decoding.items()},
    }


def state_bytes(configs: Mapping[str, ModelConfig], lengths: Sequence[int]) -> dict[str, Any]:
    """The column of bytes of state of one sequence at some lengths, float32."""
    sizes = {name: model_state_size(layer_states(config, "float32")) for name, config in configs.items()}
    return {"lengths": list(lengths), "values": {name: [[size.at(n)] for n in lengths] for name, size in sizes.items()}}


def text() -> dict[str, Any]:
    """The column of text: bits a byte at T and in the longest rows, of models of bytes."""
    losses = [row for row in read_table(TEXT) if row["test"] == "text" and row["selected"] == "True"]
    tested = [row for row in read_table(LENGTHS) if row["selected"] == "True"]
    longest = max(int(row["length"]) for row in tested)
    tested = [row for row in tested if int(row["length"]) == longest]
    values = {
        model: [
            [float(row["loss"]) / math.log(2) for row in losses if row["model"] == model],
            [math.log2(float(row["perplexity"])) for row in tested if row["model"] == model],
        ]
        for model in models(losses)
    }
    return {"lengths": [int(losses[0]["length"]), longest], "values": values}


def joined(again: bool = False) -> dict[str, Any]:
    """All columns, from the files. Speeds of the same models are kept, but for `again`."""
    rows = scores(RECALL)
    experiment = Overview()
    settings = experiment.settings_at("small", {})
    configs = {name: experiment.configure(settings, Cell(name, 1e-3, 0)).model for name in models(rows)}
    columns = recall(rows, settings.train_length, max(settings.pairs))
    longest = max(column["lengths"][1] for column in columns.values())
    columns["text"] = text()
    columns["state"] = state_bytes(configs, (settings.train_length, longest))
    old = read_json(DATA)
    if again or set(old["models"]) != set(configs):
        torch.set_num_threads(1)
        old |= {"speeds": speeds(configs, settings.train_length, longest), "device": device_name("cpu")}
    return {
        "models": list(configs), "train_length": settings.train_length, "columns": columns, "speeds": old["speeds"],
        "parameters": {row["model"]: int(row["parameters"]) for row in rows}, "device": old["device"],
    }  # fmt: skip


def table(data: Mapping[str, Any]) -> str:
    """The table of what `joined` returned, in Markdown: one row a model."""
    fast = data["speeds"]
    columns = {name: data["columns"].get(name, NOT_MEASURED) for name in (*COLUMNS, "text", *data["columns"])}
    lengths = {name: " → ".join(f"{n:,}" for n in column["lengths"]) for name, column in columns.items()}
    heading = [
        "model", "parameters", *(f"{name} {between}".rstrip() for name, between in lengths.items()),
        *(f"{name}, {unit}" for name, unit in SPEED_COLUMNS.items()),
    ]  # fmt: skip
    lines = []
    for model in data["models"]:
        cells = [_cell(name, column, model) for name, column in columns.items()]
        numbers = [f"{fast[name][model]:,.0f}" for name in SPEED_COLUMNS]
        lines.append([model, f"{data['parameters'][model]:,}", *cells, *numbers])
    return Table(heading, lines).markdown()


def _cell(name: str, column: Mapping[str, Any], model: str) -> str:
    """Both ends of a column: "99.8 → 41.0", with the interval of the far end from three seeds on."""
    ends = column["values"].get(model, [])
    if not all(ends) or not ends:
        return "–"
    if model not in column.get("learned", column["values"]):
        return "not learned"
    if name == "state":
        return " → ".join(dict.fromkeys(format_bytes(end[0]) for end in ends))
    scale, digits = (1, 3) if name == "text" else (100, 1)
    near, far = ([scale * value for value in end] for end in ends)
    return f"{fmean(near):.{digits}f} → {with_interval(far, digits)}"


def main(arguments: Sequence[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    for folder in arguments:
        if folder != SPEEDS:
            add_folder(Path(folder))
    data = joined(SPEEDS in arguments)
    write_json(DATA, data)
    save(overview(data, CHOSEN), RESULTS, "overview", ("png",))
    save(overview(data), RESULTS, "overview_all", ("png",))


if __name__ == "__main__":
    main(sys.argv[1:])
