"""Many runs of a sweep at once, each as a task of Ray, on this machine or on a cluster.

The state of a run is in its folder alone. If the worker of a run is killed or asked to end, Ray starts the run again on
any worker, and the run continues from its last checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from halflife.extras import require
from halflife.files import METRICS_JSONL, RUN_JSON
from halflife.runs.sweep import Job, Runner, one_by_one, run_job
from halflife.training.fit import StoppedBySignal

RETRIES = 5  # of a run whose worker died; each repeats at most the steps since the last checkpoint
PATIENCE = 60.0  # seconds; a file server can hold the lock of a dead machine for about this long


def make_runner(on: str = "local", *, cpus_per_run: int | None = None, gpus_per_run: float | None = None) -> Runner:
    """The function that runs the jobs of a sweep.

    Args:
        on: "local" runs one job after the other in this process. "ray" runs as many jobs at once as this machine has
            room for. "ray://host:port" runs them on that cluster (the port is that of its client server, 10001 by
            default); all of its machines need this version of halflife, and the folder of the sweep under the same
            path.
        cpus_per_run: processors, and threads, of a run on Ray; None for 1.
        gpus_per_run: GPUs of a run on Ray, from 0 to 1 (with 0.5, two runs share one); None for 1 if the cluster has
            GPUs, otherwise 0.

    Raises:
        ImportError: Ray is not installed.
        ValueError: an unknown name or an impossible number, or nothing answers at the address.
    """
    if on == "local":
        if cpus_per_run is not None or gpus_per_run is not None:
            raise ValueError("--cpus-per-run and --gpus-per-run need --on ray; --on local uses the whole machine")
        return one_by_one
    return Pool(on, 1 if cpus_per_run is None else cpus_per_run, gpus_per_run)


@dataclass(frozen=True)
class Pool:
    """Runs the jobs of a sweep as tasks of Ray; see `make_runner` for the fields.

    If one run fails, the others still run. The error is printed at once, and raised after the last run.
    """

    address: str
    cpus: int = 1
    gpus: float | None = None

    def __post_init__(self) -> None:
        place = re.fullmatch(r"ray(://(?P<host>[^/:]+):(?P<port>\d+))?", self.address)
        if place is None:
            raise ValueError(f"runs can be done on local, ray or ray://host:port; got {self.address!r}")
        if self.cpus < 1 or not 0 <= (self.gpus or 0) <= 1:
            raise ValueError(f"a run needs at least 1 processor and 0 to 1 GPUs; got {self.cpus} and {self.gpus}")
        require(f"--on {self.address}", "ray")
        if place["host"]:
            try:  # Ray itself retries for half a minute
                socket.create_connection((place["host"], int(place["port"])), timeout=5).close()
            except (OSError, OverflowError) as error:
                raise ValueError(f"nothing answers at {self.address}: {error}") from None

    def __call__(self, jobs: Sequence[Job], show: bool) -> None:
        """Run the jobs.

        Raises:
            ValueError: a run raised a ValueError, or this machine is too small for a run.
            RuntimeError: a run raised another error, or its worker died `RETRIES` + 1 times.
        """
        if not jobs:
            return
        jobs = [replace(job, folder=job.folder.absolute()) for job in jobs]
        for job in jobs:
            job.folder.mkdir(parents=True, exist_ok=True)
        with _cluster(self.address):
            failed = _run_all(jobs, self._resources(), show)
        if failed:
            error = next(iter(failed.values()))
            kind = ValueError if all(isinstance(e, ValueError) for e in failed.values()) else RuntimeError
            raise kind("; ".join(f"{name}: {_reason(e)}" for name, e in failed.items())) from error

    def _resources(self) -> dict[str, float]:
        """The processors and GPUs that each run asks Ray for."""
        import ray

        available = ray.cluster_resources()
        cpus, gpus = available.get("CPU", 0), available.get("GPU", 0)
        wanted = min(gpus, 1) if self.gpus is None else self.gpus
        # A cluster may grow on demand. This machine does not, and Ray would wait for ever.
        if self.address == "ray" and (cpus < self.cpus or gpus < wanted):
            raise ValueError(
                f"this machine has {cpus:g} processors and {gpus:g} GPUs; a run needs {self.cpus} and {wanted:g}"
            )
        return {"num_cpus": self.cpus, "num_gpus": wanted}


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    """Connect to Ray, and disconnect at the end. A local Ray that runs already is used, and keeps running."""
    import ray

    if address == "ray" and ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"address": address}
    if address == "ray":
        options = {"address": "local", "include_dashboard": False, "object_store_memory": 100 << 20}  # bytes
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises a bare Exception if it does not start in time
        hint = "" if address == "ray" else " (a cluster with a token needs RAY_AUTH_MODE=token here)"
        raise ValueError(f"no Ray at {address}: {_first_line(error)}{hint}") from error
    try:
        yield
    finally:
        ray.shutdown()


def run_job_in_worker(job: Job, threads: int) -> dict[str, Any]:
    """Run one job in a worker process; returns its result.

    Raises:
        ValueError: the machine does not see the folder, or as `run_job`.
    """
    if not job.folder.is_dir():
        raise ValueError(
            f"{socket.gethostname()} has no {job.folder}; all machines must share the file system of the sweep"
        )
    torch.set_num_threads(threads)
    return run_job(job, patience=PATIENCE)


def _run_all(jobs: Sequence[Job], resources: Mapping[str, float], show: bool) -> dict[str, Exception]:
    """Run all jobs, and return the errors of those that failed, by label. An interrupt cancels the running jobs."""
    import ray
    from ray.exceptions import RayError

    task = ray.remote(run_job_in_worker).options(**resources, max_retries=RETRIES, retry_exceptions=[StoppedBySignal])
    tasks = {task.remote(job, int(resources["num_cpus"])): job for job in jobs}
    failed: dict[str, Exception] = {}
    board = ProgressBoard(jobs, show)
    try:
        with board.progress:
            while tasks:
                for ref in ray.wait(list(tasks), timeout=1.0)[0]:
                    job = tasks.pop(ref)
                    try:
                        board.finish(job, _outcome(job, ray.get(ref)))
                    except RayError as error:
                        failed[job.name] = error
                        board.finish(job, f"failed: {_reason(error)}")
                board.update()
    finally:
        for ref in tasks:
            ray.cancel(ref, force=True)
    return failed


def _outcome(job: Job, result: dict[str, Any]) -> str:
    """The line that a finished run leaves."""
    form = {"accuracy": ".1%", "loss": ".3f"}[job.config.measure]
    return result.get("diverged") or f"validation {result['validation']:{form}}"


def _reason(error: BaseException) -> str:
    """One line: the error that the run raised, or the error of Ray."""
    cause = getattr(error, "cause", None) or error
    return _first_line(cause) if isinstance(cause, ValueError) else f"{type(cause).__name__}: {_first_line(cause)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


class ProgressBoard:
    """One progress bar for all runs together, and one for each running run. A finished run leaves a line.

    The board reads the folders of the runs: a run writes `run.json` when it starts, and its steps to `metrics.jsonl`.

    Args:
        jobs: all of them.
        show: whether to draw anything.
    """

    def __init__(self, jobs: Sequence[Job], show: bool) -> None:
        self.progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(6), MofNCompleteColumn(),
            TextColumn("{task.fields[info]}"), TimeRemainingColumn(compact=True), TextColumn("left"),
            refresh_per_second=2, speed_estimate_period=3600, disable=not show,
        )  # fmt: skip
        self.unfinished = list(jobs)
        self.steps = {job.name: _last_step(job.folder) for job in jobs}
        self.started = {job.name: _start_time(job.folder) for job in jobs}
        self.bars: dict[str, TaskID] = {}
        total = sum(job.config.steps for job in jobs)
        self.all = self.progress.add_task("all runs", total=total, completed=sum(self.steps.values()), info="")

    def update(self) -> None:
        """Read the folders and redraw the bars."""
        for job in self.unfinished:
            if (started := _start_time(job.folder)) != self.started[job.name]:
                self._add_bar(job)
                self.started[job.name] = started
            if job.name in self.bars:
                self.steps[job.name] = _last_step(job.folder)
                self.progress.update(self.bars[job.name], completed=self.steps[job.name])
        running, done = len(self.bars), len(self.steps) - len(self.unfinished)
        info = f"{running} running, {len(self.unfinished) - running} queued, {done} done"
        self.progress.update(self.all, completed=sum(self.steps.values()), info=info)

    def finish(self, job: Job, outcome: str) -> None:
        """Remove the bar of a run that ended, and print its outcome."""
        self.unfinished.remove(job)
        self.steps[job.name] = job.config.steps
        if job.name in self.bars:
            self.progress.remove_task(self.bars.pop(job.name))
        self._print(job, outcome)

    def _add_bar(self, job: Job) -> None:
        if job.name in self.bars:
            self._print(job, "its worker died; the run continues from its last checkpoint")
            self.progress.remove_task(self.bars.pop(job.name))
        self.bars[job.name] = self.progress.add_task(
            job.name, total=job.config.steps, completed=_last_step(job.folder), info=""
        )

    def _print(self, job: Job, message: str) -> None:
        if not self.progress.disable:
            self.progress.console.print(f"{job.name}: {message}", markup=False, highlight=False, soft_wrap=True)


def _start_time(folder: Path) -> int:
    """The time at which the run in `folder` last started, in nanoseconds; 0 if it has not started."""
    try:
        return (folder / RUN_JSON).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _last_step(folder: Path) -> int:
    """The last step that the run in `folder` has logged; 0 if there is none. Only the end of the file is read."""
    try:
        with (folder / METRICS_JSONL).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            steps = re.findall(rb'"step": (\d+)', file.read())
    except FileNotFoundError:
        return 0
    return int(steps[-1]) if steps else 0
