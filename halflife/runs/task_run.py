"""A run on tasks: a model trained on a curriculum of tasks and tested on others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import fmean, median
from typing import Any, ClassVar

from torch import nn

from halflife.data.task_stream import TaskStream
from halflife.evaluation.recall import accuracy, by_position
from halflife.models import LanguageModel
from halflife.runs.one import CellConfig, ModelRun
from halflife.tasks import build
from halflife.tasks.base import Task, median_lag
from halflife.training.config import ExecutionConfig

MAX_SEQUENCE_TOKENS = 1 << 24  # tokens of a sequence; more do not fit into memory with what a model computes from them
MOST_EXAMPLES = 10_000_000  # examples of a validation or test


@dataclass(frozen=True, kw_only=True)
class TestSpec:
    """One test of a trained model."""

    __test__ = False  # pytest must not collect this class

    name: str  # in `results.csv`
    task: dict[str, Any]  # as in `RunConfig`
    examples: int | None = None  # None for the run's `test_examples`

    @cached_property
    def built(self) -> Task:
        """The task."""
        return build(**self.task)


@dataclass(frozen=True, kw_only=True)
class RunConfig(CellConfig):
    """Everything that determines the numbers of a run on tasks.

    A task is a dict of the arguments of `tasks.build`: its name and its settings, `{"name": "mqar", "length": 64, …}`.

    Attributes:
        stages: the curriculum, one mixture of tasks per stage; all stages have equally many steps.
        validation: the mixture that selects the learning rate, by the mean accuracy of its tasks.
        tests: measured after training.
        validation_examples: examples of each task in the validation.
        test_examples: examples of each test.
        action_mask: whether the model gets the action masks of its examples, in training, validation and tests. Models
            without spectral Koopman attention ignore them.
        by_token: whether each test is made once more, as `NAME_by_token`, by reading one token at a time.
    """

    measure: ClassVar[str] = "accuracy"

    stages: tuple[tuple[dict[str, Any], ...], ...]
    validation: tuple[dict[str, Any], ...]
    tests: tuple[TestSpec, ...]
    validation_examples: int = 256
    test_examples: int = 256
    action_mask: bool = False
    by_token: bool = False

    @property
    def passes_action_mask(self) -> bool:
        """Whether action masks are used: they are asked for, and the model has a layer that reads them."""
        return self.action_mask and self.model.reads_action_mask

    @cached_property
    def mixtures(self) -> list[list[Task]]:
        """The tasks of each stage, and behind them those of the validation."""
        return [[build(**task) for task in mixture] for mixture in (*self.stages, self.validation)]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("validation_examples", "test_examples"):
            if not 1 <= getattr(self, name) <= MOST_EXAMPLES:
                raise ValueError(f"{name} must be between 1 and {MOST_EXAMPLES:,}; got {getattr(self, name)}")
        options = [self.model.mixer_options, *(kind["options"] for kind in self.model.hybrids)]
        if self.by_token and any(own.get("mode") == "masked" for own in options):
            raise ValueError("Koopman attention of mode 'masked' reads in both directions, so there is no by_token")
        if not self.stages or not self.validation or not all(self.stages):
            raise ValueError("a run needs at least one task in every stage, and at least one task to validate on")
        for task in (*chain(*self.mixtures), *(test.built for test in self.tests)):  # impossible sizes raise here
            if task.length > MAX_SEQUENCE_TOKENS:
                raise ValueError(
                    f"a sequence has at most {MAX_SEQUENCE_TOKENS:,} tokens; {task.name} was asked for {task.length:,}"
                )

    def sequences(self) -> dict[int, float]:
        counts: dict[int, float] = {}
        for stage in self.mixtures[:-1]:
            lengths = {task.length for task in stage}  # they take turns
            for length in lengths:
                share = self.steps * self.batch_size / len(self.stages) / len(lengths)
                counts[length] = counts.get(length, 0) + share
        return counts

    def open(self, show: bool = False) -> TaskRun:
        return TaskRun(self)


class TaskRun(ModelRun):
    """A run of a `RunConfig`.

    Its result adds "tests" (`[{"test", "length", "num_pairs", "accuracy", "chance", "shortcut_accuracy", "lag"}]`) and
    "positions" (`[{"test", "length", "accuracy", "loss"}]`, lists by position, for tasks that score every position).
    After a divergence the accuracies are NaN.
    """

    config: RunConfig

    @property
    def length(self) -> int:
        return max(task.length for task in self.config.mixtures[-1])

    @property
    def positions(self) -> list[int]:
        return sorted({1, *(test.built.length for test in self.config.tests)})

    def data(self, execution: ExecutionConfig | None = None) -> TaskStream:
        config = self.config
        if execution is not None and execution.num_micro_batches(config.batch_size) > 1:
            raise ValueError("a run on tasks reads whole batches, in one process")
        return TaskStream(config.mixtures[:-1], config.steps, config.batch_size, config.seed, config.passes_action_mask)

    def validation(self) -> Callable[[nn.Module], float]:
        settings = self._measured("validation", self.config.validation_examples)

        def validate(objective: Any) -> float:
            return fmean(accuracy(objective.model, task, **settings) for task in self.config.mixtures[-1])

        return validate

    def throughput(self, seconds: Mapping[int, float]) -> dict[str, float]:
        stream, times = self.data(), defaultdict(list)
        for step, taken in seconds.items():
            times[stream.tasks(step)[0].length].append(taken)
        tokens = self.config.batch_size * sum(length * len(own) for length, own in times.items())
        spent = sum(median(own) * len(own) for own in times.values())  # a step takes the median of its length
        return {"tokens_per_second": tokens / spent if spent else math.nan}

    def evaluate(self, model: LanguageModel, diverged: bool) -> dict[str, Any]:
        tests = self.config.tests
        return {
            "tests": [
                self._score(model, test, diverged, by_token)
                for by_token in (False, True)[: 1 + self.config.by_token] for test in tests
            ],
            "positions": [
                {"test": t.name, "length": t.built.length, **by_position(model, t.built, **self._test_settings(t))}
                for t in tests if t.built.dense and not diverged
            ],
        }  # fmt: skip

    def _score(self, model: LanguageModel, test: TestSpec, diverged: bool, by_token: bool) -> dict[str, Any]:
        task, settings = test.built, {**self._test_settings(test), "by_token": by_token}
        return {
            "test": test.name + by_token * "_by_token", "length": task.length, "num_pairs": test.task.get("num_pairs"),
            "accuracy": float("nan") if diverged else accuracy(model, task, **settings),
            "chance": task.chance, "shortcut_accuracy": task.shortcut_accuracy, "lag": median_lag(task),
        }  # fmt: skip

    def _test_settings(self, test: TestSpec) -> dict[str, Any]:
        return self._measured("test", test.examples or self.config.test_examples)

    def _measured(self, split: str, examples: int) -> dict[str, Any]:
        """The options of `evaluation.recall`."""
        config = self.config
        return {
            "split": split, "seed": config.seed, "num_examples": examples, "bf16": config.bf16,
            "action_mask": config.passes_action_mask,
        }  # fmt: skip
