"""The page that joins the overview's recall with text, speed and bytes of state: `overview.md`, data and picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from halflife.evaluation.memory import format_bytes, layer_states, model_state_size
from halflife.evaluation.throughput import Decoder, device_name, interleaved, train_step
from halflife.files import CONFIG_JSON, RESULT_JSON, read_json, write_json, write_text
from halflife.models import LanguageModel, ModelConfig
from halflife.report.intervals import LEARNED, has_learned, with_interval
from halflife.report.markdown import Rows, models
from halflife.report.table import Table
from halflife.runs.folder import FIGURES, read

PAGE, DATA, TEXT = "overview.md", "overview.json", "text"
TOKENS, DECODED = 4096, 32  # of a timed training step, and of timed decoding
# Column → its test; "trained" has the most pairs of the training, "most" those of the largest test, and "all" the mean.
RECALL = {
    "persistence": ("mqar", "trained"), "capacity": ("mqar", "most"), "decoys": ("niah:hard", "all"),
    "tracking": ("s5:s3", "all"),
}  # fmt: skip
NOT_MEASURED: dict[str, Any] = {"lengths": [], "values": {}}  # a column without measurements
SPEED_COLUMNS = {"training": "tokens/s", "decoding": "tokens/s"}  # columns with one number for each model


def recall(rows: Rows, train_length: int, pairs: int) -> dict[str, dict[str, Any]]:
    """Column → "lengths", the shortest from T on and the longest, and "values", model → accuracies by seed at both.

    "learned" are the models that have learned the task of the column at T, with as many pairs as in training.
    """
    found = {}
    for column, (test, kind) in RECALL.items():
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


def text_bits(folder: Path) -> dict[str, Any]:
    """The column of a comparison on text: bits a byte of its models in rows of T, and in the longest rows read."""
    run, values, lengths = read(folder), dict[str, list[list[float]]](), [0, 0]
    for model in filter(run.seeds, run.models):  # before a rate is selected, all rates would count as seeds
        tested = [read_json(one.path / RESULT_JSON) for one in run.trainings_of(model) if one.lengths]
        if tested:
            values[model] = [[one["bits_per_byte"] for one in tested], [_bits_in_longest(one) for one in tested]]
            lengths = [tested[0]["tests"][0]["length"], tested[0]["lengths"][-1]["length"]]
    return {"lengths": lengths, "values": values}


def _bits_in_longest(result: Mapping[str, Any]) -> float:
    nats = math.log(result["lengths"][-1]["perplexity"])
    return result["bits_per_byte"] * nats / result["tests"][0]["loss"]  # the quotient converts nats a token


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


def collect(
    folder: Path, rows: Rows, configs: Mapping[str, ModelConfig], train_length: int, pairs: int
) -> dict[str, Any]:
    """All columns of the page. Speeds are measured once for the same models, and stay in `overview.json`."""
    columns = recall(rows, train_length, pairs)
    longest = max((column["lengths"][1] for column in columns.values()), default=train_length)
    if (folder / TEXT / CONFIG_JSON).exists():
        columns["text"] = text_bits(folder / TEXT)
    columns["state"] = state_bytes(configs, (train_length, longest))
    old = read_json(folder / DATA) if (folder / DATA).exists() else {}
    known = old.get("speeds", {})
    if set(known.get("training", {})) != set(configs):
        known = speeds(configs, train_length, longest)
    return {
        "models": list(configs), "train_length": train_length, "columns": columns, "speeds": known,
        "parameters": {row["model"]: row["parameters"] for row in rows},
        "device": old.get("device") if known == old.get("speeds") else device_name("cpu"),
    }  # fmt: skip


def write_overview(folder: Path, data: Mapping[str, Any]) -> None:
    """Write `overview.json`, `overview.md` and the picture of what `collect` returned."""
    from halflife.report.figures.matplotlib_renderer import save
    from halflife.report.figures.overview import overview

    write_json(folder / DATA, dict(data))
    save(overview(data), folder / FIGURES, "overview")
    write_text(folder / PAGE, page(data))


def page(data: Mapping[str, Any]) -> str:
    """The page in Markdown: the table, and the best model of each column."""
    return "\n".join([
        "# Overview", "",
        "Recall and tracking are accuracies in percent at two lengths in tokens: `persistence` has as many pairs as in "
        "training and asks for most of them early, `capacity` more, `decoys` is a needle among decoys, and `tracking` "
        f"the running product in S3. A model has not learned a task if it is below {100 * LEARNED:.0f} % at T, with "
        "what it was trained on. Text is in bits a byte, and state in bytes of one sequence in float32. Intervals at "
        "the longer length are 95 %, by bootstrap over seeds. "
        f"Speeds are those of a training step at T = {data['train_length']:,} and of decoding one sequence, "
        f"on {data['device']}.", "",
        "![Recall, text, speed and state of all models](figures/overview.png)", "", table(data), "", *_best(data), "",
    ])  # fmt: skip


def table(data: Mapping[str, Any]) -> str:
    """The table of what `collect` returned, in Markdown: one row a model."""
    fast = data["speeds"]
    columns = {name: data["columns"].get(name, NOT_MEASURED) for name in (*RECALL, "text", *data["columns"])}
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


def _best(data: Mapping[str, Any]) -> list[str]:
    """One line a column: the model with the best mean at the longest length, or several models that are equal."""
    lines = []
    for name, column in data["columns"].items():
        learned = column.get("learned", column["values"])
        means = {model: fmean(ends[1]) for model, ends in column["values"].items() if all(ends) and model in learned}
        means = {model: mean for model, mean in means.items() if not math.isnan(mean)}
        if means:
            best = (min if name in ("text", "state") else max)(means.values())
            equal = [model for model, mean in means.items() if math.isclose(mean, best, abs_tol=1e-9)]
            lines.append(f"* Best {name} at {column['lengths'][1]:,} tokens: {', '.join(equal)}.")
    for name in SPEED_COLUMNS:
        lines.append(f"* Fastest in {name}: {max(data['speeds'][name], key=data['speeds'][name].__getitem__)}.")
    return lines
