"""Many runs at once on Ray give the table of runs one after the other, even if workers die."""

import contextlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import ray
from filelock import FileLock
from helpers import assert_raises, cases
from ray.exceptions import RayTaskError, WorkerCrashedError
from tiny_runs import SMALL, rows_of

from halflife.cli import main
from halflife.extras import install
from halflife.lab.experiments import compare as comparison
from halflife.runs import cluster as cluster_module
from halflife.runs import pool, worker
from halflife.runs.sweep import Cell, Job, run_job
from halflife.runs.task_run import RunConfig
from halflife.training import callbacks
from halflife.training.fit import StoppedBySignal

MODELS = ["mamba2", "llama"]


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # workers import functions of this file
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = new(tmp_path_factory.mktemp("whole") / "x")
    comparison.run_comparison(folder, show=False)
    return folder


def new(folder, models=MODELS, seeds=2):
    return comparison.create_comparison(models, seeds=seeds, learning_rates=[1e-2], settings=SMALL, output=folder)


def result(folder):
    found = json.loads((folder / "result.json").read_text())
    found.pop("tokens_per_second")
    return found, (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_sweep_on_ray_is_that_of_one_process(cluster, whole, tmp_path, monkeypatch):
    folder = new(tmp_path / "ray")
    monkeypatch.chdir(tmp_path)  # workers have another folder, so paths must be absolute
    rows = comparison.run_comparison(folder.relative_to(tmp_path), show=False, runner=pool.make_runner("ray"))
    assert [row["model"] for row in rows] == ["mamba2"] * 18 + ["llama"] * 18
    assert rows_of(folder) == rows_of(whole)
    assert (folder / "report.html").exists()
    for cell in (Cell(model, 1e-2, seed).folder for model in MODELS for seed in (0, 1)):
        assert result(folder / cell) == result(whole / cell)


def dies_once(job, threads, how):
    """`run_job_in_worker`, whose first process gets a signal after step 3 of 6. Each attempt notes its first step."""
    starts = job.folder / "starts"

    class Dying(callbacks.Metrics):
        def on_train_begin(self, args, state, control, **kwargs):
            super().on_train_begin(args, state, control, **kwargs)
            with starts.open("a") as file:
                file.write(f"{state.global_step}\n")

        def on_step_end(self, args, state, control, **kwargs):
            super().on_step_end(args, state, control, **kwargs)
            if state.global_step == 3 and len(starts.read_text().split()) == 1:
                os.kill(os.getpid(), how)

    with mock.patch.object(callbacks, "Metrics", Dying):
        return pool.run_job_in_worker(job, threads)


def killed(job, threads):
    return dies_once(job, threads, signal.SIGKILL)


def told_to_end(job, threads):
    return dies_once(job, threads, signal.SIGTERM)


def stands_still(job, threads):
    return dies_once(job, threads, signal.SIGSTOP)


# A run saves every 2 steps, and when it gets SIGTERM.
@pytest.mark.slow
@cases("works, starts", (killed, ["0", "2"]), (told_to_end, ["0", "3"]), (stands_still, ["0", "2"]))
def test_a_run_whose_worker_dies_goes_on_from_its_checkpoint(cluster, whole, tmp_path, monkeypatch, works, starts):
    monkeypatch.setattr(pool, "run_job_in_worker", works)
    folder = new(tmp_path / "x", ["mamba2"], seeds=1)
    comparison.run_comparison(folder, show=False, runner=pool.make_runner("ray", worker_timeout=15))
    cell = Cell("mamba2", 1e-2, 0).folder
    assert (folder / cell / "starts").read_text().split() == starts
    assert result(folder / cell) == result(whole / cell)


def fails_for_seed_0(job, threads):
    if job.config.seed == 0:
        with (job.folder / "attempts").open("a") as file:
            file.write("x")
        raise ValueError("the moon is full")
    return pool.run_job_in_worker(job, threads)


@pytest.mark.slow
def test_an_error_of_one_run_names_it_and_leaves_the_others_alone(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pool, "run_job_in_worker", fails_for_seed_0)
    folder = new(tmp_path / "x", ["mamba2"])
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--resume", str(folder), "--on", "ray"])
    assert stop.value.code == 3
    out, error = capsys.readouterr()
    assert error == "halflife: mamba2 lr 0.01 seed 0 failed: the moon is full\n"
    assert "mamba2 lr 0.01 seed 0: failed: the moon is full" in out
    assert "1 running" in out or "2 done" in out
    assert (folder / Cell("mamba2", 1e-2, 0).folder / "attempts").read_text() == "x"  # there was no second attempt
    assert (folder / Cell("mamba2", 1e-2, 1).folder / "result.json").exists()


@pytest.mark.slow
def test_an_interrupt_ends_the_tasks_and_says_how_to_go_on(cluster, whole, tmp_path, monkeypatch, capsys):
    folder = new(tmp_path / "x")

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool.ProgressBoard, "finish", interrupt)  # at most one other run is active, and two are queued
        with pytest.raises(SystemExit) as stop:
            main(["compare", "--resume", str(folder), "--on", "ray", "--cpus-per-run", "1"])
    assert stop.value.code == 130
    assert f"compare --resume {folder} --on ray --cpus-per-run 1" in capsys.readouterr().err
    left = 4 - len(list(folder.glob("*/*/result.json")))
    assert left >= 2
    time.sleep(3)
    assert 4 - len(list(folder.glob("*/*/result.json"))) == left  # no run continues by itself
    comparison.run_comparison(folder, show=False, runner=pool.make_runner("ray"))
    assert rows_of(folder) == rows_of(whole)


