"""Draw pictures of docs/results from the files beside them, with `python docs/result_pictures.py` in half a minute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import claims  # beside this file
import numpy as np
from join import RESULTS
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from halflife.files import read_json
from halflife.lab.experiments.evidence.post_parts import PARTS
from halflife.report.figures.matplotlib_renderer import save_as
from halflife.report.intervals import bootstrap
from halflife.report.style import PAGE_WIDTH, REFERENCE_LINE, ModelStyle, model_styles, styled

LENGTH = 512  # T of the models of text

TEXT_FILES = {
    "mamba2": (
        "post_parts_text.csv",
        "post_parts_text_more.csv",
        "post_parts_text_norm.csv",
        "post_parts_text_norm_float32.csv",
    ),
    "gla": ("post_parts_text_gla.csv",),
    "gated_deltanet": ("post_parts_text_gated_deltanet.csv",),
    "rwkv7": ("post_parts_text_rwkv7.csv",),
    "retnet": ("post_parts_text_retnet.csv",),
}
OTHER_BASES = {"gla": "GLA", "gated_deltanet": "Gated DeltaNet", "rwkv7": "RWKV-7", "retnet": "RetNet"}
BASES = {"mamba2": "Mamba-2", **OTHER_BASES}
RECALL_FILES = {base: f"post_parts_{base}.csv" for base in OTHER_BASES} | {"mamba2": "post_parts_mqar.csv"}


@styled
def post_parts_text() -> Figure:
    """Draw the perplexity of each part of PoST over that of Mamba-2, by seed, for the last T bytes of T and of 16 T."""
    order = sorted(parts_on_text("mamba2"), key=lambda part: over_base(part, 16 * LENGTH).mean())
    figure = Figure(figsize=(PAGE_WIDTH, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    looks = model_styles(("no stretching", "decay and gain stretched", "decay alone stretched"))
    for axes, length, title in zip(panels, (LENGTH, 16 * LENGTH), ("T", "16 T"), strict=True):
        for row, part in enumerate(order):
            kind = stretched(part)
            draw_seeds(axes, row, over_base(part, length), looks[kind], kind)
        axes.axvline(1, **REFERENCE_LINE)
        axes.set(xscale="log", title=f"{length:,} bytes, {title}", xlabel="perplexity over that of Mamba-2")
    panels[0].set(yticks=range(len(order)), yticklabels=order, xticks=(1, 1.1, 1.2), xticklabels=("1", "1.1", "1.2"))
    panels[1].set(xticks=(1, 2, 3, 5), xticklabels=("1", "2", "3", "5"))
    for axes in panels:
        axes.minorticks_off()
    name_looks(figure, panels[1])
    return figure


@styled
def post_parts_text_others() -> Figure:
    """Draw the same for the other architectures, with T and 16 T in one panel."""
    parts = {base: parts_on_text(base) for base in OTHER_BASES}
    figure, panels, order = panels_of_parts(parts)
    lengths = {"T": LENGTH, "16 T": 16 * LENGTH}
    looks = model_styles(tuple(lengths))
    for axes, base in zip(panels, parts, strict=True):
        for part in parts[base]:
            for shift, (name, length) in zip((0.17, -0.17), lengths.items(), strict=True):
                draw_seeds(axes, order.index(part) + shift, over_base(part, length, base), looks[name], name)
        axes.axvline(1, **REFERENCE_LINE)
        axes.set(xlabel=f"over that of {BASES[base]}")
    panels[0].set(xlabel="perplexity over that of GLA")
    name_looks(figure, panels[0])
    return figure


@styled
def post_parts() -> Figure:
    """Draw the recall of 32 pairs at 4 T of each part of PoST minus that of its architecture, by seed."""
    read = claims.Files()
    parts = {base: [part for part in PARTS if read.measured(RECALL_FILES[base], f"{base}:{part}")] for base in BASES}
    figure, panels, order = panels_of_parts(parts)
    (look,) = model_styles(("recall",)).values()
    for axes, base in zip(panels, parts, strict=True):
        of_base = read.accuracy(RECALL_FILES[base], base, "capacity", 128, 32)
        for part in parts[base]:
            own = read.accuracy(RECALL_FILES[base], f"{base}:{part}", "capacity", 128, 32)
            draw_seeds(axes, order.index(part), 100 * (own - of_base), look, "")
        axes.axvline(0, **REFERENCE_LINE)
    figure.supxlabel("points of 32 pairs at 4 T", fontsize="medium")
    return figure


@styled
def post_review() -> Figure:
    """Draw the logarithm of the error against N / log t, with its fit over all t, for each form of PoST."""
    data = read_json(RESULTS / "post_review.json")
    figure = Figure(figsize=(PAGE_WIDTH, 2.6), layout="constrained")
    kinds = list(data["fits"])
    for axes, kind in zip(figure.subplots(1, len(kinds), sharex=True, sharey=True), kinds, strict=True):
        points = [(p["T"], p["N"] / math.log(p["t"]), p["error"]) for p in data["points"] if p["model"] == kind]
        for look, train in zip(model_styles("ab").values(), (16, 32), strict=True):
            x, errors = zip(*((x, error) for t, x, error in points if t == train), strict=True)
            axes.plot(x, errors, look.marker, color=look.color, label=f"T = {train}", linestyle="")
        constant, slope = data["fits"][kind]["all t"]["N / log t"]["coefficients"]
        ends = np.array([min(x for _, x, _ in points), max(x for _, x, _ in points)])
        axes.plot(ends, np.exp(constant + slope * ends), "k-", linewidth=0.8)
        axes.set(title=kind, xlabel="N / log t", yscale="log")
    figure.axes[0].set(ylabel="error")
    name_looks(figure, figure.axes[0])
    return figure


def panels_of_parts(parts: Mapping[str, Sequence[str]]) -> tuple[Figure, Sequence[Axes], list[str]]:
    """Return a figure with a panel for each architecture of `parts`, and the parts in the order of their rows."""
    order = [part for part in PARTS if any(part in own for own in parts.values())][::-1]
    figure = Figure(figsize=(0.3 * len(parts) * PAGE_WIDTH, 5), layout="constrained")
    panels = figure.subplots(1, len(parts), sharex=True, sharey=True)
    for axes, base in zip(panels, parts, strict=True):
        axes.set(title=BASES[base])
    panels[0].set(yticks=range(len(order)), yticklabels=order)
    return figure, panels, order


@styled
def gate_rank_states() -> Figure:
    """Draw needles and recall of a base, the base with GateRank, and the base with as large a state, by seed."""
    tests = {
        "8 needles at 8 T": ("gate_rank_niah.csv", "niah:hard", 256, 8),
        "32 pairs at 4 T": ("gate_rank_mqar.csv", "capacity", 128, 32),
    }
    figure = Figure(figsize=(PAGE_WIDTH, 2.4), layout="constrained")
    panels = figure.subplots(1, len(tests), sharey=True)
    looks = dict(zip(("mamba2", "gated_deltanet"), model_styles("ab").values(), strict=True))
    rows = [(base, form) for base in looks for form in ("{}", "{}+gate_rank", "{0}@state({0}+gate_rank)")][::-1]
    for axes, (title, (file, test, length, pairs)) in zip(panels, tests.items(), strict=True):
        for height, (base, form) in enumerate(rows):
            values = 100 * claims.Files().accuracy(file, form.format(base), test, length, pairs)
            draw_seeds(axes, height, values, looks[base], "")
        axes.set(title=title, xlabel="right, %")
    names = {"{}": "", "{}+gate_rank": " + GateRank", "{0}@state({0}+gate_rank)": ", equal state"}
    panels[0].set(yticks=range(len(rows)), yticklabels=[f"{BASES[base]}{names[form]}" for base, form in rows])
    return figure


@styled
def endpoints() -> Figure:
    """Draw recall by length with a quarter of the length in pairs, and with 16 pairs, of four models, by seed."""
    figure = Figure(figsize=(PAGE_WIDTH, 3), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    looks = model_styles(("mamba2", "mamba2+post", "mamba2+post_optimal", "mamba2+post_released"))
    for axes, test, lengths in zip(panels, ("capacity", "persist"), ((128, 256, 512), (256, 512)), strict=True):
        tests = [("in_distribution", 64), *((test, length) for length in lengths)]
        for model, look in looks.items():
            values = [100 * claims.Files().accuracy("endpoints.csv", model, *each) for each in tests]
            where = [length for _, length in tests]
            axes.plot(where, [seeds.mean() for seeds in values], **look._asdict(), label=model)
            for length, seeds in zip(where, values, strict=True):
                axes.plot([length] * len(seeds), seeds, look.marker, color=look.color, markersize=3, alpha=0.5)
        axes.set_xscale("log", base=2)
        axes.set(xticks=(64, *lengths), xticklabels=(64, *lengths), xlabel="tokens of a sequence")
        axes.minorticks_off()
    panels[0].set(title="a quarter of the length in pairs", ylabel="recalled, %")
    panels[1].set(title="16 pairs")
    panels[1].legend(loc="lower left")
    return figure


@styled
def recall() -> Figure:
    """Draw the recall of 16 pairs by their lag, of models trained at T 64: means over seeds, and the seeds."""
    figure = Figure(figsize=(PAGE_WIDTH, 3), layout="constrained")
    axes = figure.subplots()
    forecasts = [row for row in read_json(RESULTS / "forecast_overview.json")["models"] if row["task"] == "mqar"]
    for model, look in model_styles(list(dict.fromkeys(row["model"] for row in forecasts))).items():
        rows = [row for row in forecasts if row["model"] == model]
        lags, values = rows[0]["lags"][1:], 100 * np.array([row["measured"][1:] for row in rows])  # the first lag is 0
        axes.plot(lags, values.T, color=look.color, linewidth=0.7, alpha=0.5)
        axes.plot(lags, values.mean(0), **look._asdict(), label=model, markevery=4)
    axes.axvline(64, **REFERENCE_LINE)
    axes.annotate("T", (64, 3), (3, 0), textcoords="offset points")
    axes.set(xscale="log", xticks=lags[::4], xticklabels=[f"{lag:,}" for lag in lags[::4]], ylim=(-3, 103))
    axes.set(xlabel="lag: tokens between the pairs and the question", ylabel="recalled, % of 16 pairs")
    axes.minorticks_off()
    name_looks(figure, axes)
    return figure


@styled
def speed() -> Figure:
    """Draw the milliseconds of a training step of 65,536 tokens on one H100 by the length of its sequences."""
    data = read_json(RESULTS / "speed_attention.json")
    figure = Figure(figsize=(PAGE_WIDTH, 3), layout="constrained")
    axes = figure.subplots()
    looks = model_styles(tuple(row["model"] for row in data["models"]))
    for row, look in zip(data["models"], looks.values(), strict=True):
        axes.plot(data["lengths"], [1e3 * seconds for seconds in row["seconds"]], **look._asdict(), label=row["model"])
    axes.set_xscale("log", base=2)
    axes.set(xticks=data["lengths"], xticklabels=[f"{length:,}" for length in data["lengths"]], ylim=(0, None))
    axes.set(xlabel="tokens of a sequence", ylabel="milliseconds of a training step")
    axes.minorticks_off()
    axes.legend(loc="lower right")
    return figure


@styled
def scale_lengths() -> Figure:
    """Draw the predicted largest row by the number of H100s that share it."""
    data = read_json(RESULTS / "scale.json")
    figure, axes = scale_axes(data, data["gpus"], "longest", 1)
    axes.set(xlabel="H100s that share a row", ylabel="tokens of the largest row")
    return figure


@styled
def scale_costs() -> Figure:
    """Draw the counted operations of training on a token by the length of its row."""
    data = read_json(RESULTS / "scale.json")
    figure, axes = scale_axes(data, data["lengths"], "operations", 1e9)
    axes.set(xlabel="tokens of a row", ylabel="GFLOPs of a token")
    return figure


def scale_axes(data: Any, values: Sequence[int], what: str, unit: float) -> tuple[Figure, Axes]:
    """Return a figure with a line for each model of `scale.json`."""
    figure = Figure(figsize=(PAGE_WIDTH, 3), layout="constrained")
    axes = figure.subplots()
    looks = model_styles(tuple(row["model"] for row in data["models"]))
    for row, look in zip(data["models"], looks.values(), strict=True):
        axes.plot(values, [value / unit for value in row[what]], **look._asdict(), label=row["model"])
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xticks=values[::2], xticklabels=[f"{value:,}" for value in values[::2]])
    axes.minorticks_off()
    axes.legend()
    return figure, axes


def draw_seeds(axes: Axes, height: float, values: np.ndarray, look: ModelStyle, name: str) -> None:
    """Draw one number per seed at a height, with their interval."""
    ends = bootstrap(values.tolist())
    axes.plot([ends.low, ends.high], [height, height], color=look.color)
    axes.plot(values, np.full(len(values), height), look.marker, color=look.color, markersize=5, label=name)


def name_looks(figure: Figure, axes: Axes) -> None:
    """Name every look once, below the panels."""
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named))


def over_base(part: str, length: int, base: str = "mamba2") -> np.ndarray:
    """Return the perplexity of a part over that of the architecture trained with it, for every seed of both."""
    return claims.Files().perplexity_over(file_of(part, base), f"{base}:{part}", base, length)


def parts_on_text(base: str) -> list[str]:
    """Return the parts of PoST that have runs on text."""
    return [part for part in PARTS if file_of(part, base)]


def file_of(part: str, base: str) -> str:
    """Return the name of the file of results that has a part, or "" if none has."""
    return next((name for name in TEXT_FILES[base] if claims.Files().measured(name, f"{base}:{part}")), "")


def stretched(part: str) -> str:
    """Return what a part of PoST stretches with the position."""
    options = PARTS[part]
    if "base" in options or not options.get("post", {}).get("stretch", True):
        return "no stretching"
    return "decay and gain stretched" if "stretch_gain" in options.get("mixer", {}) else "decay alone stretched"


PICTURES = (
    post_parts, post_parts_text, post_parts_text_others, gate_rank_states, endpoints, post_review, recall, speed,
    scale_lengths, scale_costs,
)  # fmt: skip


def main() -> None:
    for draw in PICTURES:
        path = RESULTS / f"{draw.__name__}.png"
        save_as(draw(), path)
        print(path)


if __name__ == "__main__":
    main()
