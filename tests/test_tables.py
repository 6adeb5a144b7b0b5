"""The tables of docs/results are those that docs/tables.py writes from the files of results."""

import csv
import json
import math
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_raises

DOCS = Path(__file__).parent.parent / "docs"

sys.path.insert(0, str(DOCS))
import differences  # noqa: E402 (scripts of the documents, not of the package)
import join  # noqa: E402
import overview  # noqa: E402
import powers  # noqa: E402
import tables  # noqa: E402

PAGES = sorted((DOCS / "results").glob("*.md"))
GLA = {"file": "post_parts_gla.csv", "columns": {"128, 32": "capacity 128 32"}}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert tables.fill(text) == text, "run `python docs/tables.py`"
    assert len(tables.TABLE.findall(text)) == text.count("<!-- table"), "an empty line ends each comment"


def selected(file, column, **wanted):
    """Model → seed → number of the rows at the selected rate, read here from the file."""
    found = {}
    with (DOCS / "results" / file).open(newline="") as lines:
        for row in csv.DictReader(lines):
            if row["selected"] == "True" and all(row[key] == value for key, value in wanted.items()):
                found.setdefault(row["model"], {})[row["seed"]] = float(row[column])
    return found


def test_cells_are_those_of_the_file():
    """Two cells. The model has three seeds, and its base five; three are paired."""
    wanted = {"file": "overview.csv", "columns": {"1,024": "mqar 1024 16"}}
    found = selected("overview.csv", "accuracy", test="mqar", length="1024", num_pairs="16")
    base, part = ({seed: 100 * value for seed, value in found[model].items()} for model in ("llama", "lightnet"))
    assert (len(base), len(part)) == (5, 3)
    mean, low, high = sum(part.values()) / 3, min(part.values()), max(part.values())
    assert f"| `lightnet` | {mean:.1f} [{low:.1f}, {high:.1f}] |" in tables.table(wanted)
    gains = [part[seed] - base[seed] for seed in part]
    assert min(gains) > 0
    gain = f"**{sum(gains) / 3:.1f} [{min(gains):.1f}, {max(gains):.1f}]**"
    pairs = {"LightNet": "lightnet", "LightNet − Llama": ["lightnet", "llama"]}
    *_, alone, difference = tables.table({**wanted, "pairs": pairs}).splitlines()
    assert alone == f"| LightNet | {mean:.1f} [{low:.1f}, {high:.1f}] |"
    assert difference == f"| LightNet − Llama | {gain} |"


def test_bits_are_those_of_the_losses():
    """Nats over ln 2, and differences seed by seed with their sign."""
    file, models = "overview_text_float32.csv", ["mamba2+ska", "mamba2"]
    found = selected(file, "loss", test="text")
    own, base = ([value / math.log(2) for _, value in sorted(found[model].items())] for model in models)
    wanted = {"file": file, "columns": {"bits": "bits"}}
    assert f"| {statistics.mean(own):.2f} [{min(own):.2f}, {max(own):.2f}] |" in tables.table(wanted)
    away = [x - y for x, y in zip(own, base, strict=True)]
    text = f"**{statistics.mean(away):+.2f} [{min(away):+.2f}, {max(away):+.2f}]**".replace("-", "−")
    assert tables.table({**wanted, "pairs": {"SKA": models}}).endswith(f"| SKA | {text} |")


def test_a_model_that_has_not_learned_says_so():
    """In the column that the table names; GLA recalls 32 pairs in 78 %, and 8 pairs always."""
    for column, mark in (("capacity 128 32", " (not learned)"), ("capacity 32 8", "")):
        assert f"| `gla`{mark} | 77." in tables.table({**GLA, "learned": column})


def test_significant_differences_are_bold():
    """By Student's t: |mean| √n / s against its quantile, 4.30 for three seeds and 2.78 for five."""
    for found in ([1.0, 2.0, 3.0], [1.0, 1.2, 1.5], [-4.0, -1.0, -2.0, -3.0, -2.5], [3.0, -1.0, 4.0, 1.0, -0.5]):
        quantile = {3: 4.303, 5: 2.776}[len(found)]
        significant = abs(statistics.mean(found)) * math.sqrt(len(found)) / statistics.stdev(found) > quantile
        text = differences.write(np.array(found), 1, "+")
        assert text.startswith("**") == text.endswith("**") == significant
        assert text.strip("*").startswith(f"{statistics.mean(found):+.1f} [")
    assert differences.write(np.array([0.0, 1e-12, 0.0]), 1) == "0.0 [0.0, 0.0]"
    assert differences.write(np.array([2.0, 2.0, 2.0]), 1) == "**2.0 [2.0, 2.0]**"
    assert differences.write(np.array([2.0, 2.1]), 1) == "2.0"


