"""Runs and sweeps in files and processes: the same seed gives the same numbers, after interruptions and kills too."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import torch
from helpers import assert_raises, cases
from tiny_runs import SMALL, TASK, comparable, interrupt_after, run, tiny

from halflife import tasks
from halflife.data.task_stream import TaskStream
from halflife.evaluation.recall import accuracy
from halflife.lab.experiments import EXPERIMENTS, SCALES
from halflife.lab.experiments import compare as comparison
from halflife.lab.experiments.mqar import mqar_model
from halflife.models import PRESETS, LanguageModel, checkpoint
from halflife.report.tables.comparison import rates_at_ends, summarise
from halflife.report.tables.estimate import describe_trial
from halflife.runs.sweep import Cell, create_sweep
from halflife.tasks import IGNORED
from halflife.tasks.layout import BOS
from halflife.training import speed, trial
from halflife.training.fit import Objective


def test_a_run_writes_what_it_did(whole):
    result = run(tiny(), whole)  # the one of the folder
    assert {p.name for p in whole.iterdir()} == {
        "config.json", "model.safetensors", "run.json", "metrics.jsonl", "spectrum.json", "result.json",
    }  # fmt: skip
    assert json.loads((whole / "run.json").read_text())["steps"] == 12
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "validation_accuracy" in line] == [4, 8, 12]
    assert [line["step"] for line in lines if "loss" in line] == [4, 8, 12]
    assert all({"loss", "learning_rate", "grad_norm"} < set(line) for line in lines if "loss" in line)
    assert [test["length"] for test in result["tests"]] == [16, 32]
    assert all(0 <= test["accuracy"] <= 1 for test in result["tests"])
    assert result["parameters"] == checkpoint.load(whole).num_parameters()
    spectrum = json.loads((whole / "spectrum.json").read_text())
    assert spectrum["channels"] == "heads"
    assert spectrum["layers"][0]["init"]["timescales"]["1"] == pytest.approx([16, 1])
    # The saved model is the tested one.
    again = accuracy(checkpoint.load(whole), tasks.build(**TASK), split="test", seed=0, num_examples=32)
    assert again == result["tests"][0]["accuracy"]


def test_a_validation_whose_line_was_lost_is_done_again(whole, tmp_path, monkeypatch):
    """As by a power cut after the last checkpoint, which is flushed to the disk, as lines are not."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tiny(), tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert run(tiny(), tmp_path)["validation"] == run(tiny(), whole)["validation"]


def test_same_seed_same_numbers_other_seed_others(whole, tmp_path):
    for seed in (0, 1):
        torch.manual_seed(7 + seed)  # earlier draws must not matter
        run(tiny(seed=seed), tmp_path / str(seed))
    assert comparable(tmp_path / "0") == comparable(whole)
    assert comparable(tmp_path / "1")[1] != comparable(whole)[1]


@pytest.mark.parametrize("step", [6, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 8, 11))])
def test_interrupted_run_goes_on_to_the_same_numbers(whole, tmp_path, monkeypatch, step):
    interrupt_after(monkeypatch, step)
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), tmp_path)
    assert not (tmp_path / "result.json").exists()
    monkeypatch.undo()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')  # a half line, as a killed process may leave it
    run(tiny(), tmp_path)
    assert comparable(tmp_path) == comparable(whole)
    assert not (tmp_path / "checkpoints").exists()


def test_a_folder_of_another_run_is_refused(whole):
    assert_raises(ValueError, "another configuration", run, tiny(learning_rate=1e-3), whole)


def test_a_diverged_run_says_so_and_is_no_candidate(tmp_path, monkeypatch):
    forward = Objective.forward

    def broken(self, input_ids, labels, num_items_in_batch=None):
        return {"loss": forward(self, input_ids, labels)["loss"] * math.nan}

    monkeypatch.setattr(Objective, "forward", broken)
    result = run(tiny(), tmp_path)
    assert "nan at step 4" in result["diverged"]
    assert all(math.isnan(test["accuracy"]) for test in result["tests"])


@cases("options", {"steps": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"learning_rate": math.inf})
def test_bad_run_settings(options):
    assert_raises(ValueError, next(iter(options)), tiny, **options)


