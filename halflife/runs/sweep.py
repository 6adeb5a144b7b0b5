"""Many runs in one folder: models × learning rates × seeds. A sweep can be resumed, and ends with one table."""

from __future__ import annotations

import math
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from halflife import extensions, files
from halflife.data.trust import sign
from halflife.runs.folder import FIGURES, RESULTS_CSV, read_result
from halflife.runs.one import CellConfig, run_one
from halflife.runs.records import scores_of, write_scores
from halflife.runs.versions import versions
from halflife.training.config import ExecutionConfig, world_size
from halflife.training.fit import StoppedBySignal, check_run_folder


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: a model, a learning rate and a seed."""

    model: str
    learning_rate: float
    seed: int

    @property
    def folder(self) -> str:
        """The folder of the run, relative to the folder of the sweep. Different rates have different folders."""
        short = f"{self.learning_rate:g}"
        rate = short if float(short) == self.learning_rate else repr(self.learning_rate)
        # The Decay paper's grid has names such as vector/mamba2.
        return f"{self.model.replace('/', '-')}/lr{rate}-seed{self.seed}"

    @property
    def title(self) -> str:
        """The label of the run in progress bars and messages."""
        return f"{self.model} lr {self.learning_rate:g} seed {self.seed}"


@dataclass(frozen=True)
class Job:
    """A run to be done: its configuration, folder, label and use of memory, and the extensions that it imports."""

    config: CellConfig
    folder: Path
    name: str
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    imports: Mapping[str, Sequence[str]] = field(default_factory=extensions.record)


Results = dict[Cell, dict[str, Any]]  # the results of the finished cells
# Runs the jobs of a sweep. Each job writes into its own folder. The second argument allows progress bars.
# Returns {job name: error} of the jobs that failed.
Runner = Callable[[Sequence[Job], bool], dict[str, str]]


class RunsFailed(Exception):
    """Some runs of a sweep raised an error (`failed`: reasons by label). `rows` are of the others, which ended."""

    def __init__(self, failed: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
        super().__init__("; ".join(f"{name} failed: {reason}" for name, reason in failed.items()))
        self.failed, self.rows = failed, rows


def cells(learning_rates: Mapping[str, Sequence[float]], seeds: Sequence[int]) -> Iterator[Cell]:
    """All cells of a sweep, in order; `learning_rates` maps each model to the rates that are tried."""
    for model, rates in learning_rates.items():
        for rate in rates:
            for seed in seeds:
                yield Cell(model, rate, seed)


def first_cells(learning_rates: Mapping[str, Sequence[float]], seeds: Sequence[int], tune: int | None) -> list[Cell]:
    """The cells that a sweep runs before it chooses learning rates: those of its first `tune` seeds, or all of them."""
    return list(cells(learning_rates, seeds[:tune]))


def count_runs(rates: int, seeds: int, tune: int | None) -> int:
    """The number of runs of a model: the first `tune` seeds try all rates, and the others run at the best one."""
    trials = seeds if tune is None else min(tune, seeds)
    return rates * trials + seeds - trials


def one_by_one(jobs: Sequence[Job], show: bool) -> dict[str, str]:
    """Run the jobs of a sweep one after the other, in this process. An error of one does not stop the others.

    An OSError does, because it would also stop the others, and so does a signal to end (StoppedBySignal).
    """
    failed = {}
    for job in jobs:
        try:
            run_job(job, show=show)
        except (OSError, StoppedBySignal):
            raise
        except Exception as error:
            failed[job.name] = reason(error)
            print(f"{job.name} failed:\n{traceback.format_exc()}", file=sys.stderr)
    return failed


def reason(error: BaseException) -> str:
    """One line about an error that a run raised. A ValueError needs no name, because its message is for users."""
    first = first_line(error)
    return first if isinstance(error, ValueError) and first else f"{type(error).__name__}: {first}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def prepared(jobs: Iterable[Job]) -> list[Job]:
    """Jobs for other processes: with absolute paths of their folders, which are made."""
    jobs = [replace(job, folder=job.folder.absolute()) for job in jobs]
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
    return jobs


def run_job(job: Job, *, show: bool = False, patience: float = 0) -> dict[str, Any]:
    """Run one job while this process holds the lock of its folder; returns the result (see `run_one`).

    It waits `patience` seconds for another process that holds the lock.

    Raises:
        ValueError: another process keeps the lock, or the folder belongs to a run with another configuration.
    """
    extensions.recall(job.imports)  # a worker on another machine does not have them yet
    with files.folder_lock(job.folder, patience):
        return run_one(job.config.open(show), job.folder, name=job.name, execution=replace(job.execution, show=show))


def run_sweep(
    folder: Path,
    configure: Callable[[Cell], CellConfig],
    *,
    seeds: Sequence[int] | None = None,
    show: bool = True,
    runner: Runner = one_by_one,
    execution: ExecutionConfig | None = None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run every cell of the sweep that `folder/config.json` describes, and write `results.csv`.

    With "tune_seeds" in that file, the first seeds try all learning rates, and the others run at the best one alone.
    Cells that have a result are not run again, and interrupted cells continue from their last checkpoint. A second
    call on the same folder therefore gives the numbers of an uninterrupted sweep.

    Args:
        folder: the folder of the sweep; its `config.json` has "learning_rates" (model → list) and "seeds".
        configure: returns the configuration of a cell.
        seeds: the seeds to run now; None for all. The table also contains finished runs of other seeds.
        runner: runs the jobs that have no result yet.
        execution: how the runs use memory; None for the defaults.

    Returns:
        The rows of `results.csv`, one per model, learning rate, seed and test (see `runs.records.Score`), and the
        reasons of the runs that failed, by their labels. `selected` marks each model's learning rate with the best
        validation, averaged over the seeds that tried all rates. Tests do not influence it.

    Raises:
        RunsFailed: no run has ended.
        ValueError: torchrun started this process, or `seeds` has a seed that is not the sweep's, or none that tries the
            learning rates, before these runs have ended.
    """
    _refuse_torchrun()
    config = files.read_json(folder / files.CONFIG_JSON)
    for place in (folder, folder / FIGURES):
        files.remove_orphans(place, older_than=60)  # other processes may share the folder
    if not (folder / files.VERSIONS_JSON).exists():  # the process was killed between the two files
        files.write_json(folder / files.VERSIONS_JSON, versions())
    execution = replace(execution or ExecutionConfig(), sweep=folder.absolute())
    jobs = {
        cell: Job(configure(cell), folder / cell.folder, cell.title, execution)
        for cell in cells(config["learning_rates"], config["seeds"])
    }
    check_seeds(seeds, config["seeds"])
    trials = first_cells(config["learning_rates"], config["seeds"], config.get("tune_seeds"))
    first = set(trials)
    others = [cell for cell in jobs if cell not in first]

    def run(wanted: Sequence[Cell], results: Results) -> tuple[dict[str, str], Results]:
        """Run the cells that have no result yet; return the reasons of failures, and all results."""
        chosen = [cell for cell in wanted if cell not in results and (seeds is None or cell.seed in seeds)]
        return (runner([jobs[cell] for cell in chosen], show), _results(jobs)) if chosen else ({}, results)

    failed, results = run(trials, _results(jobs))
    left = ", ".join(cell.title for cell in trials if cell.title not in failed and cell not in results)
    if left and seeds is not None and {cell.seed for cell in others}.intersection(seeds):
        raise ValueError(f"the learning rates are chosen by runs that have not ended ({left}); run them first")
    tried = {cell: results[cell] for cell in trials if cell in results}
    selected = {model: _select_rate(model, jobs, tried) for model in dict.fromkeys(cell.model for cell in tried)}
    more, results = run([cell for cell in others if cell.learning_rate == selected.get(cell.model)], results)
    failed |= more
    if not results:
        raise RunsFailed(failed, [])
    scores = [
        score
        for cell, result in results.items()
        for score in scores_of(result, selected=cell.learning_rate == selected.get(cell.model), **asdict(cell))
    ]
    write_scores(folder / RESULTS_CSV, scores)
    return [asdict(score) for score in scores], failed


