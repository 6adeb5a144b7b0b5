"""The experiments for open claims: their models resolve, and three steps of them run from training to the tables."""

import csv
import dataclasses
import json
import math
from pathlib import Path

import overview
import pytest
import torch
from corpora import write_texts
from helpers import assert_raises, cases
from pairwise import slow_beyond

from halflife import LanguageModel
from halflife.lab.experiments import EXPERIMENTS, compare
from halflife.lab.experiments.evidence import koopman_powers, post_parts
from halflife.models import ModelConfig
from halflife.report.figures.matplotlib_renderer import draw
from halflife.report.figures.operators import power_map
from halflife.runs.records import Training
from halflife.runs.sweep import Cell

NAMES = ("post-taken-apart", "post-taken-apart-text", "overview", "koopman-powers")
TINY = {"steps": 3, "batch_size": 2, "save_every": 3, "hidden_size": 32}
TINY_TASK = {**TINY, "test_examples": 2, "validation_examples": 2}
TINY_TEXT = {
    **TINY, "num_layers": 1, "num_heads": 2, "train_length": 16, "test_tokens": 512, "validation_tokens": 64,
    "held_out": (0.2, 0.2), "validate_every": 3,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "mqar-updates"])
def test_every_model_resolves(name):
    experiment = EXPERIMENTS[name]()
    for scale in experiment.scales:
        settings = experiment.settings_at(scale, {})
        for model in {model for group in experiment.groups.values() for model in group} | set(experiment.models):
            assert isinstance(experiment.configure(settings, Cell(model, 1e-3, 0)).model, ModelConfig)


def options(part, base="mamba2"):
    experiment = EXPERIMENTS["post-taken-apart"]()
    settings = experiment.settings_at("small", {})
    name = f"{base}:{part}" if part else base
    return experiment.configure(settings, Cell(name, 1e-2, 0)).model.mixer_options


def test_parts_are_what_they_are_called():
    assert "post" not in options("")
    assert options("post")["post"] == {"train_length": 64, "reference_length": 1}
    assert options("theorem")["post"]["reference_length"] == 64
    assert options("held")["post"]["last_position"] == 64
    assert options("static")["post"]["stretch"] is False
    assert options("gain-held")["post"]["last_position"] == 64
    assert options("gain")["stretch_gain"] is options("gain-held")["stretch_gain"] is True
    assert options("theorem-slow0.01", "rwkv7")["post"]["endpoints"] == (0.01, 1.0)
    assert options("frozen")["decay_options"] == {"step_bias": "frozen"}
    assert options("geometric")["decay_options"] == {"rate_start": "geometric", "train_length": 64}
    assert "post" not in options("geometric")
    assert options("gain-moving", "gated_deltanet")["post"]["endpoints"] == "moving"
    assert "stretch_gain" not in options("post")
    assert options("geometric-trained", "retnet")["decay_options"] == {
        "trained_rates": True, "rate_start": "geometric", "train_length": 64,
    }  # fmt: skip
    assert "post" not in options("trained", "retnet")
    for base in post_parts.BASES:
        different = [str(options(post_parts.split(name)[1], base)) for name in post_parts.models(base)]
        assert len(set(different)) == len(different)


def test_parts_that_do_not_exist():
    assert_raises(ValueError, r"unknown part of PoST 'theorme'\. Did you mean 'theorem'", options, "theorme")
    assert_raises(ValueError, "rwkv7 has no 'frozen': choose from rwkv7:post", options, "frozen", "rwkv7")


@pytest.mark.parametrize("base", slow_beyond(["mamba2"], post_parts.BASES))
def test_every_part_of_a_group_can_be_built(base):
    """The end points of a part can be out of reach for a decay, which its layer says when it is built."""
    experiment = EXPERIMENTS["post-taken-apart"]()
    settings = experiment.settings_at("smoke", {})
    for name in post_parts.models(base):
        LanguageModel(dataclasses.replace(experiment.model(name, settings), num_layers=1))


def powers(name):
    experiment = koopman_powers.KoopmanPowers()
    return experiment.build_cell(experiment.settings_at("smoke", {}), Cell(name, 1e-2, 0))


