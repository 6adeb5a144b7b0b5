"""The tables of docs/fidelity.md, and what their tests share."""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
PLACES = re.compile(r"§|Eq\. |Algorithm|Table|Appendix|Theorem|released|ours|code|fla|Longhorn|authors")
# names and addresses, whose digits are no numbers of a row
NAMES = re.compile(r"`[a-z]\w*(?:[+:]\w+)*`|\]\([^)]*\)|[A-Z][A-Za-z]+-\d")


def rows(title):
    """First cell → (place, what it is), of the table below a heading."""
    section = (DOCS / "fidelity.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    cells = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in section.splitlines() if line.startswith("| ")]
    return {first: (place, text.replace("\\", "")) for first, place, text in cells[1:]}


def names(first):
    """The names in the first cell of a row."""
    return re.findall(r"`([^`]+)`", first)


def check_row(place, text, parts):
    """Check that a row has a place and the parts, in which all of its numbers are."""
    assert PLACES.search(place), place
    assert all(part in text for part in parts), (parts, text)
    for part in sorted(parts, key=len, reverse=True):
        text = text.replace(part, "")
    assert not re.findall(r"\d", NAMES.sub("", text)), f"no check has computed the numbers in {text!r}"
