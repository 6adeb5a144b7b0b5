"""The figures of `halflife memory` and `halflife throughput`: sizes of states, and times of steps, by length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from halflife.evaluation.memory import StateSize, format_bytes
from halflife.report.figures.data import Axis, FigureData, Key, Panel, Series
from halflife.report.style import INK, PAGE_WIDTH, ModelStyle, model_styles

MAX_TICKS = 10


def memory(result: dict[str, Any]) -> FigureData:
    """Bytes of one sequence's state against its length (both log), for each model and for the KV cache of llama.

    A ring marks where the state of a model becomes smaller than the cache. `result` is that of `measure_memory`.
    """
    models, lengths = result["models"], result["lengths"]
    span = (lengths[0], lengths[-1]) if lengths[0] < lengths[-1] else (lengths[0] / 2, 2 * lengths[0])
    x = np.geomspace(*span, 200)
    cache = result["cache"]["per_token"] * x
    name, bar = f"KV cache of llama, {result['cache_dtype']}", ModelStyle(INK, "", "-")
    series, keys = [Series(name, "", bar, x, cache, "bar")], {name: Key(bar, "bar")}
    for model, style in zip(models, model_styles([model["model"] for model in models]).values(), strict=True):
        size = StateSize(*(model.get(name, 0) for name in ("constant", "per_token", "per_digit", "most_digits")))
        crossing, dots = model["smaller_from"], style._replace(linestyle="none")
        at = "never smaller" if crossing is None else f"smaller from {crossing:,}"
        series += [
            Series(model["model"], "", style, x, [size.at(int(n)) for n in x], "line"),
            Series(model["model"], "", dots, lengths, model["bytes"]),
        ]
        keys[f"{model['model']}: {at}"] = Key(style)
        if crossing is not None and span[0] <= crossing <= span[1]:
            series.append(
                Series("ring", "", ModelStyle(style.color, "o", "none"), [crossing], [size.at(crossing)], "ring")
            )
    values = [value for one in series for value in one.y if value > 0]
    low, high = min(values) / 2, 2 * max(values)
    read = Axis("tokens read", log=True, ticks=_length_ticks(lengths, span), limits=(span[0] / 1.15, span[1]))
    size = Axis("state of one sequence", log=True, ticks=size_ticks(low, high), limits=(low, high))
    panel = Panel("ring: from here on the state is smaller than the KV cache", read, size, series)
    return FigureData("memory", "State of one sequence", [panel], keys=keys, size=(PAGE_WIDTH, 3.6))


def _length_ticks(lengths: Sequence[int], span: tuple[float, float]) -> dict[float, str]:
    """Ticks at the lengths. Those whose labels do not fit are left out."""
    ticks = lengths[:1]
    for length in lengths[1:]:
        if math.log(length / ticks[-1]) >= math.log(span[1] / span[0]) / MAX_TICKS:
            ticks = [*ticks, length]
    return {length: f"{length:,}" for length in ticks}


def size_ticks(low: float, high: float, most: int = MAX_TICKS) -> dict[float, str]:
    """Ticks at powers of two between two sizes: 2¹⁰ is 1 KiB, 2²⁰ 1 MiB."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(2, math.ceil((last - first + 1) / most))
    return {2**i: format_bytes(2**i) for i in range(first, last + 1) if i % step == 0}


def step_times(result: dict[str, Any]) -> FigureData:
    """Milliseconds of a step that `measure_steps` timed against the length of a sequence (both log), for each model."""
    series, timed = [], result.get("timed", "training step")  # earlier results do not say what was timed
    for row, style in zip(result["models"], model_styles([x["model"] for x in result["models"]]).values(), strict=True):
        milliseconds = [math.nan if x is None else 1e3 * x for x in row["seconds"]]
        series.append(Series(row["model"], row["model"], style, result["lengths"], milliseconds))
    title = f"{result['device']}, {result['dtype']}, {result['tokens']:,} tokens or one sequence"
    x = Axis("tokens of a sequence", log=True, ticks={length: f"{length:,}" for length in result["lengths"]})
    panel = Panel(title, x, Axis(f"a {timed} (ms)", log=True), series)
    return FigureData("throughput", "Training steps", [panel], size=(PAGE_WIDTH, 3.6))
