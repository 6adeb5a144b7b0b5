"""One run: a model trained on a task, evaluated, and written down."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from halflife.analysis.spectrum import granularity, timescales
from halflife.evaluation.recall import accuracy, by_position
from halflife.files import write_json
from halflife.models import LanguageModel, checkpoint
from halflife.tasks import build as build_task
from halflife.training.config import ExecutionConfig, TrainConfig
from halflife.training.fit import claim_run_folder, fit


@dataclass(frozen=True, kw_only=True)
class TestSpec:
    """One test: a name, its task (see `RunConfig`) and how many examples it has (None: the run's `test_examples`)."""

    __test__ = False  # no test case, whatever pytest makes of the name

    name: str
    task: dict[str, Any]
    examples: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunConfig(TrainConfig):
    """Everything that determines a run's numbers.

    A task is written as what `tasks.build` takes: its name and its settings, `{"name": "mqar", "length": 64, …}`.

    Attributes:
        stages: the curriculum: a mixture of tasks a stage; steps are shared equally.
        validation: the mixture on which the learning rate is chosen, by the mean of its tasks' accuracies.
        tests: what is measured after training.
        validation_examples, test_examples: examples of each task of the validation, and of a test.
    """

    stages: tuple[tuple[dict[str, Any], ...], ...]
    validation: tuple[dict[str, Any], ...]
    tests: tuple[TestSpec, ...]
    validation_examples: int = 256
    test_examples: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("validation_examples", "test_examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not self.stages or not self.validation or not all(self.stages):
            raise ValueError("a run needs a task in every stage of its training, and one to validate on")
        for task in (*chain(*self.stages), *self.validation, *(test.task for test in self.tests)):
            build_task(**task)  # sizes that do not fit are errors now, not after training


def run(config: RunConfig, folder: Path, *, name: str, show: bool = True) -> dict[str, Any]:
    """Trains, tests and writes into `folder`; continues from its last checkpoint if it holds one.

    Writes `config.json` and `model.safetensors` (see `models.io`), `run.json`, `metrics.jsonl`, `spectrum.json` and
    `result.json`. A folder that has a result is not run again: its result is returned.

    Args:
        config: what to run.
        folder: its own folder.
        name: for the progress bar.
        show: whether to draw one.

    Returns:
        `{"parameters", "state_floats", "tokens_per_second", "validation", "tests": [{"test", "length", "num_pairs",
        "accuracy", "chance", "guess"}], "positions": [{"test", "length", "accuracy", "loss"}]}`, the last one lists by
        position for the tests whose tasks score every position; after a divergence the accuracies are NaN and
        "diverged" says why.

    Raises:
        ValueError: the folder belongs to a run with another configuration.
    """
    from halflife.data.task_stream import TaskStream

    if (finished := claim_run_folder(config, folder)) is not None:
        return finished
    torch.manual_seed(config.seed)
    model = LanguageModel(config.model)
    positions = sorted({1, *(build_task(**test.task).length for test in config.tests)})
    before = timescales(model, positions)
    stages = [[build_task(**task) for task in stage] for stage in config.stages]
    validation = [build_task(**task) for task in config.validation]

    def validate(_: nn.Module) -> float:
        settings = {"seed": config.seed, "num_examples": config.validation_examples, "bf16": config.bf16}
        return fmean(accuracy(model, task, split="validation", **settings) for task in validation)

    diverged, metrics = fit(
        model, config, TaskStream(stages, config.steps, config.batch_size, config.seed), folder,
        validate=validate, measure="accuracy", name=name, execution=ExecutionConfig(show=show),
    )  # fmt: skip
    model.eval()
    after = timescales(model, positions)
    spectrum = [
        {"layer": b.layer, "init": b.to_dict(), "trained": a.to_dict()} for b, a in zip(before, after, strict=True)
    ]
    write_json(folder / "spectrum.json", {"channels": granularity(model), "layers": spectrum})
    length = max(task.length for task in validation)
    result = {
        "parameters": model.num_parameters(),
        "state_floats": model.state_floats(length),
        "tokens_per_second": config.batch_size * length / metrics.seconds_per_step(),
        "validation": float("nan") if diverged else metrics.validation,
        "tests": [_test(model, config, test, diverged is not None) for test in config.tests],
        "positions": [] if diverged else _positions(model, config),
        **({"diverged": diverged} if diverged else {}),
    }
    checkpoint.save(model, folder)
    write_json(folder / "result.json", result)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return result


def _positions(model: LanguageModel, config: RunConfig) -> list[dict[str, Any]]:
    found = []
    for test in config.tests:
        task = build_task(**test.task)
        if task.dense:
            settings = {"seed": config.seed, "num_examples": test.examples or config.test_examples, "bf16": config.bf16}
            measured = by_position(model, task, split="test", **settings)
            found.append({"test": test.name, "length": task.length, **measured})
    return found


def _test(model: LanguageModel, config: RunConfig, test: TestSpec, diverged: bool) -> dict[str, Any]:
    task = build_task(**test.task)
    measured = float("nan") if diverged else accuracy(
        model, task, split="test", seed=config.seed, num_examples=test.examples or config.test_examples,
        bf16=config.bf16,
    )  # fmt: skip
    settings = {"length": task.length, "num_pairs": test.task.get("num_pairs")}
    return {"test": test.name, **settings, "accuracy": measured, "chance": task.chance, "guess": task.guess}
