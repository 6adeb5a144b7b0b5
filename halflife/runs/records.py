"""What the folders of runs hold, as dataclasses; `runs.folder` reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halflife.files import NUMBER
from halflife.runs.scores import IN_DISTRIBUTION, Score, number

# What the files of a run must hold, see `files.fits`.
LENGTH = range(1, 1 << 53)  # tokens
_TIMESCALES = {"timescales?": {str: [NUMBER]}}
SPECTRUM = {"layers?": [{"layer": int, "init?": _TIMESCALES, "trained?": _TIMESCALES}]}
RESULT = {
    "parameters": int, "validation": NUMBER, "state_size?": int, "tokens_per_second?": NUMBER, "diverged?": str,
    "tests?": [{"test": str, "length": LENGTH, "accuracy?": NUMBER, "loss?": NUMBER, "chance?": NUMBER,
                "shortcut_accuracy?": NUMBER, "num_pairs?": (int, type(None))}],
    "lengths?": [{"length": LENGTH, "perplexity": NUMBER, "last_perplexity": NUMBER}],
    "documents?": {"nats": NUMBER, "tokens": int, "documents": int},
    "bits_per_byte?": NUMBER, "bits_per_byte_of_documents?": NUMBER, "tokens?": int, "mfu?": NUMBER, "rows?": int,
    "positions?": [dict],
}  # fmt: skip
NUMBERS = (
    "validation", "tokens_per_second", "mfu", "bits_per_byte", "bits_per_byte_of_documents", "accuracy", "loss",
    "perplexity", "last_perplexity",
)  # fmt: skip
COMPARISON = {
    "models": [str], "seeds?": [int], "learning_rates?": {str: [(int, float)]}, "settings?": dict, "experiment?": str,
    "task?": str, "scale?": str, "command?": str,
}  # fmt: skip
LANGUAGE_RUN = {
    "model": {"name": str}, "learning_rate": (int, float), "seed": int, "context": LENGTH,
    "data": {"sources": [str], "tokenizer": str},
}  # fmt: skip
VERSIONS = {str: (str, type(None))}

CELL = ("model", "learning_rate", "seed", "selected")  # `selected`: at the model's selected rate, as in `results.csv`


@dataclass(frozen=True)
class Training:
    """One trained model of a sweep, or the model of a language run.

    Attributes:
        path: its folder.
        model, learning_rate, seed: its cell.
        metrics: the lines of `metrics.jsonl`.
        spectrum: the content of `spectrum.json`; `{}` before the end of training.
        positions: accuracy and loss by position, for tests that score every position (see `runs.task_run.TaskRun`).
        lengths: perplexity by the length of the text, for runs on text (see `runs.language_run`).
    """

    path: Path
    model: str
    learning_rate: float
    seed: int
    metrics: list[dict[str, Any]]
    spectrum: dict[str, Any]
    positions: list[dict[str, Any]] = field(default_factory=list)
    lengths: list[dict[str, Any]] = field(default_factory=list)

    def gates(self) -> list[tuple[int, dict[str, dict[str, float]]]]:
        """Pairs of a step and the gate statistics of every layer since the step before (`layers.gate_statistics`)."""
        statistics = {line["step"]: line["gates"] for line in self.metrics if "gates" in line}
        return sorted(statistics.items())

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Steps, and the values of `key` at these steps. If a step was logged twice, its last value counts."""
        values = {line["step"]: number(line[key]) for line in self.metrics if key in line}
        steps = sorted(values)
        return steps, [values[step] for step in steps]


@dataclass(frozen=True)
class Comparison:
    """The content of the folder of a comparison or a grid, which may be unfinished."""

    path: Path
    config: dict[str, Any]
    versions: dict[str, Any]
    scores: list[Score]
    trainings: list[Training]

    @property
    def models(self) -> list[str]:
        """Names of the models, in the order of the command."""
        return list(self.config["models"])

    @property
    def train_length(self) -> int | None:
        """T, tokens of a training sequence: the length in distribution, the setting, or the shortest tested length."""
        if len(tested := self.lengths(IN_DISTRIBUTION)) == 1:
            return tested[0]
        stated = _find(self.config.get("settings", {}), "train_length")
        return stated or min((score.length for score in self.scores), default=None)

    @property
    def tests(self) -> list[str]:
        """Names of the tests other than the one in distribution, in the order of the results."""
        return list(dict.fromkeys(score.test for score in self.scores if score.test != IN_DISTRIBUTION))

    def lengths(self, test: str) -> list[int]:
        """The lengths of a test in tokens, ascending."""
        return sorted({score.length for score in self.scores if score.test == test})

    def seeds(self, model: str) -> list[int]:
        """Seeds of a model that have scores at its selected learning rate."""
        return sorted({score.seed for score in self.select(model)})

    def select(self, model: str, **where: Any) -> list[Score]:
        """Scores of a model at its selected learning rate, with the given values of other columns."""
        return [
            score
            for score in self.scores
            if score.model == model and score.selected and all(getattr(score, k) == v for k, v in where.items())
        ]

    def mean(self, model: str, column: str, **where: Any) -> float:
        """Mean of a column over the scores of `select`; NaN if there are none yet."""
        return mean(getattr(score, column) for score in self.select(model, **where))

    def trainings_of(self, model: str) -> list[Training]:
        """Trainings of a model at its selected learning rate; all trainings before a rate is selected."""
        runs = [run for run in self.trainings if run.model == model]
        rates = {score.learning_rate for score in self.select(model)}
        return [run for run in runs if not rates or run.learning_rate in rates]

    def cells(self) -> list[tuple[Training, tuple[str, float, int, bool]]]:
        """Each training, with its values in the columns `CELL` of tables that have rows of every run."""
        selected = {one.path for model in self.models for one in self.trainings_of(model)}
        return [(one, (one.model, one.learning_rate, one.seed, one.path in selected)) for one in self.trainings]

    def times(self, length: int) -> str:
        """A length in units of T: "T", "2T", …; "" if it is not a multiple of T, or if models have T of their own."""
        if not self.train_length or length % self.train_length or len(self.lengths(IN_DISTRIBUTION)) > 1:
            return ""
        return "T" if length == self.train_length else f"{length // self.train_length}T"


@dataclass(frozen=True)
class LanguageRun:
    """The content of the folder of `halflife train`, which may be unfinished; `result` is `{}` before its end."""

    path: Path
    config: dict[str, Any]
    versions: dict[str, Any]
    training: Training
    result: dict[str, Any]

    @property
    def model(self) -> str:
        """Name of the preset."""
        return self.training.model

    @property
    def train_length(self) -> int:
        """T, tokens of a row."""
        return self.config["context"]


def mean(values: Iterable[float]) -> float:
    """Mean of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _find(nested: dict[str, Any], key: str) -> Any:
    """The first value of `key` at any depth of nested dicts; None if there is none."""
    if key in nested:
        return nested[key]
    inner = (_find(value, key) for value in nested.values() if isinstance(value, dict))
    return next((value for value in inner if value is not None), None)
