"""Models on a GPU, judged without one: compiled in one graph with our kernels as its nodes, and without host waits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halflife.models import PRESETS

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

MODIFIED = ("mamba2+post", "mamba2+post+gate_rank", "gated_deltanet+gate_rank", "mamba2+ska", "mamba2+attention")
EVERY = (*PRESETS, *MODIFIED, "mamba2+log_linear", "mamba2+swa", "gated_deltanet+koopman_mlp", "simple+tpe")
# Those that run packed by our kernels, without fla.
PACKED = ("mamba2", "gated_deltanet", "mamba2+post+gate_rank", "mamba3", "mamba3_mimo", "mamba3_echo")
# Their packed forms need the lengths of sequences as numbers, which the host knows in training: running sums of
# LightNet, and caches of softmax and log-linear attention.
READ_LENGTHS = ("lightnet", "llama", "fox", "mamba2+attention", "mamba2+swa", "mamba2+log_linear")


def run(code):
    """Run checks of `compiled.py` in a process whose Triton has no interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", f"from compiled import *; {code}"]
    done = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_compiled_ops_launch_the_same_kernels():
    run("ops()")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PRESETS, *MODIFIED])
def test_models_are_one_graph(name):
    """Forward, packed and for a token, by our kernels and plain torch."""
    run(f"one_graph({name!r}, packed={name in PACKED})")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gla", "kda", "rwkv7"])
def test_models_are_one_graph_with_fla(name):
    run(f"one_graph({name!r}, with_fla=True)")


def no_waits(names):
    return [f"no_waits({name!r}, packed={name not in READ_LENGTHS})" for name in names]


def test_the_host_waits_for_no_value():
    """Nor does a training, for the boundaries of packed rows, or for which rows go on."""
    cases = (
        ("llama", "packed"),
        ("mamba2+post+gate_rank", "packed"),
        ("gated_deltanet", "continued"),
        ("mesa", "rows"),
    )
    few = no_waits(["mesa", "mamba2+post+gate_rank", "llama", "lightnet", "longhorn_paper"])
    trainings = [f"trains_without_waits({name!r}, {mode!r})" for name, mode in cases]
    validations = [f"validates_without_waits('mamba2', {mode!r})" for mode in ("rows", "packed")]
    run("; ".join(few + trainings + validations))


@pytest.mark.slow
def test_the_host_waits_for_no_value_of_any_model():
    run("; ".join(no_waits(EVERY)))
