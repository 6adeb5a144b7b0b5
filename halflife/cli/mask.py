"""`halflife mask`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

if TYPE_CHECKING:
    from halflife.analysis.masks import Gates


@dataclass(frozen=True)
class Mask:
    """Show the decay masks of trained models with one decay a head, with GateRank or without: entries and rank.

    A table, a row a head: resets of a sequence, mean tokens of a segment, half-lives at the mean log-decay, and the
    rank of the mask's blocks below the diagonal. A picture: Γ, Λ and their product for one head a model, and the
    singular values at every cut. --example draws the paper's worked example (GateRank, Figure 2a) instead.

    examples:
      halflife mask runs/20260101-120000-gate-rank-s5-smoke
      halflife mask my-checkpoint other --text tinyshakespeare.txt --tokens 128 --layer 1 --head 0 --output mask.svg
      halflife mask my-checkpoint --task s5 --tokens 64
      halflife mask --example --output example.png
    """

    folders: Positional[tuple[Path, ...]] = ()
    """Checkpoints (config.json, model.safetensors), or runs: all checkpoints below a folder are read."""
    example: bool = False
    """Draw the paper's example; no model is read."""
    text: tuple[Path, ...] = ()
    """Files to read, one after the other; .gz is unpacked. Models of a vocabulary of 256 read bytes."""
    task: str | None = None
    """A task to read, `name` or `name:tier`. Default without a text: the task that each model was trained on."""
    tokens: int = 64
    """Tokens of a sequence; each is read from its start."""
    sequences: int = 8
    """How many for the table; the picture is of the first."""
    block: int = 8
    """Tokens of a block whose rank is counted."""
    layer: int | None = None
    """The layer in the picture, from 0. Default: that of the head with the most resets."""
    head: int | None = None
    """The head in the picture, from 0. Default: the one with the most resets."""
    tokenizer: str | None = None
    """For text and models of tokens: name or folder of a tokenizer of transformers."""
    output: Path | None = None
    """The picture to write, .png, .svg or .pdf. Default: mask.png in the first folder, or ./mask_example.png."""
    device: str | None = None
    """Where to run; by default the GPU if there is one, else the CPU."""

    def run(self) -> None:
        from halflife.report.figures import masks as mask_figure
        from halflife.report.figures.matplotlib_renderer import check_format, save_as

        if self.example == bool(self.folders):
            raise ValueError("name at least one checkpoint or run, or give --example alone")
        output = self.output or (Path("mask_example.png") if self.example else self.folders[0] / "mask.png")
        check_format(output.suffix[1:])
        if self.example:
            save_as(mask_figure.example(), output)
        else:
            found = self._survey()
            heads = [mask_figure.most_resets(label, gates, self.layer, self.head) for label, gates in found.items()]
            print_table(found, self.block)
            save_as(mask_figure.mask(heads), output)
            if (more := len(heads) - mask_figure.MAX_ROWS) > 0:
                print(f"in the picture: the first {mask_figure.MAX_ROWS} models, not the other {more}.")
        print(f"written: {output}")

    def _survey(self) -> dict[str, list[Gates]]:
        import torch

        from halflife.analysis.masks import survey

        return survey(
            self.folders, text=self.text, task=self.task, tokens=self.tokens, sequences=self.sequences,
            tokenizer=self.tokenizer, device=self.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        )  # fmt: skip


def print_table(found: dict[str, list[Gates]], block: int) -> None:
    """Prints `analysis.mask.head_numbers` of what `analysis.mask.survey` gives, a row a head."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    from halflife.analysis.masks import head_numbers
    from halflife.report.tables.terminal import print_wide

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="decay masks", title_justify="left")
    for heading in ("model", "layer", "head", "resets", "segment", "fast", "slow", "rank", "mean"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for label, layers in found.items():
        rows = [row for gates in layers for row in head_numbers(gates, block)]
        for i, row in enumerate(rows):
            table.add_row(
                "" if i else escape(label), str(row["layer"]), str(row["head"]), f"{row['resets']:.1f}",
                f"{row['segment']:.1f}", _tokens(row["fast"]), _tokens(row["slow"]), str(row["rank_max"]),
                f"{row['rank_mean']:.2f}", end_section=i + 1 == len(rows),
            )  # fmt: skip
    print_wide(table)
    read: Any = next(iter(found.values()))[0].g_fast.shape
    print(f"read: {read[0]} × {read[1]:,} tokens. fast, slow: half-lives (tokens) at the mean log-decays.")
    print(f"rank, mean: the greatest and the mean rank of blocks of {block} tokens below the diagonal.")


def _tokens(number: float | None) -> str:
    if number is None:
        return "–"
    return "∞" if math.isinf(number) else f"{number:,.0f}" if 100 <= number < 1e6 else f"{number:.3g}"
