"""The table of `halflife look`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from halflife.analysis.look import HeadLens, Lens
from halflife.analysis.look.lens import Head
from halflife.report.numbers import percent, token_count
from halflife.report.table import Table

if TYPE_CHECKING:
    from halflife.report.look import Look

MOST_ROWS = 12


def look_table(lens: Lens) -> Table:
    """The half-lives of the slowest and the fastest heads."""
    ranked = lens.ranked()
    half = MOST_ROWS // 2
    shown = ranked if len(ranked) <= MOST_ROWS else [*ranked[:half], *ranked[-half:]]
    note = (
        "half-life: tokens after which half of a write is left, the median over the first half of the text.\n"
        "left at the end: of these writes, the mean."
    )
    if len(shown) < len(ranked):
        note += f"\nThe table has the {half} slowest and the {half} fastest of {len(ranked)} heads."
    note += "".join(f"\n{place} is not shown: {reason}." for place, reason in lens.refused.items())
    return Table(
        ("layer", "head", "kind", "half-life", "left at the end"), [_row(head) for head in shown], note,
        f"the memory of {len(lens.ids):,} tokens", left=("kind",),
    )  # fmt: skip


def lost_by(head: HeadLens, documents: Sequence[int]) -> tuple[float, float]:
    """The share of the writes in the first half of each document that is lost at its end, and of that the overwritten.

    The rest of what is lost faded with the decay.
    """
    ends = np.cumsum(documents)
    rows = np.searchsorted(head.cursors, ends - 1)
    halves = [slice(end - size, end - size + max(1, size // 2)) for end, size in zip(ends, documents, strict=True)]
    left, faded = (
        np.concatenate([grid.values[row, half] for row, half in zip(rows, halves, strict=True)]).clip(0, 1)
        for grid in (head.left, head.faded)
    )
    lost = float((1 - left).sum())
    return lost / len(left), float((faded - left).clip(0).sum()) / lost if lost else 0.0


def look_sentence(label: str, lens: Look) -> str:
    """Say how long the slowest head keeps what it reads, and whether it lost it to the decay or to other tokens."""
    slowest = lens.ranked()[0]
    if slowest.kind == "attention":
        kept = f"all {len(lens.ids):,} tokens" if slowest.stored[1] else "the tokens of its window alone"
        return f"{label}: {slowest} is softmax attention, which keeps {kept}."
    lost, overwritten = lost_by(next(lens.details([slowest])), lens.documents)
    life = token_count(slowest.half_life, slowest.beyond)
    several = len(lens.documents) > 1
    end = f"the ends of {len(lens.documents)} documents" if several else f"the end of {len(lens.ids):,} tokens"
    said = f"{label}: half of what the slowest head ({slowest}) writes is left after {life} tokens"
    said += f"; at {end} {percent(lost)} of {'their first halves' if several else 'the first half'} is lost"
    said += f", {percent(overwritten)} of it overwritten and the rest faded."
    known = sum(pair.known for pair in lens.pairs)
    return f"{said} It recalls {known} of {len(lens.pairs)} pairs." if lens.pairs else said


def _row(head: Head) -> tuple[str, ...]:
    layer = f"{head.place.layer}{' +' if head.place.part else ''}"
    life = token_count(head.half_life, head.beyond)
    return layer, str(head.head), head.kind.replace("_", " "), life, percent(head.kept)
