"""fla's own kernels in Triton's interpreter, through the adapter: outputs, states and gradients, plain and packed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
if sys.platform != "linux":
    pytest.skip("fla-core imports triton, which has Linux wheels only", allow_module_level=True)

# Four times the largest error measured in float16, and for ridge attention, whose values are kept in bfloat16.
TOLERANCE, SOLVED = 4 * 1.2e-3, 4 * 7.7e-3


@pytest.mark.parametrize("case", [
    "linear_attention none", "linear_attention scalar", "linear_attention vector", "delta_rule none",
    "delta_rule scalar", "delta_rule vector", "log_linear_attention scalar", "ridge_attention scalar",
    "forgetting_attention scalar",
])  # fmt: skip
def test_equals_the_token_loop_in_float64(case):
    """Also −inf and 0 among the log-decays, and gradients of ridge attention of a size of 1e-5."""
    script = Path(__file__).parent / "fla_interpreted.py"
    done = subprocess.run([sys.executable, str(script), case], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ways = json.loads(done.stdout.splitlines()[-1])
    assert len(ways) == {"forgetting_attention scalar": 1, "ridge_attention scalar": 3}.get(case, 2)
    for way, errors in ways.items():
        assert max(errors.values()) < (SOLVED if "ridge" in case else TOLERANCE), (way, errors)
