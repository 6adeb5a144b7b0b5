"""Write the badge "Open in Colab" into the notebooks: `python .ci/badges.py`.

Colab opens notebooks of GitHub. The address of the repository stands in one place, `Repository` in `[project.urls]` of
pyproject.toml. Without it, or if it is not on GitHub, the notebooks have no badge.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BADGE = re.compile(r"^\[!\[Open in Colab\].*\n", re.M)


def badge(pyproject: str, notebook: str) -> str:
    """Return the line of the badge, or "" without a repository on GitHub.

    Args:
        pyproject: the text of pyproject.toml.
        notebook: path of the notebook in the repository.
    """
    found = re.search(r'^Repository = "https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?"$', pyproject, re.M)
    if found is None:
        return ""
    target = f"https://colab.research.google.com/github/{found[1]}/blob/main/{notebook}"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({target})\n"


def with_badge(text: str, line: str) -> str:
    """Return the text of a notebook's first cell with this badge as its first line, in the place of an older one."""
    return line + BADGE.sub("", text)


def main(root: Path = ROOT) -> None:
    pyproject = (root / "pyproject.toml").read_text()
    for path in sorted((root / "docs" / "notebooks").glob("*.ipynb")):
        book = json.loads(path.read_text())
        line = badge(pyproject, path.relative_to(root).as_posix())
        book["cells"][0]["source"] = with_badge("".join(book["cells"][0]["source"]), line).splitlines(keepends=True)
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n")
        print(f"{path.name}: {'a badge' if line else 'no badge, because [project.urls] names no repository on GitHub'}")


if __name__ == "__main__":
    sys.exit(main())
