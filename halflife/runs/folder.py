"""Reads the folder of a run, a comparison or a `halflife train`: settings, scores, training curves, decay spectra."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from halflife.files import read_json

IN_DISTRIBUTION = "in_distribution"
_WANTED = (
    "a comparison's folder holds config.json, versions.json, results.csv at its end, and a folder a model; "
    "that of `halflife train` run.json, versions.json, metrics.jsonl, and result.json at its end"
)
_WANTED = (
    "a comparison's folder holds config.json, versions.json, results.csv at its end, and a folder a model; "
    "that of `halflife train` run.json, versions.json, metrics.jsonl, and result.json at its end"
)


@dataclass(frozen=True)
class Score:
    """One row of `results.csv`: a trained model on one test at one length.

    Accuracies, `chance` and `guess` are fractions in [0, 1]; numbers left empty by an unfinished run are NaN.
    """

    model: str
    learning_rate: float
    seed: int
    selected: bool
    parameters: float
    state_floats: float
    tokens_per_second: float
    test: str
    length: int
    num_pairs: float
    accuracy: float
    chance: float
    guess: float


@dataclass(frozen=True)
class Training:
    """One trained model: its folder, the lines of its `metrics.jsonl`, its `spectrum.json` (`{}` before its end), and
    accuracy and loss by position of the tests that score every one (see `training.run`)."""

    path: Path
    model: str
    learning_rate: float
    seed: int
    metrics: list[dict[str, Any]]
    spectrum: dict[str, Any]
    positions: list[dict[str, Any]] = field(default_factory=list)

    def gates(self) -> list[tuple[int, dict[str, dict[str, float]]]]:
        """Steps, and at each what the slow gates of every layer did since the one before (`layers.gate_statistics`)."""
        found = {line["step"]: line["gates"] for line in self.metrics if "gates" in line}
        return sorted(found.items())

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and the values of `key` at them; a step logged again after a resume counts once, the last time."""
        values = {line["step"]: _number(line[key]) for line in self.metrics if key in line}
        steps = sorted(values)
        return steps, [values[step] for step in steps]


@dataclass(frozen=True)
class Comparison:
    """All that a comparison run has left in its folder so far."""

    path: Path
    config: dict[str, Any]
    versions: dict[str, Any]
    scores: list[Score]
    trainings: list[Training]

    @property
    def models(self) -> list[str]:
        """Names, in the order of the command."""
        return list(self.config["models"])

    @property
    def train_length(self) -> int | None:
        """T, tokens of a training sequence: from the settings, or else the shortest length tested."""
        stated = _find(self.config.get("settings", {}), "train_length")
        return stated or min((score.length for score in self.scores), default=None)

    @property
    def tests(self) -> list[str]:
        """The tests over lengths, in the order of the results."""
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
        """Mean of a column over `select(…)`; NaN where there is nothing yet."""
        return mean(getattr(score, column) for score in self.select(model, **where))

    def trainings_of(self, model: str) -> list[Training]:
        """Trainings of a model at its selected learning rate; all of them as long as none is selected."""
        runs = [run for run in self.trainings if run.model == model]
        rates = {score.learning_rate for score in self.select(model)}
        # A folder's name may round the rate.
        return [
            run for run in runs if not rates or any(math.isclose(run.learning_rate, r, rel_tol=1e-4) for r in rates)
        ]

    def times(self, length: int) -> str:
        """A length in units of the training length: "T", "2T", …; "" when it is no multiple."""
        if not self.train_length or length % self.train_length:
            return ""
        return "T" if length == self.train_length else f"{length // self.train_length}T"


@dataclass(frozen=True)
class LanguageRun:
    """All that a run of `halflife train` has left in its folder so far; `result` is `{}` before its end."""

    path: Path
    config: dict[str, Any]
    versions: dict[str, Any]
    training: Training
    result: dict[str, Any]

    @property
    def model(self) -> str:
        """The preset's name."""
        return self.training.model

    @property
    def train_length(self) -> int:
        """T, tokens of a row."""
        return self.config["context"]


def read_any(run_dir: str | Path) -> Comparison | LanguageRun:
    """Reads a run folder, whichever kind it is.

    Raises:
        FileNotFoundError, ValueError: as `read` and `read_language`.
    """
    return read_language(run_dir) if (Path(run_dir) / "run.json").is_file() else read(run_dir)


