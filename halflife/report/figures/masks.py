"""Pictures of decay masks: those of one head of each model, and the paper's example (GateRank, Figure 2a)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
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
from halflife.report.style import COLOURS, INK, WIDTH, escape_formula, legend, model_styles, styled

NAMES = ("Γ", "Λ", "Γ ⊙ Λ")
FAINTEST = 1e-3  # smaller entries have its colour; the colours begin at the smallest entry if that is larger
SMALLEST = 1e-18  # smaller singular values are drawn here
RESET: dict[str, Any] = {"color": COLOURS[1], "width": 0.8, "length": 4}  # of ticks
MAX_ROWS = 4  # models in one picture
EXAMPLE_RESETS, EXAMPLE_LENGTH = (1, 3, 5), 6  # tokens, counted from 0 as in the paper
EXAMPLE_FAINTEST, EXAMPLE_DARK = 0.05, 0.3
EXAMPLE_SLOW, EXAMPLE_FAST = 0.5, 0.8  # α at a reset, and β at every token


class Head(NamedTuple):
    """One head of a layer, on one sequence.

    Attributes:
        label: the model's name.
        gates: the gates of the layer.
        head: its number, from 0.
        sequence: the number of the sequence, from 0.
    """

    label: str
    gates: Gates
    head: int
    sequence: int = 0

    def masks(self) -> tuple[Tensor, Tensor, Tensor]:
        """The masks Γ and Λ and their product, `[T, T]`."""
        one = slice(self.sequence, self.sequence + 1)
        gamma, lam = self.gates.of(one).masks()
        return gamma[0, self.head], lam[0, self.head], (gamma * lam)[0, self.head]

    def resets(self) -> list[int]:
        """The tokens (from 0) at which the head resets."""
        return self.gates.resets()[self.sequence, :, self.head].nonzero().flatten().tolist()

    def title(self) -> str:
        """The head's name and how often it resets."""
        count, length = len(self.resets()), self.gates.g_fast.shape[1]
        name = f"{escape_formula(self.label)}, layer {self.gates.layer}, head {self.head}: "
        if not count:
            return f"{name}no reset in {length} tokens"
        resets = "1 reset" if count == 1 else f"{count} resets"
        return f"{name}{resets} in {length} tokens, mean segment {length / (count + 1):.3g}"


def most_resets(label: str, found: Sequence[Gates], layer: int | None = None, head: int | None = None) -> Head:
    """The head with the most resets in the first sequence, within the given layer and head number, if any.

    Raises:
        ValueError: the layer does not exist or has no scalar decay, or the head does not exist; the message lists the
            choices.
    """
    chosen = [gates for gates in found if layer in (None, gates.layer)]
    if not chosen:
        layers = ", ".join(str(gates.layer) for gates in found)
        raise ValueError(f"{label} has no layer {layer} with a scalar decay for each head; choose from {layers}")
    heads = [Head(label, gates, h) for gates in chosen for h in range(gates.g_fast.shape[2]) if head in (None, h)]
    if not heads:
        raise ValueError(f"{label} has no head {head}; choose 0 to {chosen[0].g_fast.shape[2] - 1}")
    return max(heads, key=lambda one: len(one.resets()))


# ----------------------------------------------------------------------------------------------- models


