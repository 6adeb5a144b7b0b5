"""Runs of a second on a task, and what must be the same however often they are interrupted."""

import csv
import json

import pytest
from transformers import TrainerCallback

from halflife import preset
from halflife.runs.one import run_one
from halflife.runs.task_run import RunConfig, TestSpec
from halflife.training.config import ExecutionConfig
from halflife.training.trainer import HalflifeTrainer

TASK = {"name": "mqar", "vocab_size": 64, "length": 16, "num_pairs": 2}
# The settings of a comparison of two models whose runs take a second.
SMALL = {
    "hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 128, "train_length": 8, "pairs": (2,), "steps": 6,
    "batch_size": 4, "test_examples": 16, "validation_examples": 16, "save_every": 2, "validate_every": 3,
}  # fmt: skip


def tiny(model="mamba2+post", **options):
    config = preset(
        model, hidden_size=16, num_layers=1, vocab_size=64, num_heads=2, train_length=16, mlp="none",
        tie_embeddings=False,
    )  # fmt: skip
    defaults = {
        "model": config, "stages": (({**TASK, "num_pairs": 1},), (TASK,)), "validation": (TASK,),
        "tests": (TestSpec(name="capacity", task=TASK), TestSpec(name="persist", task={**TASK, "length": 32})),
        "steps": 12, "batch_size": 4, "learning_rate": 1e-2, "validate_every": 4, "save_every": 4,
        "validation_examples": 32, "test_examples": 32,
    }  # fmt: skip
    return RunConfig(**{**defaults, **options})


def run(config, folder):
    return run_one(config.open(), folder, name="x", execution=ExecutionConfig(show=False))


def rows_of(folder):
    """The rows of a comparison without their times."""
    with (folder / "results.csv").open() as file:
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in csv.DictReader(file)]


def comparable(folder):
    """What must be the same however often a run was interrupted: all but the time that it took."""
    result = json.loads((folder / "result.json").read_text())
    result.pop("tokens_per_second")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return result, lines, (folder / "model.safetensors").read_bytes(), (folder / "spectrum.json").read_text()


class AfterStep(TrainerCallback):
    """Calls a function after a step."""

    def __init__(self, step, function):
        self.step, self.function = step, function

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.function()


def after_step(monkeypatch, step, function):
    """Calls `function` after a step of every run from now on."""
    original = HalflifeTrainer.__init__

    def extended(self, *args, callbacks, **kwargs):
        original(self, *args, callbacks=[AfterStep(step, function), *callbacks], **kwargs)

    monkeypatch.setattr(HalflifeTrainer, "__init__", extended)


def interrupt_after(monkeypatch, step):
    """Ctrl-C after a step of every run from now on."""

    def interrupt():
        raise KeyboardInterrupt

    after_step(monkeypatch, step, interrupt)


def interrupt(folder, step):
    """Ctrl-C after a step."""
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, step)
        with pytest.raises(KeyboardInterrupt):
            run(tiny(), folder)