def test_stream_gives_each_stage_its_share_and_each_step_its_batch():
    stages = [[tasks.build(**{**TASK, "num_pairs": k})] for k in (1, 2)]
    stream = TaskStream(stages, steps=10, batch_size=3, seed=7)
    assert [(batch["labels"] != IGNORED).sum().item() for batch in (stream[i] for i in range(10))] == [3] * 5 + [6] * 5
    assert torch.equal(stream[4]["input_ids"], stream[4]["input_ids"])
    assert not torch.equal(stream[4]["input_ids"], stream[3]["input_ids"])


def test_a_mixture_shares_every_batch_and_its_lengths_take_turns():
    mixed = [tasks.build(name, length=length, num_pairs=2) for name in ("niah", "sysprompt") for length in (16, 24)]
    stream = TaskStream([mixed], steps=8, batch_size=5, seed=0)
    shapes = [tuple(batch["input_ids"].shape) for batch in (stream[i] for i in range(8))]
    assert shapes == [(5, 16), (5, 24)] * 4
    # Only sysprompt begins with BOS. Of five examples, the tasks have two and three in turn.
    counts = [(stream[i]["input_ids"][:, 0] == BOS).sum().item() for i in range(8)]
    assert sorted(counts[:2] + counts[2:4]) == [2, 2, 3, 3]
    assert sum(counts) == 20
    assert torch.equal(stream[5]["input_ids"], stream[5]["input_ids"])
    together = torch.cat([stream[i]["input_ids"].flatten() for i in range(0, 8, 2)])
    assert together.unique().numel() > 60  # no batch is repeated


def test_tokens_per_second_count_the_tokens_of_each_step():
    """Steps of 16 and of 32 tokens take turns; a run that goes on knows the steps of its own process."""
    config = tiny(stages=((TASK, {**TASK, "length": 32}),), validation=({**TASK, "length": 32},))
    for seconds, expected in (
        ({0: 0.1, 1: 0.3, 2: 0.1, 3: 0.3, 4: 9.0}, 4 * (3 * 16 + 2 * 32) / 0.9),
        ({7: 0.3, 9: 0.3}, 4 * 32 / 0.3),
    ):
        assert config.open().throughput(seconds)["tokens_per_second"] == pytest.approx(expected)
    assert math.isnan(config.open().throughput({})["tokens_per_second"])


def test_accuracy_is_that_of_a_token_loop(monkeypatch):
    model, task = LanguageModel(tiny().model).eval(), tasks.build(**TASK)
    batch = task.generate(40, tasks.stream_seed("test", 3))
    right = [
        model(batch.inputs[i : i + 1])[0][0, t].argmax() == batch.labels[i, t]
        for i in range(40)
        for t in (batch.labels[i] != IGNORED).nonzero().flatten()
    ]
    monkeypatch.setattr("halflife.evaluation.recall.BATCH_TOKENS", 100)
    measured = accuracy(model, task, split="test", seed=3, num_examples=40)
    assert measured == pytest.approx(sum(right).item() / len(right))


def test_an_answer_of_several_characters_counts_as_a_whole():
    """A model that always says "4" is right in about one of ten digits, and in one of 100 answers."""
    task = tasks.build("toolcalling", length=400, min_calls=10, max_calls=30)
    model = LanguageModel(dataclasses.replace(tiny().model, vocab_size=128))
    model.logits = lambda hidden: torch.nn.functional.one_hot(torch.full(hidden.shape[:-1], ord("4")), 128)
    batch = task.generate(600, tasks.stream_seed("test", 0))
    answers = torch.stack([row[row != IGNORED] for row in batch.labels])
    expected = (answers == ord("4")).all(1).double().mean().item()
    assert 0 < expected < 0.05 < (answers == ord("4")).double().mean().item()
    assert accuracy(model, task, split="test", seed=0, num_examples=600) == pytest.approx(expected)


