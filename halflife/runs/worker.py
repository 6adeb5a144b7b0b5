"""A run in a worker process of Ray or Slurm, and the sign of life that the worker leaves in the folder of the run."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halflife.runs.sweep import Job, run_job

WORKER = ".worker"  # the file with the sign of life: machine, process, node of Ray, and a count
PULSE_S = 2.0  # seconds between two signs of life
BUSY_SHARE = 0.002  # the least share of a processor that the main thread of a run takes while it goes on
GRACE_S = 30.0  # seconds in which workers that are asked to end must have saved
PATIENCE = 60.0  # seconds; a file server can hold the lock of a dead machine for about this long


class SignOfLife(NamedTuple):
    """What the file `WORKER` holds."""

    host: str  # name of the machine
    pid: int
    node: str  # id of the node in Ray
    count: int  # rises while the process computes


def run_job_in_worker(job: Job, threads: int) -> dict[str, Any]:
    """Run one job in a worker process; returns its result, and raises as `run_job`."""
    if not job.folder.is_dir():
        raise ValueError(
            f"{socket.gethostname()} has no {job.folder}; all machines must share the file system of the sweep"
        )
    torch.set_num_threads(threads)
    with signs_of_life(job.folder / WORKER):
        return run_job(job, patience=PATIENCE)


@contextmanager
def signs_of_life(path: Path) -> Iterator[None]:
    """Write a sign of life into `path` every `PULSE_S` seconds in which this thread has computed. Delete it at the end.

    A process that is stopped, that gets no processor, or that waits for ever writes none.
    """
    ray = sys.modules.get("ray")  # a worker of Slurm may have no Ray
    node = ray.get_runtime_context().get_node_id() if ray and ray.is_initialized() else "none"
    host, pid = socket.gethostname(), os.getpid()
    clock = _clock_of_this_thread()
    ended = threading.Event()

    def write(count: int) -> None:
        beside = path.with_name(f"{path.name}.tmp")  # unlike in `write_text`, the disk is not waited for
        beside.write_text(f"{host} {pid} {node} {count}", encoding="utf-8")
        os.replace(beside, path)

    def watch() -> None:
        count, used = 0, clock()
        while not ended.wait(PULSE_S):
            if (now := clock()) - used >= BUSY_SHARE * PULSE_S:
                count, used = count + 1, now
                with suppress(OSError):  # a full disk stops the run itself, with a message
                    write(count)

    write(0)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)


def read_sign(job: Job) -> SignOfLife | None:
    """The last sign of life of the worker that does a job; None if there is no worker."""
    try:
        host, pid, node, count = (job.folder / WORKER).read_text(encoding="utf-8").split()
        return SignOfLife(host, int(pid), node, int(count))
    except (OSError, ValueError):
        return None


class Silence:
    """How long the workers of some runs have given no sign of life; `allowed` is in seconds."""

    def __init__(self, allowed: float) -> None:
        self.allowed = allowed
        self._seen: dict[Path, tuple[SignOfLife, float]] = {}
        self._last = time.monotonic()

    def too_long(self, jobs: Iterable[Job]) -> list[tuple[Job, SignOfLife]]:
        """The jobs whose workers were silent for too long. Call this at least once in `PULSE_S` seconds.

        The time in which this process itself stood still does not count.
        """
        now = time.monotonic()
        elapsed, self._last = min(now - self._last, 2 * PULSE_S), now
        late = []
        for job in jobs:
            if (sign := read_sign(job)) is None:
                continue
            before, silent = self._seen.get(job.folder, (None, 0.0))
            silent = silent + elapsed if sign == before else 0.0
            self._seen[job.folder] = sign, silent
            if silent > self.allowed:
                late.append((job, sign))
                del self._seen[job.folder]
        return late


def stop_workers(jobs: Iterable[Job]) -> None:
    """Ask the workers of this machine to save and end, and wait until they have done so, at most `GRACE_S` seconds."""
    asked = [job.folder / WORKER for job in jobs if (sign := read_sign(job)) and send(sign, signal.SIGTERM)]
    deadline = time.monotonic() + GRACE_S
    while any(path.exists() for path in asked) and time.monotonic() < deadline:
        time.sleep(0.1)


def send(sign: SignOfLife, number: int) -> bool:
    """Send a signal to the process that gave a sign of life. Returns whether it is a worker of this machine."""
    with suppress(OSError):
        # The number may have gone to another process by now; Ray names its workers.
        if sign.host == socket.gethostname() and Path(f"/proc/{sign.pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(sign.pid, number)
            return True
    return False


def _clock_of_this_thread() -> Callable[[], float]:
    """A clock of the processor time of the calling thread, which any thread may read; elsewhere that of the process."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time
    return partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))
