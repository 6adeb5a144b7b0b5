"""Many runs of a sweep at once, each a task of Ray: on this machine, or on a cluster.

A run keeps its state in its folder alone. One whose worker is killed, or told to end, goes on from its last checkpoint
wherever Ray starts it again.
"""

from __future__ import annotations

import importlib.util
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

from halflife.runs.sweep import Job, Runner, one_by_one, perform
from halflife.training.fit import Stopped

RETRIES = 5  # of a run whose worker is gone; each costs at most the steps since its last checkpoint
PATIENCE = 60.0  # seconds; a file server may hold the lock of a machine that is gone about so long


def executor(on: str = "local", *, cpus_per_run: int | None = None, gpus_per_run: float | None = None) -> Runner:
    """What does the runs of a sweep.

    Args:
        on: "local": one after the other, in this process; "ray": as many at once as this machine has room for;
            "ray://host:port": on that cluster (the port is its client server's, 10001 unless it was told otherwise),
            all of whose machines have this version of halflife, and the sweep's folder under the same path.
        cpus_per_run: processors of a run on Ray, which are its threads; None for 1.
        gpus_per_run: GPUs of a run on Ray, 0 to 1 (0.5: two share one); None for 1 where the cluster has any, else 0.

    Raises:
        ValueError: another name or number, no Ray here, or nothing that answers at the address.
    """
    if on == "local":
        if cpus_per_run is not None or gpus_per_run is not None:
            raise ValueError("processors and GPUs per run are for --on ray; --on local has all of this machine's")
        return one_by_one
    return Pool(on, 1 if cpus_per_run is None else cpus_per_run, gpus_per_run)


@dataclass(frozen=True)
class Pool:
    """Does the jobs of a sweep as tasks of Ray; see `executor`.

    An error of one run ends neither the others nor the queue: it is shown at once, and raised in the end.
    """

    address: str
    cpus: int = 1
    gpus: float | None = None

    def __post_init__(self) -> None:
        place = re.fullmatch(r"ray(://(?P<host>[^/:]+):(?P<port>\d+))?", self.address)
        if place is None:
            raise ValueError(f"runs are done on local, ray or ray://host:port; got {self.address!r}")
        if self.cpus < 1 or not 0 <= (self.gpus or 0) <= 1:
            raise ValueError(f"a run has at least 1 processor and 0 to 1 GPUs; got {self.cpus} and {self.gpus}")
        if importlib.util.find_spec("ray") is None:
            raise ValueError(f"{self.address} needs Ray: pip install 'halflife[sweep]'")
        if place["host"]:
            try:  # Ray itself would try for half a minute
                socket.create_connection((place["host"], int(place["port"])), timeout=5).close()
            except (OSError, OverflowError) as error:
                raise ValueError(f"nothing answers at {self.address}: {error}") from None

    def __call__(self, jobs: Sequence[Job], show: bool) -> None:
        """Does them.

        Raises:
            ValueError: a run raised one, or this machine is too small for a run.
            RuntimeError: a run ended with another error, or its worker died `RETRIES` + 1 times.
        """
        if not jobs:
            return
        jobs = [replace(job, folder=job.folder.absolute()) for job in jobs]
        for job in jobs:
            job.folder.mkdir(parents=True, exist_ok=True)
        with _cluster(self.address):
            failed = _finish(jobs, self._resources(), show)
        if failed:
            error = next(iter(failed.values()))
            kind = ValueError if all(isinstance(e, ValueError) for e in failed.values()) else RuntimeError
            raise kind("; ".join(f"{name}: {_reason(e)}" for name, e in failed.items())) from error

    def _resources(self) -> dict[str, float]:
        """What Ray is to give to each run."""
        import ray

        found = ray.cluster_resources()
        cpus, gpus = found.get("CPU", 0), found.get("GPU", 0)
        wanted = min(gpus, 1) if self.gpus is None else self.gpus
        # A cluster may grow when it is asked to; this machine does not, and Ray would wait for ever.
        if self.address == "ray" and (cpus < self.cpus or gpus < wanted):
            raise ValueError(
                f"there are {cpus:g} processors and {gpus:g} GPUs here; a run is to have {self.cpus} and {wanted:g}"
            )
        return {"num_cpus": self.cpus, "num_gpus": wanted}


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    """A connection to Ray that ends with the context; a local one that is there already is used, and stays."""
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
    except Exception as error:  # a bare one where it does not start in time
        hint = "" if address == "ray" else " (a cluster with a token needs RAY_AUTH_MODE=token here)"
        raise ValueError(f"no Ray at {address}: {_first_line(error)}{hint}") from error
    try:
        yield
    finally:
        ray.shutdown()