def test_sweep_has_every_seed_and_picks_the_rate_on_validation(tmp_path):
    folder = comparison.create_comparison(
        ["mamba2"], seeds=2, learning_rates=[1e-3, 1e-2], settings=SMALL, output=tmp_path / "a"
    )
    rows = comparison.run_comparison(folder, show=False)
    assert len(rows) == 2 * 2 * (1 + 4 + 4)
    (selected,) = {row["learning_rate"] for row in rows if row["selected"]}
    results = {
        (rate, seed): json.loads((folder / Cell("mamba2", rate, seed).folder / "result.json").read_text())
        for rate in (1e-3, 1e-2) for seed in (0, 1)
    }  # fmt: skip
    assert {(row["learning_rate"], row["seed"], row["validation"]) for row in rows} == {
        (*run, result["validation"]) for run, result in results.items()
    }
    means = {rate: results[rate, 0]["validation"] + results[rate, 1]["validation"] for rate in (1e-3, 1e-2)}
    assert means[selected] == max(means.values())
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "versions.json", "results.csv", "timescales.csv", "validation.csv", "report.html", "figures",
        "mamba2",
    }  # fmt: skip
    assert [row["seed"] for row in summarise(rows)] == [0, 1, 0, 1, "mean"]
    assert_raises(FileExistsError, "--resume", comparison.create_comparison, ["mamba2"], settings=SMALL, output=folder)