def test_tables_of_other_columns_are_not_joined(tmp_path):
    (tmp_path / "old.csv").write_text("model,loss\na,1\n")
    with pytest.raises(ValueError, match="has the columns model, loss, and the new table model, length"):
        join.add(tmp_path / "old.csv", [{"model": "b", "length": "3"}])


def test_tables_of_earlier_versions_are_joined(tmp_path):
    """They have no validation, whichever of the two is older."""
    former = "model,learning_rate,seed,selected\na,1,0,True\n"
    now = "model,learning_rate,seed,selected,validation\nb,1,0,True,0.5\n"
    for old, new, expected in ((former, now, ["", "0.5"]), (now, former, ["0.5", ""])):
        (tmp_path / "old.csv").write_text(old, encoding="utf-8")
        (tmp_path / "new.csv").write_text(new, encoding="utf-8")
        join.add(tmp_path / "old.csv", join.read_table(tmp_path / "new.csv"))
        assert [row["validation"] for row in join.read_table(tmp_path / "old.csv")] == expected


def test_a_rate_may_be_given(tmp_path, monkeypatch):
    """The table with the most rates selects, but for a model whose rate is an argument."""
    heading = "model,learning_rate,seed,selected\n"
    monkeypatch.setattr(join, "RESULTS", tmp_path)
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    old.write_text(heading + "a,1,0,False\na,3,0,True\nb,1,0,True\n", encoding="utf-8")
    new.write_text(heading + "a,2,0,True\nb,2,0,True\n", encoding="utf-8")
    join.main(["old.csv", "a=2", str(new)])
    selected = [row["model"] + row["learning_rate"] for row in join.read_table(old) if row["selected"] == "True"]
    assert selected == ["b1", "a2"]
    assert_raises(ValueError, "has no run of a=5", join.main, ["old.csv", "a=5", str(new)])


def test_runs_join_a_regression(tmp_path, monkeypatch):
    """What was taken out comes back, the regressions too. A run that the file has stays as it is."""
    whole = json.loads((DOCS / "results" / "decay_regression.json").read_text())
    lost = [run for run in whole["runs"] if run["model"] == "vector/gla" and run["seed"] > 1]
    assert len(lost) == 3
    known = {**next(run for run in whole["runs"] if run["model"] == "vector/gla"), "loss": 99.0}
    file = tmp_path / "decay_regression.json"
    file.write_text(json.dumps({"runs": [run for run in whole["runs"] if run not in lost], "regressions": {}}))
    (tmp_path / "results.csv").write_text((DOCS / "results" / "decay_design.csv").read_text())
    monkeypatch.setattr(join.DecayDesign, "decays", lambda self, folder, rows: [known, *lost])
    join.add_decays(file, tmp_path)
    joined = json.loads(file.read_text())
    assert joined["runs"] == whole["runs"]
    assert joined["regressions"]["init"]["median"]["rows"] == 37
    for name, one in whole["regressions"]["trained"].items():
        assert joined["regressions"]["trained"][name]["coefficients"] == pytest.approx(one["coefficients"])


def test_signs_of_differences():
    *_, difference = tables.table({**GLA, "pairs": {"gain": ["gla:gain", "gla"]}}).splitlines()
    assert difference.count("−") == 3
    assert "-" not in difference
    assert tables.table({**GLA, "pairs": {"itself": ["gla", "gla"]}}).endswith("| 0.0 [0.0, 0.0] |")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"collumns": {}}, "a table has no collumns; it may have also, columns"),
        ({"models": ["gla", "glo"]}, "post_parts_gla.csv has no results of glo"),
        ({"file": {"post_parts_gla.csv": ["glo"]}, "also": ["rate"]}, "post_parts_gla.csv has no results of glo"),
        ({"columns": {"niah": "niah"}}, "has no results of gla in niah"),
    ],
)
def test_a_wrong_table_is_refused(wanted, message):
    assert_raises(ValueError, message, tables.table, {**GLA, **wanted})


@pytest.mark.slow
def test_the_overview_is_that_of_its_files():
    """`overview.json` says what the files of results say, beside the speeds."""
    data = json.loads((DOCS / "results" / "overview.json").read_text(encoding="utf-8"))
    found = overview.joined()
    assert found["models"] == data["models"]
    assert overview.table(found) == overview.table(data)


def test_the_overview_s_text_is_that_of_its_files():
    """One model's, computed here."""
    column = overview.text()
    rows = [row for row in join.read_table(overview.TEXT) if (row["model"], row["selected"]) == ("gla", "True")]
    bits = [float(row["loss"]) / math.log(2) for row in rows if row["test"] == "text"]
    assert len(bits) == 3
    assert column["values"]["gla"][0] == bits
    assert column["lengths"] == [512, 8192]


HEADING = "model,learning_rate,seed,selected,loss\n"


