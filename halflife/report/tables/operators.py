"""Several trained models read one text: the tables, figure and data of their Koopman operators."""

from __future__ import annotations

import csv
import math
from io import StringIO
from pathlib import Path
from typing import Any

from halflife.analysis.decays import QUANTILES
from halflife.analysis.operators import DELTA, KEPT, RHO
from halflife.analysis.tables import finite
from halflife.files import write_json, write_text
from halflife.report.tables.terminal import print_wide

LAYER = ("tokens", "rank", "width", "power", "ridge", "chunk_size", "retries", "state_floats", "crossover")
HEAD = (
    "sigma_max", *QUANTILES, "persistent", "transient", "neither", *(f"kept_{power}" for power in KEPT),
    "eigenvector_condition", "condition", "lambda_min", "unexplained", "filter_bias", "linear_bound", "linear_distance",
    "gamma", "mix", "eta",
)  # fmt: skip
HEADINGS = ("layer", "head", "σ max", "|λ|", "lasts", "kept", "κ(G̃)", "left", "bias", "linear", "γ", "μ", "η")
COLUMNS = ("model", "layer", "head", *HEAD, *LAYER)


def write(result: dict[str, Any], output: Path) -> list[Path]:
    """Prints the table of the models' operators and writes data and figure; returns the files.

    Without a layer of SKA nothing is printed or written.
    """
    from halflife.report.figures.matplotlib_renderer import save
    from halflife.report.figures.operators import operators

    if not result["models"]:
        return []
    print_table(result)
    return [*write_tables(result, output), *save(operators(result), output, "koopman")]


def operators_of(surveyed: dict[str, Any]) -> dict[str, Any]:
    """The models with a layer of SKA among those that `decay_survey.survey` gives.

    Returns:
        `{"text", "tokenizer", "length", "sequences", "delta", "rho", "models": [{"model", "checkpoint", "layers"}]}`;
        "layers" is what `koopman_survey` gives, "delta" and "rho" its settings of `koopman.modes`.
    """
    models = [
        {"model": model["model"], "checkpoint": model["checkpoint"], "layers": model["operators"]}
        for model in surveyed["models"] if model["operators"]
    ]  # fmt: skip
    return {**surveyed, "delta": DELTA, "rho": RHO, "models": models}


def write_tables(result: dict[str, Any], folder: Path) -> list[Path]:
    """Writes what `operators_of` gives as `koopman.json` (null: not finite) and, a row a head, `koopman.csv`."""
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