def work(job: Job, threads: int) -> dict[str, Any]:
    """The task, in a worker process; returns the run's result.

    Raises:
        ValueError: the machine does not see the folder; or see `perform`.
    """
    if not job.folder.is_dir():
        raise ValueError(f"{socket.gethostname()} has no {job.folder}; all machines must share the sweep's file system")
    torch.set_num_threads(threads)
    return perform(job, patience=PATIENCE)


def _finish(jobs: Sequence[Job], resources: Mapping[str, float], show: bool) -> dict[str, Exception]:
    """Does all of the jobs; those that failed, with their errors. An interrupt ends what is running."""
    import ray
    from ray.exceptions import RayError

    task = ray.remote(work).options(**resources, max_retries=RETRIES, retry_exceptions=[Stopped])
    tasks = {task.remote(job, int(resources["num_cpus"])): job for job in jobs}
    failed: dict[str, Exception] = {}
    board = Board(jobs, show)
    try:
        with board.progress:
            while tasks:
                for ref in ray.wait(list(tasks), timeout=1.0)[0]:
                    job = tasks.pop(ref)
                    try:
                        result = ray.get(ref)
                        board.done(job, result.get("diverged") or f"validation {result['validation']:.1%}")
                    except RayError as error:
                        failed[job.name] = error
                        board.done(job, f"failed: {_reason(error)}")
                board.update()
    finally:
        for ref in tasks:
            ray.cancel(ref, force=True)
    return failed


def _reason(error: BaseException) -> str:
    """A line: the run's own error, or Ray's."""
    cause = getattr(error, "cause", None) or error
    return _first_line(cause) if isinstance(cause, ValueError) else f"{type(cause).__name__}: {_first_line(cause)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


class Board:
    """Bars for all runs together and for each that is running; one that is done leaves a line.

    It reads the folders: a run writes `run.json` when it begins, and the steps of `metrics.jsonl`.

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
        self.jobs = list(jobs)
        self.steps = {job.name: _step(job.folder) for job in jobs}
        self.began = {job.name: _began(job.folder) for job in jobs}
        self.bars: dict[str, TaskID] = {}
        total = sum(job.config.steps for job in jobs)
        self.all = self.progress.add_task("all runs", total=total, completed=sum(self.steps.values()), info="")

    def update(self) -> None:
        """Draws what the folders say now."""
        for job in self.jobs:
            if (began := _began(job.folder)) != self.began[job.name]:
                self._begin(job)
                self.began[job.name] = began
            if job.name in self.bars:
                self.steps[job.name] = _step(job.folder)
                self.progress.update(self.bars[job.name], completed=self.steps[job.name])
        running, done = len(self.bars), len(self.steps) - len(self.jobs)
        info = f"{running} running, {len(self.jobs) - running} queued, {done} done"
        self.progress.update(self.all, completed=sum(self.steps.values()), info=info)

    def done(self, job: Job, what: str) -> None:
        """Takes a run off the board."""
        self.jobs.remove(job)
        self.steps[job.name] = job.config.steps
        if job.name in self.bars:
            self.progress.remove_task(self.bars.pop(job.name))
        self._say(job, what)

    def _begin(self, job: Job) -> None:
        if job.name in self.bars:
            self._say(job, "its worker was lost; going on from its last checkpoint")
            self.progress.remove_task(self.bars.pop(job.name))
        self.bars[job.name] = self.progress.add_task(
            job.name, total=job.config.steps, completed=_step(job.folder), info=""
        )

    def _say(self, job: Job, what: str) -> None:
        if not self.progress.disable:
            self.progress.console.print(f"{job.name}: {what}", markup=False, highlight=False, soft_wrap=True)


def _began(folder: Path) -> int:
    """When the run in `folder` began last; 0 if it has not."""
    try:
        return (folder / "run.json").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _step(folder: Path) -> int:
    """The last step that a run has logged."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            found = re.findall(rb'"step": (\d+)', file.read())
    except FileNotFoundError:
        return 0
    return int(found[-1]) if found else 0