def add(folder, old, new):
    """The runs of `old` and `new` (model, rate, seed, selected), joined; losses say where a row is from."""
    files = [folder / "old.csv", folder / "new.csv"]
    for file, runs in zip(files, (old, new), strict=True):
        file.write_text(HEADING + "".join(f"{run},{file.stem}\n" for run in runs.split()), encoding="utf-8")
    join.add(files[0], join.read_table(files[1]), overview.place)
    return files[0].read_text(encoding="utf-8").removeprefix(HEADING).split()


def test_models_are_added_in_the_order_of_the_presets(tmp_path):
    old = "gla,1,0,True mamba2@state(gla),1,1,True mamba2+post,1,0,True"
    rows = add(tmp_path, old, "retnet,1,7,True mamba2,1,7,True gla,1,0,True")
    models = ["mamba2,1,7,True,new", "mamba2+post,1,0,True,old", "mamba2@state(gla),1,1,True,old", "gla,1,0,True,old"]
    assert rows == [*models, "retnet,1,7,True,new"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [  # seeds at the selected rate, a rate that is not selected, and a table with more rates, which selects another
        ("gla,1,0,True", "gla,1,3,True", ["gla,1,0,True,old", "gla,1,3,True,new"]),
        ("gla,1,0,True", "gla,2,0,True", ["gla,1,0,True,old", "gla,2,0,False,new"]),
        ("gla,1,0,True", "gla,1,0,False gla,2,0,True", ["gla,1,0,False,old", "gla,2,0,True,new"]),
    ],
)
def test_runs_are_added_to_models(tmp_path, old, new, expected):
    assert add(tmp_path, old, new) == expected


def test_comparisons_are_added_to_the_map(tmp_path, monkeypatch):
    """New models and cells; those that the map has stay. Controls and longer runs have files of their own."""
    heading, old = "model,learning_rate,seed,selected\n", {"untrained": {"h1": {"K1": 1.0}}, "steps": {"K1:h1": [100]}}
    new = {"untrained": {"h1": {"K1": 0.0}, "l3": {"K1": 0.5}}, "steps": {"K0:l3": [None], "K1:h1": [7]}}
    files = {"TRAINED": "all.csv", "MAP": "all.json", "LONGER": "longer.csv", "CONTROLS": "controls.csv"}
    for name, file in files.items():
        monkeypatch.setattr(powers, name, tmp_path / file)
    control = "gated_deltanet:h1@state(K1:h1),1,0,True"
    powers.TRAINED.write_text(heading + "K1:h1,1,0,True\n", encoding="utf-8")
    powers.CONTROLS.write_text(heading + control.replace(",0,", ",1,") + "\n", encoding="utf-8")
    powers.LONGER.write_text(heading + "K1:h9,1,0,True\n", encoding="utf-8")
    for path in (powers.MAP, powers.LONGER.with_suffix(".json")):
        path.write_text(json.dumps(old), encoding="utf-8")
    (tmp_path / "results.csv").write_text(f"{heading}K0:l3,1,0,True\nK1:h1,1,0,True\n{control}\n", encoding="utf-8")
    (tmp_path / "powers.json").write_text(json.dumps(new), encoding="utf-8")

    def rows(path):
        return path.read_text(encoding="utf-8").splitlines()[1:]

    for steps in (1800, 3600):
        (tmp_path / "config.json").write_text(json.dumps({"settings": {"steps": steps}}), encoding="utf-8")
        powers.add_folder(tmp_path)
    assert rows(powers.TRAINED) == ["K0:l3,1,0,True", "K1:h1,1,0,True"]
    assert rows(powers.LONGER) == ["K0:l3,1,0,True", "K1:h1,1,0,True", "K1:h9,1,0,True"]
    assert rows(powers.CONTROLS) == [control.replace(",0,", ",1,"), control]
    for path in (powers.MAP, powers.LONGER.with_suffix(".json")):
        assert json.loads(path.read_text(encoding="utf-8")) == {
            "untrained": {"h1": {"K1": 1.0}, "l3": {"K1": 0.5}}, "steps": {"K0:l3": [None], "K1:h1": [100]},
        }  # fmt: skip


def test_the_demo_s_sentence_holds_in_every_run():
    """Gated DeltaNet recalls most at the longest lag, by far, in each build, at each number of steps and seed."""
    runs = {}
    for row in join.read_table(DOCS / "results" / "demo.csv"):
        if row["lag"] == "239":
            runs.setdefault((row["build"], row["steps"], row["seed"]), {})[row["model"]] = float(row["accuracy"])
    assert {build for build, *_ in runs} == {"native", "chunked"}
    for recalled in runs.values():
        best = recalled.pop("gated_deltanet")
        assert best > max(recalled.values()) + 0.15  # 18, 22 and 24 points on three runs, 42 or more on the others
