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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from join import RESULTS, add, read_table, scores  # beside this file

from halflife.evaluation.throughput import device_name
from halflife.files import CONFIG_JSON, read_json, write_json
from halflife.lab.experiments.evidence import overview_page
from halflife.lab.experiments.evidence.overview import Overview
from halflife.report.figures.matplotlib_renderer import save
from halflife.report.figures.overview import CHOSEN, overview
from halflife.report.markdown import models
from halflife.runs.sweep import Cell

RECALL, TEXT, LENGTHS = (RESULTS / name for name in ("overview.csv", "overview_text.csv", "overview_text_lengths.csv"))
DATA, SPEEDS = RESULTS / overview_page.DATA, "--speeds"


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
    """What `overview_page.collect` returns, from the files. Speeds of the same models are kept, but for `again`."""
    rows = scores(RECALL)
    experiment = Overview()
    settings = experiment.settings_at("small", {})
    configs = {name: experiment.configure(settings, Cell(name, 1e-3, 0)).model for name in models(rows)}
    columns = overview_page.recall(rows, settings.train_length, max(settings.pairs))
    longest = max(column["lengths"][1] for column in columns.values())
    columns["text"] = text()
    columns["state"] = overview_page.state_bytes(configs, (settings.train_length, longest))
    old = read_json(DATA)
    if again or set(old["models"]) != set(configs):
        torch.set_num_threads(1)
        old |= {"speeds": overview_page.speeds(configs, settings.train_length, longest), "device": device_name("cpu")}
    return {
        "models": list(configs), "train_length": settings.train_length, "columns": columns, "speeds": old["speeds"],
        "parameters": {row["model"]: int(row["parameters"]) for row in rows}, "device": old["device"],
    }  # fmt: skip


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
