"""What the folders of runs hold: schemas, the table `results.csv`, and dataclasses that `runs.folder` fills."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from halflife.files import NUMBER, without_null, write_csv

# What the files of a run must hold, see `files.fits`.
LENGTH = range(1, 1 << 53)  # tokens
_TIMESCALES = {"timescales?": {str: [NUMBER]}}
SPECTRUM = {"layers?": [{"layer": int, "init?": _TIMESCALES, "trained?": _TIMESCALES}]}
RESULT = {
    "parameters": int, "validation": NUMBER, "state_size?": int, "tokens_per_second?": NUMBER, "diverged?": str,
    "tests?": [{"test": str, "length": LENGTH, "accuracy?": NUMBER, "loss?": NUMBER, "chance?": NUMBER,
                "shortcut_accuracy?": NUMBER, "num_pairs?": (int, type(None)), "lag?": (int, float, type(None))}],
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
IN_DISTRIBUTION = "in_distribution"
LAG = "lag"  # the test whose lengths are drawn as the lags that they give


@dataclass(frozen=True)
class Score:
    """One row of `results.csv`: a trained model on one test at one length. The fields are the columns.

    `accuracy`, `chance` and `shortcut_accuracy` (see `tasks.Task`) are fractions in [0, 1]. `loss` is in nats per
    token. `validation` is that of the run after its last step, which selects learning rates: an accuracy, or the loss
    of runs on text. `lag` is the median number of tokens from an answer to its question, in
    samples of the test. A number that does not apply, or that a diverged run does not have, is NaN in memory and an
    empty cell.
    """

    model: str
    learning_rate: float
    seed: int
    selected: bool
    parameters: float
    state_size: float
    tokens_per_second: float
    test: str
    length: int
    num_pairs: float = math.nan
    accuracy: float = math.nan
    chance: float = math.nan
    shortcut_accuracy: float = math.nan
    loss: float = math.nan
    validation: float = math.nan
    lag: float = math.nan


KEYLESS = "best answer that ignores the key"
GUESS_MARGIN = 0.1  # of the way from a guess to no error; a model that is not beyond it has not learned


def at_guess_level(accuracy: float, shortcut: float) -> bool:
    """Whether an accuracy in distribution is hardly above that of the best answer without the key."""
    return accuracy <= shortcut + GUESS_MARGIN * (1 - shortcut) < 1


COLUMNS = {field.name: str(field.type) for field in fields(Score)}
ADDED = ("loss", "validation", "lag")  # columns that a table may lack


def scores_of(result: Mapping[str, Any], **cell: Any) -> list[Score]:
    """The rows of one finished run, from its `result.json` and the columns `CELL`."""
    shared = {name: result[name] for name in ("parameters", "state_size")}
    # null after a resume from the last step, and the validation of a diverged run
    shared |= {name: number(result[name]) for name in ("tokens_per_second", "validation")}
    # A null, such as the number of pairs of a task without pairs, becomes NaN.
    tests = [{name: value for name, value in test.items() if value is not None} for test in result["tests"]]
    return [Score(**cell, **shared, **test) for test in tests]


def repeated_tests(rows: Iterable[Mapping[str, Any]]) -> set[tuple[str, int]]:
    """The tests, as (test, length), whose scores are those in distribution again, run by run, and so say nothing new.

    `rows` are those of `results.csv`.
    """
    cells: dict[tuple[str, int], dict[Any, str]] = {}
    for row in rows:
        of_run = (row["model"], row["learning_rate"], row["seed"], repr(row["num_pairs"]))
        cells.setdefault((row["test"], row["length"]), {})[of_run] = repr(row["accuracy"])
    known = {length: own for (test, length), own in cells.items() if test == IN_DISTRIBUTION}
    return {key for key, own in cells.items() if key[0] != IN_DISTRIBUTION and own == known.get(key[1])}


def write_scores(path: Path, scores: Iterable[Score]) -> None:
    """Write the table, whole or not at all."""
    rows = ([getattr(score, name) for name in COLUMNS] for score in scores)
    write_csv(path, [*COLUMNS], ([None if isinstance(x, float) and math.isnan(x) else x for x in row] for row in rows))


def read_scores(path: Path, text: str) -> Iterator[Score]:
    """The rows of a table with the content `text`. A ValueError names the file and the line that is damaged."""
    rows = csv.DictReader(text.splitlines(), strict=True)
    names = rows.fieldnames or ()
    missing = set(COLUMNS) - set(ADDED) - set(names)
    if missing:
        raise ValueError(f"{path} is truncated or damaged: it has no column {', '.join(sorted(missing))}")
    try:
        for row in rows:
            if None in row.values():
                raise ValueError("cells are missing")
            yield Score(**{name: _CELLS[kind](row[name]) for name, kind in COLUMNS.items() if name in names})
    except (ValueError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is truncated or damaged: line {rows.line_num}: {error}") from error
    if not text.endswith("\n"):  # the last number may have lost digits
        raise ValueError(f"{path} is truncated: its last line has no end")


def number(value: Any) -> float:
    """A number; NaN for an empty cell or a JSON null."""
    return math.nan if value in ("", None) else float(value)


def _text_cell(value: str | None) -> str:
    if not value:
        raise ValueError("a cell is empty or missing")
    return value


def _boolean(value: str | None) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{value!r} is neither True nor False")
    return value == "True"


_CELLS: dict[str, Callable[[Any], Any]] = {"str": _text_cell, "int": int, "bool": _boolean, "float": number}


@dataclass(frozen=True)
class Training:
    """One trained model of a sweep, or the model of a language run."""

    path: Path
    model: str
    learning_rate: float
    seed: int
    metrics: list[dict[str, Any]]  # the lines of `metrics.jsonl`
    spectrum: dict[str, Any]  # the content of `spectrum.json`; `{}` before the end of training
    # Of tests that score every position (see `runs.task_run.TaskRun`), and of runs on text (see `runs.language_run`).
    positions: list[dict[str, Any]] = field(default_factory=list)
    lengths: list[dict[str, Any]] = field(default_factory=list)

    def gates(self) -> list[tuple[int, dict[str, dict[str, float]]]]:
        """Pairs of a step and the gate statistics of every layer since the step before (`layers.gate_statistics`)."""
        statistics = {line["step"]: without_null(line["gates"], math.nan) for line in self.metrics if "gates" in line}
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
        stated = self.config.get("settings", {}).get("train_length")
        return stated or min((score.length for score in self.scores), default=None)

    @property
    def tests(self) -> list[str]:
        """Names of the tests other than the one in distribution, in the order of the results."""
        return list(dict.fromkeys(score.test for score in self.scores if score.test != IN_DISTRIBUTION))

    def lengths(self, test: str) -> list[int]:
        """The lengths of a test in tokens, ascending."""
        return sorted({score.length for score in self.scores if score.test == test})

    def guess(self, test: str) -> str:
        """What `shortcut_accuracy` is in a test, in the words of its task."""
        own = [score for score in self.scores if score.test == test]
        return KEYLESS if any(math.isfinite(score.num_pairs) for score in own) else "best guess"

    def not_learned(self, model: str) -> bool:
        """Whether a model is at the level of a guess in distribution, see `at_guess_level`."""
        inside = {"test": IN_DISTRIBUTION}
        return at_guess_level(*(self.mean(model, column, **inside) for column in ("accuracy", "shortcut_accuracy")))

    def lag(self, test: str, length: int) -> float:
        """The median lag of a test at a length, tokens; NaN if the table does not say."""
        return mean(score.lag for score in self.scores if (score.test, score.length) == (test, length))

    def seeds(self, model: str) -> list[int]:
        """Seeds of a model that have scores at its selected learning rate."""
        return sorted({score.seed for score in self.select(model)})

    def select(self, model: str, **where: Any) -> list[Score]:
        """Scores of a model at its selected learning rate, with the given values of other columns."""
        where |= {"model": model, "selected": True}
        return [score for score in self.scores if all(getattr(score, k) == v for k, v in where.items())]

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