def read_language(run_dir: str | Path) -> LanguageRun:
    """Reads the folder of a run of `halflife train`, finished or not.

    Raises:
        FileNotFoundError: the folder or a file of it is missing; the message names it.
        ValueError: a file is truncated or damaged, or it is the folder of another run; the message names it.
    """
    path = Path(run_dir)
    config = _present(read_json, path / "run.json")
    if not isinstance(config, dict) or "context" not in config:
        raise ValueError(f"{path} is one run of a comparison; the comparison's own folder is {path.parent.parent}")
    versions = _present(read_json, path / "versions.json")
    metrics, result = path / "metrics.jsonl", path / "result.json"
    finished = result.exists()
    lines = _read_lines(metrics, finished) if finished or metrics.exists() else []
    training = Training(path, config["model"]["name"], config["learning_rate"], config["seed"], lines, {})
    return LanguageRun(path, config, versions, training, read_json(result) if finished else {})


def read(run_dir: str | Path) -> Comparison:
    """Reads the folder of a comparison.

    A run that has not finished has no `results.csv` yet; what its trainings have logged so far is read nevertheless.

    Raises:
        FileNotFoundError: the folder or a file of it is missing; the message names it.
        ValueError: a file is truncated or damaged; the message names it, and the line.
    """
    path = Path(run_dir)
    config = _present(read_json, path / "config.json")
    if not isinstance(config, dict) or not config.get("models"):
        raise ValueError(f"{path / 'config.json'} names no models: {_WANTED}")
    versions = _present(read_json, path / "versions.json")
    scores = list(_read_scores(path / "results.csv"))
    trainings = [run for model in config["models"] for run in _read_trainings(path / model, model, bool(scores))]
    return Comparison(path, config, versions, scores, trainings)


def mean(values: Iterable[float]) -> float:
    """Mean of the values that are finite; NaN if none is."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict as one level with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


# ------------------------------------------------------------------------------------------------ files


def _read_scores(path: Path) -> Iterator[Score]:
    if not path.exists():
        return
    text = _text(path)
    rows = csv.DictReader(text.splitlines(), strict=True)
    missing = {field.name for field in fields(Score)} - set(rows.fieldnames or ())
    if missing:
        raise ValueError(f"{path} is truncated or damaged: no column {', '.join(sorted(missing))}")
    try:
        for row in rows:
            if None in row.values():
                raise ValueError("cells are missing")
            yield Score(**{field.name: _CONVERT.get(field.name, _number)(row[field.name]) for field in fields(Score)})
    except (ValueError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is truncated or damaged: line {rows.line_num}: {error}") from error
    if not text.endswith("\n"):  # the last number may have lost digits
        raise ValueError(f"{path} is truncated: its last line has no end")


def _read_trainings(folder: Path, model: str, finished: bool) -> list[Training]:
    trainings = []
    for path in folder.glob("lr*-seed*"):
        name = re.fullmatch(r"lr(.+)-seed(\d+)", path.name)
        if name is None:
            continue
        metrics, spectrum, result = (path / name for name in ("metrics.jsonl", "spectrum.json", "result.json"))
        trainings.append(
            Training(
                path=path,
                model=model,
                learning_rate=float(name[1]),
                seed=int(name[2]),
                metrics=_read_lines(metrics, finished) if finished or metrics.exists() else [],
                spectrum=_present(read_json, spectrum) if finished or spectrum.exists() else {},
                positions=read_json(result).get("positions", []) if result.exists() else [],
            )
        )
    return sorted(trainings, key=lambda run: (run.learning_rate, run.seed))


def _read_lines(path: Path, finished: bool) -> list[dict[str, Any]]:
    lines = _text(path).splitlines(keepends=True)
    if lines and not finished and not lines[-1].endswith("\n"):
        lines.pop()  # being written right now
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            parsed.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is truncated or damaged: line {number}: {error}") from error
    return parsed


def _text(path: Path) -> str:
    try:
        return _present(Path.read_text, path, encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from error


def _present(reader: Callable[..., Any], path: Path, **options: Any) -> Any:
    """What `reader` makes of a file that must be there."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {_WANTED}")
    return reader(path, **options)


# ----------------------------------------------------------------------------------------------- values


def _number(value: Any) -> float:
    """A number; NaN for an empty cell or a JSON null."""
    return math.nan if value in ("", None) else float(value)


def _text_cell(value: str | None) -> str:
    if not value:
        raise ValueError("an empty or missing cell")
    return value


def _boolean(value: str | None) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"neither True nor False: {value!r}")
    return value == "True"


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "model": _text_cell,
    "test": _text_cell,
    "seed": int,
    "length": int,
    "selected": _boolean,
}


def _find(nested: dict[str, Any], key: str) -> Any:
    """The first value of `key` at any depth of nested dicts; None if there is none."""
    if key in nested:
        return nested[key]
    inner = (_find(value, key) for value in nested.values() if isinstance(value, dict))
    return next((value for value in inner if value is not None), None)
