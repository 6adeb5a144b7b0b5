"""Many runs in one folder: models × learning rates × seeds. A sweep can be resumed, and ends with one table."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from halflife import __version__
from halflife.files import RESULT_JSON, folder_lock, read_json, write_json
from halflife.runs.folder import (
    CONFIG_JSON,
    RESULTS_CSV,
    VERSIONS_JSON,
    cell_folder,
    read_result,
)
from halflife.runs.one import CellConfig, run_one
from halflife.runs.scores import scores_of, write_scores
from halflife.training.config import ExecutionConfig
from halflife.training.fit import claim_run_folder


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: a model, a learning rate and a seed."""

    model: str
    learning_rate: float
    seed: int

    @property
    def folder(self) -> str:
        """The folder of the run, relative to the folder of the sweep."""
        return cell_folder(self.model, self.learning_rate, self.seed)

    @property
    def title(self) -> str:
        """The label of the run in progress bars and messages."""
        return f"{self.model} lr {self.learning_rate:g} seed {self.seed}"


@dataclass(frozen=True)
class Job:
    """A run to be done: its configuration, its folder, and its label."""

    config: CellConfig
    folder: Path
    name: str


# Runs the jobs of a sweep. Each job writes into its own folder. The second argument allows progress bars.
Runner = Callable[[Sequence[Job], bool], None]


def cells(learning_rates: Mapping[str, Sequence[float]], seeds: Sequence[int]) -> Iterator[Cell]:
    """All cells of a sweep, in order; `learning_rates` maps each model to the rates that are tried."""
    for model, rates in learning_rates.items():
        for rate in rates:
            for seed in seeds:
                yield Cell(model, rate, seed)


def one_by_one(jobs: Sequence[Job], show: bool) -> None:
    """Run the jobs of a sweep one after the other, in this process."""
    for job in jobs:
        run_job(job, show=show)


def run_job(job: Job, *, show: bool = False, patience: float = 0) -> dict[str, Any]:
    """Run one job while this process holds the lock of its folder; returns the result (see `run_one`).

    Args:
        show: whether to draw a progress bar.
        patience: seconds to wait for another process that holds the lock.

    Raises:
        ValueError: another process keeps the lock, or the folder belongs to a run with another configuration.
    """
    with folder_lock(job.folder, patience):
        return run_one(job.config.open(show), job.folder, name=job.name, execution=ExecutionConfig(show=show))


def run_sweep(
    folder: Path,
    configure: Callable[[Cell], CellConfig],
    *,
    seeds: Sequence[int] | None = None,
    show: bool = True,
    runner: Runner = one_by_one,
) -> list[dict[str, Any]]:
    """Run every cell of the sweep that `folder/config.json` describes, and write `results.csv`.

    Cells that have a result are not run again, and interrupted cells continue from their last checkpoint. A second
    call on the same folder therefore gives the numbers of an uninterrupted sweep.

    Args:
        folder: the folder of the sweep; its `config.json` has "learning_rates" (model → list) and "seeds".
        configure: returns the configuration of a cell.
        seeds: the seeds to run now; None for all. The table also contains finished runs of other seeds.
        show: whether to draw progress bars.
        runner: runs the jobs that have no result yet.

    Returns:
        The rows of `results.csv`, one per model, learning rate, seed and test (see `runs.folder.Score`). `selected`
        marks each model's learning rate with the best validation, averaged over seeds. Tests do not influence it.
    """
    config = read_json(folder / CONFIG_JSON)
    jobs = {
        cell: Job(configure(cell), folder / cell.folder, cell.title)
        for cell in cells(config["learning_rates"], config["seeds"])
    }
    done = _results(jobs)
    runner([job for cell, job in jobs.items() if cell not in done and (seeds is None or cell.seed in seeds)], show)
    results = _results(jobs)
    if not results:
        raise ValueError(f"there is nothing to run: the seeds of {folder} are {', '.join(map(str, config['seeds']))}")
    selected = {model: _select_rate(model, jobs, results) for model in dict.fromkeys(cell.model for cell in results)}
    scores = [
        score
        for cell, result in results.items()
        for score in scores_of(result, selected=cell.learning_rate == selected[cell.model], **asdict(cell))
    ]
    write_scores(folder / RESULTS_CSV, scores)
    return [asdict(score) for score in scores]


def _results(jobs: Mapping[Cell, Job]) -> dict[Cell, dict[str, Any]]:
    """The results of the finished cells, whichever process ran them."""
    found = {}
    for cell, job in jobs.items():
        if (job.folder / RESULT_JSON).exists() and claim_run_folder(job.config, job.folder):
            found[cell] = read_result(job.folder)
    return found


def _select_rate(model: str, jobs: Mapping[Cell, Job], results: Mapping[Cell, dict[str, Any]]) -> float:
    """The learning rate with the best mean validation; a run that diverged has the worst possible value."""
    sign, worst = (1, 0.0) if next(iter(jobs.values())).config.measure == "accuracy" else (-1, math.inf)
    values: dict[float, list[float]] = {}
    for cell, result in results.items():
        if cell.model == model:
            value = result["validation"]
            values.setdefault(cell.learning_rate, []).append(worst if math.isnan(value) else value)
    return max(values, key=lambda rate: sign * fmean(values[rate]))


def create_sweep(folder: Path, config: dict[str, Any]) -> Path:
    """Create the folder of a sweep, with its configuration and the versions of the packages that run it.

    Raises:
        FileExistsError: the folder holds a sweep already.
    """
    if (folder / CONFIG_JSON).exists():
        raise FileExistsError(f"{folder} holds a comparison already; continue it with --resume {folder}")
    write_json(folder / CONFIG_JSON, config)
    write_json(folder / VERSIONS_JSON, versions())
    return folder


def versions() -> dict[str, str]:
    """The versions of the packages that the numbers depend on, and the device."""
    names = ("torch", "transformers", "accelerate", "safetensors")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    packages = {name: _version(name) for name in names}
    system = {"python": platform.python_version(), "platform": platform.platform(), "device": device}
    return {"halflife": __version__, **packages, **system}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
