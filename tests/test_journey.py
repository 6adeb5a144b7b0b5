"""The files and Python calls that a token passes in one block do not grow (`benchmarks/journey.py`)."""

import sys
from pathlib import Path

import pytest

from halflife.ops.backends.native import build

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import journey

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))


@pytest.mark.parametrize(
    ("name", "kind", "files", "calls", "of_layers"),
    [
        ("mamba2+post+gate_rank", "training step", 26, 225, 15),
        ("mamba2+post+gate_rank", "decoded token", 23, 162, 15),
        ("gated_deltanet", "training step", 28, 211, 30),
        ("gated_deltanet", "decoded token", 24, 136, 31),
    ],
)
def test_limits(name, kind, files, calls, of_layers):
    """`of_layers` are the calls of functions in `layers` and `models`."""
    counted = journey.journey(name)[kind]
    assert len({file for file, _ in counted}) <= files
    assert counted.total() <= calls
    assert sum(n for (file, _), n in counted.items() if file.startswith(("layers", "models"))) <= of_layers
