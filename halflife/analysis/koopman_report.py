"""Several trained models read one text: the tables, figure and data of their Koopman operators."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from halflife.analysis.decay_survey import check_vocabulary, checkpoints, finite, pieces, print_wide, read_ids
from halflife.analysis.decay_values import QUANTILES
from halflife.analysis.koopman_survey import KEPT, koopman_survey, ska_layers
from halflife.files import write_json, write_text
from halflife.models import io

LAYER = ("tokens", "rank", "width", "power", "ridge", "chunk_size", "retries", "state_floats", "crossover")
HEAD = (
    "sigma_max", *QUANTILES, "persistent", "transient", "neither", *(f"kept_{power}" for power in KEPT),
    "eigenvector_condition", "condition", "lambda_min", "unexplained", "filter_bias", "linear_bound", "linear_distance",
    "gamma", "mix", "eta",
)  # fmt: skip
HEADINGS = ("layer", "head", "σ max", "|λ|", "lasts", "kept", "κ(G̃)", "left", "bias", "linear", "γ", "μ", "η")
COLUMNS = ("model", "layer", "head", *HEAD, *LAYER)


def report(
    folders: Sequence[Path],
    text: Sequence[Path],
    output: Path,
    *,
    length: int = 2048,
    sequences: int = 8,
    tokenizer: str | None = None,
    device: torch.device | str = "cpu",
    show: bool = False,
) -> list[Path]:
    """Prints the table of the models' operators and writes data and figure; returns the files.

    Arguments and errors are those of `decay_survey.survey`. Without a layer of SKA nothing is printed or written.
    """
    from halflife.analysis.figures import save
    from halflife.analysis.koopman_figures import operators

    result = survey(folders, text, length=length, sequences=sequences, tokenizer=tokenizer, device=device, show=show)
    if not result["models"]:
        return []
    print_table(result)
    return [*write_tables(result, output), *save(operators(result), output, "koopman")]


def survey(
    folders: Sequence[Path],
    text: Sequence[Path],
    *,
    length: int = 2048,
    sequences: int = 8,
    tokenizer: str | None = None,
    device: torch.device | str = "cpu",
    show: bool = False,
    delta: float = 0.3,
    rho: float = 0.7,
) -> dict[str, Any]:
    """Reads a text with every model below the folders that has a layer of SKA.

    Args:
        delta, rho: see `koopman.modes`; the others are those of `decay_survey.survey`.

    Returns:
        `{"text", "tokenizer", "length", "sequences", "delta", "rho", "models": [{"model", "checkpoint", "layers"}]}`;
        "layers" is what `koopman_survey` gives.

    Raises:
        FileNotFoundError, ValueError: as `decay_survey.survey`; no model at all is no error.
    """
    from rich.console import Console
    from rich.progress import track

    found = checkpoints(folders)
    ids = pieces(read_ids(text, tokenizer), length, sequences)
    models = []
    console = Console(stderr=True)
    hidden = not (show and console.is_terminal)
    for label, folder in track(found.items(), "operators", console=console, transient=True, disable=hidden):
        model = io.load(folder, device)
        if ska_layers(model):
            check_vocabulary(model.config, ids, tokenizer)
            layers = koopman_survey(model, ids, delta=delta, rho=rho)
            models.append({"model": label, "checkpoint": str(folder), "layers": layers})
    return {
        "text": [str(file) for file in text], "tokenizer": tokenizer, "length": ids.shape[1], "sequences": len(ids),
        "delta": delta, "rho": rho, "models": models,
    }  # fmt: skip


def write_tables(result: dict[str, Any], folder: Path) -> list[Path]:
    """Writes what `survey` gives as `koopman.json` (null: not finite) and, a row a head, `koopman.csv`."""
    table = StringIO()
    writer = csv.DictWriter(table, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {"model": model["model"], **layer, **head}
        for model in result["models"] for layer in model["layers"] for head in layer["heads"]
    )  # fmt: skip
    files = [folder / "koopman.json", folder / "koopman.csv"]
    write_json(files[0], finite(result))
    write_text(files[1], table.getvalue())
    return files


def print_table(result: dict[str, Any]) -> None:
    """Prints what `survey` gives, a table a model that fits 80 columns, a row a head."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    for model in result["models"]:
        title = f"Koopman operators of {escape(model['model'])}"
        table = Table(box=SIMPLE_HEAD, padding=0, title=title, title_justify="left")
        for heading in HEADINGS:
            table.add_column(heading, justify="right")
        for layer in model["layers"]:
            for head in layer["heads"]:
                last = head is layer["heads"][-1]
                table.add_row("" if head["head"] else str(layer["layer"]), *_cells(layer, head), end_section=last)
        print_wide(table)
        for layer in model["layers"]:
            print(_sentence(layer))
    _print_legend(result)


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
        f"layer {layer['layer']}: {layer['tokens']:,} tokens in {layer['state_floats']:,} numbers a head "
        f"(a cache has more from {math.floor(layer['crossover']) + 1:,} on){retries}"
    )


def _print_legend(result: dict[str, Any]) -> None:
    print(
        f"read: {result['sequences']} × {result['length']:,} tokens; medians over sequences.\n"
        f"|λ|: median and 95 % quantile of the modes. lasts: how many have |1 − γλ| ≤ {result['delta']:g}.\n"
        "kept: mean of |γλ|². left: share of the values' energy that ridge regression\n"
        "leaves; bias: what the filter adds. linear: distance from linear attention."
    )