def check_seeds(chosen: Sequence[int] | None, seeds: Sequence[int]) -> None:
    """Raise a ValueError that names the chosen seeds that do not belong to a sweep."""
    if unknown := [seed for seed in chosen or () if seed not in seeds]:
        raise ValueError(
            f"there is no seed {', '.join(map(str, unknown))} to run; the comparison has the seeds {seeds[0]} to "
            f"{seeds[-1]}"
        )


def _results(jobs: Mapping[Cell, Job]) -> Results:
    """The results of the finished cells, whichever process ran them."""
    found = {}
    for cell, job in jobs.items():
        if (job.folder / files.RESULT_JSON).exists() and check_run_folder(job.config, job.folder):
            found[cell] = read_result(job.folder)
    return found


def _select_rate(model: str, jobs: Mapping[Cell, Job], results: Results) -> float | None:
    """The learning rate with the fewest diverged runs, and among these the best mean validation of the others.

    Of rates that end at the same validation, such as 100 %, it is the one that learned soonest: the mean of all its
    validations is best. Only the seeds that ran at all these rates count. None if every run of the model diverged.
    """
    measure = next(iter(jobs.values())).config.measure
    sign = 1 if measure == "accuracy" else -1
    values: dict[float, list[float]] = {}
    results = _of_common_seeds({cell: result for cell, result in results.items() if cell.model == model})
    for cell, result in results.items():
        values.setdefault(cell.learning_rate, []).append(result["validation"])
    diverged = {rate: sum(map(math.isnan, found)) for rate, found in values.items()}
    whole = {rate: [x for x in found if not math.isnan(x)] for rate, found in values.items()}
    scores = {rate: (-diverged[rate], sign * fmean(whole[rate])) for rate in values if whole[rate]}
    if len(best := [rate for rate in scores if scores[rate] == max(scores.values())]) < 2:
        return next(iter(best), None)
    tied = [cell for cell in results if not math.isnan(results[cell]["validation"])]
    folders = {rate: [jobs[cell].folder for cell in tied if cell.learning_rate == rate] for rate in best}
    return max(best, key=lambda rate: sign * _mean_of_training(folders[rate], f"validation_{measure}"))


