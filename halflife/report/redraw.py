"""The figures of a run's folder drawn anew, from what was saved there alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from halflife.analysis.forecast_survey import saved
from halflife.files import atomic_path, read_json
from halflife.report.figures import language as language_figures
from halflife.report.figures import theory as theory_figures
from halflife.report.figures.comparison import FORMATS, check_format, save, save_all
from halflife.report.figures.decays import against_paper, decays
from halflife.report.figures.forecast import forecasts
from halflife.report.figures.operators import operators
from halflife.report.figures.spectrum import all_of as spectra
from halflife.report.page.render import write_page
from halflife.runs.folder import RESULTS_JSON, Comparison, LanguageRun, read_any

# What `halflife spectrum` saves of a text that trained models read, and how it is drawn.
READINGS: dict[str, Callable[[dict[str, Any]], dict[str, Figure]]] = {
    "decays": lambda data: {**({"decays": decays(data)} if data["text"] else {}), **spectra(data)},
    "koopman": lambda data: {"koopman": operators(data)},
}


def redraw(run_dir: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draws every figure of a run and its report page; returns the files.

    Args:
        run_dir: the folder of a comparison or of a run of `halflife train`. What `halflife spectrum` left in its
            `spectrum/` and `halflife forecast` in its `forecast/` is drawn too. Or a folder of `halflife theory` or
            `halflife forecast`, which has no page.
        formats: png, svg, pdf.

    Raises:
        FileNotFoundError: it is no such folder, or a file of it is missing; the message names it.
        ValueError: a file is truncated or damaged, or a format unknown.
    """
    for suffix in formats:
        check_format(suffix)
    if files := _analyses(Path(run_dir), formats):
        return files
    run = read_any(run_dir)
    files = save_all(run.path, formats) if isinstance(run, Comparison) else _language(run, formats)
    folder = run.path / "spectrum"
    for name, draw in READINGS.items():
        if (folder / f"{name}.json").exists():
            for one, figure in draw(_numbers(read_json(folder / f"{name}.json"))).items():
                files += save(figure, folder, one, formats)
    files += _analyses(run.path / "forecast", formats)
    return [*files, write_page(run)]


def _analyses(folder: Path, formats: Sequence[str]) -> list[Path]:
    """What `halflife theory`, `halflife forecast` and the Decay paper's grid left in a folder."""
    files = []
    if (folder / RESULTS_JSON).exists():
        files += save(against_paper(read_json(folder / RESULTS_JSON)), folder, "results", formats)
    if (folder / "theory.json").exists():
        files += theory_figures.draw_all(_numbers(read_json(folder / "theory.json")), folder, formats)
    if (folder / "forecast.json").exists():
        files += save(forecasts(saved(folder / "forecast.json")), folder, "forecast", formats)
    return files


def _language(run: LanguageRun, formats: Sequence[str]) -> list[Path]:
    """Those of `halflife train`; a run that has not finished, or diverged, has none."""
    if "lengths" not in run.result:
        return []
    drawings: dict[str, Callable[[Path], None]] = {
        "loss": partial(language_figures.curve, run.path), "length": partial(language_figures.by_length, run.result)
    }  # fmt: skip
    files = [run.path / "figures" / f"{name}.{suffix}" for name in drawings for suffix in formats]
    for file in files:
        with atomic_path(file) as temporary:
            whole = temporary.with_suffix(file.suffix)  # which says the format
            drawings[file.stem](whole)
            whole.replace(temporary)
    return files


def _numbers(data: Any) -> Any:
    """What JSON has no word for, NaN and infinities, is NaN again."""
    if isinstance(data, dict):
        return {key: _numbers(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_numbers(value) for value in data]
    return math.nan if data is None else data
