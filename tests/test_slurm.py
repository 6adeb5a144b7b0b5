"""`compare --on slurm`: real submitit, with commands of Slurm that run the jobs on this machine."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_slurm
import pytest
from helpers import assert_raises, cases
from tiny_runs import tiny

from halflife.extras import install
from halflife.runs import slurm
from halflife.runs.sweep import Job
from halflife.training.fit import StoppedBySignal

SIZES = ["--steps", "6", "--batch-size", "4", "--hidden-size", "16", "--num-layers", "1", "--num-heads", "2"]
TASK = ["--vocab-size", "128", "--train-length", "8", "--pairs", "2", "--test-examples", "16", "--save-every", "2"]
COMPARE = ["compare", "mamba2", "llama", "--lr", "1e-2", *SIZES, *TASK, "--quiet"]
ON_SLURM = ["--on", "slurm", "--slurm", "time=30", "partition=tiny", "mem=2GB"]


@cases(
    "options, message",
    (["--on", "slurm", "--slurm", "time=10"], "login node"),
    (["--slurm", "time=10"], "give both, or neither"),
)
def test_options_without_slurm_are_refused(options, message, refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: real("json") if name == "submitit" else real(name))
    assert message in refused("compare", "mamba2", *options)
    assert not list(tmp_path.iterdir())


def test_submitit_is_asked_for_before_a_folder_is_made(refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "submitit" else real(name))
    error = refused("compare", "mamba2", "--on", "slurm")
    assert error == f"halflife: --on slurm needs submitit: {install('slurm')}\n"
    assert not list(tmp_path.iterdir())


@pytest.fixture
def commands(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    fake_slurm.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bin"


def halflife(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "halflife.cli", *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        **options,
    )  # fmt: skip


def results(folder):
    found = {}
    for path in sorted(folder.glob("*/*/result.json")):
        found[path.parent.relative_to(folder).as_posix()] = result = json.loads(path.read_text())
        result.pop("tokens_per_second")
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "x"
    process = halflife(*COMPARE, "--output", str(folder))
    _, error = process.communicate()
    assert process.returncode == 0, error
    return results(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("partition=x",), "time limit"), (("time=1:00",), "time limit"), (("tiem=10",), "tiem=10"),
        (("time",), "name=value"),
    ],
)  # fmt: skip
def test_options_are_checked_before_anything_is_submitted(commands, options, message):
    assert_raises(ValueError, re.escape(message), slurm.SlurmRunner, options)
    assert_raises(ValueError, "whole GPUs", slurm.SlurmRunner, ("time=10",), gpus=0.5)


@pytest.mark.slow
def test_a_comparison_on_slurm_is_that_of_one_process(commands, whole, tmp_path):
    process = halflife(*COMPARE, *ON_SLURM, "--cpus-per-run", "2", "--output", "x")
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert results(tmp_path / "x") == whole
    assert (tmp_path / "x" / "report.html").exists()
    scripts = sorted(commands.glob("*.sh"))
    assert len(scripts) == 2
    for line in ("--partition=tiny", "--time=30", "--mem=2GB", "--cpus-per-task=2", "--signal=USR1@90"):
        assert f"#SBATCH {line}" in scripts[0].read_text()
    assert not list(tmp_path.glob("x/*/*/.slurm"))


@pytest.mark.slow
def test_jobs_outlive_the_command_and_a_resumed_command_waits_for_them(commands, whole, tmp_path):
    """One job is killed while no command waits; the resumed command submits it again. One goes on untouched."""
    process = halflife(*COMPARE, *ON_SLURM, "--output", "x")
    deadline = time.monotonic() + 200
    while len(list(tmp_path.glob("x/*/*/.slurm"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "the jobs stay in Slurm" in error
    assert "compare --resume x --on slurm --slurm time=30 partition=tiny mem=2GB" in error
    number = next(tmp_path.glob("x/mamba2/*/.slurm")).read_text()
    os.killpg(int((commands / f"{number}.pid").read_text()), signal.SIGKILL)
    process = halflife("compare", "--resume", "x", *ON_SLURM, "--quiet")
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert results(tmp_path / "x") == whole
    assert len(list(commands.glob("*.sh"))) == 3  # two jobs, and the killed one again


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_end(commands, whole, tmp_path):
    (tmp_path / "broken.py").write_text(
        "import os\n"
        "def save(self, model, folder):\n"
        "    if 'llama' in str(folder):\n"
        "        raise RuntimeError('no luck')\n"
        "    old(self, model, folder)\n"
        "if 'SLURM_JOB_ID' in os.environ:\n"
        "    from halflife.runs.task_run import TaskRun\n"
        "    old, TaskRun.save = TaskRun.save, save\n"
    )
    process = halflife(*COMPARE, *ON_SLURM, "--output", "x", env={**os.environ, "HALFLIFE_IMPORT": "broken"})
    _, error = process.communicate(timeout=300)
    assert process.returncode == 3, error
    assert "llama lr 0.01 seed 0 failed: RuntimeError: no luck" in error
    assert {name.partition("/")[0] for name in results(tmp_path / "x")} == {"mamba2"}


class Handle:
    """What `executor.submit` returns in the test below: a job that has ended already."""

    job_id = "7"

    def __init__(self, result):
        self.result, self.paths = lambda: result, None

    def done(self, force_check=False):
        return True


def test_a_job_that_was_warned_is_submitted_again_until_it_makes_no_progress(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    job = Job(tiny(), tmp_path, "x")

    def warned(job, threads):
        raise StoppedBySignal("stopped after step 3 of 12", signal.SIGUSR1)

    monkeypatch.setattr(slurm, "run_job_in_worker", warned)
    stopped = slurm.run_in_slurm(job, 1)
    assert stopped == ("stopped", "stopped after step 3 of 12")
    submitted = []

    class Executor:
        """Runs are stopped three times at each of four steps, and end then."""

        def submit(self, function, *arguments):
            submitted.append(arguments)
            done = len(submitted) - 1
            (tmp_path / "metrics.jsonl").write_text(f'{{"step": {done // 3}}}\n')
            return Handle(stopped if done < 12 else ("done", {"validation": 0.5}))

    assert slurm._Queue(Executor(), 2).run([job], show=False, check=lambda: None) == {}
    assert submitted == [(job, 2)] * 13

    class Stuck(Executor):
        def submit(self, function, *arguments):
            submitted.append(arguments)
            return Handle(stopped)

    submitted.clear()
    assert slurm._Queue(Stuck(), 2).run([job], show=False, check=lambda: None) == {"x": "stopped after step 3 of 12"}
    assert len(submitted) == 1 + slurm.RETRIES
    assert not (tmp_path / ".slurm").exists()