def descendants(mark):
    """The processes that inherited a variable: number → command line, with the names of Ray's agents."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"MARK_OF_THE_TEST={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
    return found


@contextlib.contextmanager
def own_cluster(folder, tmp_path, runs=4):
    """A comparison on a cluster of its own, once all runs that fit have begun; gives the process and the mark."""
    mark = tmp_path.name + secrets.token_hex(4)
    command = [sys.executable, "-m", "halflife.cli", "compare", "--resume", str(folder), "--on", "ray", "--quiet"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            command, env=environment | {"MARK_OF_THE_TEST": mark}, stdout=said, stderr=said, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 120
        while len(list(folder.glob("*/*/metrics.jsonl"))) < 2:
            assert process.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield process, mark
    finally:
        for number in descendants(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    """A comparison of runs of some seconds, and its results in one process."""
    settings = SMALL | {"steps": 400, "save_every": 20, "validate_every": 200}

    def create(folder):
        return comparison.create_comparison(
            ["mamba2"], seeds=4, learning_rates=[1e-2], settings=settings, output=folder
        )

    reference = create(tmp_path_factory.mktemp("longer") / "x")
    comparison.run_comparison(reference, show=False)
    return create, rows_of(reference)


def gone(mark, within=30):
    """Whether no process with the mark is left after some seconds."""
    deadline = time.monotonic() + within
    while (left := descendants(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.mark.slow
@cases(
    "program",
    "RuntimeEnvAgent|runtime_env/agent",
    "DashboardAgent|dashboard/agent.py",
    "/raylet/raylet\0",
    "gcs_server\0",
)
def test_a_killed_server_does_not_end_the_comparison(longer, tmp_path, program):
    create, expected = longer
    folder = create(tmp_path / "x")
    with own_cluster(folder, tmp_path) as (process, mark):
        victims = [number for number, command in descendants(mark).items() if re.search(program, command)]
        assert victims
        for number in victims:  # an agent that starts a process is there twice for a moment
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        assert process.wait(240) == 0, (tmp_path / "said").read_text()
        assert not gone(mark)
    assert rows_of(folder) == expected


@pytest.mark.slow
@cases("number, code", (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL))
def test_a_driver_that_ends_leaves_no_process_of_its_cluster(longer, tmp_path, number, code):
    create, expected = longer
    folder = create(tmp_path / "x")
    with own_cluster(folder, tmp_path) as (process, mark):
        process.send_signal(number)
        assert process.wait(60) == code, (tmp_path / "said").read_text()
        assert not gone(mark)
    comparison.run_comparison(folder, show=False)
    assert rows_of(folder) == expected


OWNER = """
import sys
from halflife.runs import pool
with pool._cluster("ray"):
    import ray
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""
STRANGER = """
import sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
ray.get(ray.remote(lambda path: open(path, "w").close()).remote(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("token", [None, "0" * 64])
def test_a_stranger_cannot_run_a_task_on_our_cluster(tmp_path, token):
    """Neither without a token nor with a wrong one."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    known = {} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", OWNER], env=plain, **pipes) as owner:
        command = [sys.executable, "-c", STRANGER, owner.stdout.readline().strip(), str(tmp_path / "was here")]
        stranger = subprocess.run(command, env=plain | known, capture_output=True, text=True, timeout=120)
        owner.stdin.close()
    assert owner.returncode == 0
    assert stranger.returncode != 0
    assert re.search("authenticat|token", stranger.stderr, re.IGNORECASE)
    assert not (tmp_path / "was here").exists()


