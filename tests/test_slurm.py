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
from types import SimpleNamespace

import fake_slurm
import pytest
import submitit
from helpers import assert_raises, cases
from tiny_runs import tiny

from halflife.extras import install
from halflife.runs import slurm
from halflife.runs.sweep import Job, prepared
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


class Handle:
    """What `executor.submit` returns in the tests below: a job that has ended already."""

    def __init__(self, end, number="7"):
        self.end, self.job_id, self.paths = end, number, SimpleNamespace(stderr="7.err")

    def done(self, force_check=False):
        return True

    def result(self):
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


class Slurm:
    """In the place of submitit's executor. `ends` has what the submitted jobs return or raise, in turn."""

    def __init__(self, monkeypatch, *ends, states=()):
        self.ends, self.states, self.submitted, self.parameters = [*ends], dict(states), [], {}
        self.SlurmExecutor = lambda folder: self
        self.SlurmExecutor._valid_parameters = submitit.SlurmExecutor._valid_parameters
        self.update_parameters = lambda **given: self.parameters.update(given)
        monkeypatch.setattr(slurm, "_submitit", lambda: self)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        monkeypatch.setattr(shutil, "which", lambda name: name)
        self.folder = None

    def submit(self, function, job, threads):
        self.submitted.append((job.name, threads))
        return Handle(self.ends.pop(0), str(len(self.submitted)))

    def SlurmJob(self, folder, job_id, tasks):
        handle = Handle(("done", {"validation": 0.5}), job_id)
        handle.watcher = SimpleNamespace(get_state=lambda number, mode: self.states[number])
        return handle


DONE = ("done", {"validation": 0.5})


def jobs_in(folder, *names):
    return [Job(tiny(), folder / name, name) for name in names]


def test_jobs_are_submitted_found_again_and_continued(tmp_path, monkeypatch, capsys):
    """One run has a job in Slurm already, the job of another is gone, one fails, and one was ended without a result."""
    ended = submitit.core.utils.FailedJobError("the node failed\nand more")
    queue = Slurm(monkeypatch, DONE, ("failed", "no luck"), ended, DONE, states={"41": "RUNNING by 1", "42": "FAILED"})
    jobs = jobs_in(tmp_path, "found", "gone", "fails", "ended")
    for job, number in zip(jobs, ("41", "42"), strict=False):
        job.folder.mkdir()
        (job.folder / ".slurm").write_text(number)
    runner = slurm.SlurmRunner(("time=30", "partition=tiny"), cpus=2, gpus=1)
    assert runner(jobs, True) == {"fails": "no luck"}
    assert queue.submitted == [("gone", 2), ("fails", 2), ("ended", 2), ("ended", 2)]
    assert queue.parameters == {
        "job_name": "halflife", "cpus_per_task": 2, "gpus_per_node": 1, "time": 30, "partition": "tiny",
    }  # fmt: skip
    assert not list(tmp_path.glob("*/.slurm"))
    assert "fails: failed: no luck" in capsys.readouterr().out
    assert runner([], True) == {}


def test_an_interrupt_leaves_the_jobs_in_slurm_and_says_how_to_end_them(tmp_path, monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(Handle, "done", lambda self, force_check: False)
    queue = slurm._Queue(Slurm(monkeypatch, DONE, DONE), 1)
    with pytest.raises(KeyboardInterrupt):
        queue.run(prepared(jobs_in(tmp_path, "x", "y")), False, interrupt)
    assert "to end them: scancel 1 2\n" in capsys.readouterr().err
    assert [path.read_text() for path in sorted(tmp_path.glob("*/.slurm"))] == ["1", "2"]


def test_an_error_in_a_job_is_its_result(tmp_path):
    job = Job(tiny(), tmp_path / "nowhere", "x")
    kind, why = slurm.run_in_slurm(job, 1)
    assert kind == "failed"
    assert "all machines must share the file system" in why


def test_a_job_that_was_warned_is_submitted_again_until_it_makes_no_progress(tmp_path, monkeypatch):
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

    queue = Slurm(monkeypatch, *[stopped] * (1 + slurm.RETRIES))
    assert slurm._Queue(queue, 2).run([job], show=False, check=lambda: None) == {"x": "stopped after step 3 of 12"}
    assert not queue.ends
    assert not (tmp_path / ".slurm").exists()
