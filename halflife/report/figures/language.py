"""Figures of language models: the loss while training, and by position in the context."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from halflife.report.style import REFERENCE_LINE, WIDTH, model_styles, styled

BITS = 1 / math.log(2)


def lines(folder: Path) -> list[dict[str, Any]]:
    """What a run logged, a dict a line of `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@styled
def curves(folders: Mapping[str, Path], path: Path, goals: Mapping[str, float] | None = None) -> None:
    """Validation loss (lines) and training loss (thin) of runs against their steps; `goals` are horizontal lines."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.4), layout="constrained")
    for name, look in model_styles(list(folders)).items():
        logged = lines(folders[name])
        styles: dict[str, dict[str, Any]] = {
            "loss": {"alpha": 0.35, "linewidth": 0.8}, "validation_loss": {"label": name},
        }  # fmt: skip
        for key, style in styles.items():
            found = [(line["step"], line[key] * BITS) for line in logged if key in line]
            axes.plot(*zip(*found, strict=True), color=look.color, linestyle=look.linestyle, **style)
    for name, value in (goals or {}).items():
        axes.axhline(value, **REFERENCE_LINE)
        axes.annotate(name, (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axes.set(xlabel="step", ylabel="loss (bits a token)", xscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def curve(folder: Path, path: Path) -> None:
    """`curves` of one run."""
    curves({"validation (thin: training)": folder}, path)


@styled
def by_lengths(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Left: loss by position in the context. Right: perplexity at multiples of the training length."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.2), layout="constrained")
    for name, look in model_styles(list(results)).items():
        result, style = results[name], {"color": look.color, "marker": look.marker, "linestyle": look.linestyle}
        buckets = result["positions"]
        left.plot([b["last"] for b in buckets], [b["loss"] * BITS for b in buckets], label=name, **style)
        sizes = [row["length"] for row in result["lengths"]]
        right.plot(sizes, [row["perplexity"] for row in result["lengths"]], **style)
    trained = next(iter(results.values()))["lengths"][0]["length"]
    _trained(left, trained)
    _trained(right, trained)
    left.set(xlabel="position (end of the octave)", ylabel="loss (bits a token)", xscale="log")
    right.set(xlabel="length of the text", ylabel="perplexity", xscale="log")
    left.set_xscale("log", base=2)
    right.set_xscale("log", base=2)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(results))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _trained(axes: Axes, length: int) -> None:
    axes.axvline(length, **REFERENCE_LINE)
    axes.annotate(
        "trained", (length, 1), xycoords=("data", "axes fraction"), ha="right", va="top", fontsize=8, rotation=90
    )


def by_length(result: Mapping[str, Any], path: Path) -> None:
    """`by_lengths` of one run."""
    by_lengths({"validation": result}, path)
