"""The table of `halflife mask`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from halflife.analysis.masks import Gates, HeadMask, head_masks
from halflife.report.numbers import token_count
from halflife.report.table import Table, grouped

HEADINGS = ("model", "layer", "head", "resets", "segment", "fast", "slow", "rank", "mean")


def mask_table(gates_of: Mapping[str, Sequence[Gates]], block: int) -> Table:
    """The masks of several models, a row for each head.

    `gates_of` maps labels to the gates of each layer (`measure_masks`). Ranks are those of blocks of `block` tokens.
    """
    rows = grouped(
        (label, [_cells(head) for gates in layers for head in head_masks(gates, block)])
        for label, layers in gates_of.items()
    )
    sequences, length, _ = next(iter(gates_of.values()))[0].g_fast.shape
    note = (
        f"input: {sequences} × {length:,} tokens. resets: in a sequence. segment: mean tokens between resets.\n"
        "fast, slow: half-lives (tokens) of the fast and slow state, at their mean log-decays.\n"
        f"rank, mean: largest and mean rank of the blocks of {block} tokens below the diagonal."
    )
    return Table(HEADINGS, rows, note, "decay masks")


def _cells(head: HeadMask) -> tuple[str, ...]:
    return (
        str(head.layer), str(head.head), f"{head.resets:.1f}", f"{head.segment:.1f}", token_count(head.fast),
        token_count(head.slow), str(head.rank_max), f"{head.rank_mean:.2f}",
    )  # fmt: skip
