"""The Python of the documents runs, from top to bottom, as a reader would run it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def section(text, heading):
    """What stands under a heading of the second level, or the whole text."""
    return text if heading is None else text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("name", "heading", "count"), [("docs/streaming.md", None, 6), ("README.md", "As a library", 2)]
)
def test_python_of_the_documents_runs(name, heading, count, tmp_path, monkeypatch):
    """Every block, in one namespace; their number, so that none goes unseen."""
    text = section((ROOT / name).read_text(), heading)
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) == count
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in blocks:
        exec(compile(block[1], name, "exec"), namespace)
