"""Many runs of a sweep at once, each as a task of Ray, on this machine or on a cluster.

The state of a run is in its folder alone. If the worker of a run is killed, asked to end, or gives no sign of life, the
run starts again on any worker and continues from its last checkpoint. If the servers of a cluster that started here
die, another cluster starts and does the rest.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from halflife.extras import require
from halflife.runs.board import ProgressBoard, outcome
from halflife.runs.cluster import marked, servers
from halflife.runs.interrupts import signals_noted
from halflife.runs.sweep import Job, Runner, first_line, one_by_one, prepared, reason
from halflife.runs.worker import WORKER, SignOfLife, Silence, read_sign, run_job_in_worker, send, stop_workers
from halflife.training.fit import StoppedBySignal

RETRIES = 5  # of a run whose worker died, and of a cluster; a run repeats at most the steps since its last checkpoint
WORKER_TIMEOUT = 600.0  # seconds
# Ray gives its workers the lowest priority but four, with which a busy machine starves them.
OWN_CLUSTER = {
    "address": "local", "include_dashboard": False, "object_store_memory": 100 << 20,  # bytes
    "_system_config": {"worker_niceness": 0},
}  # fmt: skip


def make_runner(
    on: str = "local", *, cpus_per_run: int | None = None, gpus_per_run: float | None = None,
    worker_timeout: float | None = None,
) -> Runner:  # fmt: skip
    """The function that runs the jobs of a sweep.

    Args:
        on: "local" runs one job after the other in this process. "ray" runs as many jobs at once as this machine has
            room for. "ray://host:port" runs them on that cluster (the port is that of its client server, 10001 by
            default); all of its machines need this version of halflife, and the folder of the sweep under the same
            path.
        cpus_per_run: processors, and threads, of a run on Ray; None for 1.
        gpus_per_run: GPUs of a run on Ray, from 0 to 1 (with 0.5, two runs share one); None for 1 if the cluster has
            GPUs, otherwise 0.
        worker_timeout: seconds without a sign of life after which a worker is killed; None for `WORKER_TIMEOUT`. A
            worker gives none while it is stopped, gets no processor, or waits.
    """
    if on == "local":
        if not cpus_per_run is gpus_per_run is worker_timeout is None:
            raise ValueError(
                "--cpus-per-run, --gpus-per-run and --worker-timeout need --on ray; --on local uses the whole machine"
            )
        return one_by_one
    return Pool(
        on, 1 if cpus_per_run is None else cpus_per_run, gpus_per_run,
        WORKER_TIMEOUT if worker_timeout is None else worker_timeout,
    )  # fmt: skip


@dataclass(frozen=True)
class Pool:
    """Runs the jobs of a sweep as tasks of Ray; see `make_runner` for the fields.

    If one run fails, the others still run. Its error is printed at once.
    """

    address: str
    cpus: int = 1
    gpus: float | None = None
    worker_timeout: float = WORKER_TIMEOUT

    def __post_init__(self) -> None:
        place = re.fullmatch(r"ray(://(?P<host>[^/:]+):(?P<port>\d+))?", self.address)
        if place is None:
            raise ValueError(f"runs can be done on local, ray, ray://host:port or slurm; got {self.address!r}")
        if self.cpus < 1 or not 0 <= (self.gpus or 0) <= 1:
            raise ValueError(f"a run needs at least 1 processor and 0 to 1 GPUs; got {self.cpus} and {self.gpus}")
        if not self.worker_timeout >= 10:
            raise ValueError(f"the worker timeout must be at least 10 seconds; got {self.worker_timeout}")
        require(f"--on {self.address}", "ray")
        if place["host"]:
            try:  # Ray itself retries for half a minute
                socket.create_connection((place["host"], int(place["port"])), timeout=5).close()
            except (OSError, OverflowError) as error:
                raise ValueError(f"nothing answers at {self.address}: {error}") from None

    def __call__(self, jobs: Sequence[Job], show: bool) -> dict[str, str]:
        """Run the jobs, and return the reasons of those that failed, by label.

        A run fails if it raises an error, or if its worker died `RETRIES` + 1 times. The rest fails if a cluster that
        others have started ends, or if ours ends `RETRIES` + 1 times.

        Raises:
            ValueError: this machine is too small for a run, or no Ray answers.
        """
        if not jobs:
            return {}
        own = self.address == "ray" and not _is_connected()
        sweep = _Sweep(prepared(jobs), self.worker_timeout, show)
        for _ in range(1 + RETRIES * own):
            if sweep.waiting:
                with suppress(_ClusterLost), _cluster(self.address) as alive, signals_noted() as check:
                    sweep.run(self._resources(), alive, check)
        return sweep.failed | {job.name: "the Ray cluster ended" for job in sweep.waiting}

    def _resources(self) -> dict[str, float]:
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
def _cluster(address: str) -> Iterator[Callable[[], bool]]:
    """Connect to Ray, and disconnect at the end. A local Ray that runs already is used, and keeps running.

    The servers of Ray listen on all interfaces, and run what they are sent. A cluster that starts here therefore gets a
    random token, without which it refuses every request. It ends with this process, however this process ends. The
    yielded function tells whether its servers have all survived.
    """
    if address == "ray" and "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "ray" and _is_connected():
        yield lambda: True
    elif address == "ray":
        with marked() as mark, _connected(**OWN_CLUSTER):
            started = servers(mark)
            yield lambda: servers(mark) == started
    else:
        with _connected(address=address):
            yield lambda: True


def _is_connected() -> bool:
    """Whether this process uses Ray already. This does not import Ray, which reads the token when it is imported."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


