"""Many runs at once on Ray give the table of runs one after the other, even if workers die."""

import csv
import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import ray
from filelock import FileLock

from halflife.cli import main
from halflife.experiments import compare as comparison
from halflife.runs import pool
from halflife.runs.sweep import Cell, Job, run_job
from halflife.runs.task_run import RunConfig
from halflife.training import callbacks

SMALL = {
    "hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 128, "train_length": 8, "pairs": (2,), "steps": 6,
    "batch_size": 4, "test_examples": 16, "validation_examples": 16, "save_every": 2, "validate_every": 3,
}  # fmt: skip
MODELS = ["mamba2", "llama"]


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # workers import functions of this file
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The comparison with runs one after the other, in this process."""
    folder = new(tmp_path_factory.mktemp("whole") / "x")
    comparison.run_comparison(folder, show=False)
    return folder


def new(folder, models=MODELS, seeds=2):
    return comparison.create_comparison(models, seeds=seeds, learning_rates=[1e-2], settings=SMALL, output=folder)


def without_speed(rows):
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def table(folder):
    with (folder / "results.csv").open() as file:
        return without_speed(csv.DictReader(file))


def result(folder):
    found = json.loads((folder / "result.json").read_text())
    found.pop("tokens_per_second")
    return found, (folder / "model.safetensors").read_bytes()


# ------------------------------------------------------------------------------------- what becomes of the runs


@pytest.mark.slow
def test_a_sweep_on_ray_is_that_of_one_process(cluster, whole, tmp_path, monkeypatch):
    folder = new(tmp_path / "ray")
    monkeypatch.chdir(tmp_path)  # workers have another folder, so paths must be absolute
    rows = comparison.run_comparison(folder.relative_to(tmp_path), show=False, runner=pool.make_runner("ray"))
    assert [row["model"] for row in rows] == ["mamba2"] * 18 + ["llama"] * 18
    assert table(folder) == table(whole)
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


# A run saves every 2 steps, and when it gets SIGTERM.
@pytest.mark.slow
@pytest.mark.parametrize(("worker", "starts"), [(killed, ["0", "2"]), (told_to_end, ["0", "3"])])
def test_a_run_whose_worker_dies_goes_on_from_its_checkpoint(cluster, whole, tmp_path, monkeypatch, worker, starts):
    monkeypatch.setattr(pool, "run_job_in_worker", worker)
    folder = new(tmp_path / "x", ["mamba2"], seeds=1)
    comparison.run_comparison(folder, show=False, runner=pool.make_runner("ray"))
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
    assert table(folder) == table(whole)


@pytest.mark.slow
def test_a_run_is_too_large_for_this_machine(cluster, tmp_path):
    folder = new(tmp_path / "x", ["mamba2"])
    with pytest.raises(ValueError, match="2 processors and 0 GPUs; a run needs 3"):
        comparison.run_comparison(folder, show=False, runner=pool.make_runner("ray", cpus_per_run=3))


# ------------------------------------------------------------------------------------------------ without Ray


def job(folder, seed=0):
    experiment = comparison.EXPERIMENTS["mqar"]()
    config = experiment.configure(experiment.settings_at("smoke", SMALL), Cell("mamba2", 1e-2, seed))
    assert isinstance(config, RunConfig)
    return Job(config, folder, f"seed {seed}")


def test_a_folder_has_one_process_at_a_time(tmp_path):
    (tmp_path / "x").mkdir()
    with (
        FileLock(tmp_path / "x" / ".lock"),
        pytest.raises(ValueError, match=f"another process is at work in {tmp_path}"),
    ):
        run_job(job(tmp_path / "x"))
    assert run_job(job(tmp_path / "x"))["parameters"] > 0


def test_workers_must_see_the_folder(tmp_path):
    with pytest.raises(ValueError, match="share"):
        pool.run_job_in_worker(job(tmp_path / "nowhere"), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "ray://127.0.0.1:1"], "nothing answers at ray://127.0.0.1:1"),
        (["--on", "ray://127.0.0.1:99999"], "nothing answers"),
        (["--on", "ray://nowhere"], "ray://host:port"),
        (["--on", "mars"], "local, ray, ray://host:port or slurm"),
        (["--on", "ray", "--cpus-per-run", "0"], "at least 1 processor"),
        (["--on", "ray", "--gpus-per-run", "2"], "0 to 1 GPUs"),
        (["--gpus-per-run", "1"], "--on ray"),
    ],
)
def test_a_bad_place_fails_soon_in_one_line_and_writes_nothing(arguments, message, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    assert message in refused("compare", "mamba2", *arguments)
    assert time.monotonic() - began < 30  # Ray itself would try for 35 s
    assert not list(tmp_path.iterdir())


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'halflife-lm\[sweep\]'"):
        pool.make_runner("ray")


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
