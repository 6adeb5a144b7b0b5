"""Echo's tables, from made-up results."""

import json
import math

from halflife.lab.experiments import echo_tables
from halflife.lab.experiments.echo_tables import TABLE_2, TABLE_3
from halflife.report.markdown import in_distribution, percent


def row(model="mamba2", seed=0, test="niah", length=64, pairs=1, accuracy=0.5, **other):
    return {
        "model": model, "learning_rate": 0.01, "seed": seed, "selected": True, "parameters": 1000, "state_size": 64,
        "tokens_per_second": 10.0, "test": test, "length": length, "num_pairs": pairs, "accuracy": accuracy, **other,
    }  # fmt: skip


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_percent_gives_the_mean_and_every_seed():
    rows = [row(seed=0, accuracy=0.5), row(seed=0, accuracy=1.0), row(seed=1, accuracy=0.25)]
    assert percent(rows) == "50.0 (75.0, 25.0)"
    assert percent(rows[:1]) == "50.0"
    assert percent([*rows, row(seed=3, accuracy=0.5)]) == "50.0 [25.0, 75.0] (75.0, 25.0, 50.0)"
    assert percent([]) == "–"
    assert percent([row(accuracy=math.nan), *rows]) == "diverged"
    assert percent([*rows, row(seed=2, accuracy=0.0, selected=False)]) == "50.0 (75.0, 25.0)"


def test_transfer_stands_beside_the_paper():
    rows = [
        row(model, 0, test, length, pairs, accuracy=0.9 if model == "mamba2+ska:K1" else 0.1)
        for model in ("mamba2", "mamba2+ska:K1") for test in TABLE_3 for length in (64, 4096) for pairs in (1, 4)
    ]  # fmt: skip
    three, two = echo_tables.transfer(rows).split("### Table 2")
    found = {cells(line)[0]: cells(line)[1:] for line in three.splitlines() if line.startswith("| ")}
    assert found["task"] == ["paper: SSM", "paper: SSM+Attn", "paper: SSM+SKA", "mamba2", "mamba2+ska:K1"]
    assert found["multihop"] == ["39.3", "71.1", "76.7", "10.0", "90.0"]
    assert set(found) == {"task", *TABLE_3}
    lengths = [cells(line)[0] for line in two.splitlines() if line.startswith("| ")]
    assert lengths == ["length", "64", "4,096"]
    assert cells(two.splitlines()[-1])[1:4] == [f"{x:.1f}" for x in TABLE_2[4096]]


def test_learning_reads_the_validation_on_the_way(tmp_path):
    folder = tmp_path / "mamba2" / "lr0.01-seed0"
    folder.mkdir(parents=True)
    lines = [{"step": 100, "loss": 2.0}, *({"step": s, "validation_accuracy": s / 1000} for s in (100, 200, 600))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = echo_tables.learning(tmp_path, [row(test="capacity"), row(test="persist")])
    assert cells(table.splitlines()[0]) == [
        "model", *(f"step {s}" for s in (100, 200, 300, 400, 600)), "capacity 64",
    ]  # fmt: skip
    assert cells(table.splitlines()[-1]) == ["mamba2", "10.0", "20.0", "nan", "nan", "60.0", "50.0"]


def test_models_are_listed_with_their_sizes():
    table = in_distribution([row(seed=s, accuracy=s / 10) for s in (1, 2)])
    assert cells(table.splitlines()[-1]) == ["mamba2", "1,000", "64", "15.0 (10.0, 20.0)"]


def test_a_test_that_repeats_the_scores_in_distribution_has_no_column():
    tests = {("capacity", 64): 0.5, ("in_distribution", 64): 0.5, ("persist", 64): 0.4, ("capacity", 128): 0.5}
    rows = [row(test=test, length=length, accuracy=x) for (test, length), x in tests.items()]
    heading = cells(in_distribution(rows).splitlines()[0])
    assert heading == ["model", "parameters", "state", "in_distribution 64", "persist 64", "capacity 128"]