@contextmanager
def _connected(**options: Any) -> Iterator[None]:
    """`ray.init` with these options, and `ray.shutdown`."""
    import ray

    address = options["address"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises a bare Exception if it does not start in time
        hint = "" if address == "local" else " (a cluster with a token needs RAY_AUTH_MODE=token here)"
        raise ValueError(f"no Ray at {address}: {first_line(error)}{hint}") from error
    try:
        yield
    finally:
        ray.shutdown()


class _ClusterLost(Exception):
    """The servers of the cluster are gone, or the connection to them."""


class _Sweep:
    """The jobs of a sweep that have not ended, over as many clusters as it takes."""

    def __init__(self, jobs: Sequence[Job], timeout: float, show: bool) -> None:
        self.waiting = list(jobs)
        self.attempts: Counter[str] = Counter()
        self.failed: dict[str, str] = {}  # reasons by label
        self.board = ProgressBoard(jobs, show)
        self.timeout = timeout  # seconds without a sign of life after which a worker counts as dead
        self.running: dict[Any, Job] = {}  # by the references of Ray's tasks, also those that wait for a worker

    def run(self, resources: Mapping[str, float], alive: Callable[[], bool], check: Callable[[], None]) -> None:
        """Run the jobs on the cluster that this process is connected to. An interrupt cancels the running jobs.

        `alive` tells whether the servers of the cluster live, and `check` raises an error after a signal to end.

        Raises:
            _ClusterLost: the jobs in `waiting` have not ended.
        """
        import ray

        task = ray.remote(run_job_in_worker).options(**resources, max_retries=0)
        silence = Silence(self.timeout)
        try:
            with self.board.progress:
                while self.waiting or self.running:
                    for job in self.waiting:
                        (job.folder / WORKER).unlink(missing_ok=True)  # of a worker that was killed
                        self.running[task.remote(job, int(resources["num_cpus"]))] = job
                    self.waiting = []
                    for ref in ray.wait(list(self.running), timeout=1.0)[0]:
                        self._take(ref, alive)
                    check()
                    if not alive():
                        raise _ClusterLost
                    for job, sign in silence.too_long(self.running.values()):
                        self.board.note(job, f"no sign of life for {self.timeout:g} s; its worker is killed")
                        _kill_worker(sign)
                    self.board.update()
        except (KeyboardInterrupt, StoppedBySignal):
            stop_workers(self.running.values())
            raise
        except (ConnectionError, _ClusterLost) as error:
            lost, self.running = self.running.values(), {}
            for job in lost:
                self._again(job, "its cluster ended", started=read_sign(job) is not None)
            raise _ClusterLost from error
        finally:
            for ref in self.running:
                ray.cancel(ref, force=True)

    def _take(self, ref: Any, alive: Callable[[], bool]) -> None:
        """Note the outcome of a task that has ended, or let its job wait for another attempt."""
        import ray
        from ray.exceptions import LocalRayletDiedError, RayError, RayTaskError

        job = self.running[ref]
        try:
            result: Any = ray.get(ref)
        except RayTaskError as error:
            del self.running[ref]
            if isinstance(error.cause, StoppedBySignal):
                self._again(job, str(error.cause))
            else:
                self._give_up(job, reason(error.cause or error))
        except RayError as error:
            if isinstance(error, LocalRayletDiedError) or not alive():
                raise _ClusterLost from error
            del self.running[ref]
            self._again(job, "its worker died")
        else:
            del self.running[ref]
            self.board.finish(job, outcome(job, result))

    def _again(self, job: Job, why: str, started: bool = True) -> None:
        """Let a job wait for another attempt, which continues from its last checkpoint, unless it had all of them."""
        self.attempts[job.name] += started
        if self.attempts[job.name] > RETRIES:
            self._give_up(job, f"{why}, {self.attempts[job.name]} times in all; its checkpoints are kept")
        else:
            self.waiting.append(job)

    def _give_up(self, job: Job, why: str) -> None:
        self.failed[job.name] = why
        self.board.finish(job, f"failed: {why}")


def _kill_worker(sign: SignOfLife) -> None:
    """Kill a worker on any machine of the cluster. Ray then ends its task with an error."""
    if not send(sign, signal.SIGKILL):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = NodeAffinitySchedulingStrategy(sign.node, soft=False)
        ray.remote(send).options(num_cpus=0, scheduling_strategy=place).remote(sign, signal.SIGKILL)
