"""`halflife reproduce`."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from halflife.cli.resume import only, resumable


@dataclass(frozen=True)
class Reproduce:
    """Run a paper's experiment, every variant on one budget, and check its findings.

    decay_design: the Decay paper's grid on bytes of text: losses beside the paper's, findings, figure.

    examples:
      halflife reproduce decay_design --text corpus/*.txt --variants vector/mamba2 simple/0.99 --seeds 3
      halflife reproduce --resume runs/20260101-120000-decay_design-small
    """

    experiment: Positional[Literal["decay_design"]] = "decay_design"
    """Which."""
    scale: str = "small"
    """smoke (a minute), small (hours on 2 cores), or paper (GPUs)."""
    variants: tuple[str, ...] = ("core",)
    """Names of variants; "core" is enough for every finding, "all" the whole grid."""
    seeds: int = 2
    """How many seeds, from 0; every one is in the table."""
    text: tuple[Path, ...] = ()
    """Files to train on, one after the other; .gz is unpacked. Default: Python's own standard library, 11 MB."""
    resume: Path | None = None
    """Go on with the experiment in this folder; of the others only --only-seeds and --tables-only may be given."""
    only_seeds: tuple[int, ...] = ()
    """Run only these seeds now, so that several processes can share the work."""
    tables_only: bool = False
    """With --resume: run nothing, write the tables of what is finished."""
    output: Path | None = None
    """The folder to write. Default: runs/<time>-<experiment>-<scale>."""
    steps: int | None = None
    """Training steps instead of the scale's."""
    batch_size: int | None = None
    """Sequences a batch instead of the scale's."""
    length: int | None = None
    """Bytes a sequence instead of the scale's."""
    hidden_size: int | None = None
    """Model width instead of the scale's."""
    num_layers: int | None = None
    """Layers instead of the scale's."""
    num_heads: int | None = None
    """Heads instead of the scale's."""
    quiet: bool = False
    """No progress bars."""

    OVERRIDES = ("steps", "batch_size", "length", "hidden_size", "num_layers", "num_heads")

    def run(self) -> None:
        from halflife.experiments import decay_design

        if self.resume is not None:
            only(self, "resume", "only_seeds", "tables_only", "quiet")
            folder = self.resume
        else:
            folder = decay_design.new(
                variants=self.variants, scale=self.scale, seeds=self.seeds, text=self.text,
                overrides={n: v for n in self.OVERRIDES if (v := getattr(self, n)) is not None},
                output=self.output or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{self.experiment}-{self.scale}",
                command=shlex.join(["halflife", *sys.argv[1:]]),
            )  # fmt: skip
        print(f"writing to {folder}")
        with resumable(f"halflife reproduce --resume {folder}"):
            if not self.tables_only:
                decay_design.execute(folder, seeds=self.only_seeds or None, show=not self.quiet)
        print(decay_design.tabulate(folder).read_text(encoding="utf-8"))
