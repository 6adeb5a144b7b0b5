"""The main job: train several models on a task, test them, and write tables, figures and a report."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from halflife.experiments.base import EXPERIMENTS, SCALES, Settings
from halflife.files import read_json
from halflife.registry import unknown
from halflife.training.sweep import Cell, create, sweep


def new(
    models: Sequence[str],
    *,
    task: str = "mqar",
    scale: str = "smoke",
    seeds: int = 1,
    learning_rates: Sequence[float] | None = None,
    overrides: Mapping[str, Any] | None = None,
    output: Path | None = None,
    name: str | None = None,
    command: str = "",
) -> Path:
    """Sets up a comparison: checks every choice at once and writes the resolved configuration.

    Args:
        models: preset names.
        task, scale: which experiment.
        seeds: how many, from 0.
        learning_rates: tried for every model; None means the experiment's own.
        overrides: fields of `Settings` that replace the scale's.
        output: the folder; None means `runs/<time>-<name>`.
        name: of that folder; None means the task and scale.
        command: what the user typed, for the report.

    Returns:
        The folder; give it to `execute`.

    Raises:
        ValueError: an unknown name, a combination without meaning, sizes that do not fit.
        FileExistsError: `output` holds a comparison already.
    """
    experiment = EXPERIMENTS[task]()
    if scale not in SCALES:
        raise unknown("scale", scale, list(SCALES))
    if not models or len(set(models)) != len(models):
        raise ValueError(f"name at least one model, each once; got {', '.join(models) or 'none'}")
    if seeds < 1:
        raise ValueError(f"seeds is how many to run, at least 1; got {seeds}")
    settings = dataclasses.replace(experiment.scales[scale], **(overrides or {}))
    rates = {model: list(learning_rates or experiment.learning_rates(model, scale)) for model in models}
    config = {
        "command": command, "models": list(models), "task": task, "scale": scale, "seeds": list(range(seeds)),
        "learning_rates": rates, "settings": dataclasses.asdict(settings),
    }  # fmt: skip
    for model in models:
        for rate in rates[model]:
            experiment.configure(settings, Cell(model, rate, 0))
    label = re.sub(r"[^\w.+-]", "-", name or f"{task}-{scale}")
    return create(output or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{label}", config)


def execute(folder: Path, *, show: bool = True) -> list[dict[str, Any]]:
    """Runs, or goes on with, the comparison in `folder`; then writes its table, figures and report.

    Returns:
        The rows of `results.csv`.

    Raises:
        FileNotFoundError: there is no comparison in the folder.
    """
    from halflife.analysis.report import write_report

    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} holds no comparison (no config.json)")
    config = read_json(folder / "config.json")
    experiment = EXPERIMENTS[config["task"]]()
    saved: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config["settings"].items()}
    settings = Settings(**saved)
    rows = sweep(folder, lambda cell: experiment.configure(settings, cell), show=show)
    write_report(folder)
    return rows


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a run for a table: the run's own numbers and `accuracy[(test, length)]`; means of the selected runs.

    Means stand after their model's runs, their seed is "mean"; seeds that diverged are left out, and it says so.
    """
    table: list[dict[str, Any]] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        runs: dict[tuple[float, int], dict[str, Any]] = {}
        for row in (r for r in rows if r["model"] == model):
            entry = runs.setdefault((row["learning_rate"], row["seed"]), {**row, "accuracy": {}})
            entry["accuracy"][row["test"], row["length"]] = row["accuracy"]
        table.extend(runs.values())
        chosen = [entry for entry in runs.values() if entry["selected"]]
        whole = [entry for entry in chosen if not any(map(math.isnan, entry["accuracy"].values()))]
        if len(chosen) > 1 and whole:
            mean = {key: fmean(e["accuracy"][key] for e in whole) for key in chosen[0]["accuracy"]}
            speed = fmean(e["tokens_per_second"] for e in whole)
            label = "mean" if whole == chosen else f"mean of {len(whole)} of {len(chosen)}"
            table.append({**chosen[0], "seed": label, "accuracy": mean, "tokens_per_second": speed})
    return table


def levels(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], tuple[float, float]]:
    """(test, length) → (chance, accuracy of the best answer that ignores the key)."""
    return {(row["test"], row["length"]): (row["chance"], row["guess"]) for row in rows}


def shown(accuracy: float) -> str:
    """An accuracy as a percentage; "diverged" for NaN."""
    return "diverged" if math.isnan(accuracy) else f"{100 * accuracy:.1f}"
