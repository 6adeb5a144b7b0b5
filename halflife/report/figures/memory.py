"""The figure of `halflife memory`: the size of states against the length."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from halflife.evaluation.memory import LinearSize, format_bytes
from halflife.report.style import INK, WIDTH, model_styles, plain, styled

CACHE: dict[str, Any] = {"color": INK, "linewidth": 4, "alpha": 0.35, "solid_capstyle": "butt"}
RING: dict[str, Any] = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 1.4}
DOTS: dict[str, Any] = {"linestyle": "none", "clip_on": False}
MAX_TICKS = 10
GAP = 0.055  # between labels, as a share of the panel's height; it holds some 17


@styled
def memory(result: dict[str, Any]) -> Figure:
    """Draw the bytes of one sequence's state against its length, on log axes, with a line a model and the KV cache.

    Each line has its name at its right end. A ring marks the length from which on a model's state is smaller than the
    cache, if the lengths include it.

    Args:
        result: as `evaluation.memory.measure_memory` returns it.
    """
    models = result["models"]
    sizes = {model["model"]: LinearSize(model["constant"], model["per_token"]) for model in models}
    cache = LinearSize(per_token=result["cache"]["per_token"])
    first, last = result["lengths"][0], result["lengths"][-1]
    span = (first, last) if first < last else (first / 2, 2 * last)
    figure = Figure(figsize=(WIDTH, max(3.6, 0.24 * (len(models) + 3))), layout="constrained")
    axes = figure.subplots()
    x = np.geomspace(*span, 200)
    axes.plot(x, cache.per_token * x, **CACHE)
    for model, (name, look) in zip(models, model_styles(list(sizes)).items(), strict=True):
        size = sizes[name]
        axes.plot(x, size.constant + size.per_token * x, color=look.color, linestyle=look.linestyle)
        axes.plot(
            result["lengths"], model["bytes"], color=look.color, marker=look.marker, linestyle="none", clip_on=False
        )
        crossing = model["smaller_from"]
        if crossing is not None and span[0] <= crossing <= span[1]:
            axes.plot(crossing, size.at(crossing), color=look.color, **RING)
    _scales(axes, result["lengths"], span)
    _names(axes, result, {"": cache, **sizes}, span[1])
    axes.set_title("ring: from this length on the state is smaller than the KV cache", loc="left")
    return figure


def _scales(axes: Axes, lengths: list[int], span: tuple[float, float]) -> None:
    axes.set(xlabel="tokens read", ylabel="state of one sequence")
    axes.set_xscale("log", base=2)
    ticks = lengths[:1]
    for length in lengths[1:]:  # only lengths whose labels have room
        if math.log(length / ticks[-1]) >= math.log(span[1] / span[0]) / MAX_TICKS:
            ticks.append(length)
    axes.set_xticks(ticks, [f"{length:,}" for length in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=4, numticks=MAX_TICKS))  # 4⁵ is 1 KiB, 4¹⁰ 1 MiB
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    axes.set_xlim(span[0] / 1.15, span[1])  # the lines to the names begin where the curves end
    low, high = axes.dataLim.intervaly
    axes.set_ylim(low / 2, high * 2)


def _names(axes: Axes, result: dict[str, Any], sizes: dict[str, LinearSize], end: float) -> None:
    """Write each line's name at its right end. Names of lines that end close together move apart.

    Args:
        sizes: name → size; the name of the cache is "".
        end: the length at which the lines end.
    """
    crossings = {model["model"]: model["smaller_from"] for model in result["models"]}
    models = model_styles(list(crossings))
    low, high = np.log(axes.get_ylim())
    ends = [float(np.log(size.constant + size.per_token * end) - low) / float(high - low) for size in sizes.values()]
    beside: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
    for name, at, moved in zip(sizes, ends, apart(ends, min(GAP, 0.95 / len(ends))), strict=True):
        if look := models.get(name):
            text, colour = f"{plain(name)}: {_when(crossings[name])}", look.color
            mark = Line2D([1.055], [moved], color=colour, marker=look.marker, **beside)
        else:
            text, colour = f"KV cache of llama, {result['cache_dtype']}", INK
            mark = Line2D([1.04, 1.065], [moved, moved], **CACHE, **beside)
        axes.add_line(Line2D([1, 1.04], [at, moved], color=colour, linewidth=0.8, **beside))
        axes.add_line(mark)
        axes.annotate(text, (1.075, moved), xycoords="axes fraction", fontsize=8, va="center", annotation_clip=False)


def _when(crossing: int | None) -> str:
    return "never smaller" if crossing is None else f"smaller from {crossing:,}"


def apart(positions: list[float], gap: float) -> list[float]:
    """Return positions between 0 and 1 that are at least `gap` apart, in the order of `positions`.

    Positions that are too close to each other form a group, which is centred at their mean and stays inside the panel.
    Groups that meet are joined. Of equal positions the first one comes to lie highest.
    """
    order = sorted(range(len(positions)), key=lambda i: (positions[i], -i))
    groups: list[list[int]] = []

    def centre(group: list[int]) -> float:
        reach = gap * (len(group) - 1) / 2
        return min(max(sum(positions[i] for i in group) / len(group), reach), 1 - reach)

    for i in order:
        groups.append([i])
        while len(groups) > 1:
            lower, upper = groups[-2:]
            if centre(upper) - centre(lower) >= gap * (len(lower) + len(upper)) / 2:
                break
            groups[-2:] = [lower + upper]
    moved = {
        i: centre(group) + gap * (place - (len(group) - 1) / 2) for group in groups for place, i in enumerate(group)
    }
    return [moved[i] for i in range(len(positions))]