def test_cells_of_the_map_are_what_they_are_called():
    task = powers("K2:h4").validation[0]
    assert (task["hold"], task["value_size"], task["length"]) == (4, 1, 96)
    assert powers("K2:l3-none").validation[0]["length"] == 4 * 7
    assert powers("K2:h2-masked").action_mask
    assert not powers("K2:h2").action_mask
    batches = {powers(name).batch_size * powers(name).validation[0]["length"] for name in ("K1", "K1:h4", "K1:l3")}
    assert batches == {64 * 24}
    options = powers("learned:h4").model.hybrid["options"]
    assert (options["mix"], options["power"], options["chunk_size"]) == ("powers", 3, 16)
    assert powers("K2-mixed-g1.5").model.hybrid["options"]["gamma"] == 1.5
    ridge = powers("ridge-conv").model
    assert (ridge.mixer, ridge.mixer_options["power"], ridge.mixer_options["conv_size"]) == ("ska", 0, 4)
    assert not ridge.hybrids
    for name, message in (
        ("K9:h1", "unknown model of koopman-powers 'K9'"), ("K1:h0", "a cell is hN or lN"),
        ("attention:h1-masked", "attention reads no action mask"),
    ):  # fmt: skip
        assert_raises(ValueError, message, powers, name)


def test_the_steps_until_a_model_has_learned():
    logs = [[(100, 0.5), (200, 0.95), (300, 0.8)], [(100, 0.1)], []]
    runs = [
        Training(Path(), "K1", 1e-2, seed, [{"step": n, "validation_accuracy": x} for n, x in log], {})
        for seed, log in enumerate(logs)
    ]
    assert koopman_powers.steps_until_learned(runs) == [200, None, None]


def test_the_map_is_drawn_with_empty_cells():
    panels = {"before": {"K1": {"h1": 1.0, "h4": 0.34}}, "after": {"attention": {"h4": 0.25}, "K1": {"h1": 0.5}}}
    before, after = draw(power_map(panels)).axes
    texts = lambda axes: [text.get_text() for text in axes.texts]  # noqa: E731
    assert (texts(before), texts(after)) == (["100", "34"], ["25", "50"])
    assert [label.get_text() for label in after.get_yticklabels()] == ["attention", "K1"]


def test_reassigned_keys_at_every_length():
    """At T to 16 T, K keys with the fillers or with the updates that fill the sequence."""
    experiment = EXPERIMENTS["mqar-updates"]()
    config = experiment.build_cell(experiment.settings_at("smoke", {}), Cell("mamba2+ska_post", 1e-2, 0))
    tests = {(test.name, test.task["length"]): test.task["updates"] for test in config.tests}
    assert tests == {
        ("in_distribution", 24): 1, ("persist", 24): 1, ("persist", 96): 1, ("persist", 384): 1,
        ("reassigned", 24): 1, ("reassigned", 96): 10, ("reassigned", 384): 46,
    }  # fmt: skip
    options = config.model.hybrid["options"]
    assert (options["decay"], options["beta"], options["post"]["train_length"]) == ("simple", True, 24)
    assert (options["rank"], options["chunk_size"]) == (24, 2)
    assert_raises(ValueError, "a number for each of pairs", experiment.settings_at, "smoke", {"updates": (1, 2)})


def test_before_training_one_power_recalls_and_two_recall_what_is_held():
    def recalled(cell, power):
        task = koopman_powers.MQAR(**koopman_powers.MapCell.parse(cell).sizes(256, 8))
        return koopman_powers.untrained_recall(task, power=power)

    assert recalled("h1", 1) == 1.0
    assert max(recalled("h1", 2), recalled("h1", 0)) < 0.1
    assert recalled("h4", 2) > 0.9 > 0.6 > recalled("h4", 1)
    assert recalled("l3", 1) > 0.9 > recalled("l3", 2)


