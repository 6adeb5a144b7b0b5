"""The table of `halflife look`."""

from __future__ import annotations

from halflife.analysis.look import Lens
from halflife.analysis.look.lens import Head
from halflife.report.numbers import percent, token_count
from halflife.report.table import Table

MOST_ROWS = 12


def look_table(lens: Lens) -> Table:
    """The half-lives of the slowest and the fastest heads."""
    ranked = lens.ranked()
    half = MOST_ROWS // 2
    shown = ranked if len(ranked) <= MOST_ROWS else [*ranked[:half], *ranked[-half:]]
    longest = len(lens.ids) // 2
    note = (
        "half-life: tokens after which half of a write is left, the median over the first half of the text.\n"
        "left at the end: of these writes, the mean."
    )
    if len(shown) < len(ranked):
        note += f"\nThe table has the {half} slowest and the {half} fastest of {len(ranked)} heads."
    note += "".join(f"\n{place} is not shown: {reason}." for place, reason in lens.refused.items())
    return Table(
        ("layer", "head", "kind", "half-life", "left at the end"), [_row(head, longest) for head in shown], note,
        f"the memory of {len(lens.ids):,} tokens", left=("kind",),
    )  # fmt: skip


def _row(head: Head, longest: int) -> tuple[str, ...]:
    layer = f"{head.place.layer}{' +' if head.place.part else ''}"
    life = token_count(head.half_life, longest)
    return layer, str(head.head), head.kind.replace("_", " "), life, percent(head.kept)
