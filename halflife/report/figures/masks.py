"""Pictures of decay masks: a head's of each model, and the paper's worked example (GateRank, Figure 2a)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from torch import Tensor

from halflife.analysis.masks import Gates, cut_values
from halflife.files import atomic_path
from halflife.report.style import COLOURS, INK, WIDTH, legend, model_styles, plain, styled

NAMES = ("Γ", "Λ", "Γ ⊙ Λ")
FAINTEST = 1e-3  # entries below are drawn like it; colours begin at the smallest entry if that is larger
SMALLEST = 1e-18  # singular values below are drawn at it
RESET: dict[str, Any] = {"color": COLOURS[1], "width": 0.8, "length": 4}  # a tick
MAX_ROWS = 4  # models of one picture
EXAMPLE_RESETS, EXAMPLE_LENGTH = (1, 3, 5), 6  # tokens from 0, as the paper's subscripts
EXAMPLE_FAINTEST, EXAMPLE_DARK = 0.05, 0.3
EXAMPLE_SLOW, EXAMPLE_FAST = 0.5, 0.8  # α at a reset and β at every token of the picture


class Head(NamedTuple):
    """One head of one model's layer, on one sequence."""

    label: str
    gates: Gates
    head: int
    sequence: int = 0

    def masks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Γ, Λ and their product, `[T, T]`."""
        one = slice(self.sequence, self.sequence + 1)
        layer, fast, slow = self.gates
        gamma, lam = Gates(layer, fast[one], None if slow is None else slow[one]).masks()
        return gamma[0, self.head], lam[0, self.head], (gamma * lam)[0, self.head]

    def resets(self) -> list[int]:
        """The tokens, from 0, that end a segment."""
        return self.gates.resets()[self.sequence, :, self.head].nonzero().flatten().tolist()

    def title(self) -> str:
        """Which head it is, and how often it resets."""
        count, length = len(self.resets()), self.gates.g_fast.shape[1]
        name = f"{plain(self.label)}, layer {self.gates.layer}, head {self.head}: "
        if not count:
            return f"{name}no reset in {length} tokens"
        resets = "1 reset" if count == 1 else f"{count} resets"
        return f"{name}{resets} in {length} tokens, mean segment {length / (count + 1):.3g}"


def most_resets(label: str, found: Sequence[Gates], layer: int | None = None, head: int | None = None) -> Head:
    """The head with the most resets in the first sequence, among those of a layer, or the head, that is asked for.

    Raises:
        ValueError: there is no such layer with one decay a head, or no such head; the message lists the choices.
    """
    chosen = [gates for gates in found if layer in (None, gates.layer)]
    if not chosen:
        layers = ", ".join(str(gates.layer) for gates in found)
        raise ValueError(f"{label} has no layer {layer} with one decay a head; choose from {layers}")
    heads = [Head(label, gates, h) for gates in chosen for h in range(gates.g_fast.shape[2]) if head in (None, h)]
    if not heads:
        raise ValueError(f"{label} has no head {head}; choose 0 to {chosen[0].g_fast.shape[2] - 1}")
    return max(heads, key=lambda one: len(one.resets()))


# ----------------------------------------------------------------------------------------------- models


@styled
def mask(heads: Sequence[Head]) -> Figure:
    """Γ, Λ and Γ ⊙ Λ (log colour), a row a model, with ticks at its resets; below, the singular values at every cut.

    At token m that is what tokens from m on read from tokens up to m: σ₂/σ₁ and σ₃/σ₁, the latter at rounding where two
    states suffice. At most `MAX_ROWS` models are drawn.
    """
    heads = heads[:MAX_ROWS]
    figure = Figure(figsize=(WIDTH, 2.55 * len(heads) + 1.9), layout="constrained")
    heights = [*([2.55] * len(heads)), 1.9]
    subfigures: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    *rows, below = subfigures
    masks = [one.masks() for one in heads]
    smallest = min(both[torch.ones_like(both).tril().bool()].min().item() for *_, both in masks)
    faintest = min(max(smallest, FAINTEST), 0.5)
    for row, one, shown in zip(rows, heads, masks, strict=True):
        panels = row.subplots(1, 3)
        for axes, name, entries in zip(panels, NAMES, shown, strict=True):
            drawn = _heat(axes, entries, one.resets(), faintest)
            axes.set(title=name, xlabel="written at token j")
        panels[0].set_ylabel("read at token i")
        row.suptitle(one.title(), fontsize=9, x=0.01, ha="left")
        beyond = "min" if smallest < faintest else "neither"
        _colour_bar(row, drawn, panels, beyond)
    lines = _cuts(below.subplots(), heads)
    legend(figure, [*lines, Line2D([], [], color=RESET["color"], marker="|", linestyle="none", label="reset")])
    return figure


def _heat(axes: Axes, entries: Tensor, resets: Sequence[int], faintest: float) -> AxesImage:
    """One mask, nothing above its diagonal; ticks above and to the right stand at the resets."""
    upper = ~np.tri(len(entries), dtype=bool)
    shown = np.ma.masked_array(entries.clamp(min=faintest).numpy(), upper)
    drawn = axes.imshow(shown, norm=LogNorm(faintest, 1), cmap="magma", interpolation="nearest")
    axes.grid(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))
        axis.set_ticks(resets, minor=True)
        axis.remove_overlapping_locs = False  # a reset keeps its tick where a number stands
    axes.tick_params(which="minor", bottom=False, left=False, top=True, right=True, **RESET)
    return drawn


def _colour_bar(figure: FigureBase, drawn: AxesImage, panels: Any, extend: str) -> None:
    bar = figure.colorbar(drawn, ax=panels, extend=extend, shrink=0.8, label="what is left", format="%g")
    bar.minorformatter = NullFormatter()
    low, high = drawn.get_clim()
    bar.set_ticks([tick for tick in (0.001, 0.01, 0.1, 0.2, 0.5, 1) if low <= tick <= high])


def _cuts(axes: Axes, heads: Sequence[Head]) -> list[Line2D]:
    """σ₂ drawn through and σ₃ dotted, a colour a model; in grey, σ₂ of the first model's fast gates alone."""
    lines = []

    def draw(entries: Tensor, k: int, label: str, **look: Any) -> None:
        values = cut_values(entries)[:, k].clamp(min=SMALLEST)
        lines.extend(axes.step(range(len(values)), values, where="mid", label=label, linewidth=1.2, **look))

    alone = heads[0].gates._replace(g_slow=None)
    draw(heads[0]._replace(gates=alone).masks()[2], 1, "one decay (Mamba-2), σ₂", color=INK, alpha=0.45)
    for one, look in zip(heads, model_styles([one.label for one in heads]).values(), strict=True):
        for k, linestyle in ((1, "-"), (2, (0, (1, 1)))):
            label = f"{plain(one.label)}, σ{'₁₂₃'[k]}"
            draw(one.masks()[2], k, label, color=look.color, linestyle=linestyle)
    axes.set(yscale="log", ylim=(SMALLEST / 3, 3), xlabel="token m", ylabel="σ / σ₁")
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_title("singular values of what tokens from m on read from tokens up to m", loc="left")
    return lines


