"""What trackers get about a model in training: its decay spectrum, as values and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from halflife.files import finite
from halflife.models import LanguageModel
from halflife.models.timescales import granularity

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def track_options(track: Sequence[str]) -> dict[str, Any]:
    """The options of an `ExecutionConfig` that report a run, with its spectra, to the trackers of these names."""
    return {"track": tuple(dict.fromkeys(track)), "observe": observe_decays if track else None}


def observe_decays(model: LanguageModel) -> tuple[dict[str, float], dict[str, Figure]]:
    """The time-scales of the layers' decays in tokens, and their figure. Both are empty for a model without a decay.

    The names are `timescales/layer<i>/<shortest, median or longest>`. They are base time-scales at the training length
    that PoST knows, otherwise at position 1.
    """
    from halflife.analysis.model_spectrum import model_spectrum
    from halflife.report.figures.matplotlib_renderer import draw
    from halflife.report.figures.spectrum import timescales

    spectrum = model_spectrum(model)
    if not spectrum.layers:
        return {}, {}
    values = {}
    for layer in spectrum.layers:
        scales = layer.spectra[str(spectrum.positions[:2][-1])].timescales
        for name, statistic in (("shortest", min), ("median", median), ("longest", max)):
            values[f"timescales/layer{layer.layer}/{name}"] = float(statistic(scales))
    data = {"model": model.config.name, "channels": granularity(model), **spectrum.to_dict()}
    return values, {"decay_spectrum": draw(timescales(finite({"models": [data]})))}