def test_processes_with_the_mark_of_a_cluster_end_with_its_driver():
    driver = (
        "import subprocess, sys; sys.path.insert(0, sys.argv[1]); import cluster\n"
        "with cluster.marked() as mark:\n"
        "    subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "    print(mark, flush=True); sys.stdin.read(1)\n"
    )
    for signalled in (False, True):
        with subprocess.Popen(
            [sys.executable, "-c", driver, str(Path(cluster_module.__file__).parent)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdin
            assert process.stdout
            mark = process.stdout.readline().strip()
            deadline = time.monotonic() + 5  # a process that has just begun shows no environment for a moment
            while not (found := cluster_module.members(mark)) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert list(found.values()) == ["sleep 60 "]
            process.kill() if signalled else process.stdin.close()
        deadline = time.monotonic() + 5
        while cluster_module.members(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not cluster_module.members(mark)


def test_a_worker_gives_signs_of_life_while_it_computes(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "PULSE_S", 0.05)
    monkeypatch.setattr(worker, "BUSY_SHARE", 0.2)
    one = job(tmp_path)
    silence, began = worker.Silence(0.15), time.monotonic()
    with worker.signs_of_life(tmp_path / worker.WORKER):
        while time.monotonic() < began + 0.4:
            assert not silence.too_long([one])
        late = []
        while not late and time.monotonic() < began + 3:
            time.sleep(0.05)
            late = silence.too_long([one])
        assert late[0][1].pid == os.getpid()
        assert not silence.too_long([one])  # the worker that replaces it has the same time
    assert not list(tmp_path.iterdir())
    assert not silence.too_long([one])


def job(folder, seed=0):
    experiment = comparison.EXPERIMENTS["mqar"]()
    config = experiment.configure(experiment.settings_at("smoke", SMALL), Cell("mamba2", 1e-2, seed))
    assert isinstance(config, RunConfig)
    return Job(config, folder, f"seed {seed}")


class Tasks:
    """In the place of Ray: tasks that end at once. `ends` has what the attempts return or raise, in turn."""

    def __init__(self, monkeypatch, *ends):
        self.ends, self.submitted, self.cancelled = [*ends], [], []
        for name in ("remote", "wait", "get", "cancel"):
            monkeypatch.setattr(ray, name, getattr(self, name))

    def remote(self, function):
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self.submit))

    def submit(self, job, threads):
        self.submitted.append(job.name)
        return len(self.submitted)

    def wait(self, refs, timeout):
        return refs[:1], refs[1:]

    def get(self, ref):
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    def cancel(self, ref, force):
        self.cancelled.append(ref)


def failure(cause):
    return RayTaskError("run_job_in_worker", "a traceback", cause)


DONE = {"validation": 0.5}


@cases(
    "ends, failed",
    ([DONE], {}),
    ([WorkerCrashedError(), failure(StoppedBySignal("stopped after step 3")), DONE], {}),
    ([failure(ValueError("the moon is full"))], {"seed 0": "the moon is full"}),
    ([WorkerCrashedError()] * 6, {"seed 0": "its worker died, 6 times in all; its checkpoints are kept"}),
)
def test_a_task_ends_or_is_tried_again(ends, failed, tmp_path, monkeypatch, capsys):
    tasks = Tasks(monkeypatch, *ends)
    sweep = pool._Sweep([job(tmp_path)], 60, show=True)
    sweep.run({"num_cpus": 1}, alive=lambda: True, check=lambda: None)
    assert tasks.submitted == ["seed 0"] * len(ends)
    assert sweep.failed == failed
    last = f"failed: {failed['seed 0']}" if failed else "validation 50.0%"
    assert f"seed 0: {last}" in capsys.readouterr().out


@pytest.mark.parametrize("started", [True, False])
def test_another_cluster_does_the_rest_and_the_last_one_is_said(started, tmp_path, monkeypatch):
    """Only attempts that had begun count against a run."""
    tasks, clusters = Tasks(monkeypatch, *[WorkerCrashedError()] * 6), []

    @contextlib.contextmanager
    def dies(address):
        clusters.append(address)
        yield lambda: False

    def submit(job, threads):
        if started:
            (job.folder / worker.WORKER).write_text("here 1 none 0")
        tasks.submitted.append(job.name)

    tasks.submit = submit
    monkeypatch.setattr(pool, "_cluster", dies)
    monkeypatch.setattr(pool, "_is_connected", lambda: False)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2})
    failed = pool.make_runner("ray")([job(tmp_path)], False)
    assert len(tasks.submitted) == len(clusters) == 6
    assert not tasks.cancelled
    ended = "its cluster ended, 6 times in all; its checkpoints are kept" if started else "the Ray cluster ended"
    assert failed == {"seed 0": ended}
    assert pool.make_runner("ray")([], False) == {}
    assert_raises(
        ValueError, "has 2 processors and 0 GPUs; a run needs 3 and 0", pool.Pool("ray", 3), [job(tmp_path)], False
    )


