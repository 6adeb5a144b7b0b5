"""The figures of `halflife memory` and `halflife throughput`: sizes of states, and times of steps, by length."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from halflife.evaluation.memory import StateSize, format_bytes
from halflife.report.figures.grids import panel_grid
from halflife.report.style import INK, escape_formula, legend, model_handles, model_styles, styled

CACHE: dict[str, Any] = {"color": INK, "linewidth": 4, "alpha": 0.35, "solid_capstyle": "butt"}
RING: dict[str, Any] = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 1.4}
MAX_TICKS = 10
GAP = 0.055  # between labels, as a fraction of the panel's height, which has room for about 17 labels


@styled
def memory(result: dict[str, Any]) -> Figure:
    """Bytes of one sequence's state against its length (both log), for each model and for the KV cache of llama.

    The name of a model stands at the end of its line. A ring marks where its state becomes smaller than the cache.

    Args:
        result: what `evaluation.memory.measure_memory` returns.
    """
    models = result["models"]
    fields = ("constant", "per_token", "per_digit", "most_digits")
    sizes = {model["model"]: StateSize(*(model.get(name, 0) for name in fields)) for model in models}
    cache = StateSize(per_token=result["cache"]["per_token"])
    first, last = result["lengths"][0], result["lengths"][-1]
    span = (first, last) if first < last else (first / 2, 2 * last)
    figure, (axes,) = panel_grid(1, max(3.6, 0.24 * (len(models) + 3)))
    x = np.geomspace(*span, 200)
    axes.plot(x, cache.per_token * x, **CACHE)
    for model, (name, style) in zip(models, model_styles(list(sizes)).items(), strict=True):
        size, dots = sizes[name], {"color": style.color, "marker": style.marker, "linestyle": "none", "clip_on": False}
        axes.plot(x, [size.at(int(n)) for n in x], color=style.color, linestyle=style.linestyle)
        axes.plot(result["lengths"], model["bytes"], **dots)
        crossing = model["smaller_from"]
        if crossing is not None and span[0] <= crossing <= span[1]:
            axes.plot(crossing, size.at(crossing), color=style.color, **RING)
    _set_scales(axes, result["lengths"], span)
    _write_names(axes, result, {"": cache, **sizes}, span[1])
    axes.set_title("ring: from here on the state is smaller than the KV cache", loc="left")
    return figure


@styled
def step_times(result: dict[str, Any]) -> Figure:
    """Milliseconds of a training step against the length of a sequence (both log), for each model.

    Args:
        result: what `evaluation.throughput.measure_steps` returns.
    """
    names = [row["model"] for row in result["models"]]
    figure, (axes,) = panel_grid(1, 3.6)
    for row, style in zip(result["models"], model_styles(names).values(), strict=True):
        points = [(n, 1e3 * x) for n, x in zip(result["lengths"], row["seconds"], strict=True) if x is not None]
        axes.plot([n for n, _ in points], [x for _, x in points], **style._asdict())
    axes.set(xlabel="tokens of a sequence", ylabel="a training step (ms)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda milliseconds, _: f"{milliseconds:,g}"))
    axes.set_xticks(result["lengths"], [f"{length:,}" for length in result["lengths"]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(f"{result['device']}, {result['dtype']}, {result['tokens']:,} tokens or one sequence", loc="left")
    legend(figure, model_handles(names))
    return figure


def _set_scales(axes: Axes, lengths: list[int], span: tuple[float, float]) -> None:
    axes.set(xlabel="tokens read", ylabel="state of one sequence")
    axes.set_xscale("log", base=2)
    ticks = lengths[:1]
    for length in lengths[1:]:  # labels that do not fit are left out
        if math.log(length / ticks[-1]) >= math.log(span[1] / span[0]) / MAX_TICKS:
            ticks.append(length)
    axes.set_xticks(ticks, [f"{length:,}" for length in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=4, numticks=MAX_TICKS))  # 4⁵ is 1 KiB, 4¹⁰ 1 MiB
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    axes.set_xlim(span[0] / 1.15, span[1])  # lines end where the leader lines to their names begin
    low, high = axes.dataLim.intervaly
    axes.set_ylim(low / 2, high * 2)


def _write_names(axes: Axes, result: dict[str, Any], sizes: dict[str, StateSize], end: float) -> None:
    """Write the name of each line at its right end, without overlaps. In `sizes`, the cache has the name ""."""
    crossings = {model["model"]: model["smaller_from"] for model in result["models"]}
    models = model_styles(list(crossings))
    low, high = np.log(axes.get_ylim())
    ends = [float(np.log(size.at(int(end))) - low) / float(high - low) for size in sizes.values()]
    beside: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
    for name, at, moved in zip(sizes, ends, apart(ends, min(GAP, 0.95 / len(ends))), strict=True):
        if style := models.get(name):
            text, colour = f"{escape_formula(name)}: {_crossing(crossings[name])}", style.color
            mark = Line2D([1.055], [moved], color=colour, marker=style.marker, **beside)
        else:
            text, colour = f"KV cache of llama, {result['cache_dtype']}", INK
            mark = Line2D([1.04, 1.065], [moved, moved], **CACHE, **beside)
        axes.add_line(Line2D([1, 1.04], [at, moved], color=colour, linewidth=0.8, **beside))
        axes.add_line(mark)
        axes.annotate(text, (1.075, moved), xycoords="axes fraction", fontsize=8, va="center", annotation_clip=False)


def _crossing(crossing: int | None) -> str:
    return "never smaller" if crossing is None else f"smaller from {crossing:,}"


def apart(positions: list[float], gap: float) -> list[float]:
    """Move positions between 0 and 1 so that neighbours are at least `gap` apart. Their order stays the same.

    Of equal positions, later ones move down. Positions that are too close form a group around their mean, inside
    [0, 1]. Groups that overlap are joined.
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
