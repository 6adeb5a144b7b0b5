"""The table of `halflife mask`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from halflife.analysis.masks import Gates, HeadMask, head_masks
from halflife.report.tables.terminal import print_sections, token_count

HEADINGS = ("model", "layer", "head", "resets", "segment", "fast", "slow", "rank", "mean")


def print_masks(gates_of: Mapping[str, Sequence[Gates]], block: int) -> None:
    """Print the masks of several models, a row for each head.

    Args:
        gates_of: label → the gates of each layer, see `measure_masks`.
        block: the tokens of a block whose rank is counted.
    """
    from rich.markup import escape

    sections = []
    for label, layers in gates_of.items():
        heads = [head for gates in layers for head in head_masks(gates, block)]
        sections.append([("" if i else escape(label), *_cells(head)) for i, head in enumerate(heads)])
    print_sections("decay masks", HEADINGS, sections)
    sequences, length, _ = next(iter(gates_of.values()))[0].g_fast.shape
    print(f"input: {sequences} × {length:,} tokens. resets: in a sequence. segment: mean tokens between resets.")
    print("fast, slow: half-lives (tokens) of the fast and slow state, at their mean log-decays.")
    print(f"rank, mean: largest and mean rank of the blocks of {block} tokens below the diagonal.")


def _cells(head: HeadMask) -> tuple[str, ...]:
    return (
        str(head.layer), str(head.head), f"{head.resets:.1f}", f"{head.segment:.1f}", token_count(head.fast),
        token_count(head.slow), str(head.rank_max), f"{head.rank_mean:.2f}",
    )  # fmt: skip