@pytest.fixture
def ray_process():
    """A process that has a name as Ray's workers have, which alone are signalled."""
    with subprocess.Popen(["ray::run", "60"], executable="/bin/sleep") as process:
        yield process
        process.kill()


def test_an_interrupt_lets_workers_save_and_cancels_their_tasks(ray_process, tmp_path, monkeypatch):
    tasks = Tasks(monkeypatch)

    def interrupt():
        for folder, process in ((tmp_path / "0", ray_process.pid), (tmp_path / "1", os.getpid())):
            (folder / worker.WORKER).write_text(f"{socket.gethostname()} {process} none 0")
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([], refs))
    monkeypatch.setattr(worker, "GRACE_S", 0.1)
    jobs = [job(tmp_path / str(seed), seed) for seed in range(2)]
    for one in jobs:
        one.folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        pool._Sweep(jobs, 60, False).run({"num_cpus": 1}, lambda: True, interrupt)
    assert ray_process.wait(5) == -signal.SIGTERM
    assert tasks.cancelled == [1, 2]


@pytest.mark.parametrize("host", [socket.gethostname(), "elsewhere"])
def test_a_worker_without_a_sign_of_life_is_killed_where_it_is(host, ray_process, tmp_path, monkeypatch):
    tasks, far = Tasks(monkeypatch, WorkerCrashedError(), DONE), []

    def submit(one, *signal_or_threads):
        if isinstance(one, worker.SignOfLife):
            far.append((one, *signal_or_threads))
            return ray_process.kill()
        if not tasks.submitted:
            (one.folder / worker.WORKER).write_text(f"{host} {ray_process.pid} {'0' * 56} 0")
        tasks.submitted.append(one.name)
        return len(tasks.submitted)

    def wait(refs, timeout):
        with contextlib.suppress(subprocess.TimeoutExpired):
            ray_process.wait(0.1)
        return ([], refs) if ray_process.returncode is None else (refs, [])

    tasks.submit = submit
    monkeypatch.setattr(ray, "wait", wait)
    sweep = pool._Sweep([job(tmp_path)], 0, show=False)
    sweep.run({"num_cpus": 1}, lambda: True, lambda: None)
    assert ray_process.wait(5) == -signal.SIGKILL
    assert tasks.submitted == ["seed 0"] * 2
    assert not sweep.failed
    assert bool(far) == (host == "elsewhere")


LOGS = {"log_to_driver": False, "logging_level": logging.ERROR}


