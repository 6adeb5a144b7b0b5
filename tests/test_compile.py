"""What torch's compiler sees: whole models in one graph, with our kernels as its nodes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)


def run(call):
    """Run a check of `compiled.py` in a process whose Triton has no interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", f"import compiled; compiled.{call}"]
    done = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_compiled_ops_launch_the_same_kernels():
    run("ops()")
