"""Pictures of decay masks: those of one head of each model, and the paper's example (GateRank, Figure 2a)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halflife.analysis.masks import Gates, cut_values
from halflife.report.figures.data import Axis, Colours, FigureData, Image, Key, Panel, Reference, Series, Weight
from halflife.report.style import COLOURS, FORMULA, INK, PAGE_WIDTH, ModelStyle, label_styles

NAMES = ("Γ", "Λ", "Γ ⊙ Λ")
FAINTEST_SHARE = 1e-3  # smaller entries have its colour; the colours begin at the smallest entry if that is larger
ROUNDING = 1e-14  # of singular values over the largest one, in float64; smaller ones are drawn here
MAX_TICKS = 8  # tokens that all have a number
MAX_ROWS = 4  # models in one picture
EXAMPLE_RESETS, EXAMPLE_LENGTH = (1, 3, 5), 6  # tokens, counted from 0 as in the paper
EXAMPLE_FAINTEST = 0.05
EXAMPLE_SLOW, EXAMPLE_FAST = 0.5, 0.8  # α at a reset, and β at every token


class Head(NamedTuple):
    """One head of a layer, on one sequence.

    `label` is the model's name, and `gates` are those of the layer. Heads and sequences are counted from 0.
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
        name = f"{self.label}, layer {self.gates.layer}, head {self.head}: "
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


def mask(heads: Sequence[Head]) -> FigureData:
    """Γ, Λ and Γ ⊙ Λ (log colours) with ticks at the resets, a row for each model; below, singular values.

    The singular values are those of the block of the mask in which tokens from m on read from tokens up to m, relative
    to the largest, for every m. Two states suffice where σ₃/σ₁ is at rounding level. At most `MAX_ROWS` models are
    drawn.
    """
    heads = heads[:MAX_ROWS]
    masks = [one.masks() for one in heads]
    smallest = min(both[torch.ones_like(both).tril().bool()].min().item() for *_, both in masks)
    panels: list[Image | Panel] = []
    for one, shown in zip(heads, masks, strict=True):
        panels += _images(shown, one.resets(), f"{one.title()}\n")
    title = "singular values of the block in which tokens from m on read from tokens up to m"
    y = Axis("σ / σ₁", log=True, limits=(ROUNDING / 10, 3))
    rounding = [Reference("rounding", y=ROUNDING)]
    panels.append(Panel(title, Axis("token m", whole=True), y, _singular_values(heads), rounding, wide=True))
    return FigureData(
        "mask", "Decay masks", panels, size=(2.5, 2.55), keys={"reset": Key(ModelStyle(COLOURS[1], "|", "none"))},
        colours=Colours("share that is left", min(max(smallest, FAINTEST_SHARE), 0.5), 1, log=True),
    )  # fmt: skip


def _images(masks: Sequence[Tensor], resets: Sequence[int], above: str = "", texts: Any = ((), (), ())) -> list[Image]:
    """The lower triangles of the three masks of a head, with marks at the resets."""
    panels = []
    for i, (name, entries) in enumerate(zip(NAMES, masks, strict=True)):
        cells = np.where(np.tri(len(entries), dtype=bool), entries.numpy(), np.nan)
        ticks = {token: str(token) for token in range(len(entries))} if len(entries) <= MAX_TICKS else {}
        y = Axis("" if i else "read at token i", ticks=ticks)
        title = name if i else f"{above}{name}"
        panels.append(Image(title, Axis("written at token j", ticks=ticks), y, cells, resets, texts[i]))
    return panels


def _singular_values(heads: Sequence[Head]) -> list[Series]:
    """σ₂ (solid) and σ₃ (dotted) of each model, and σ₂ of the first model's fast gates alone."""
    fast_only = dataclasses.replace(heads[0].gates, g_slow=None, factors=None)
    alone = cut_values(heads[0]._replace(gates=fast_only).masks()[2])
    lines: dict[str, tuple[Tensor, ModelStyle, Weight]] = {
        "one decay (Mamba-2), σ₂": (alone[:, 1], ModelStyle(INK, "", "-"), "bar")
    }
    styles = label_styles(one.label for one in heads)
    for one in heads:
        style, values = styles[one.label], cut_values(one.masks()[2])
        for k, line in ((1, "-"), (2, FORMULA.linestyle)):
            lines[f"{one.label}, σ{'₁₂₃'[k]}"] = (values[:, k], ModelStyle(style.color, "", line), "line")
    return [
        Series(name, name, style, range(len(values)), values.clamp(min=ROUNDING).tolist(), weight)
        for name, (values, style, weight) in lines.items()
    ]


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


def example() -> FigureData:
    """Γ, Λ and Γ ⊙ Λ of the example with the formula of each entry, in colours for α = 1/2 and β = 4/5."""
    head = Head("example", example_gates(), 0)
    texts = [[[_formula(entry) for entry in row] for row in symbols] for symbols in example_symbols()]
    above = f"resets at 1, 3 and 5 (ticks), colours for α = {EXAMPLE_SLOW}, β = {EXAMPLE_FAST}\n"
    return FigureData(
        "example", "Decay masks", _images(head.masks(), head.resets(), above, texts), size=(0.53 * PAGE_WIDTH, 4.1),
        colours=Colours("share that is left", EXAMPLE_FAINTEST, 1, log=True),
    )  # fmt: skip


def _formula(symbol: str) -> str:
    """An entry as matplotlib writes formulas, with two factors in a line."""
    names = symbol.replace("α", r"\alpha").replace("β", r"\beta").split()
    return "\n".join("$" + " ".join(names[k : k + 2]) + "$" for k in range(0, len(names), 2))
