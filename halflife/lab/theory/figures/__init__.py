"""Figures of `halflife theory`, one for each topic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from halflife.files import THEORY_JSON, read_json, without_null
from halflife.lab.theory.figures.echo import gradient_flow, gram_sizes, layer_costs, phase_attenuation, statement_values
from halflife.lab.theory.figures.spectra import (
    channels_in_use,
    coherence_maps,
    energy_growth,
    errors_by_channels,
    errors_by_ends,
    errors_by_position,
    gaps,
    impulse_responses,
    relative_energies,
    taper_bands,
)
from halflife.lab.theory.figures.text import autocovariances, block_exponents, information, spectral_density
from halflife.report.figures.data import FigureData
from halflife.report.figures.matplotlib_renderer import FORMATS, save

FIGURES: dict[str, Callable[[Any], FigureData]] = {
    "errors": errors_by_channels, "ends": errors_by_ends, "positions": errors_by_position, "gaps": gaps,
    "coherence": coherence_maps, "channels": channels_in_use, "responses": impulse_responses, "energy": energy_growth,
    "normalization": relative_energies, "taper": taper_bands,
    "autocovariance": lambda data: autocovariances(data["sequences"]), "blocks": block_exponents,
    "density": spectral_density, "information": information, "gradients": gradient_flow, "phases": phase_attenuation,
    "gram": gram_sizes, "costs": layer_costs, "statements": statement_values,
}  # fmt: skip


def redraw(folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw the figures of the `theory.json` in a folder, if there is one, and return the files."""
    file = folder / THEORY_JSON
    return draw_all(without_null(read_json(file), math.nan), folder, formats) if file.exists() else []


def draw_all(data: Mapping[str, Any], folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw what `theory.compute.compute` returns, or its JSON, as `theory_<topic>.<format>` and return the files."""
    return [
        file for name, draw in FIGURES.items() if name in data
        for file in save(draw(data[name]), folder, formats=formats)
    ]  # fmt: skip