def test_a_cluster_of_our_own_has_a_token_and_is_watched(monkeypatch):
    started, running = [], {"gcs_server", "raylet"}
    monkeypatch.setattr(pool, "_is_connected", lambda: False)
    monkeypatch.setattr(pool, "servers", lambda mark: set(running))
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options))
    monkeypatch.setattr(ray, "shutdown", lambda: started.append("ended"))
    with mock.patch.dict(os.environ):
        os.environ.pop("RAY_AUTH_MODE", None)
        with pool._cluster("ray") as alive:
            assert (os.environ["RAY_AUTH_MODE"], len(os.environ["RAY_AUTH_TOKEN"])) == ("token", 64)
            assert alive()
            running.remove("raylet")
            assert not alive()
        with pool._cluster("ray://there:1") as alive:
            assert alive()
    assert [one if one == "ended" else one["address"] for one in started] == [
        "local",
        "ended",
        "ray://there:1",
        "ended",
    ]


@cases("address, hint", ("local", "no room$"), ("ray://there:1", r"no room \(a cluster with a token needs RAY_AUTH"))
def test_ray_that_does_not_start_is_an_error_in_one_line(address, hint, monkeypatch):
    def fails(**options):
        raise Exception("no room\nand a long report")

    monkeypatch.setattr(ray, "init", fails)
    with pytest.raises(ValueError, match=f"no Ray at {address}: {hint}"), pool._connected(address=address):
        pass


def test_a_folder_has_one_process_at_a_time(tmp_path):
    (tmp_path / "x").mkdir()
    with (
        FileLock(tmp_path / "x" / ".lock"),
        pytest.raises(ValueError, match=f"another process is at work in {tmp_path}"),
    ):
        run_job(job(tmp_path / "x"))
    assert pool.run_job_in_worker(job(tmp_path / "x"), 1)["parameters"] > 0
    assert not (tmp_path / "x" / worker.WORKER).exists()


def test_workers_must_see_the_folder_and_ray_must_be_installed(tmp_path, monkeypatch):
    assert_raises(ValueError, "share", pool.run_job_in_worker, job(tmp_path / "nowhere"), 1)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert_raises(ImportError, re.escape(install("sweep")), pool.make_runner, "ray")


@cases(
    "arguments, message",
    (["--on", "ray://127.0.0.1:1"], "nothing answers at ray://127.0.0.1:1"),
    (["--on", "ray://127.0.0.1:99999"], "nothing answers"),
    (["--on", "ray://nowhere"], "ray://host:port"),
    (["--on", "mars"], "local, ray, ray://host:port or slurm"),
    (["--on", "ray", "--cpus-per-run", "0"], "at least 1 processor"),
    (["--on", "ray", "--gpus-per-run", "2"], "0 to 1 GPUs"),
    (["--gpus-per-run", "1"], "--on ray"),
    (["--worker-timeout", "60"], "--on ray"),
    (["--on", "slurm", "--slurm", "time=1", "--worker-timeout", "60"], "--worker-timeout is for Ray"),
    (["--on", "ray", "--worker-timeout", "nan"], "at least 10 seconds"),
)
def test_a_bad_place_fails_soon_in_one_line_and_writes_nothing(arguments, message, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    assert message in refused("compare", "mamba2", *arguments)
    assert time.monotonic() - began < 30  # Ray itself would try for 35 s
    assert not list(tmp_path.iterdir())


def test_the_board_reads_the_folders(tmp_path):
    jobs = [job(tmp_path / str(seed), seed) for seed in range(3)]
    for each in jobs:
        each.folder.mkdir()
    (jobs[2].folder / "run.json").write_text("{}")  # a run that was interrupted after step 4 and waits
    (jobs[2].folder / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0}\n{"step": 4, "loss": 1.0}\n')
    board = pool.ProgressBoard(jobs, show=False)

    def together():
        board.update()
        task = board.progress.tasks[0]
        return task.completed, task.total, task.fields["info"]

    assert together() == (4, 18, "0 running, 3 queued, 0 done")
    (jobs[0].folder / "run.json").write_text("{}")
    (jobs[0].folder / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0}\n{"st')  # a line that is being written
    assert together() == (6, 18, "1 running, 2 queued, 0 done")
    assert [task.description for task in board.progress.tasks] == ["all runs", "seed 0"]
    board.finish(jobs[0], "validation 50%")
    os.utime(jobs[2].folder / "run.json", ns=(1, 1))  # the line is written again
    assert together() == (10, 18, "1 running, 1 queued, 1 done")
    assert [task.description for task in board.progress.tasks] == ["all runs", "seed 2"]
