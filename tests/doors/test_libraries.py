"""Every line of docs/how-to/with-other-libraries.md runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/how-to/with-other-libraries.md"
LINES = re.findall(r"^\|[^|]*\|[^|]*\| `(.*)` \|$", PAGE.read_text(encoding="utf-8"), re.M)


def test_the_page_has_lines():
    assert len(LINES) >= 20


@pytest.fixture(scope="module")
def found():
    """The error of each line, or ""."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("page_lines.py")], input=json.dumps(LINES), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(LINES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_a_line_runs(line, found):
    assert found[line] == ""
