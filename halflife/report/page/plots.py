"""What the report page's plots are made of: plain dicts in plotly's terms, in the looks of `analysis.style`.

All that is not a model's colour is `INK`, which the page replaces by the colour of its text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from halflife.report.style import INK, LEVELS, ModelStyle, model_styles
from halflife.runs.folder import Training, mean

# Of a matplotlib marker: plotly's symbol, and its outline in an SVG of 8 × 8 around 0.
MARKS = {
    "o": ("circle", "M4 0A4 4 0 1 1-4 0A4 4 0 1 1 4 0Z"), "s": ("square", "M-3.5-3.5H3.5V3.5H-3.5Z"),
    "^": ("triangle-up", "M0-4.5L4 3H-4Z"), "D": ("diamond", "M0-5L5 0L0 5L-5 0Z"),
    "v": ("triangle-down", "M0 4.5L4-3H-4Z"),
    "P": ("cross", "M-1.5-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z"),
    "X": ("x", "M-4.2-2.1L-2.1-4.2L0-2.1L2.1-4.2L4.2-2.1L2.1 0L4.2 2.1L2.1 4.2L0 2.1L-2.1 4.2L-4.2 2.1L-2.1 0Z"),
    "h": ("hexagon", "M0-4.5L3.9-2.2V2.2L0 4.5L-3.9 2.2V-2.2Z"),
}  # fmt: skip
MAX_TICKS = 6

Curve = tuple[Sequence[float], Sequence[float]]  # x and y


class Key(NamedTuple):
    """An entry of a figure's legend; its button shows and hides the traces of its name."""

    label: str
    color: str
    dash: str
    mark: str = ""


class Panel(NamedTuple):
    """One plot: its traces and layout as plotly takes them, but for what all plots of the page share."""

    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


class Plot(NamedTuple):
    """A figure of the page: panels side by side, with what they show in words (alt) and how to read them (caption)."""

    name: str
    title: str
    alt: str
    caption: str
    panels: list[Panel]
    keys: list[Key]


# ---------------------------------------------------------------------------------------------- traces


def bundle(label: str, look: ModelStyle, seeds: Mapping[int, Curve], hover: str) -> list[dict[str, Any]]:
    """A model's curves: a thin line a seed, and their mean, thick, where all have values.

    Args:
        label: the model's name.
        look: its colour, marker and line.
        seeds: the curve of each seed; those without points are left out.
        hover: how a point reads, in plotly's terms: "step %{x:,}: %{y:.2%}".
    """
    seeds = {seed: curve for seed, curve in seeds.items() if len(curve[0])}
    if not seeds:
        return []
    if len(seeds) == 1:
        [(seed, (x, y))] = seeds.items()
        return [trace(label, label, x, y, look, hover, note=f", seed {seed}")]
    values = [dict(zip(*curve, strict=True)) for curve in seeds.values()]
    shared = sorted(set.intersection(*(set(own) for own in values)))
    average = [mean(own[x] for own in values) for x in shared]
    thin = [trace(f"{label}, seed {seed}", label, *curve, look, hover, thick=False) for seed, curve in seeds.items()]
    return [*thin, trace(label, label, shared, average, look, hover, note=f", mean of {len(seeds)} seeds")]


def trace(
    name: str, group: str, x: Sequence[float], y: Sequence[float], look: ModelStyle, hover: str, *,
    thick: bool = True, note: str = "",
) -> dict[str, Any]:  # fmt: skip
    """One line, thick with markers or thin without; `group` is the legend's entry that it belongs to."""
    return {
        "type": "scatter", "mode": "lines+markers" if thick else "lines", "name": name, "legendgroup": group,
        "x": list(x), "y": [rounded(value) for value in y], "opacity": 1 if thick else 0.45,
        "line": {"color": look.color, "width": 2.2 if thick else 1, "dash": dash(look.linestyle)},
        "marker": {"symbol": MARKS[look.marker][0], "size": 8, "maxdisplayed": 16},
        "hovertemplate": f"<b>{escape(name)}</b>{note}<br>{hover}<extra></extra>",
    }  # fmt: skip


def levels(label: str, x: Sequence[float], y: Sequence[float], hover: str) -> dict[str, Any]:
    """The dotted line of "shortcut_accuracy" or "chance"."""
    look = LEVELS[label]
    drawn = trace(label, look["label"], x, y, ModelStyle(INK, "o", look["linestyle"]), hover)
    return {**drawn, "mode": "lines", "line": {**drawn["line"], "width": 1.4}}


