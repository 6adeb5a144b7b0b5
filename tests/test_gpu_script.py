"""The script of `make gpu`, at toy sizes on a CPU. It ends normally and reports the kernels that fail."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import cases, put_backend

from halflife.ops.spec import OPS

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def script(name):
    return importlib.import_module(name)


def run(output, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("OUT", "TRITON_INTERPRET")}
    command = [sys.executable, str(FOLDER / "gpu.py"), "--device", "cpu", "--output", str(output)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**kept, "OMP_NUM_THREADS": "1", **environment}, check=False
    )


def timed_rows(text, backend):
    """Return the cells of the speed table's rows of one backend. Each row must have both times and both ratios."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.count("|") == 15]
    found = [cells for cells in rows if cells[3] == backend]
    for cells in found:
        assert all(float(cells[column]) > 0 for column in (4, 5, 9, 10)), cells
    return found


@pytest.mark.slow
def test_ends_well_on_a_cpu(tmp_path):
    done = run(tmp_path / "results", OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "results").glob("*.md")
    text = file.read_text()
    assert (tmp_path / "out" / file.name).read_text() == text
    assert "WRONG" not in text
    assert "FAILED" not in text
    for op in ("linear_attention", "delta_rule", "gate_rank, linear", "gate_rank, delta"):
        assert f"| {op} | 16 | chunked |" in text  # the lengths from which on it is faster than softmax attention
    assert len(timed_rows(text, "chunked")) == 2 * 4
    assert len(timed_rows(text, "SDPA")) == 2
    assert all(cells[8] and cells[13] for cells in timed_rows(text, "chunked") if cells[2].startswith("gate_rank"))
    assert "backend 'triton' cannot run this linear_attention" in text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="triton has Linux wheels only")
