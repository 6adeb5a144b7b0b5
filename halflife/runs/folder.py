"""The folders that halflife writes: the names of their files, their kinds, and what they hold.

| folder       | files while it runs                                     | files at its end                            |
|--------------|---------------------------------------------------------|---------------------------------------------|
| model        |                                                         | `config.json`, `model.safetensors`,         |
|              |                                                         | files of the tokenizer                      |
| task run     | `run.json` (every setting), `metrics.jsonl`             | a model, `result.json`, `spectrum.json`     |
| language run | `run.json`, `versions.json`, `metrics.jsonl`            | a model, `result.json`, `samples.txt`,      |
|              |                                                         | `report.html`, `figures/`                   |
| comparison   | `config.json`, `versions.json`, a task run per cell     | `results.csv`, `summary.md`, `report.html`, |
|              | (`cell_folder`)                                         | `figures/`                                  |
| grid         | `config.json`, `versions.json`, a language run per cell | `results.csv`, `results.json`, `summary.md`,|
|              |                                                         | the figure `results`                        |

A run in progress also has `checkpoints/`, whose folders count when they contain `complete.json`. `files.py` names the
files that lower parts of the package write (`run.json`, `metrics.jsonl`, …); this module re-uses these names and adds
the others. `folder_kind` decides the kind of a folder. `scores` holds the schema of `results.csv`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from halflife.files import CONFIG_JSON, METRICS_JSONL, RESULT_JSON, RUN_JSON, read_json
from halflife.runs.scores import FORMER_NAMES, IN_DISTRIBUTION, Score, number, read_scores

VERSIONS_JSON = "versions.json"  # versions of the packages, the device, and the command of a language run
SPECTRUM_JSON = "spectrum.json"  # decay time-scales of every layer before and after training
RESULTS_CSV = "results.csv"  # one `Score` a row
RESULTS_JSON = "results.json"  # of a grid: results by variant and seed, and the paper's losses
SUMMARY_MD = "summary.md"
SAMPLES_TXT = "samples.txt"
REPORT_HTML = "report.html"
FIGURES = "figures"

_EXPECTED = (
    "a comparison's folder holds config.json, versions.json, a folder per model, and at its end results.csv; "
    "a folder of `halflife train` holds run.json, versions.json, metrics.jsonl, and at its end result.json"
)


class FolderKind(Enum):
    """The kinds of folders in the table above."""

    MODEL = "model"
    TASK_RUN = "task run"
    LANGUAGE_RUN = "language run"
    COMPARISON = "comparison"
    GRID = "grid"


def folder_kind(path: Path) -> FolderKind:
    """The kind of a folder, from the keys of its `run.json` or `config.json`.

    Raises:
        FileNotFoundError: it has neither file.
        ValueError: the file is damaged, or has the keys of no kind.
    """
    if (path / RUN_JSON).is_file():
        run = read_json(path / RUN_JSON)
        if isinstance(run, dict) and "context" in run:
            return FolderKind.LANGUAGE_RUN
        return FolderKind.TASK_RUN
    config = _present(read_json, path / CONFIG_JSON)
    if isinstance(config, dict):
        if config.get("models"):
            return FolderKind.GRID if config.get("experiment") == "decay-design" else FolderKind.COMPARISON
        if "format" in config:
            return FolderKind.MODEL
    raise ValueError(f"{path / CONFIG_JSON} names no models: {_EXPECTED}")


def cell_folder(model: str, learning_rate: float, seed: int) -> str:
    """The folder of one run of a sweep, relative to the folder of the sweep."""
    return f"{_model_folder(model)}/lr{learning_rate:g}-seed{seed}"


def _model_folder(model: str) -> str:
    return model.replace("/", "-")  # variants of the Decay paper's grid have names such as vector/mamba2


@dataclass(frozen=True)
class Training:
    """One trained model of a sweep, or the model of a language run.

    Attributes:
        path: its folder.
        model, learning_rate, seed: its cell.
        metrics: the lines of `metrics.jsonl`.
        spectrum: the content of `spectrum.json`; `{}` before the end of training.
        positions: accuracy and loss by position, for tests that score every position (see `runs.task_run.TaskRun`).
    """

    path: Path
    model: str
    learning_rate: float
    seed: int
    metrics: list[dict[str, Any]]
    spectrum: dict[str, Any]
    positions: list[dict[str, Any]] = field(default_factory=list)

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
        """T, tokens of a training sequence: the setting if there is one, otherwise the shortest tested length."""
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
        # The name of a folder rounds the rate.
        return [
            run for run in runs if not rates or any(math.isclose(run.learning_rate, r, rel_tol=1e-4) for r in rates)
        ]

    def times(self, length: int) -> str:
        """A length in units of the training length T: "T", "2T", …; "" if it is not a multiple of T."""
        if not self.train_length or length % self.train_length:
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


def read_any(run_dir: str | Path) -> Comparison | LanguageRun:
    """Read the folder of a comparison, a grid or a language run.

    Raises:
        FileNotFoundError: the folder or a file in it is missing; the message names it.
        ValueError: a file is truncated or damaged, or the folder is of another kind; the message names it.
    """
    path = Path(run_dir)
    if (path / RUN_JSON).is_file():
        return read_language(path)
    return read(path)


def read_language(run_dir: str | Path) -> LanguageRun:
    """Read the folder of a run of `halflife train`, finished or not; raises as `read_any`."""
    path = Path(run_dir)
    config = _present(read_json, path / RUN_JSON)
    if folder_kind(path) is not FolderKind.LANGUAGE_RUN:
        raise ValueError(f"{path} is one run of a comparison; the folder of the comparison is {path.parent.parent}")
    versions = _present(read_json, path / VERSIONS_JSON)
    finished = (path / RESULT_JSON).exists()
    metrics = _read_metrics(path / METRICS_JSONL, finished)
    training = Training(path, config["model"]["name"], config["learning_rate"], config["seed"], metrics, {})
    return LanguageRun(path, config, versions, training, read_result(path) if finished else {})


def read(run_dir: str | Path) -> Comparison:
    """Read the folder of a comparison or a grid; raises as `read_any`.

    An unfinished comparison has no `results.csv`; the metrics that its trainings have logged so far are read.
    """
    path = Path(run_dir)
    config = _present(read_json, path / CONFIG_JSON)
    if (kind := folder_kind(path)) not in (FolderKind.COMPARISON, FolderKind.GRID):
        raise ValueError(f"{path / CONFIG_JSON} names no models: {_EXPECTED}")
    versions = _present(read_json, path / VERSIONS_JSON)
    table = path / RESULTS_CSV
    scores = list(read_scores(table, _text(table))) if table.exists() else []
    tasks = kind is FolderKind.COMPARISON
    trainings = [t for model in config["models"] for t in _read_trainings(path, model, bool(scores), tasks)]
    return Comparison(path, config, versions, scores, trainings)


def read_result(folder: Path) -> dict[str, Any]:
    """The `result.json` of a finished run; keys that version 0.1.0 wrote have their present names."""
    return _rename(read_json(folder / RESULT_JSON))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of the `metrics.jsonl` of a run, one dict each; a half-written last line is left out."""
    return _read_metrics(folder / METRICS_JSONL, finished=False)