def dash(linestyle: Any) -> str:
    """Plotly's name of a matplotlib line style."""
    return "solid" if linestyle == "-" else ",".join(f"{2 * length:g}px" for length in linestyle[1])


def rounded(value: float, digits: int = 6) -> float | None:
    """A number with so many digits, None where it is not finite (JSON has no word for it)."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def model_keys(models: Sequence[str]) -> list[Key]:
    """The legend of models."""
    drawn = model_styles(models)
    return [Key(model, look.color, dash(look.linestyle), MARKS[look.marker][1]) for model, look in drawn.items()]


def level_keys() -> list[Key]:
    """The legend of guess and chance."""
    return [Key(look["label"], INK, dash(look["linestyle"])) for look in LEVELS.values()]


# ---------------------------------------------------------------------------------------------- layout


def layout(x: dict[str, Any], y: dict[str, Any], train_length: int | None = None) -> dict[str, Any]:
    """Axes, and a vertical line at the training length."""
    return {"xaxis": x, "yaxis": y, "shapes": [at(train_length)] if train_length else []}


def at(x: float, text: str = "T") -> dict[str, Any]:
    """A vertical line with a name above it."""
    label = {"text": text, "textposition": "end", "textangle": 0, "yanchor": "bottom", "font": {"color": INK}}
    line = {"color": INK, "width": 1, "dash": "dash"}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line, "label": label}


def percentages(title: str) -> dict[str, Any]:
    """An axis of shares from 0 to 1."""
    return {"title": {"text": title}, "tickformat": ".0%", "range": [-0.03, 1.03]}


def linear(title: str, **own: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "tickformat": ",", **own}


def logarithmic(title: str, ticks: Sequence[float] | None = None, **own: Any) -> dict[str, Any]:
    """A logarithmic axis; of `ticks`, so many as have room."""
    kept = list(ticks or ())[:: -(-len(ticks or ()) // MAX_TICKS) or 1]
    labels = {"tickvals": kept, "ticktext": [short(tick) for tick in kept]} if kept else {}
    return {"title": {"text": title}, "type": "log", **labels, **own}


def decades(title: str, traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A logarithmic axis for the y of `traces`: ticks at powers of ten, of a short span also between them."""
    found = [y for trace in traces for y in trace["y"] if y] or [1]
    span = max(found) / min(found)
    return logarithmic(title, dtick="D1" if span < 5 else "D2" if span < 300 else 1, tickformat=",~g")


def octaves(last: float) -> list[int]:
    """1, 2, 4, … up to `last`."""
    return [2**i for i in range(int(last).bit_length())]


def short(length: float) -> str:
    """A number of tokens on an axis: 512, 4K."""
    return f"{length / 1024:g}K" if length >= 1024 and length % 1024 == 0 else f"{length:,g}"


# ----------------------------------------------------------------------------------------------- gates

GATES = {
    "reset_rate": ("share of tokens that reset", "%{y:.2%}"),
    "segment_length": ("mean segment (tokens)", "%{y:.4g} tokens"),
    "slow_share": ("slow state's share of energy", "%{y:.2%}"),
}


def gates(trainings: Mapping[str, Sequence[Training]]) -> Plot:
    """What the slow gates do while models train, means over layers; `trainings` are those of each model."""
    panels = []
    for name, (title, hover) in GATES.items():
        traces = []
        for model, look in model_styles(list(trainings)).items():
            seeds = {one.seed: _gate(one, name) for one in trainings[model]}
            traces += bundle(model, look, seeds, f"step %{{x:,}}: {hover}")
        axis = percentages("") if name == "slow_share" else decades("", traces)
        panels.append(Panel(title, traces, layout(linear("step", rangemode="tozero"), axis)))
    gated = {trace["legendgroup"] for trace in panels[0].data}
    models = ", ".join(model for model in trainings if model in gated)
    return Plot(
        "gates",
        "What the slow gates do",
        f"Line charts of the share of resets, the mean segment and the slow state's energy while {models} trained.",
        "Means over layers: a thick line a model, thin lines its seeds. At a reset the fast state joins the slow one. "
        "A layer that never resets has one state: its line ends where a logarithm would.",
        panels,
        [key for key in model_keys(list(trainings)) if key.label in gated],
    )


def _gate(one: Training, name: str) -> Curve:
    """Steps, and the mean over layers; a logarithm knows no 0."""
    found = [(step, mean(layer[name] for layer in layers.values())) for step, layers in one.gates()]
    return [step for step, _ in found], [value or math.nan for _, value in found]
