"""Many runs of a sweep at once, each as a job of Slurm, which submitit submits and watches.

The state of a run is in its folder alone. If Slurm ends a job early (a time limit, preemption, a node that fails), the
waiting command submits the run again, and the run continues from its last checkpoint. If the command itself ends, the
jobs stay in Slurm, and a resumed command waits for them.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from halflife.extras import require
from halflife.files import write_text
from halflife.registry import unknown
from halflife.runs.board import ProgressBoard, last_step, outcome
from halflife.runs.interrupts import signals_noted
from halflife.runs.pool import RETRIES
from halflife.runs.sweep import Job, first_line, prepared, reason
from halflife.runs.worker import run_job_in_worker
from halflife.training.fit import StoppedBySignal

JOB_ID = ".slurm"  # in the folder of a run that was submitted: the number of its job
CHECK_SECONDS = 60.0  # seconds between questions to Slurm about jobs that have no result yet
ACTIVE_STATES = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING", "COMPLETING")


@dataclass(frozen=True)
class SlurmRunner:
    """Runs the jobs of a sweep as jobs of Slurm. It waits for all of them; an error of one does not stop the others."""

    # "name=value", with the names of sbatch: "time" in minutes, which must be given, "partition", "account", "mem",
    # "qos", "constraint", "gres", …
    options: tuple[str, ...]
    cpus: int = 1  # processors, and threads, of a run
    gpus: float | None = None  # GPUs of a run, a whole number

    def __post_init__(self) -> None:
        require("--on slurm", "submitit")
        if shutil.which("srun") is None or shutil.which("sbatch") is None:
            raise ValueError("--on slurm needs Slurm's commands, which are not here; use a login node of the cluster")
        if self.cpus < 1 or (self.gpus or 0) < 0 or (self.gpus or 0) % 1:
            raise ValueError(f"a job needs at least 1 processor and whole GPUs; got {self.cpus} and {self.gpus}")
        self._parameters()

    def __call__(self, jobs: Sequence[Job], show: bool) -> dict[str, str]:
        """Run the jobs, and return the reasons of those that failed, by label.

        A run fails if it raises an error, or if Slurm ended it `RETRIES` + 1 times without a new checkpoint or log.
        """
        if not jobs:
            return {}
        jobs = prepared(jobs)
        # submitit writes its files into the folder of the sweep, a folder for each job (%j).
        logs = (jobs[0].execution.sweep or jobs[0].folder).absolute() / "slurm" / "%j"
        executor = _submitit().SlurmExecutor(folder=logs)
        executor.update_parameters(**self._parameters())
        with signals_noted() as check:
            return _Queue(executor, self.cpus).run(jobs, show, check)

    def _parameters(self) -> dict[str, Any]:
        known = sorted(_submitit().SlurmExecutor._valid_parameters())
        given: dict[str, Any] = {}
        for option in self.options:
            name, equals, value = option.partition("=")
            name = name.replace("-", "_")
            if not equals or name not in known:
                raise unknown("option of Slurm (name=value)", option, known)
            given[name] = value
        if not given.get("time", "").isdecimal():
            raise ValueError("--on slurm needs the time limit of a run in minutes: --slurm time=720 partition=…")
        gpus = {} if self.gpus is None else {"gpus_per_node": int(self.gpus)}
        return {"job_name": "halflife", "cpus_per_task": self.cpus, **gpus, **given, "time": int(given["time"])}


def _submitit() -> Any:
    """The package. Before a time limit, Slurm sends the signal that is set here, on which a run saves and stops."""
    os.environ.setdefault("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    return import_module("submitit")


def run_in_slurm(job: Job, threads: int) -> tuple[str, Any]:
    """Run one job in a job of Slurm. It returns ("done", its result) or ("failed", the reason).

    If a signal has ended it, so that it can continue, it returns ("stopped", …).
    """
    try:
        return "done", run_job_in_worker(job, threads)
    except StoppedBySignal as stopped:
        return "stopped", str(stopped)
    except Exception as error:
        traceback.print_exc()
        return "failed", reason(error)


class _Queue:
    """The submitted runs of one sweep."""

    def __init__(self, executor: Any, threads: int) -> None:
        self.executor, self.threads = executor, threads
        self.handles: dict[str, Any] = {}  # label of a run → submitit's job
        self.attempts: dict[str, tuple[int, int]] = {}  # label → last step at the submission, times without progress

    def run(self, jobs: Sequence[Job], show: bool, check: Callable[[], None]) -> dict[str, str]:
        """Submit the jobs, or find them in Slurm, and wait until all have ended. Returns the reasons of failures.

        `check` raises an error after a signal to end.
        """
        failed: dict[str, str] = {}
        board, asked = ProgressBoard(jobs, show), 0.0
        waiting = {job.name: job for job in jobs}
        try:
            with board.progress:
                for job in jobs:
                    self.handles[job.name] = self._attach(job) or self._submit(job)
                while waiting:
                    ask = time.monotonic() - asked > CHECK_SECONDS
                    asked = time.monotonic() if ask else asked
                    for job in [job for name, job in waiting.items() if self.handles[name].done(force_check=ask)]:
                        kind, value = self._collect(job)
                        if kind == "stopped" and self._may_retry(job):
                            self._submit(job)
                            continue
                        del waiting[job.name]
                        (job.folder / JOB_ID).unlink(missing_ok=True)
                        if kind == "done":
                            board.finish(job, outcome(job, value))
                        else:
                            failed[job.name] = value
                            board.finish(job, f"failed: {value}")
                    board.update()
                    check()
                    time.sleep(1.0)
        except (KeyboardInterrupt, StoppedBySignal):
            ids = " ".join(self.handles[name].job_id for name in waiting if name in self.handles)
            print(f"\nthe jobs stay in Slurm, and --resume waits for them; to end them: scancel {ids}", file=sys.stderr)
            raise
        return failed

    def _attach(self, job: Job) -> Any | None:
        """The job of Slurm that an earlier command submitted for this run, if it waits or runs."""
        with suppress(FileNotFoundError):
            number = (job.folder / JOB_ID).read_text(encoding="utf-8").strip()
            handle = _submitit().SlurmJob(folder=self.executor.folder, job_id=number, tasks=[0])
            state = handle.watcher.get_state(number, mode="force")
            if state.split()[:1] and state.split()[0] in ACTIVE_STATES:
                return handle
        return None

    def _submit(self, job: Job) -> Any:
        handle = self.executor.submit(run_in_slurm, job, self.threads)
        write_text(job.folder / JOB_ID, handle.job_id)
        self.handles[job.name] = handle
        return handle

    def _collect(self, job: Job) -> tuple[str, Any]:
        """What a job that has ended returned. A job without a result was ended by Slurm, and can continue."""
        errors = import_module("submitit.core.utils")
        try:
            return self.handles[job.name].result()
        except (errors.FailedJobError, errors.UncompletedJobError) as error:
            where = self.handles[job.name].paths.stderr
            return "stopped", f"Slurm ended the job without a result ({first_line(error)}); see {where}"

    def _may_retry(self, job: Job) -> bool:
        """Whether the job may be resubmitted: its run made progress, or has `RETRIES` attempts left."""
        step = last_step(job.folder)
        before, tried = self.attempts.get(job.name, (step, 0))
        tried = tried if before == step else 0
        self.attempts[job.name] = (step, tried + 1)
        return tried < RETRIES