def _of_common_seeds(results: Results) -> Results:
    """The results of the seeds that have one at every learning rate; all results if there is no such seed."""
    seeds: dict[float, set[int]] = {}
    for cell in results:
        seeds.setdefault(cell.learning_rate, set()).add(cell.seed)
    common = set.intersection(*seeds.values()) if seeds else set()
    return {cell: result for cell, result in results.items() if cell.seed in common} if common else results


def _mean_of_training(folders: Sequence[Path], key: str) -> float:
    """The mean of all validations in the logs of the runs; 0 if these have been deleted."""
    lines = [line for folder in folders for line in files.read_metrics(folder / files.METRICS_JSONL)]
    return fmean([line[key] for line in lines if line.get(key) is not None] or [0.0])


def create_sweep(folder: Path, config: dict[str, Any]) -> Path:
    """Create the folder of a sweep, with its configuration and the versions of the packages that run it."""
    _refuse_torchrun()
    if (folder / files.CONFIG_JSON).exists():
        again = f"--resume {shlex.quote(str(folder))}"
        raise FileExistsError(f"{folder} holds a comparison already; continue it with {again}")
    files.check_new_folder(folder)
    files.write_json(folder / files.CONFIG_JSON, sign(config))
    files.write_json(folder / files.VERSIONS_JSON, versions())
    return folder


def _refuse_torchrun() -> None:
    """Raise a ValueError under torchrun, whose processes would each take another run and add up their gradients."""
    if world_size() > 1:
        raise ValueError("torchrun trains one model; start a comparison without it, and give --on ray for many at once")
