"""The script of `make gpu`, at toy sizes on a CPU: its rows, its processes, and the folder of compiled kernels."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import put_backend

from halflife.ops.spec import OPS

FOLDER = Path(__file__).parent.parent / "benchmarks"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="triton has Linux wheels only")


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def script(name):
    return importlib.import_module(name)


@pytest.mark.slow
@on_linux
def test_all_that_is_timed_in_the_interpreter(tmp_path):
    """All that is timed, at toy sizes with our Triton kernels. The checks have tests of their own."""
    kinds = ["rates", "ops", "steps", "passes", "decode"]
    kept = {name: value for name, value in os.environ.items() if name != "OUT"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "gpu.py"), "--device", "cpu", "--only", *kinds],
        capture_output=True, text=True, check=False,
        env={**kept, "OMP_NUM_THREADS": "1", "OUT": str(tmp_path), "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert not [row for row in rows if "failure" in row or row["part"] == "end"]
    jobs = script("gpu_jobs")
    timed = {(row["op"], row["backend"]) for row in rows if row["part"] == "ops"}
    able = {(name, ours) for name in jobs.OPS for ours in jobs.backends_of(name, "ours")}
    assert timed == able
    assert {(row["model"], row["way"]) for row in rows if row["part"] == "steps"} == {
        (name, way) for name in script("gpu_models").MODELS for way in ("eager", "compiled")
    }
    assert {row["part"] for row in rows} >= {"head", "rates", "check", "passes", "decode", "koopman"}
    assert "checks are right" in done.stdout


def test_without_a_gpu_it_says_what_it_would_do(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    script("gpu").main()
    text = capsys.readouterr().out
    assert "no CUDA device here" in text
    for job in (
        "ops: delta_rule, scalar / 128 / fla",
        "steps: llama / compiled",
        "selfcheck: dplr / fla",
        "warm: gla",
        "warm: dplr, vector / 128",
    ):
        assert job in text


def test_the_plan():
    """It ends in less than ten minutes, every job has a function, and ours come before fla's in each process."""
    gpu, jobs = script("gpu"), script("gpu_jobs")
    phases = gpu.phases("cuda")
    assert [phase.until for phase in phases] == sorted(phase.until for phase in phases)
    assert phases[-1].until < 600
    every = [job for phase in phases for family in phase.families for job in family]
    assert {job.partition(":")[0] for job in every} == set(jobs.JOBS)
    assert len(every) == len(set(every))
    assert {name for name in jobs.OPS if any(f"ops: {name} / 64 / ours" == job for job in every)} == set(jobs.OPS)
    for phase in phases:
        for family in phase.families:
            assert sorted(family, key=lambda job: job.endswith("fla")) == family


def test_rows_of_an_op(monkeypatch):
    jobs = script("gpu_jobs")
    check, timed = jobs.op_rows("log_linear_attention, scalar / 16 / ours", "cpu")
    assert check["ok"]
    assert 0 < check["error"] < 0.02
    for way in ("forward_ms", "both_ms", "graph_forward_ms", "graph_both_ms"):
        low, high = timed[f"{way}_quartiles"]
        assert 0 < low <= timed[way] <= high
    (fla,) = jobs.op_rows("log_linear_attention, scalar / 16 / fla", "cpu")
    assert "not on cpu" in fla["refused"]
    assert jobs.backends_of("log_linear_attention, scalar") == ["chunked", "fla"]
    assert jobs.backends_of("delta_rule, vector") == ["triton", "fla"]
    assert jobs.backends_of("dplr, vector") == ["triton", "fla"]
    assert jobs.backends_of("delta_rule, scalar") == ["triton", "fla"]
    assert jobs.backends_of("softmax attention", "fla") == []


def test_rows_of_checks():
    jobs = script("gpu_jobs")
    rows = [
        *jobs.parity_rows("linear_attention, scalar / all", "cpu"),
        *jobs.selfcheck_rows("l2_normalize / all", "cpu"),
    ]
    assert {row["part"] for row in rows} == {"check", "selfcheck"}
    assert all(row["ok"] for row in rows)


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    breaking(monkeypatch, lambda call, right: tuple(1.1 * x for x in right(call)))
    monkeypatch.setattr(script("gpu_jobs"), "backends_of", lambda *_: ["chunked"])
    (row,) = script("gpu_jobs").op_rows("delta_rule, vector / 16 / ours", "cpu")
    assert not row["ok"]
    assert row["error"] > 0.05


def test_the_report():
    row = {"part": "ops", "op": "dplr, vector", "backend": "fla", "B": 4, "T": 8, "K": 64, "forward_ms": 1.5}
    text = script("gpu").report([
        {"part": "head"}, row | {"graph_forward_ms": 1.25, "both_ms": 3}, {"part": "check", "ok": True},
        {"part": "steps", "model": "gla", "way": "eager", "B": 4, "T": 8, "ms": 2.0}, {"part": "check", "ok": False},
    ])  # fmt: skip
    assert "| ops | dplr, vector | fla | 4 × 8 | 64 | 1.500 (1.250) | 3.000 |" in text
    assert "| steps | gla | eager | 4 × 8 |  | 2.000 |  |" in text
    assert "1 of 2 checks are right." in text


