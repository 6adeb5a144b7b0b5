"""The main job: train several models on a task, test them, and write tables, figures and a report."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halflife.experiments.base import EXPERIMENTS
from halflife.files import read_json, write_text
from halflife.runs.sweep import Cell, Runner, create, one_by_one, sweep


def new(
    models: Sequence[str],
    *,
    tasks: Sequence[str] = ("mqar",),
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
        models: preset names; none means the experiment's own.
        tasks: one name of `EXPERIMENTS`, or the mixture of tasks, `name` or `name:tier`, that "recall" trains on.
        scale: smoke, small or paper.
        seeds: how many, from 0.
        learning_rates: tried for every model; None means the experiment's own.
        overrides: settings of the experiment that replace the scale's.
        output: the folder; None means `runs/<time>-<name>`.
        name: of that folder; None means the task and scale.
        command: what the user typed, for the report.

    Returns:
        The folder; give it to `execute`.

    Raises:
        ValueError: an unknown name, a combination without meaning, sizes that do not fit.
        FileExistsError: `output` holds a comparison already.
    """
    kind = tasks[0] if len(tasks) == 1 and tasks[0] in set(EXPERIMENTS) - {"recall"} else "recall"
    chosen = EXPERIMENTS[kind]()
    own = {"tasks": tuple(tasks)} if kind == "recall" else {}
    settings = chosen.resolve(scale, {**own, **(overrides or {})})
    models = tuple(models) or chosen.models
    if not models or len(set(models)) != len(models):
        raise ValueError(f"name at least one model, each once; got {', '.join(models) or 'none'}")
    if seeds < 1:
        raise ValueError(f"seeds is how many to run, at least 1; got {seeds}")
    rates = {model: list(learning_rates or chosen.learning_rates(model, scale)) for model in models}
    task = "+".join(tasks)
    config = {
        "command": command, "models": list(models), "experiment": kind, "task": task, "scale": scale,
        "seeds": list(range(seeds)),
        "learning_rates": rates, "settings": dataclasses.asdict(settings),
    }  # fmt: skip
    for model in models:
        for rate in rates[model]:
            chosen.configure(settings, Cell(model, rate, 0))
    label = re.sub(r"[^\w.+-]", "-", name or f"{task}-{scale}")
    return create(output or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{label}", config)


def execute(
    folder: Path, *, only_seeds: Sequence[int] | None = None, show: bool = True, on: Runner = one_by_one
) -> list[dict[str, Any]]:
    """Runs, or goes on with, the comparison in `folder`; then writes its table, figures and report.

    Args:
        only_seeds: run only these now, so that several processes can share the work; the table has what is finished.
        show: whether to draw progress bars.
        on: where the runs are done: `training.pool.executor` of a name.

    Returns:
        The rows of `results.csv`.

    Raises:
        FileNotFoundError: there is no comparison in the folder.
    """
    from halflife.report.redraw import write_report

    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} holds no comparison (no config.json)")
    config = read_json(folder / "config.json")
    if "experiment" not in config:
        raise ValueError(f"{folder} was written by a version whose comparisons this one does not continue")
    experiment = EXPERIMENTS[config["experiment"]]()
    saved: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config["settings"].items()}
    settings = experiment.settings(**saved)
    rows = sweep(folder, lambda cell: experiment.configure(settings, cell), seeds=only_seeds, show=show, execute=on)
    write_report(folder)
    if summary := experiment.summary(folder, rows):
        write_text(folder / "summary.md", summary)
    return rows