def test_columns_of_the_overview():
    """The pairs of training and of the largest test, at the shortest length that has them and at the longest."""
    level = {"a": 0.83, "b": 0, "c": 0.9}
    rows = [
        {"model": model, "seed": seed, "selected": True, "test": test, "length": length, "num_pairs": pairs,
         "accuracy": (1 if math.isnan(pairs) else pairs) / 100 + seed / 1000 + length / 1e6 + level[model]}
        for seed in (0, 1) for model in level
        for test in ("mqar", "niah:hard", "s5:s3") for length in (64, 128, 1024)
        for pairs in ((math.nan,) if test == "s5:s3" else (1, 16, 32)) if not (pairs == 32 and length == 64)
    ]  # fmt: skip
    found = overview.recall(rows, 64, 16)
    assert found["persistence"]["lengths"] == [64, 1024]
    assert found["persistence"]["values"]["a"][1] == pytest.approx([0.991024, 0.992024])
    assert found["capacity"]["lengths"] == [128, 1024]
    assert found["capacity"]["values"]["a"][0] == pytest.approx([1.150128, 1.151128])
    assert found["decoys"]["values"]["a"][0][0] == pytest.approx(0.83 + (0.01 + 0.16) / 2 + 64e-6)
    assert [found[name]["learned"] for name in found] == [["a", "c"]] * 3 + [["c"]]  # 0.84 is not learned
    data = {
        "models": ["a", "b", "c"], "train_length": 64, "columns": found, "device": "cpu",
        "parameters": {"a": 9000, "b": 900, "c": 90},
        "speeds": {"training": {"a": 1e4, "b": 2, "c": 1}, "decoding": {"a": 500.0, "b": 1, "c": 1}},
    }  # fmt: skip
    page = overview.table(data)
    assert "| a | 9,000 | 99.1 → 99.2 | 115.1 → 115.2 |" in page
    assert "| not learned | – | 10,000 | 500 |" in page
    assert "| b | 900 |" + " not learned |" * 4 in page


def test_states_of_the_overview_are_of_one_size():
    """Layers of linear attention and of the delta rule store d²/h numbers per head and short convolutions."""
    experiment = EXPERIMENTS["overview"]()
    settings = experiment.settings_at("small", {})
    sizes = []
    for name in ("mamba2", "gated_deltanet", "rwkv7", "simple", "tnl"):
        with torch.device("cpu"):
            sizes.append(LanguageModel(experiment.configure(settings, Cell(name, 1e-2, 0)).model).state_size())
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize(("hold", "power"), [(2, 1), (2, 3), (3, 5), (5, 4), (5, 9), (9, 8)])
def test_before_training_powers_from_h_minus_1_to_2h_minus_1_recall_what_is_held(hold, power):
    """Where one step of K goes on to the next token with probability 1/h, these are most likely to go on once."""
    task = koopman_powers.MQAR(**koopman_powers.MapCell.parse(f"h{hold}").sizes(256, 8))
    assert koopman_powers.untrained_recall(task, power=power) == 1.0
    assert koopman_powers.untrained_recall(task, power=4 * hold) < 0.5


@pytest.mark.slow
@cases(
    "name, models, changes",
    ("post-taken-apart", ["mamba2", "mamba2:gain-held"], TINY_TASK),
    ("post-taken-apart-text", ["mamba2", "mamba2:gain"], TINY_TEXT),
    ("koopman-powers", ["learned:h2", "ridge-conv:h2", "K2:l3-masked"], TINY_TASK),
    ("mqar-updates", ["mamba2+ska_decay", "mesa", "mamba2+attention"], TINY_TASK),
    ("overview", ["gated_deltanet+gate_rank", "mamba2+ska", "mamba2@state(mamba2+ska)"], TINY_TASK),
)
def test_three_steps(name, models, changes, tmp_path, monkeypatch):
    monkeypatch.setenv("HALFLIFE_CACHE", str(tmp_path / "cache"))
    settings = dict(changes)
    if name.endswith("text"):
        text = write_texts(tmp_path / "text", "the state forgets what it cannot hold in {i} tokens; " * 30)
        settings["text"] = (str(text),)
    folder = compare.create_comparison(
        models, experiment=name, settings=settings, learning_rates=[1e-3], output=tmp_path / "run"
    )
    rows = compare.run_comparison(folder, show=False)
    assert {row["model"] for row in rows} == set(models)
    if name == "koopman-powers":
        assert (folder / "figures" / "powers.png").exists()
        assert json.loads((folder / "powers.json").read_text())["steps"] == {model: [None] for model in models}
    if name.endswith("text"):
        assert "| perplexity of the last T of | 16 | 32 |" in (folder / "summary.md").read_text()
        lengths = list(csv.DictReader((folder / "lengths.csv").read_text().splitlines()))
        assert {(row["model"], row["length"]) for row in lengths} >= {
            (model, n) for model in models for n in ("16", "32")
        }
        assert (folder / "figures" / "length.png").exists()