@pytest.mark.slow
def test_processes_that_die(tmp_path):
    """One is out of time, and one has a job that is unknown. The rows before stay, and a row says why it ended."""
    gpu, rows = script("gpu"), tmp_path / "rows.jsonl"
    gpu.run_phase([["ops: dplr, vector / 16 / ours", "ops: none / 16 / ours"]], gpu.Phase("", 0, []), "cpu", rows,
                  time.time() + 300)  # fmt: skip
    *before, last = map(json.loads, rows.read_text().splitlines())
    assert [row["part"] for row in before] == ["check", "ops"]
    assert "exit status 1" in last["failure"]
    assert "KeyError: 'none'" in last["failure"]
    assert last["ok"] is False
    gpu.run_phase([["rates: "], ["rates: "], ["rates: "]], gpu.Phase("", 0, []), "cpu", rows, time.time())
    late = [json.loads(line)["failure"] for line in rows.read_text().splitlines()[3:]]
    assert late == ["out of time"] * 2 + ["out of time before its start"]


# ------------------------------------------------------------------------------------- compiled kernels that travel


def test_lists_of_files_are_mended(tmp_path):
    folder = tmp_path / "ABC"
    folder.mkdir()
    (folder / "__grp__k.json").write_text(json.dumps({"child_paths": {"k.json": "/elsewhere/ABC/k.json"}}))
    script("gpu_cache").relocate(tmp_path)
    assert json.loads((folder / "__grp__k.json").read_text()) == {"child_paths": {"k.json": str(folder / "k.json")}}


def test_kernels_of_another_day_are_not_used(tmp_path, monkeypatch):
    cache = script("gpu_cache")
    now = {"triton": "3.9.0", "sources": {"a": "1"}}
    monkeypatch.setattr(cache, "stamp", lambda: now)
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    assert "there is no" in cache.use(tmp_path)
    (tmp_path / "stamp.json").write_text(json.dumps(now | {"sources": {"a": "2"}}))
    assert "Triton 3.9.0 is installed" in cache.use(tmp_path)
    assert os.environ["TRITON_CACHE_DIR"] == "before"
    (tmp_path / "stamp.json").write_text(json.dumps(now))
    assert cache.use(tmp_path) is None
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)


CODE = """
import sys
from pathlib import Path
import gpu_cache, gpu_jobs, offline_kernels
folder, way = Path(sys.argv[1]), sys.argv[2]
def run():
    gpu_jobs._op_launches("linear_attention, scalar", (1, 200), 64)
if way == "fill":
    print(gpu_cache.fill(folder, [run]))
else:
    assert gpu_cache.use(folder) is None
    launches = []
    with offline_kernels.captured(launches):
        run()
    with gpu_cache.watching() as seen:
        for launch in launches:
            offline_kernels.compiled(launch, "sm_90")
    print(len({launch.name for launch in launches} - set(seen["hits"])), len(seen["hits"]), len(seen["compiled"]))
"""


@pytest.mark.slow
@on_linux
def test_another_process_compiles_nothing(tmp_path):
    """Also where the folder has been moved."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(FOLDER), str(FOLDER.parent), environment.get("PYTHONPATH", "")])

    def run(folder, way):
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(folder), way], capture_output=True, text=True, check=False,
            env={**environment, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path / "other")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [int(x) for x in done.stdout.split()]

    (count,) = run(tmp_path / "here", "fill")
    assert count >= 3
    (tmp_path / "here").rename(tmp_path / "there")
    missed, hits, compiled = run(tmp_path / "there", "use")
    assert (missed, compiled) == (0, 0)
    assert 3 <= hits <= count


# ------------------------------------------------------------------------------------------------------- parity


def breaking(monkeypatch, how):
    """Replace the delta rule's chunked form by `how(call, right)`, but not in float64, which is the measure."""

    def broken(call):
        return right(call) if call["q"].dtype == torch.float64 else how(call, right)

    right = put_backend(monkeypatch, "delta_rule", "chunked", broken)


def chunked_rows(case):
    """Return the rows of the chunked form alone."""
    parity = script("parity")
    with mock.patch.object(parity.backends, "registered", return_value=["chunked"]):
        return list(parity.rows(case, "cpu"))


def test_parity_sees_a_wrong_gradient_of_one_input(monkeypatch):
    def how(call, right):
        g = call["g"].clone()
        if g.requires_grad:
            g.register_hook(lambda dg: 1.1 * dg)
        return right(call.with_tensors(g=g))

    breaking(monkeypatch, how)
    rows = chunked_rows("delta_rule, vector")
    assert len(rows) == 4
    assert not any(row["ok"] for row in rows)
    assert {row["worst"] for row in rows} == {"dgv"}
    assert "**WRONG**" in "\n".join(script("parity").table(rows))


def test_parity_sees_what_breaks_down(monkeypatch):
    def how(call, right):
        if call["q"].dtype == torch.bfloat16:
            raise RuntimeError("out of shared memory | required 3\nhint")
        return right(call)

    breaking(monkeypatch, how)
    rows = chunked_rows("delta_rule, vector")
    assert [row["ok"] for row in rows] == [True, False] * 2
    table = script("parity").table(rows)
    assert sum("**FAILED**: RuntimeError: out of shared memory / required 3 |" in line for line in table) == 2


def test_parity_lets_a_backend_refuse(monkeypatch):
    limits = lambda op, device, call: "no" if call and call["q"].dtype == torch.float32 else None  # noqa: E731
    put_backend(monkeypatch, "delta_rule", "chunked", OPS["delta_rule"].backends["chunked"].function, limits)
    rows = chunked_rows("delta_rule, vector")
    assert all(row["ok"] for row in rows)
    assert {row["dtype"] for row in rows if "refused" in row} == {"float32"}
    assert not any("float32" in line for line in script("parity").table(rows))
