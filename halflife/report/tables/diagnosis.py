"""What `halflife diagnose` says in words: what models allow, and how their layers forget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from halflife.analysis.diagnosis import Allowed
from halflife.analysis.model_spectrum import training_position
from halflife.evaluation.memory import format_bytes
from halflife.report.numbers import token_count
from halflife.report.tables.forecast import sentences

SHORT, LONG = 32, 512  # tokens: layers that forget sooner are short, and those that keep longer are long


def allowed_lines(allowed: Mapping[str, Allowed]) -> Iterator[str]:
    """A line for each model: its layers, and for each measurement "yes" or the reason against it."""
    for label, one in allowed.items():
        kinds = ", ".join(f"{one.mixers.count(kind)} × {kind}" for kind in dict.fromkeys(one.mixers))
        answers = "; ".join(f"{name}: {getattr(one, name) or 'yes'}" for name in ("spectrum", "forecast", "memory"))
        yield f"{label} ({kinds}): {answers}."


def verdict(label: str, allowed: Allowed, spectrum: Mapping[str, Any] | None, reason: str = "") -> str:
    """Say how the layers of a model forget, or the `reason` against a spectrum, and how much memory it needs."""
    found = spectrum["layers"] if spectrum else []
    some = " with a decay" if len(found) < len(allowed.mixers) else ""
    none = "No layer has a decay that can be read."
    if reason and not allowed.spectrum:
        none = f"There is no spectrum: {reason}."
    parts = [_of_layers(spectrum, some) if spectrum and found else none]
    if allowed.state_bytes is not None:
        grows = f", and {format_bytes(allowed.token_bytes)} more with each token" if allowed.token_bytes else ""
        parts.append(f"Its state of one sequence takes {format_bytes(allowed.state_bytes)}{grows}.")
    return f"{label}: {' '.join(parts)}"


def _of_layers(model: Mapping[str, Any], some: str) -> str:
    """How long the slowest head of each layer keeps what it reads: its horizon on the text, or its base time-scale.

    `some` says which heads and layers are meant if others have no decay.
    """
    on_text = all("horizon" in layer for layer in model["layers"])
    position = str(training_position(model["positions"]))
    reach: dict[int, float] = {
        layer["layer"]: layer["horizon"] if on_text else max(layer["spectra"][position]["timescales"])
        for layer in model["layers"]
    }
    longest = model["layers"][0]["longest_lag"] if on_text else None
    where = "on the text" if on_text else "at zero input"
    long = {layer: reached for layer, reached in reach.items() if reached >= LONG}
    if not long:
        heads = "All heads" if max(reach.values()) <= SHORT else "The slowest heads"
        return f"{heads}{some} forget within {_tokens(max(reach.values()))} tokens, {where}."
    kept = ", ".join(f"layer {layer} keeps {_tokens(reached, longest)}" for layer, reached in long.items())
    others = [reached for layer, reached in reach.items() if layer not in long]
    rest = f"; the other layers{some} forget within {_tokens(max(others))}" if others else ""
    return f"{kept[0].upper()}{kept[1:]} tokens{rest}, {where}."


def _tokens(number: float, longest: int | None = None) -> str:
    return token_count(number if math.isinf(number) else math.ceil(number), longest)


def findings(allowed: Mapping[str, Allowed], found: Mapping[str, Any]) -> list[str]:
    """All sentences about the models."""
    reason = found["spectrum"] if isinstance(found["spectrum"], str) else ""
    spectra = {} if isinstance(found["spectrum"], str) else {one["model"]: one for one in found["spectrum"]["models"]}
    said: Sequence[str] = [verdict(label, one, spectra.get(label), reason) for label, one in allowed.items()]
    forecast = found["forecast"]
    whole = isinstance(forecast, str)
    refused = {label: one.forecast for label, one in allowed.items() if one.forecast} if whole else forecast["refused"]
    if whole and not refused:
        return [*said, f"There is no forecast: {forecast.removeprefix('nothing to forecast: ')}."]
    measured = [] if whole else sentences(forecast)
    # What a forecast needs is said before, with what the models allow.
    reasons = {label: why.partition(";")[0].split(": ", 1)[-1] for label, why in refused.items()}
    return [*said, *measured, *(f"There is no forecast of {label}: {why}." for label, why in reasons.items())]
