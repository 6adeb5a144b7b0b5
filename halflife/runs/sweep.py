"""Many runs in one folder: models × learning rates × seeds, resumable, with one table in the end."""

from __future__ import annotations

import csv
import io
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from halflife.files import folder_lock, read_json, write_json, write_text
from halflife.runs.task_run import RunConfig, run

COLUMNS = (
    "model", "learning_rate", "seed", "selected", "parameters", "state_floats", "tokens_per_second", "test", "length",
    "num_pairs", "accuracy", "chance", "guess",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run of a sweep, and where it is written."""

    model: str
    learning_rate: float
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.model}/lr{self.learning_rate:g}-seed{self.seed}"

    @property
    def title(self) -> str:
        return f"{self.model} lr {self.learning_rate:g} seed {self.seed}"


@dataclass(frozen=True)
class Job:
    """A run that is to be done: its settings, its own folder, and what to call it."""

    config: RunConfig
    folder: Path
    name: str


# How the jobs of a sweep are done: takes them, and whether to draw progress bars; each writes into its folder.
Runner = Callable[[Sequence[Job], bool], None]


def cells(learning_rates: Mapping[str, Sequence[float]], seeds: Sequence[int]) -> Iterator[Cell]:
    """All runs of a sweep, in order; `learning_rates` says which are tried for each model."""
    for model, rates in learning_rates.items():
        for rate in rates:
            for seed in seeds:
                yield Cell(model, rate, seed)


def one_by_one(jobs: Sequence[Job], show: bool) -> None:
    """Does the jobs of a sweep one after the other, in this process."""
    for job in jobs:
        perform(job, show=show)


def perform(job: Job, *, show: bool = False, patience: float = 0) -> dict[str, Any]:
    """The result of `run`, which no other process does in that folder at the same time.

    Args:
        show: whether to draw a progress bar.
        patience: seconds that another process is given to leave the folder.

    Raises:
        ValueError: it does not, or the folder belongs to a run with another configuration.
    """
    with folder_lock(job.folder, patience):
        return run(job.config, job.folder, name=job.name, show=show)


def sweep(
    folder: Path,
    configure: Callable[[Cell], RunConfig],
    *,
    seeds: Sequence[int] | None = None,
    show: bool = True,
    execute: Runner = one_by_one,
) -> list[dict[str, Any]]:
    """Runs every cell of the sweep described by `folder/config.json`, and writes `results.csv`.

    Cells that have a result are not run again and interrupted ones go on from their last checkpoint, so that calling
    this again on the same folder gives the numbers of an uninterrupted sweep.

    Args:
        folder: of the sweep; its `config.json` has "learning_rates" (model → list) and "seeds".
        configure: the run of a cell.
        seeds: run only these now; of the others, what has a result is in the table.
        show: whether to draw progress bars.
        execute: does the runs that have no result yet.

    Returns:
        The rows of `results.csv`: every model, learning rate, seed and test. `selected` marks the learning rate of
        each model with the best mean validation accuracy over seeds (in distribution; tests have no part in it).
    """
    config = read_json(folder / "config.json")
    jobs = {
        cell: Job(configure(cell), folder / cell.folder, cell.title)
        for cell in cells(config["learning_rates"], config["seeds"])
    }
    done = _results(jobs)
    execute([job for cell, job in jobs.items() if cell not in done and (seeds is None or cell.seed in seeds)], show)
    results = _results(jobs)
    if not results:
        raise ValueError(f"nothing to run: the seeds are {', '.join(map(str, config['seeds']))}")
    best = {model: _best_rate(model, results) for model in dict.fromkeys(cell.model for cell in results)}
    rows = [
        {
            "model": cell.model, "learning_rate": cell.learning_rate, "seed": cell.seed,
            "selected": cell.learning_rate == best[cell.model],
            **{name: result[name] for name in ("parameters", "state_floats", "tokens_per_second")}, **test,
        }
        for cell, result in results.items()
        for test in result["tests"]
    ]  # fmt: skip
    table = io.StringIO()
    writer = csv.DictWriter(table, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(folder / "results.csv", table.getvalue())
    return rows


def _results(jobs: Mapping[Cell, Job]) -> dict[Cell, dict[str, Any]]:
    """Those of the cells that are finished, whoever ran them."""
    return {
        cell: run(job.config, job.folder, name=job.name, show=False)
        for cell, job in jobs.items()
        if (job.folder / "result.json").exists()
    }


def _best_rate(model: str, results: dict[Cell, dict[str, Any]]) -> float:
    """The learning rate with the best mean validation accuracy; a run that diverged counts as 0."""
    scores: dict[float, list[float]] = {}
    for cell, result in results.items():
        if cell.model == model:
            accuracy = result["validation"]
            scores.setdefault(cell.learning_rate, []).append(0.0 if math.isnan(accuracy) else accuracy)
    return max(scores, key=lambda rate: fmean(scores[rate]))


def create(folder: Path, config: dict[str, Any]) -> Path:
    """A new sweep folder with its configuration and the versions of what runs it.

    Raises:
        FileExistsError: there is a sweep in it already (resume that one).
    """
    if (folder / "config.json").exists():
        raise FileExistsError(f"{folder} holds a comparison already; continue it with --resume {folder}")
    write_json(folder / "config.json", config)
    write_json(folder / "versions.json", versions())
    return folder


def versions() -> dict[str, str]:
    """The versions that a run's numbers depend on, and the device."""
    names = ("halflife", "torch", "transformers", "accelerate", "safetensors")
    found = {name: _version(name) for name in names}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    return {**found, "python": platform.python_version(), "platform": platform.platform(), "device": device}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