def test_ends_well_in_the_interpreter(tmp_path):
    """Triton's interpreter runs the kernels forward and backward in a minute."""
    done = run(tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(timed_rows(done.stdout, "triton")) == 2 * 4
    assert "| gate_rank, delta | triton | bfloat16 | 70 |" in done.stdout


def test_no_gpu_is_an_error():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(FOLDER / "gpu.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr


def test_kernels_of_others_have_their_own_processes():
    gpu = script("gpu")
    assert gpu._whose("dplr, scalar / fla", "cuda") == ("dplr, scalar", True)
    assert gpu._whose("delta_rule / 64", "cuda") == ("delta_rule / 64", False)
    assert gpu._whose("dplr", "cpu") == ("dplr", None)
    parity = script("parity")
    names = ["triton", "fla", "chunked"]
    assert parity.chosen(names, True) == ["fla"]
    assert parity.chosen(names, False) == ["triton", "chunked"]
    assert parity.chosen(names, None) == names
    backend = {row["backend"] for row in script("speed").rows(16, "cpu", [], float("inf"), True)}
    assert backend == {"fla"}


def breaking(monkeypatch, how):
    """Replace DPLR's chunked form by `how(call, right)`, except in float64, with which the others are compared."""

    def broken(call):
        return right(call) if call["q"].dtype == torch.float64 else how(call, right)

    right = put_backend(monkeypatch, "dplr", "chunked", broken)


def chunked_rows(case):
    """Return the rows of the chunked form. Where native kernels are built, there are rows of these as well."""
    return [row for row in script("parity").rows(case, "cpu") if row["backend"] == "chunked"]


def test_parity_sees_a_wrong_gradient_of_one_input(monkeypatch):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return 1.1 * dx

    breaking(monkeypatch, lambda call, right: right(call.with_tensors(g=Double.apply(call["g"]))))
    rows = chunked_rows("dplr, scalar")
    assert len(rows) == 4
    assert not any(row["ok"] for row in rows)
    assert {row["worst"] for row in rows} == {"dg"}
    assert "**WRONG**" in "\n".join(script("parity").table(rows))


def test_parity_sees_what_breaks_down(monkeypatch):
    def how(call, right):
        if call["q"].dtype == torch.bfloat16:
            raise RuntimeError("out of shared memory | required 3\nhint")
        return right(call)

    breaking(monkeypatch, how)
    rows = chunked_rows("dplr, vector")
    assert [row["ok"] for row in rows] == [True, False] * 2
    table = script("parity").table(rows)
    assert sum("**FAILED**: RuntimeError: out of shared memory / required 3 |" in line for line in table) == 2


def test_parity_lets_a_backend_refuse(monkeypatch):
    limits = lambda op, device, call: "no" if call and call["q"].dtype == torch.float32 else None  # noqa: E731
    put_backend(monkeypatch, "dplr", "chunked", OPS["dplr"].backends["chunked"].function, limits)
    rows = chunked_rows("dplr, scalar")
    assert all(row["ok"] for row in rows)
    assert {row["dtype"] for row in rows if "refused" in row} == {"float32"}
    assert not any("float32" in line for line in script("parity").table(rows))


@pytest.mark.slow
def test_speed_leaves_out_a_wrong_kernel(monkeypatch):
    """Every timed kernel is first compared with the chunked form. The rows of the others stay."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    right = {op: OPS[op].backends["chunked"].function for op in ("linear_attention", "gate_rank", "delta_rule")}
    for op, function in right.items():
        put_backend(monkeypatch, op, "triton", function)
    put_backend(monkeypatch, "delta_rule", "triton", lambda call: tuple(1.1 * x for x in right["delta_rule"](call)))
    rows = list(script("speed").rows(16, "cpu", ["T 128"], time.time() + 100))
    (failure,) = [row for row in rows if "failure" in row]
    assert (failure["name"], failure["backend"], failure["fatal"]) == ("delta_rule", "triton", False)
    assert "WRONG" in failure["failure"]
    timed = {(row["name"], row["backend"]) for row in rows if "forward" in row}
    assert ("delta_rule", "triton") not in timed
    assert {name for name, backend in timed if backend == "triton"} == {
        "linear_attention", "gate_rank, linear", "gate_rank, delta",
    }  # fmt: skip
    assert "| 16 | 64 | delta_rule | triton | **FAILED**" in "\n".join(script("speed").table(rows))


@pytest.mark.slow
def test_speed_stops_in_time():
    rows = list(script("speed").rows(16, "cpu", [], time.time()))
    assert [row["T"] for row in rows if row.get("late")] == [64, 128]
    assert sum("out of time" in line for line in script("speed").table(rows)) == 2


def test_ratios():
    """Floors by hand: 2 ms (2 GFLOP at 1 TFLOP/s) forward, and 3 ms (3 × 4 GB at 4 TB/s) with the backward pass."""
    size = {"K": 64, "T": 1024}
    common = {**size, "flops": (2e9, 2e9), "bytes": 4e9}
    rows = [
        {"K": 64, "gemm": 1e12, "copy": 4e12},
        {**common, "name": "linear_attention", "backend": "triton", "forward": 4e-3, "both": 9e-3},
        {**common, "name": "linear_attention", "backend": "fla", "forward": 5e-3, "both": None},
        {**common, "name": "gate_rank, linear", "backend": "triton", "forward": 6e-3, "both": 12e-3},
        {**common, "name": "softmax attention", "backend": "SDPA", "forward": 8e-3, "both": 6e-3},
    ]
    table = [line.replace(" ", "") for line in script("speed").table(rows)]
    assert "|64|1024|linear_attention|triton|4.000|2.0|0.50|0.80||9.000|3.0|1.50|||" in table
    assert "|64|1024|gate_rank,linear|triton|6.000|3.0|0.75||1.50|12.000|4.0|2.00||1.33|" in table
    assert "|64|1024|linear_attention|fla|5.000|2.5|0.62||||||||" in table


@cases(
    "ratios, expected",
    ({}, ""),
    ({1024: 3.0, 2048: 1.5}, "> 2048"),
    ({1024: 0.9, 2048: 0.5}, "≤ 1024"),
    ({1024: 2.0, 4096: 0.5}, "2048"),
    ({2048: 0.5, 1024: 1.2, 512: 0.9}, "1183"),  # 1024 · 2^(ln 1.2 / ln 2.4): the last crossing counts
)
def test_crossing(ratios, expected):
    got = script("speed").crossing(ratios)
    assert got == expected or abs(int(got) - int(expected)) <= 1


def finish(job):
    while job.running():
        time.sleep(0.05)
    return job.results()


def test_a_worker_out_of_time_is_ended():
    rows, died = finish(script("gpu").Job("parity", ["dplr, scalar"], "cpu", [], time.time()))
    assert rows == []
    assert died == ["parity dplr, scalar: out of time"]


def test_a_worker_that_dies_is_said():
    rows, (died,) = finish(script("gpu").Job("parity", ["dplr, scalar", "nothing"], "cpu", [], time.time() + 100))
    assert len([row for row in rows if row["backend"] == "chunked"]) == 4  # the rows before the error
    assert died == "parity dplr, scalar, nothing: exit status 1: KeyError: 'nothing'"
