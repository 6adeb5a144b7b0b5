"""Many runs of a sweep at once, each as a task of Ray, on this machine or on a cluster.

The state of a run is in its folder alone. If the worker of a run is killed or asked to end, Ray starts the run again on
any worker, and the run continues from its last checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from halflife.extras import require
from halflife.files import METRICS_JSONL, RUN_JSON, write_text
from halflife.runs.sweep import Job, Runner, one_by_one, reason, run_job
from halflife.training.config import SIGNALS
from halflife.training.fit import StoppedBySignal

RETRIES = 5  # of a run whose worker died; each repeats at most the steps since the last checkpoint
WORKER = ".worker"  # in the folder of a run that a worker is doing: its machine and process
GRACE = 30.0  # seconds in which workers that are asked to end must have saved
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

    If one run fails, the others still run. Its error is printed at once.
    """

    address: str
    cpus: int = 1
    gpus: float | None = None

    def __post_init__(self) -> None:
        place = re.fullmatch(r"ray(://(?P<host>[^/:]+):(?P<port>\d+))?", self.address)
        if place is None:
            raise ValueError(f"runs can be done on local, ray, ray://host:port or slurm; got {self.address!r}")
        if self.cpus < 1 or not 0 <= (self.gpus or 0) <= 1:
            raise ValueError(f"a run needs at least 1 processor and 0 to 1 GPUs; got {self.cpus} and {self.gpus}")
        require(f"--on {self.address}", "ray")
        if place["host"]:
            try:  # Ray itself retries for half a minute
                socket.create_connection((place["host"], int(place["port"])), timeout=5).close()
            except (OSError, OverflowError) as error:
                raise ValueError(f"nothing answers at {self.address}: {error}") from None

    def __call__(self, jobs: Sequence[Job], show: bool) -> dict[str, str]:
        """Run the jobs, and return the reasons of those that failed, by label.

        A run fails if it raises an error, or if its worker died `RETRIES` + 1 times.

        Raises:
            ValueError: this machine is too small for a run, or no Ray answers.
        """
        if not jobs:
            return {}
        jobs = [replace(job, folder=job.folder.absolute()) for job in jobs]
        for job in jobs:
            job.folder.mkdir(parents=True, exist_ok=True)
        with _cluster(self.address), _signals_raise():
            return _run_all(jobs, self._resources(), show)

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
def _signals_raise() -> Iterator[None]:
    """Raise `StoppedBySignal` on a signal to end. Ray's handler would end the process without a word to the runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: object) -> None:
        raise StoppedBySignal("the comparison was stopped", number)

    previous = {number: signal.signal(number, stop) for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    """Connect to Ray, and disconnect at the end. A local Ray that runs already is used, and keeps running.

    The servers of Ray listen on all interfaces, and run what they are sent. A cluster that starts here therefore gets a
    random token, without which it refuses every request.
    """
    if address == "ray" and "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if address == "ray" and ray.is_initialized():
        yield
        return
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
    worker = job.folder / WORKER
    write_text(worker, f"{socket.gethostname()} {os.getpid()}")
    try:
        return run_job(job, patience=PATIENCE)
    finally:
        worker.unlink(missing_ok=True)


def _stop_workers(jobs: Iterable[Job]) -> None:
    """Ask the workers of this machine to save and end, and wait until they have done so, at most `GRACE` seconds."""
    asked = []
    for job in jobs:
        with suppress(OSError, ValueError):
            host, pid = (job.folder / WORKER).read_text(encoding="utf-8").split()
            # The number may have gone to another process by now; Ray names its workers.
            if host == socket.gethostname() and Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                os.kill(int(pid), signal.SIGTERM)
                asked.append(job.folder / WORKER)
    deadline = time.monotonic() + GRACE
    while any(path.exists() for path in asked) and time.monotonic() < deadline:
        time.sleep(0.1)


def _run_all(jobs: Sequence[Job], resources: Mapping[str, float], show: bool) -> dict[str, str]:
    """Run all jobs, and return the reasons of those that failed, by label. An interrupt cancels the running jobs."""
    import ray
    from ray.exceptions import RayError

    task = ray.remote(run_job_in_worker).options(**resources, max_retries=RETRIES, retry_exceptions=[StoppedBySignal])
    tasks = {task.remote(job, int(resources["num_cpus"])): job for job in jobs}
    failed: dict[str, str] = {}
    board = ProgressBoard(jobs, show)
    try:
        with board.progress:
            while tasks:
                for ref in ray.wait(list(tasks), timeout=1.0)[0]:
                    job = tasks.pop(ref)
                    try:
                        board.finish(job, _outcome(job, ray.get(ref)))
                    except RayError as error:
                        failed[job.name] = reason(getattr(error, "cause", None) or error)
                        board.finish(job, f"failed: {failed[job.name]}")
                board.update()
    except (KeyboardInterrupt, StoppedBySignal):
        _stop_workers(tasks.values())
        raise
    finally:
        for ref in tasks:
            ray.cancel(ref, force=True)
    return failed


def _outcome(job: Job, result: dict[str, Any]) -> str:
    """The line that a finished run leaves."""
    form = {"accuracy": ".1%", "loss": ".3f"}[job.config.measure]
    return result.get("diverged") or f"validation {result['validation']:{form}}"


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
