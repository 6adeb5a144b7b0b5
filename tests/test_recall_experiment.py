"""Mixtures of tasks: training and tests, the models of the Echo paper, grids in tables and pictures, Echo's tables."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from helpers import assert_raises, cases

from halflife import decay
from halflife.cli.compare import _next_commands
from halflife.lab.experiments import EXPERIMENTS, compare, echo
from halflife.lab.experiments.echo import TABLE_2, TABLE_3, VARIANTS, variant
from halflife.lab.experiments.recall import grid, recall_model
from halflife.models import LanguageModel
from halflife.report.redraw import run_figures, save_figures
from halflife.report.table import show
from halflife.report.tables.comparison import comparison_tables, levels, summarise
from halflife.runs.folder import read
from halflife.runs.sweep import Cell
from halflife.tasks import IGNORED, build
from halflife.tasks.base import median_lag

ECHO = EXPERIMENTS["echo-transfer"]()
SMALL = ECHO.scales["small"]

TINY = {
    "hidden_size": 16, "num_layers": 2, "num_heads": 2, "steps": 4, "batch_size": 4, "pairs": (1, 2),
    "lengths": (16, 24), "test_pairs": (1, 2, 4), "test_tasks": ("niah:hard", "commonword"), "test_examples": 8,
    "validation_examples": 8, "save_every": 2, "validate_every": 2, "train_length": 24,
}  # fmt: skip


def test_a_grid_holds_every_cell_that_has_room():
    cells = list(grid(("tooltrace",), (16, 32), (1, 4, 8)))
    assert [(c["length"], c["num_pairs"]) for c in cells] == [(16, 1), (32, 1), (32, 4)]  # T ≥ 5 KV + 3
    assert all(build(**cell).length == cell["length"] for cell in cells)
    hard, plain = (next(grid((name,), (64,), (4,))) for name in ("niah:hard", "niah"))
    assert hard["hard"]
    assert "hard" not in plain
    (text,) = grid(("economy:easy",), (64,), (4,))
    assert build(**text).length == text["length"] != 64


@pytest.mark.parametrize(("name", "held"), [("mqar", "lag"), ("post-mqar", "persist")])
def test_tests_vary_what_their_names_say(name, held):
    """By their samples: `capacity` the pairs, `lag` the lag alone, by whole lengths, and `persist` hardly the lag."""
    experiment = EXPERIMENTS[name]()
    settings = experiment.settings_at("smoke", {"length_factors": (1, 2, 4, 8)})
    tests = {}
    for test in experiment.configure(settings, Cell("mamba2", 1e-2, 0)).tests:
        pairs = test.built.generate(4, seed=0).labels.ne(IGNORED).sum(1)
        tests.setdefault(test.name, []).append((test.built.length, pairs.unique().item(), median_lag(test.built)))
    assert list(tests) == ["in_distribution", "capacity", held]
    assert [pairs for _, pairs, _ in tests["capacity"]] == [8, 16, 32, 64]
    lengths, pairs, lags = zip(*tests[held], strict=True)
    assert (lengths, set(pairs)) == ((32, 64, 128, 256), {8})
    assert lags[0] == tests["in_distribution"][0][2]
    grown = [lag - lags[0] for lag in lags]
    assert grown == [0, 32, 96, 224] if held == "lag" else grown[-1] < 32


def test_other_numbers_of_pairs_are_validated_and_held():
    """Those of the last stage, also where they are not T/4: nothing else selects a rate, and `lag` has as many."""
    plan = compare.plan_comparison(["mamba2"], settings={"pairs": (2, 4)})
    config = plan.configure(plan.cells()[0])
    assert [task["num_pairs"] for (task,) in config.stages] == [2, 4]
    assert config.validation == (config.tests[0].task,) == config.stages[-1]
    held = [test.task for test in config.tests if test.name == "lag"]
    assert [(task["num_pairs"], task["gap"]) for task in held] == [(4, task["length"] - 16) for task in held]


@pytest.mark.parametrize(("experiment", "sizes"), [("post-mqar", {"pairs": ()}), ("echo-transfer", {"test_pairs": ()})])
def test_no_numbers_of_pairs_are_refused(experiment, sizes):
    with pytest.raises(ValueError, match="at least one"):
        compare.plan_comparison(["mamba2"], experiment=experiment, settings=sizes)


def test_a_cell_of_echo_has_the_sizes_that_are_asked_for():
    experiment = EXPERIMENTS["echo-mqar"]()
    settings = experiment.settings_at("smoke", {"hidden_size": 32, "num_layers": 3})
    model = experiment.configure(settings, Cell("mamba2:4x64", 1e-3, 0)).model
    assert (model.hidden_size, model.num_layers) == (32, 3)
    assert_raises(ValueError, "equal-state", experiment.configure, settings, Cell("mamba2:4x65", 1e-3, 0))


def test_a_rate_that_is_named_twice_is_tried_once():
    plan = compare.plan_comparison(["mamba2"], tasks=["mqar"], learning_rates=[1e-3, 1e-2, 1e-3])
    assert plan.learning_rates == {"mamba2": [1e-3, 1e-2]}


def test_tasks_without_pairs_have_the_lengths_that_are_asked_for():
    cells = list(grid(("s5:a5", "s5:s3"), (64, 128), (4,)))
    assert [(c["name"], c["length"]) for c in cells] == [
        ("s5", 64), ("s5", 128), ("s5", 64), ("s5", 128),
    ]  # fmt: skip
    assert {c["group"] for c in cells[:2]} == {"a5"}
    config = EXPERIMENTS["recall"]().configure(
        EXPERIMENTS["recall"]().settings_at("smoke", {"tasks": ("s5",), "test_tasks": ("s5",)}), Cell("mamba2", 1e-3, 0)
    )
    assert config.stages == (({"name": "s5", "length": 32},),)
    assert [test.task["length"] for test in config.tests if test.name == "s5"] == [32, 64, 128]


def test_mqar_in_a_mixture_has_the_ids_of_the_others():
    (cell,) = grid(("mqar",), (64,), (8,))
    batch = build(**cell).generate(32, 0)
    keys, values = batch.inputs[:, 0:16:2], batch.inputs[:, 1:16:2]
    assert keys.min() >= 16
    assert keys.max() < 48 <= values.min()
    assert values.max() < 80
    rest = batch.inputs[:, 17::2]  # queries stand at even positions
    assert rest.min() >= 80
    assert rest.max() < 128


def test_the_training_mixture_is_validated_and_tested_in_distribution():
    config = ECHO.configure(SMALL, Cell("mamba2", 1e-3, 0))
    (mixture,) = config.stages[-1:]
    names = {(task["name"], task["num_pairs"]) for task in mixture}
    assert names == {(name, k) for name in ("sysprompt", "tooltrace") for k in range(1, 9)}
    assert config.validation == mixture
    assert tuple(test.task for test in config.tests if test.name == "in_distribution") == mixture
    assert {test.name for test in config.tests} - {"in_distribution"} == set(SMALL.test_tasks)
    assert max(test.task["length"] for test in config.tests) == 64 * 64


@cases(
    "model, published, ours",
    ("mamba2", 1.11e6, 1_093_296),
    ("mamba2+attention", 998e3, 989_592),
    ("mamba2+ska", 982e3, 973_232),
)
def test_baselines_of_the_echo_paper_have_its_sizes(model, published, ours):
    """Sizes agree within 1.6 %. The paper gives those of the Mamba-3 block of its Appendix G (see `recall_model`)."""
    with torch.device("meta"):
        parameters = LanguageModel(recall_model(model, SMALL)).num_parameters()
    assert parameters == ours
    assert abs(parameters / published - 1) < 0.016


def test_hybrid_layers_are_the_last_half():
    config = recall_model("mamba2+ska", SMALL, power=1)
    assert config.hybrid["layers"] == [2, 3]
    assert config.hybrid["options"] == {"num_heads": 4, "rank": 24, "chunk_size": SMALL.ska_chunk, "power": 1}


def test_variants_change_the_ska_layers_and_nothing_else():
    for name in VARIANTS:
        _, options = variant(f"mamba2+ska:{name}")
        config = ECHO.model(f"mamba2+ska:{name}", SMALL)
        assert options.items() <= config.hybrid["options"].items()
        plain = ECHO.model("mamba2+ska", SMALL)
        assert dataclasses.replace(config, hybrid={}, name="") == dataclasses.replace(plain, hybrid={}, name="")
    models = [json.dumps(ECHO.model(f"mamba2+ska:{name}", SMALL).hybrid) for name in VARIANTS]
    assert len(set(models)) == len(models)


def test_the_baseline_of_equal_state_has_no_smaller_state():
    experiment = EXPERIMENTS["echo-mqar"]()
    settings = experiment.scales["smoke"]
    floats = {
        name: LanguageModel(experiment.model(name, settings)).state_size()
        for name in ("mamba2", "mamba2:equal-state", "mamba2+ska")
    }
    assert floats["mamba2"] < floats["mamba2+ska"] <= floats["mamba2:equal-state"] < 1.1 * floats["mamba2+ska"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = compare.create_comparison(
        ("mamba2", "mamba2+ska"), tasks=("sysprompt", "tooltrace"), settings=TINY, seeds=2,
        output=tmp_path_factory.mktemp("runs") / "mixture",
    )  # fmt: skip
    partly = compare.run_comparison(folder, only_seeds=(1,), show=False)
    assert {row["seed"] for row in partly} == {1}
    return folder, compare.run_comparison(folder, show=False)


def test_a_mixture_is_compared_on_a_grid(finished):
    folder, rows = finished
    cells = {(row["test"], row["length"], row["num_pairs"]) for row in rows if row["test"] != "in_distribution"}
    hard = {("niah:hard", 16, 1), ("niah:hard", 16, 2), ("niah:hard", 24, 1), ("niah:hard", 24, 2)}
    common = {("commonword", length, k) for length in (16, 24) for k in (1, 2, 4)}
    assert cells == hard | common
    assert {row["seed"] for row in rows} == {0, 1}
    assert all(0 <= row["accuracy"] <= 1 for row in rows)
    assert (folder / "report.html").exists()
    run = read(folder)
    assert {"recall.png", "recall.svg"} <= {path.name for path in save_figures(run, run_figures(run))}


def test_a_task_of_text_needs_no_tier(tmp_path):
    """The length of the task is its default, which is not in the settings."""
    names = "lengths", "test_pairs", "train_length", "pairs"
    kept = {name: value for name, value in TINY.items() if name not in names}
    sizes = {**kept, "steps": 1, "test_tasks": ("toolcalling",), "test_examples": 2, "validation_examples": 2}
    given = {"tasks": ("toolcalling",), "settings": {**sizes, "lengths": (16, 24)}}
    assert_raises(ValueError, "lengths=.*changes nothing here", compare.plan_comparison, ("mamba2",), **given)
    folder = compare.create_comparison(("mamba2",), tasks=("toolcalling",), settings=sizes, output=tmp_path / "text")
    rows = compare.run_comparison(folder, show=False)
    assert {(row["test"], row["length"]) for row in rows} == {("in_distribution", 400), ("toolcalling", 400)}


def test_the_first_half_has_short_sequences_where_they_are_asked_for():
    settings = ECHO.settings_at("paper", {"warm_length": 24, "warm_pairs": (1, 4)})
    warm, rest = ECHO.build_cell(settings, Cell("mamba2", 1e-3, 0)).stages
    assert {(task["length"], task["num_pairs"]) for task in warm} == {(24, 1), (24, 4)}
    assert {(task["length"], task["num_pairs"]) for task in rest} == {(64, pairs) for pairs in range(1, 9)}
    assert len(ECHO.build_cell(ECHO.scales["paper"], Cell("mamba2", 1e-3, 0)).stages) == 1


def test_a_test_has_as_many_examples_as_its_tokens_allow():
    settings = ECHO.settings_at("paper", {"test_tasks": ("niah",), "test_tokens": 1 << 15})
    config = ECHO.build_cell(settings, Cell("mamba2", 1e-3, 0))
    examples = {test.task["length"]: test.examples for test in config.tests if test.name == "niah"}
    assert examples == {64: 512, 128: 256, 256: 128, 512: 64, 1024: 32, 2048: 16, 4096: 16}


def test_the_first_seeds_choose_the_rates_of_the_others(tmp_path):
    """Seed 0 tries both rates, and seed 1 runs at the better one; the results are those of the whole grid."""
    sizes = {**TINY, "steps": 3, "test_examples": 2}
    choices = {"settings": sizes, "seeds": 2, "learning_rates": (1e-3, 1e-2), "output": tmp_path / "tuned"}
    folder = compare.create_comparison(("mamba2",), tasks=("sysprompt",), tune_seeds=1, **choices)
    with pytest.raises(ValueError, match=r"mamba2 lr 0\.001 seed 0, mamba2 lr 0\.01 seed 0"):
        compare.run_comparison(folder, only_seeds=(1,), show=False)
    assert compare.Comparison.load(folder).try_runs(folder).runs == 3
    rows = compare.run_comparison(folder, show=False)
    best = {row["learning_rate"] for row in rows if row["selected"]}
    runs = {(row["learning_rate"], row["seed"]) for row in rows}
    assert runs == {(1e-3, 0), (1e-2, 0), *((rate, 1) for rate in best)}
    assert len(best) == 1
    assert compare.Comparison.load(folder).try_runs(folder) is None
    with pytest.raises(ValueError, match="at most the number of seeds, 2; got 3"):
        compare.plan_comparison(("mamba2",), seeds=2, tune_seeds=3)


def test_a_table_of_a_grid_has_the_means_of_its_cells(finished, capsys):
    _, rows = finished
    table = summarise(rows)
    first = next(row for row in table if row["seed"] == 0 and row["model"] == "mamba2")
    own = [
        r["accuracy"] for r in rows
        if (r["model"], r["seed"], r["test"], r["length"]) == ("mamba2", 0, "commonword", 24)
    ]  # fmt: skip
    assert len(own) == 3
    assert first["accuracy"]["commonword", 24] == pytest.approx(sum(own) / 3)
    chance, guess = levels(rows)["commonword", 24]
    assert chance == pytest.approx((1 / 2 + 1 / 3 + 1 / 5) / 3)
    assert guess == pytest.approx((2 / 3 + 2 / 4 + 2 / 6) / 3)
    show(*comparison_tables(rows))
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("mamba2+ska", "com", "nia", "ignoring the key"))


def row(model="mamba2", seed=0, test="niah", length=64, pairs=1, accuracy=0.5, **other):
    return {
        "model": model, "learning_rate": 0.01, "seed": seed, "selected": True, "parameters": 1000, "state_size": 64,
        "tokens_per_second": 10.0, "test": test, "length": length, "num_pairs": pairs, "accuracy": accuracy, **other,
    }  # fmt: skip


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_transfer_stands_beside_the_paper():
    rows = [
        row(model, 0, test, length, pairs, accuracy=0.9 if model == "mamba2+ska:K1" else 0.1)
        for model in ("mamba2", "mamba2+ska:K1") for test in TABLE_3 for length in (64, 4096) for pairs in (1, 4)
    ]  # fmt: skip
    three, two = echo.EchoTransfer().summary(Path(), rows).split("### Table 2")
    found = {cells(line)[0]: cells(line)[1:] for line in three.splitlines() if line.startswith("| ")}
    assert found["task"] == ["paper: SSM", "paper: SSM+Attn", "paper: SSM+SKA", "mamba2", "mamba2+ska:K1"]
    assert found["multihop"] == ["39.3", "71.1", "76.7", "10.0", "90.0"]
    assert set(found) == {"task", *TABLE_3}
    lengths = [cells(line)[0] for line in two.splitlines() if line.startswith("| ")]
    assert lengths == ["length", "64", "4,096"]
    assert cells(two.splitlines()[-1])[1:4] == [f"{x:.1f}" for x in TABLE_2[4096]]


def test_retnet_has_the_decays_that_post_ran_it_with():
    """fla's RetNet, 1 − 2^(−5−j), and not Appendix E's, from which it differs at the 8 heads of the state of 32k."""
    experiment = EXPERIMENTS["post-mqar"]()
    for state, heads in (("64k", 4), ("32k", 8)):
        config = experiment.model(f"retnet:{state}", experiment.settings_at("paper", {}))
        options = {name: config.mixer_options[name] for name in ("num_heads", "decay")}
        assert options == {"num_heads": heads, "decay": "retnet_paper"}
    rates = decay.build("retnet_paper", num_heads=8, head_dim=64, granularity="scalar").rates()
    assert (-rates).exp().tolist() == pytest.approx([1 - 2.0 ** (-5 - j) for j in range(8)])


@pytest.mark.parametrize(("task", "has_forecast"), [("mqar", True), ("niah", True), ("sysprompt", False)])
def test_only_tasks_with_a_forecast_are_told_of_it(task, has_forecast):
    plan = compare.plan_comparison(["mamba2"], tasks=[task])
    assert ("halflife forecast runs/x" in _next_commands(Path("runs/x"), plan)) == has_forecast
