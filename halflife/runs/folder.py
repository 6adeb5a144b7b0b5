"""The folders that halflife writes: the names of their files, their kinds, and what they hold.

| folder       | files while it runs                                     | files at its end                            |
|--------------|---------------------------------------------------------|---------------------------------------------|
| model        |                                                         | `config.json`, `model.safetensors`,         |
|              |                                                         | files of the tokenizer                      |
| task run     | `run.json` (every setting), `metrics.jsonl`             | a model, `result.json`, `spectrum.json`     |
| language run | `run.json`, `versions.json`, `metrics.jsonl`            | a model, `result.json`, `samples.txt`,      |
|              |                                                         | `spectrum.json`, `report.html`, `figures/`  |
| comparison   | `config.json`, `versions.json`, a task run per cell     | `results.csv`, `timescales.csv`,            |
|              | (`sweep.Cell.folder`)                                   | `validation.csv`, `report.html`, `figures/` |
| grid         | `config.json`, `versions.json`, a language run per cell | files of a comparison, `lengths.csv`,       |
|              |                                                         | `summary.md`, `results.json`; for 8 rows of |
|              |                                                         | the Decay paper, `decay_regression.json`    |

A run in progress also has `checkpoints/`, whose folders count when they contain `complete.json`. `files.py` names the
files that lower parts of the package write (`run.json`, `metrics.jsonl`, …), and this module the others. `folder_kind`
decides the kind of a folder. `records` holds the schemas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from halflife import files
from halflife.data.trust import unsigned
from halflife.runs.records import (
    COMPARISON,
    LANGUAGE_RUN,
    NUMBERS,
    RESULT,
    SPECTRUM,
    VERSIONS,
    Comparison,
    LanguageRun,
    Score,
    Training,
    number,
    read_scores,
)

LENGTHS_CSV = "lengths.csv"  # perplexity on text by its length, a length a row
DECAY_REGRESSION_JSON = "decay_regression.json"  # distributions of λ, and the loss that they predict
SPECTRUM_JSON = "spectrum.json"  # decay time-scales of every layer before and after training
RESULTS_CSV = "results.csv"  # one `Score` a row
RESULTS_JSON = "results.json"  # of a grid, see `read_grid`
VALIDATION_CSV = "validation.csv"  # accuracy or loss on validation data, a step of training a row
TIMESCALES_CSV = "timescales.csv"  # decay time-scales before and after training, a channel a row
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
    if (path / files.RUN_JSON).is_file():
        run = files.read_json(path / files.RUN_JSON)
        if isinstance(run, dict) and "context" in run:
            return FolderKind.LANGUAGE_RUN
        return FolderKind.TASK_RUN
    config = _present(files.read_json, path / files.CONFIG_JSON)
    if isinstance(config, dict):
        if config.get("models"):
            on_text = config.get("experiment") == "decay-design" or "text" in config.get("settings", {})
            return FolderKind.GRID if on_text else FolderKind.COMPARISON
        if "format" in config:
            return FolderKind.MODEL
    raise ValueError(f"{path / files.CONFIG_JSON} names no models: {_EXPECTED}")


def read_any(run_dir: str | Path) -> Comparison | LanguageRun:
    """Read the folder of a comparison, a grid or a language run.

    Raises:
        FileNotFoundError: the folder or a file in it is missing; the message names it.
        ValueError: a file is truncated or damaged, or the folder is of another kind; the message names it.
    """
    return read_language(run_dir) if (Path(run_dir) / files.RUN_JSON).is_file() else read(run_dir)


def read_language(run_dir: str | Path) -> LanguageRun:
    """Read the folder of a run of `halflife train`, finished or not; raises as `read_any`."""
    path = Path(run_dir)
    config = _present(files.read_json, path / files.RUN_JSON)
    if folder_kind(path) is not FolderKind.LANGUAGE_RUN:
        raise ValueError(f"{path} is one run of a comparison; the folder of the comparison is {path.parent.parent}")
    config = unsigned(check_content(path / files.RUN_JSON, config, LANGUAGE_RUN))
    versions = _checked(path / files.VERSIONS_JSON, VERSIONS)
    finished = (path / files.RESULT_JSON).exists()
    metrics = _read_metrics(path / files.METRICS_JSONL, finished)
    training = Training(path, config["model"]["name"], config["learning_rate"], config["seed"], metrics, {})
    return LanguageRun(path, config, versions, training, read_result(path) if finished else {})


def read(run_dir: str | Path) -> Comparison:
    """Read the folder of a comparison or a grid; raises as `read_any`.

    An unfinished comparison has no `results.csv`; the metrics that its trainings have logged so far are read.
    """
    path = Path(run_dir)
    config = _present(files.read_json, path / files.CONFIG_JSON)
    if (kind := folder_kind(path)) not in (FolderKind.COMPARISON, FolderKind.GRID):
        raise ValueError(f"{path / files.CONFIG_JSON} names no models: {_EXPECTED}")
    config = unsigned(check_content(path / files.CONFIG_JSON, config, COMPARISON))
    versions = _checked(path / files.VERSIONS_JSON, VERSIONS)
    table = path / RESULTS_CSV
    scores = list(read_scores(table, _text(table))) if table.exists() else []
    tasks = kind is FolderKind.COMPARISON
    trainings = [t for model in config["models"] for t in _read_trainings(path, model, scores, tasks)]
    return Comparison(path, config, versions, scores, trainings)


def read_grid(folder: Path) -> dict[str, Any]:
    """The `results.json` of a grid, whose parts are empty before its first run has finished.

    "results": variant → seed → sizes and loss; "paper": variant → the paper's loss; "findings": sentences.
    """
    empty: dict[str, Any] = {"results": {}, "paper": {}, "findings": []}
    return empty | (files.read_json(folder / RESULTS_JSON) if (folder / RESULTS_JSON).exists() else {})


def read_result(folder: Path) -> dict[str, Any]:
    """The `result.json` of a finished run.

    Raises:
        ValueError: the file is damaged, or holds no result; the message names it.
    """
    path = folder / files.RESULT_JSON
    result = files.read_json_object(path)
    if missing := [name for name in ("parameters", "validation") if name not in result]:
        raise ValueError(f"{path} holds no result of a run: it has no {', '.join(missing)}")
    check_content(path, result, RESULT)
    # A number that was not finite is null in the file: the loss after a divergence, or a speed that nobody measured.
    for numbers in (result, *result.get("tests", ()), *result.get("lengths", ())):
        numbers |= {name: number(numbers[name]) for name in NUMBERS if name in numbers}
    return result | ({"positions": files.without_null(result["positions"], math.nan)} if "positions" in result else {})


def _read_metrics(path: Path, finished: bool) -> list[dict[str, Any]]:
    """The lines of a metrics file. Unless the run is finished, the file and the end of its last line may be missing."""
    if finished and not _present(Path.read_bytes, path).endswith(b"\n"):
        raise ValueError(f"{path} is truncated: its last line has no end")
    return files.read_metrics(path)


def _read_trainings(sweep: Path, model: str, scores: Sequence[Score], tasks: bool) -> list[Training]:
    """The trainings of one model of a sweep, by learning rate and seed.

    A training in the table has ended, and all of its files must be there. Task runs (`tasks`) all have spectra and may
    have tests by position.
    """
    trainings = []
    ended = {(score.model, score.learning_rate, score.seed) for score in scores}
    for path in (sweep / model.replace("/", "-")).glob("lr*-seed*"):
        name = re.fullmatch(r"lr(.+)-seed(\d+)", path.name)
        if name is None:
            continue
        rate, seed = float(name[1]), int(name[2])
        finished = (model, rate, seed) in ended
        spectrum: dict[str, Any] = {}
        result = read_result(path) if (path / files.RESULT_JSON).exists() else {}
        if (file := path / SPECTRUM_JSON).exists() or (tasks and finished):
            # JSON holds neither the time-scale of a channel that never decays, nor those of a model that diverged.
            unknown = math.nan if "diverged" in result else math.inf
            spectrum = files.without_null(_checked(file, SPECTRUM), unknown)
        metrics = _read_metrics(path / files.METRICS_JSONL, finished)
        positions = result.get("positions", []) if tasks else []
        trainings.append(Training(path, model, rate, seed, metrics, spectrum, positions, result.get("lengths", [])))
    return sorted(trainings, key=lambda training: (training.learning_rate, training.seed))


def check_content(path: Path, data: Any, schema: Any) -> Any:
    """Return the data of a file, or raise a ValueError that names the file and the first wrong part of it."""
    if files.fits(data, schema):
        return data
    wrong = [key for key in schema if isinstance(key, str) and not files.fits(data, {key: schema[key]})]
    raise ValueError(f"{path} is damaged: {wrong[0].removesuffix('?') if wrong else 'its content'} cannot be")


def _checked(path: Path, schema: Any) -> Any:
    return check_content(path, _present(files.read_json, path), schema)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from error


def _present(reader: Callable[[Path], Any], path: Path) -> Any:
    """Read a file that must exist."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {_EXPECTED}")
    return reader(path)