def mean(values: Iterable[float]) -> float:
    """Mean of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict as one level with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _read_trainings(sweep: Path, model: str, finished: bool, tasks: bool) -> list[Training]:
    """The trainings of one model of a sweep, by learning rate and seed.

    Args:
        finished: whether every file must be there.
        tasks: whether the trainings are task runs; language runs have neither spectra nor tests by position.
    """
    trainings = []
    for path in (sweep / _model_folder(model)).glob("lr*-seed*"):
        name = re.fullmatch(r"lr(.+)-seed(\d+)", path.name)
        if name is None:
            continue
        spectrum = path / SPECTRUM_JSON
        trainings.append(
            Training(
                path=path,
                model=model,
                learning_rate=float(name[1]),
                seed=int(name[2]),
                metrics=_read_metrics(path / METRICS_JSONL, finished),
                spectrum=_present(read_json, spectrum) if tasks and (finished or spectrum.exists()) else {},
                positions=read_result(path).get("positions", []) if tasks and (path / RESULT_JSON).exists() else [],
            )
        )
    return sorted(trainings, key=lambda training: (training.learning_rate, training.seed))


def _read_metrics(path: Path, finished: bool) -> list[dict[str, Any]]:
    """The lines of a metrics file. Unless the run is finished, the file and the end of its last line may be missing."""
    if not finished and not path.exists():
        return []
    lines = _text(path).splitlines(keepends=True)
    if lines and not finished and not lines[-1].endswith("\n"):
        lines.pop()
    parsed = []
    for i, line in enumerate(lines, start=1):
        try:
            parsed.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is truncated or damaged: line {i}: {error}") from error
    return parsed


def _text(path: Path) -> str:
    try:
        return _present(Path.read_text, path, encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from error


def _present(reader: Callable[..., Any], path: Path, **options: Any) -> Any:
    """Read a file that must exist."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {_EXPECTED}")
    return reader(path, **options)


def _rename(data: Any) -> Any:
    """JSON data with the keys of version 0.1.0 replaced by the present ones, at any depth."""
    if isinstance(data, dict):
        return {FORMER_NAMES.get(key, key): _rename(value) for key, value in data.items()}
    return [_rename(value) for value in data] if isinstance(data, list) else data


def _find(nested: dict[str, Any], key: str) -> Any:
    """The first value of `key` at any depth of nested dicts; None if there is none."""
    if key in nested:
        return nested[key]
    inner = (_find(value, key) for value in nested.values() if isinstance(value, dict))
    return next((value for value in inner if value is not None), None)