@styled
def mask(heads: Sequence[Head]) -> Figure:
    """Γ, Λ and Γ ⊙ Λ (log colours) with ticks at the resets, a row for each model; below, singular values.

    The singular values are those of the block of the mask in which tokens from m on read from tokens up to m, relative
    to the largest, for every m. Two states suffice where σ₃/σ₁ is at rounding level. At most `MAX_ROWS` models are
    drawn.
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
            image = _draw_mask(axes, entries, one.resets(), faintest)
            axes.set(title=name, xlabel="written at token j")
        panels[0].set_ylabel("read at token i")
        row.suptitle(one.title(), fontsize=9, x=0.01, ha="left")
        beyond = "min" if smallest < faintest else "neither"
        _colour_bar(row, image, panels, beyond)
    lines = _draw_singular_values(below.subplots(), heads)
    legend(figure, [*lines, Line2D([], [], color=RESET["color"], marker="|", linestyle="none", label="reset")])
    return figure


def _draw_mask(axes: Axes, entries: Tensor, resets: Sequence[int], faintest: float) -> AxesImage:
    """Draw the lower triangle of a mask. Ticks above and to the right mark the resets."""
    upper = ~np.tri(len(entries), dtype=bool)
    shown = np.ma.masked_array(entries.clamp(min=faintest).numpy(), upper)
    image = axes.imshow(shown, norm=LogNorm(faintest, 1), cmap="magma", interpolation="nearest")
    axes.grid(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))
        axis.set_ticks(resets, minor=True)
        axis.remove_overlapping_locs = False  # a reset has a tick even next to a number
    axes.tick_params(which="minor", bottom=False, left=False, top=True, right=True, **RESET)
    return image


def _colour_bar(figure: FigureBase, image: AxesImage, panels: Any, extend: str) -> None:
    bar = figure.colorbar(image, ax=panels, extend=extend, shrink=0.8, label="share that is left", format="%g")
    bar.minorformatter = NullFormatter()
    low, high = image.get_clim()
    bar.set_ticks([tick for tick in (0.001, 0.01, 0.1, 0.2, 0.5, 1) if low <= tick <= high])


def _draw_singular_values(axes: Axes, heads: Sequence[Head]) -> list[Line2D]:
    """Draw σ₂ (solid) and σ₃ (dotted) of each model, and in grey σ₂ of the first model's fast gates alone."""
    lines = []

    def draw(values: Tensor, label: str, **style: Any) -> None:
        shown = values.clamp(min=SMALLEST)
        lines.extend(axes.step(range(len(shown)), shown, where="mid", label=label, linewidth=1.2, **style))

    fast_only = dataclasses.replace(heads[0].gates, g_slow=None, factors=None)
    one_decay = cut_values(heads[0]._replace(gates=fast_only).masks()[2])
    draw(one_decay[:, 1], "one decay (Mamba-2), σ₂", color=INK, alpha=0.45)
    for one, style in zip(heads, model_styles([one.label for one in heads]).values(), strict=True):
        values = cut_values(one.masks()[2])
        for k, linestyle in ((1, "-"), (2, (0, (1, 1)))):
            label = f"{escape_formula(one.label)}, σ{'₁₂₃'[k]}"
            draw(values[:, k], label, color=style.color, linestyle=linestyle)
    axes.set(yscale="log", ylim=(SMALLEST / 3, 3), xlabel="token m", ylabel="σ / σ₁")
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_title("singular values of the block in which tokens from m on read from tokens up to m", loc="left")
    return lines


# ---------------------------------------------------------------------------------------------- example


def example_gates() -> Gates:
    """The gates of six tokens with resets at tokens 1, 3 and 5, counted from 0 (GateRank, Figure 2a)."""
    slow = torch.zeros(1, EXAMPLE_LENGTH, 1, dtype=torch.float64)
    slow[:, list(EXAMPLE_RESETS)] = math.log(EXAMPLE_SLOW)
    return Gates(0, torch.full_like(slow, math.log(EXAMPLE_FAST)), slow)


def example_symbols() -> tuple[list[list[str]], ...]:
    """The formulas of the entries of Γ, Λ and Γ ⊙ Λ: "α_3 α_1" for α₃α₁, "1" without factors, "" above the diagonal."""

    def written(*factors: list[list[list[str]]]) -> list[list[str]]:
        return [[" ".join(name for f in factors for name in f[i][j]) or "1" if j <= i else "" for j in T] for i in T]

    T = range(EXAMPLE_LENGTH)
    until = [min((r for r in EXAMPLE_RESETS if r > j), default=EXAMPLE_LENGTH) for j in T]
    gamma = [[[f"α_{t}" for t in range(i, j, -1) if t in EXAMPLE_RESETS] for j in T] for i in T]
    lam = [[[f"β_{t}" for t in range(min(until[j], i), j, -1)] for j in T] for i in T]
    return written(gamma), written(lam), written(gamma, lam)


@styled
def example() -> Figure:
    """Γ, Λ and Γ ⊙ Λ of the example with the formula of each entry, in colours for α = 1/2 and β = 4/5."""
    head = Head("example", example_gates(), 0)
    figure = Figure(figsize=(1.6 * WIDTH, 4.1), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, name, entries, symbols in zip(panels, NAMES, head.masks(), example_symbols(), strict=True):
        image = _draw_mask(axes, entries, head.resets(), faintest=EXAMPLE_FAINTEST)
        axes.set(title=name, xlabel="written at token j", xticks=range(EXAMPLE_LENGTH), yticks=range(EXAMPLE_LENGTH))
        for i, row in enumerate(symbols):
            for j, symbol in enumerate(row):
                _draw_formula(axes, i, j, symbol, dark=entries[i, j].item() < EXAMPLE_DARK)
    panels[0].set_ylabel("read at token i")
    figure.suptitle(f"resets at 1, 3 and 5 (ticks), colours for α = {EXAMPLE_SLOW}, β = {EXAMPLE_FAST}", fontsize=9)
    _colour_bar(figure, image, panels, "neither")
    return figure


def _draw_formula(axes: Axes, i: int, j: int, symbol: str, dark: bool) -> None:
    if symbol:
        names = symbol.replace("α", r"\alpha").replace("β", r"\beta").split(" ")
        lines = ["$" + " ".join(names[k : k + 2]) + "$" for k in range(0, len(names), 2)]
        axes.text(j, i, "\n".join(lines), ha="center", va="center", fontsize=8, color="#ffffff" if dark else INK)
