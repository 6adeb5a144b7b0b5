"""Draws figures and report page of a folder from the files in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from halflife.files import FORECAST_JSON, read_json, without_null
from halflife.report.card import write_card
from halflife.report.figures.comparison import comparison_figures
from halflife.report.figures.comparison_spectrum import spectrum
from halflife.report.figures.data import FigureData
from halflife.report.figures.decays import decays, grid_figures
from halflife.report.figures.forecast import forecast_figures
from halflife.report.figures.language import language_figures
from halflife.report.figures.matplotlib_renderer import FORMATS, check_format, save
from halflife.report.figures.operators import operators
from halflife.report.figures.spectrum import spectrum_figures
from halflife.report.page.render import write_page
from halflife.report.tables.csv_files import write_lengths, write_timescales, write_validations
from halflife.report.tables.forecast import read_forecasts
from halflife.runs.folder import FIGURES, FolderKind, folder_kind, read_any
from halflife.runs.records import Comparison, LanguageRun

# The files that `halflife spectrum` writes about a text that trained models read, and the figures of each.
SPECTRUM_FILES: dict[str, Callable[[dict[str, Any]], list[FigureData]]] = {
    "decays": lambda data: [*([decays(data)] if data["text"] else []), *spectrum_figures(data)],
    "koopman": lambda data: [operators(data)],
}


def write_report(run_dir: str | Path) -> Path:
    """Write the figures and `report.html` of a run, and a comparison's time-scales or a language model's card.

    The run, finished or not, is a comparison or one of `halflife train`. Returns the path of the page. Errors are those
    of `runs.folder.read_any`.
    """
    run = read_any(run_dir)
    figures = run_figures(run)
    save_figures(run, figures)
    if isinstance(run, LanguageRun):
        write_card(run)
    else:
        write_timescales(run)
        write_validations(run)
        write_lengths(run)
    return write_page(run, figures)


def run_figures(run: Comparison | LanguageRun) -> list[FigureData]:
    """The figures that a run has data for, which its files and its page show."""
    if isinstance(run, LanguageRun):
        return language_figures(run)
    return grid_figures(run) if folder_kind(run.path) is FolderKind.GRID else comparison_figures(run)


def save_figures(
    run: Comparison | LanguageRun, data: Sequence[FigureData], formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Draw the figures of a run, and the spectra of a comparison, into its folder `figures/` and return the files."""
    figures = list(data)
    if isinstance(run, Comparison):
        on_text = folder_kind(run.path) is FolderKind.GRID
        if not on_text or any(one.spectrum for one in run.trainings):
            figures.insert(0, spectrum(run))
    return [file for one in figures for file in save(one, run.path / FIGURES, formats=formats)]


def redraw(run_dir: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw every figure of a folder and its report page, in some of the formats png, svg and pdf; return the files.

    The folder is that of a comparison or of a run of `halflife train`, with the `spectrum/` of `halflife spectrum` and
    the `forecast/` of `halflife forecast` in it; or it is one of `halflife forecast`, which has no page.
    """
    for suffix in formats:
        check_format(suffix)
    if files := redraw_forecast(Path(run_dir), formats):
        return files
    run = read_any(run_dir)
    data = run_figures(run)
    files = save_figures(run, data, formats)
    folder = run.path / "spectrum"
    for name, figures_of in SPECTRUM_FILES.items():
        if (folder / f"{name}.json").exists():
            for figure in figures_of(without_null(read_json(folder / f"{name}.json"), math.nan)):
                files += save(figure, folder, formats=formats)
    files += redraw_forecast(run.path / "forecast", formats)
    return [*files, write_page(run, data)]


def redraw_forecast(folder: Path, formats: Sequence[str]) -> list[Path]:
    """Draw the figures of what `halflife forecast` wrote into a folder, if it has."""
    if not (folder / FORECAST_JSON).exists():
        return []
    figures = forecast_figures(read_forecasts(folder / FORECAST_JSON))
    return [file for figure in figures for file in save(figure, folder, formats=formats)]