# ---------------------------------------------------------------------------------------------- example


def example_gates() -> Gates:
    """Six tokens with resets at 1, 3 and 5, counted from 0 (GateRank, Figure 2a)."""
    slow = torch.zeros(1, EXAMPLE_LENGTH, 1, dtype=torch.float64)
    slow[:, list(EXAMPLE_RESETS)] = math.log(EXAMPLE_SLOW)
    return Gates(0, torch.full_like(slow, math.log(EXAMPLE_FAST)), slow)


def example_symbols() -> tuple[list[list[str]], ...]:
    """The entries of Γ, Λ and Γ ⊙ Λ in the example: α₃α₁ is "α_3 α_1"; "1" for none, "" above the diagonal."""

    def written(*factors: list[list[list[str]]]) -> list[list[str]]:
        return [[" ".join(name for f in factors for name in f[i][j]) or "1" if j <= i else "" for j in T] for i in T]

    T = range(EXAMPLE_LENGTH)
    until = [min((r for r in EXAMPLE_RESETS if r > j), default=EXAMPLE_LENGTH) for j in T]
    gamma = [[[f"α_{t}" for t in range(i, j, -1) if t in EXAMPLE_RESETS] for j in T] for i in T]
    lam = [[[f"β_{t}" for t in range(min(until[j], i), j, -1)] for j in T] for i in T]
    return written(gamma), written(lam), written(gamma, lam)


@styled
def example() -> Figure:
    """The example's Γ, Λ and Γ ⊙ Λ, each entry with its formula, coloured for α = 1/2 and β = 4/5."""
    head = Head("example", example_gates(), 0)
    figure = Figure(figsize=(1.6 * WIDTH, 4.1), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, name, entries, symbols in zip(panels, NAMES, head.masks(), example_symbols(), strict=True):
        drawn = _heat(axes, entries, head.resets(), faintest=EXAMPLE_FAINTEST)
        axes.set(title=name, xlabel="written at token j", xticks=range(EXAMPLE_LENGTH), yticks=range(EXAMPLE_LENGTH))
        for i, row in enumerate(symbols):
            for j, symbol in enumerate(row):
                _entry(axes, i, j, symbol, dark=entries[i, j].item() < EXAMPLE_DARK)
    panels[0].set_ylabel("read at token i")
    figure.suptitle(f"resets at 1, 3 and 5 (ticks); coloured for α = {EXAMPLE_SLOW}, β = {EXAMPLE_FAST}", fontsize=9)
    _colour_bar(figure, drawn, panels, "neither")
    return figure


def _entry(axes: Axes, i: int, j: int, symbol: str, dark: bool) -> None:
    if symbol:
        names = symbol.replace("α", r"\alpha").replace("β", r"\beta").split(" ")
        lines = ["$" + " ".join(names[k : k + 2]) + "$" for k in range(0, len(names), 2)]
        axes.text(j, i, "\n".join(lines), ha="center", va="center", fontsize=8, color="#ffffff" if dark else INK)


FORMATS: dict[str, dict[str, Any]] = {".png": {"dpi": 150}, ".svg": {"metadata": {"Date": None}}}


@styled
def save(figure: Figure, file: Path) -> None:
    """Writes the picture, whole or not at all, as PNG (150 dpi) or SVG, by the file's name.

    Raises:
        ValueError: see `check_suffix`.
    """
    check_suffix(file)
    with atomic_path(file) as temporary:
        figure.savefig(temporary, format=file.suffix[1:], **FORMATS[file.suffix])


def check_suffix(file: Path) -> None:
    """Whether a picture can be written to a file of this name.

    Raises:
        ValueError: it ends neither in .png nor in .svg.
    """
    if file.suffix not in FORMATS:
        raise ValueError(f"a picture is a .png or a .svg; got {file}")