def test_torchrun_trains_no_comparison(tmp_path, monkeypatch):
    """Its processes would find different runs free, and add up the gradients of different seeds."""
    folder = comparison.create_comparison(["mamba2"], settings=SMALL, output=tmp_path / "a")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for work in (comparison.run_comparison, lambda folder: create_sweep(folder.with_name("b"), {})):
        assert_raises(ValueError, "torchrun trains one model", work, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert_raises(ValueError, "whole batches, in one process", run, tiny(), tmp_path / "c")


def test_a_comparison_is_extended(tmp_path):
    """What was run stays as it was."""
    folder = comparison.create_comparison(
        ["llama"], learning_rates=[1e-3], settings=SMALL | {"steps": 2}, output=tmp_path / "a", command="first"
    )
    before = comparison.run_comparison(folder, show=False)
    comparison.extend_comparison(folder, ["llama", "retnet"], learning_rates=[1e-2, 1e-3], command="second")
    rows = comparison.run_comparison(folder, show=False)
    assert {(row["model"], row["learning_rate"], row["seed"]) for row in rows} == {
        (model, rate, 0) for model in ("llama", "retnet") for rate in (1e-3, 1e-2)
    }
    assert [row | {"selected": True} for row in rows if row | {"selected": True} in before] == before
    comparison.extend_comparison(folder, seeds=2)
    config = json.loads((folder / "config.json").read_text())
    assert config["learning_rates"] == {"llama": [1e-3, 1e-2], "retnet": [1e-2, 1e-3]}
    assert (config["models"], config["seeds"], config["command"]) == (["llama", "retnet"], [0, 1], "first; second")
    for wrong, message in (
        ({"models": ["llama"], "learning_rates": [1e-2]}, "not tried"),
        ({"models": ["retnet"]}, "in the comparison already"),
        ({"seeds": 1}, "can only be added"),
        ({"models": ["lama"]}, "Did you mean"),
        ({"learning_rates": [-1.0]}, "learning"),
    ):
        assert_raises(ValueError, message, comparison.extend_comparison, folder, **wrong)
    assert json.loads((folder / "config.json").read_text()) == config


def test_a_best_rate_at_the_end_of_its_grid_is_said():
    def rows(*rates, best):
        return [{"model": "a", "learning_rate": rate, "selected": rate == best} for rate in rates]

    assert rates_at_ends(rows(1e-3, 1e-2, 1e-1, best=1e-3)) == {"a": (1e-3, "lowest", 1e-4)}
    assert rates_at_ends(rows(1e-2, 3e-3, best=1e-2)) == {"a": (1e-2, "highest", 0.03)}
    assert not rates_at_ends(rows(1e-3, 1e-2, 1e-1, best=1e-2))
    assert not rates_at_ends(rows(1e-3, best=1e-3))
    assert not rates_at_ends(rows(1e-3, 1e-2, best=None))


@cases(
    "arguments, message",
    ({"models": []}, "at least one model"),
    ({"models": ["mamba2", "mamba2"]}, "each model once"),
    ({"models": ["mamba7"]}, "unknown preset"),
    ({"models": ["llama+post"]}, "llama has none"),
    ({"models": ["mamba2"], "scale": "huge"}, "smoke, small, paper"),
    ({"models": ["mamba2"], "tasks": ["mqr"]}, "mqar"),
    ({"models": ["mamba2"], "tasks": ["niah:harder"]}, "hard"),
    ({"models": ["mamba2"], "tasks": ["mqar:hard"]}, "no tiers"),
    ({"models": ["mamba2"], "tasks": ["niah"], "settings": {"vocab_size": 64}}, "setting"),
    ({"models": ["mamba2:K0"], "experiment": "echo-transfer"}, r"variant of models with \+ska"),
    ({"models": ["mamba2+ska:K9"], "experiment": "echo-transfer"}, "K4-full"),
    ({"models": ["mamba2"], "tasks": ["tooltrace"], "settings": {"lengths": (4,)}}, "length of at least"),
    ({"models": ["mamba2"], "seeds": 0}, "at least 1"),
    ({"models": ["mamba2"], "learning_rates": [-1.0]}, "learning_rate"),
    ({"models": ["mamba2"], "settings": {"num_heads": 7}}, "divide"),
)
def test_bad_comparisons_fail_before_anything_is_written(tmp_path, arguments, message):
    assert_raises(ValueError, message, comparison.create_comparison, **arguments, output=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_resuming_nothing_is_an_error(tmp_path):
    assert_raises(FileNotFoundError, "no comparison", comparison.run_comparison, tmp_path)


SCALED = [(task, scale) for task in EXPERIMENTS for scale in EXPERIMENTS[task].scales]


def test_scales_are_known():
    assert {scale for _, scale in SCALED} == set(SCALES)
    assert all({"smoke", "small"} <= set(EXPERIMENTS[task].scales) for task in EXPERIMENTS)


@pytest.mark.parametrize(
    ("task", "scale"), [x if x[1] == "smoke" else pytest.param(*x, marks=pytest.mark.slow) for x in SCALED]
)
def test_every_scale_configures_every_model(task, scale):
    experiment = EXPERIMENTS[task]()
    settings = experiment.scales[scale]
    presets = ("mamba2", "mamba2+post", "gated_deltanet", "retnet", "gla", "gla+post", "simple", "llama")
    on_text = experiment.measure == "loss"
    named = on_text or task in ("echo-tiers", "koopman-powers", "post-review")  # their models are variants, not presets
    own = experiment.models_at(scale) if on_text or task == "post-review" else experiment.models
    for model in (*own, *(() if on_text or named else presets)):
        config = experiment.configure(settings, Cell(model, experiment.learning_rates(model, scale)[0], 0))
        for test in () if on_text else config.tests:
            tasks.build(**test.task)
    if on_text:
        assert config.context == settings.train_length
        return
    capacity = [test.task["length"] for test in config.tests if test.name == "capacity"]
    assert named or not capacity or capacity == [settings.train_length * factor for factor in settings.length_factors]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_learn_mqar(name):
    with torch.device("meta"):
        for scale in EXPERIMENTS["mqar"].scales.values():
            LanguageModel(mqar_model(name, scale))


def test_models_of_the_paper_have_equal_states():
    paper = EXPERIMENTS["mqar"].scales["paper"]
    for d, h, state in ((512, 4, 65536), (512, 8, 32768), (256, 4, 16384)):
        settings = dataclasses.replace(paper, hidden_size=d, num_heads=h)
        for name in ("mamba2", "mamba2+post", "gated_deltanet", "gla", "retnet"):
            with torch.device("meta"):
                mixer = LanguageModel(mqar_model(name, settings)).blocks[0].mixer
            rows = mixer.state_size if name.startswith("mamba2") else mixer.head_dim
            columns = mixer.head_dim if name.startswith("mamba2") else mixer.value_dim
            assert h * rows * columns == state == d * d // h


def test_atomic_writes_leave_no_half_file(tmp_path, monkeypatch):
    from halflife.files import read_json, write_text

    write_text(tmp_path / "a.json", "{}")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    assert_raises(OSError, "disk full", write_text, tmp_path / "a.json", '{"b": ')
    assert read_json(Path(tmp_path / "a.json")) == {}


def test_runs_are_tried_before_they_begin(monkeypatch):
    """The estimate grows with steps and rows; AdamW's states and the saved activations fit its memory."""
    monkeypatch.setattr(trial, "now", lambda: clock.append(clock[-1] + 2) or clock[-1])
    clock, cpu, config = [0], torch.device("cpu"), tiny()
    size = LanguageModel(config.model).num_parameters()
    once = trial.try_runs([(config, config.sequences())], cpu)
    assert (once.runs, once.steps, once.seconds) == (1, config.steps, 2 * config.steps)  # 2 s a step
    twice = trial.try_runs([(config, config.sequences()), (tiny(seed=1, steps=24), {16: 96})], cpu)
    assert (twice.runs, twice.steps, twice.seconds) == (2, 36, 72)
    activations = once.memory - 16 * size
    assert 4 * 16 * 16 * 4 < activations < 1e6
    monkeypatch.setattr(trial, "TIMED_TOKENS", 32)  # two rows of four
    fewer = trial.try_runs([(config, config.sequences())], cpu)
    assert fewer.seconds == 2 * once.seconds
    assert fewer.memory - 16 * size == pytest.approx(activations, rel=0.2)
    assert once.disk == 4 * size + 36 * size + trial.REPORT_BYTES
    monkeypatch.setattr(trial, "TIMED_MODELS", 1)
    other = tiny("gated_deltanet")
    assert trial.try_runs([(one, one.sequences()) for one in (config, other)], cpu).seconds == 2 * fewer.seconds
    monkeypatch.setattr(trial, "TIMED_PARAMETERS", size - 1)
    large = trial.try_runs([(config, config.sequences())], cpu)
    assert (large.runs, large.steps, large.seconds, large.memory) == (1, config.steps, None, 16 * size)
    assert "because a model is too large to be timed before, at least 144 KiB of memory, " in describe_trial(large)
    assert trial.try_runs([], cpu) is None
    other = describe_trial(twice, here=False)
    assert other.startswith("2 runs, 36 steps in all: the time is not known, because they run on other machines, ")
    assert "of disk" in other
    assert describe_trial(twice).startswith("2 runs, 36 steps in all: about 72 s of training on this machine")


def test_a_slow_matrix_product_is_measured_on_fewer_rows(monkeypatch):
    """The rate of a device is measured in a few seconds, however slow it is."""
    clock, sizes = [0.0], []
    monkeypatch.setattr(speed, "GEMM_SECONDS", 0.5)

    def mm(a, b):
        sizes.append(len(a))
        clock.append(clock[-1] + 2 * len(a) ** 3 / 1e9)

    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr(speed, "times", mm)
    assert speed.gemm_rate(torch.device("cpu"), torch.float32) == pytest.approx(1e9)
    assert max(sizes) == 512
    assert clock[-1] < 2


def test_no_training_exceeds_the_rate_that_it_is_measured_against(monkeypatch):
    """One product of five is not disturbed by others, and bfloat16 is emulated: that one in float32 counts."""
    clock, count = [0.0], [0]

    def mm(a, b):
        count[0] += 1
        slow = (1 if count[0] % 5 == 0 else 3) * (100 if a.dtype == torch.bfloat16 else 1)
        clock.append(clock[-1] + slow * 2 * len(a) ** 3 / 1e11)

    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr(speed, "times", mm)
    assert speed.peak_rate(torch.device("cpu"), bf16=True) == pytest.approx(1e11)
    assert speed.gemm_rate(torch.device("cpu"), torch.float32) == pytest.approx(1e11 / 3)


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_a_product_is_timed_until_the_accelerator_is_done(kind, monkeypatch):
    waited, draw = [], torch.randn
    monkeypatch.setattr(speed.torch, "randn", lambda *size, device, dtype: draw(*size, dtype=dtype))
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    assert speed.gemm_rate(torch.device(kind), torch.float32, largest=8) > 0
    assert len(waited) > 1
    assert {device.type for device in waited} == {kind}
