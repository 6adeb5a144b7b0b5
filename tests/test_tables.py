"""The tables of docs/results are those that docs/tables.py writes from the files of results."""

import csv
import dataclasses
import json
import sys
from pathlib import Path

import pytest

from halflife.experiments.evidence import overview_page
from halflife.runs.scores import read_scores

DOCS = Path(__file__).parent.parent / "docs"

sys.path.insert(0, str(DOCS))
import tables  # noqa: E402 (a script of the documents, not of the package)

PAGES = sorted((DOCS / "results").glob("*.md"))
GLA = {"file": "post_parts_gla.csv", "columns": {"128, 32": "capacity 128 32"}}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert tables.fill(text) == text, "run `python docs/tables.py`"


def test_cells_are_those_of_the_file():
    """Two cells, computed here from the file."""
    with (DOCS / "results" / "post_parts_gla.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["test"], row["num_pairs"]) == ("capacity", "32")]

    def seeds(model):
        return [100 * float(row["accuracy"]) for row in rows if (row["model"], row["selected"]) == (model, "True")]

    base, post = seeds("gla"), seeds("gla:post")
    assert len(base) == len(post) == 3
    mean, low, high = sum(post) / 3, min(post), max(post)
    every = ", ".join(f"{value:.1f}" for value in post)
    assert f"| `gla:post` | {mean:.1f} [{low:.1f}, {high:.1f}] ({every}) |" in tables.table(GLA)
    gains = [x - y for x, y in zip(post, base, strict=True)]
    assert min(gains) > 0
    gain = f"**{sum(gains) / 3:.1f} [{min(gains):.1f}, {max(gains):.1f}]**"
    table = tables.table({**GLA, "minus": "gla"})
    assert f"| `gla:post` | {gain} |" in table
    assert "| `gla` |" not in table
    assert tables.table({**GLA, "pairs": {"PoST − GLA": ["gla:post", "gla"]}}).endswith(f"| PoST − GLA | {gain} |")


def test_signs_of_differences():
    assert tables.table({**GLA, "minus": "gla", "models": ["gla:gain"]}).count("−") == 3
    assert "-" not in tables.table({**GLA, "minus": "gla", "models": ["gla:gain"]}).splitlines()[-1]
    assert tables.table({**GLA, "pairs": {"itself": ["gla", "gla"]}}).endswith("| 0.0 [0.0, 0.0] |")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"collumns": {}}, "a table has no collumns; it may have also, columns"),
        ({"models": ["gla", "glo"]}, "post_parts_gla.csv has no results of glo"),
        ({"columns": {"niah": "niah"}}, "has no results of gla in niah"),
    ],
)
def test_a_wrong_table_is_refused(wanted, message):
    with pytest.raises(ValueError, match=message):
        tables.table({**GLA, **wanted})


def test_the_overview_has_the_results_of_its_file():
    """`overview.json` says of recall what the file of results says."""
    folder = DOCS / "results"
    data = json.loads((folder / "overview.json").read_text(encoding="utf-8"))
    path = folder / "overview.csv"
    rows = [dataclasses.asdict(score) for score in read_scores(path, path.read_text(encoding="utf-8"))]
    found = overview_page.recall(rows, data["train_length"], 16)
    assert found == {name: data["columns"][name] for name in found}
    assert {row["model"] for row in rows} == set(data["models"])
