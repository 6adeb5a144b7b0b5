"""The command line: parse, call, print."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

EPILOG = """examples:
  halflife compare mamba2 mamba2+post gated_deltanet --task mqar --scale smoke
  halflife compare mamba2 simple+vector --scale small --seeds 3 --lr 1e-3 3e-3 1e-2
  halflife compare --resume runs/20260101-120000-mqar-smoke
  halflife spectrum runs/20260101-120000-mqar-smoke --text tinyshakespeare.txt
  halflife list
  halflife info
"""


@dataclass(frozen=True)
class Compare:
    """Train models on a task, test them in and beyond distribution, and write a table, figures and a report.

    Results go to runs/<time>-<name>/: results.csv, report.html, figures/, and a folder a run with its configuration,
    metrics and weights. An interrupted comparison goes on with --resume DIR, to the same numbers.
    """

    models: Positional[tuple[str, ...]] = ()
    """Presets, base[+modifier…]; `halflife list` shows them."""
    task: str = "mqar"
    """The task; `halflife list` shows them."""
    scale: str = "smoke"
    """smoke (minutes on 2 cores), small (an hour), or paper (a GPU)."""
    seeds: int = 1
    """How many seeds, from 0; every one is in the table."""
    lr: tuple[float, ...] = ()
    """Learning rates to try; the best on in-distribution validation is marked. Default: the scale's own."""
    resume: Path | None = None
    """Go on with the comparison in this folder; nothing else may be given."""
    output: Path | None = None
    """The folder to write. Default: runs/<time>-<name>."""
    name: str | None = None
    """Name of that folder, after the time. Default: <task>-<scale>."""
    steps: int | None = None
    """Training steps instead of the scale's."""
    batch_size: int | None = None
    """Examples a batch instead of the scale's."""
    hidden_size: int | None = None
    """Model width instead of the scale's."""
    num_layers: int | None = None
    """Layers instead of the scale's."""
    num_heads: int | None = None
    """Heads instead of the scale's."""
    vocab_size: int | None = None
    """Vocabulary of the task instead of the scale's."""
    train_length: int | None = None
    """Training length T instead of the scale's."""
    pairs: tuple[int, ...] | None = None
    """Curriculum: pairs a stage, instead of the scale's."""
    test_examples: int | None = None
    """Examples a test instead of the scale's."""
    save_every: int | None = None
    """Steps between checkpoints instead of the scale's."""
    quiet: bool = False
    """No progress bars."""

    OVERRIDES = (
        "steps", "batch_size", "hidden_size", "num_layers", "num_heads", "vocab_size", "train_length", "pairs",
        "test_examples", "save_every",
    )  # fmt: skip

    def run(self) -> None:
        from halflife.experiments import compare
        from halflife.experiments.tables import print_comparison

        if self.resume is not None:
            _only(self, "resume", "quiet")
            folder = self.resume
        else:
            overrides = {n: v for n in self.OVERRIDES if (v := getattr(self, n)) is not None}
            folder = compare.new(
                self.models, task=self.task, scale=self.scale, seeds=self.seeds, learning_rates=self.lr or None,
                overrides=overrides, output=self.output, name=self.name,
                command=shlex.join(["halflife", *sys.argv[1:]]),
            )  # fmt: skip
        print(f"writing to {folder}")
        with _resumable(f"halflife compare --resume {folder}"):
            rows = compare.execute(folder, show=not self.quiet)
        print_comparison(rows)
        print(f"report: {folder / 'report.html'}")


@dataclass(frozen=True)
class Spectrum:
    """Let trained models read a text and show how fast each of their layers forgets on it.

    The decays λ of every layer, at every token, head and channel: medians and quartiles as a table, a figure
    (decays.png, decays.svg) and data (decays.json, decays.csv).

    examples:
      halflife spectrum runs/20260101-120000-mqar-smoke --text tinyshakespeare.txt
      halflife spectrum my-checkpoint another --text book.txt.gz --length 4096 --output decays
    """

    folders: Positional[tuple[Path, ...]]
    """Checkpoints (config.json, model.safetensors), or runs: all checkpoints below a folder are read."""
    text: tuple[Path, ...]
    """Files to read, one after the other; .gz is unpacked. Models of a vocabulary of 256 read bytes."""
    length: int = 2048
    """Tokens of a sequence; each is read from its start."""
    sequences: int = 8
    """How many, evenly spread over the text."""
    tokenizer: str | None = None
    """For models of tokens: name or folder of a tokenizer of transformers."""
    output: Path | None = None
    """The folder to write. Default: spectrum/ in the first folder."""
    device: str | None = None
    """Where to run; by default the GPU if there is one, else the CPU."""
    quiet: bool = False
    """No progress bar."""

    def run(self) -> None:
        import torch

        from halflife.analysis.decay_figures import decays
        from halflife.analysis.decay_survey import print_table, survey, write_tables
        from halflife.analysis.figures import save

        result = survey(
            self.folders, self.text, length=self.length, sequences=self.sequences, tokenizer=self.tokenizer,
            device=self.device or ("cuda" if torch.cuda.is_available() else "cpu"), show=not self.quiet,
        )  # fmt: skip
        print_table(result)
        output = self.output or self.folders[0] / "spectrum"
        files = [*write_tables(result, output), *save(decays(result), output, "decays")]
        print(f"written to {output}: {', '.join(file.name for file in files)}")


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
            _only(self, "resume", "only_seeds", "tables_only", "quiet")
            folder = self.resume
        else:
            folder = decay_design.new(
                variants=self.variants, scale=self.scale, seeds=self.seeds, text=self.text,
                overrides={n: v for n in self.OVERRIDES if (v := getattr(self, n)) is not None},
                output=self.output or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{self.experiment}-{self.scale}",
                command=shlex.join(["halflife", *sys.argv[1:]]),
            )  # fmt: skip
        print(f"writing to {folder}")
        with _resumable(f"halflife reproduce --resume {folder}"):
            if not self.tables_only:
                decay_design.execute(folder, seeds=self.only_seeds or None, show=not self.quiet)
        print(decay_design.tabulate(folder).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Convert:
    """Weights in and out: models of transformers and fla as checkpoints of halflife, and Mamba-2 for transformers.

    examples:
      halflife convert mamba2-130m-hf my-mamba2
      halflife convert my-mamba2 for-transformers --to transformers
      halflife convert Qwen3-Next-80B-A3B-Instruct layer-0 --layer 0
    """

    source: Positional[Path]
    """The folder to read: mamba2, rwkv7, gla or gated_deltanet in safetensors, or a mixer of a qwen3_next."""
    target: Positional[Path]
    """The folder to write; it must hold no checkpoint."""
    to: Literal["halflife", "transformers"] = "halflife"
    layer: int | None = None
    """Which mixer of a qwen3_next, from 0; `halflife.models.convert.load_layer` reads it."""

    def run(self) -> None:
        from halflife.models.convert import convert

        print(f"written to {convert(self.source, self.target, to=self.to, layer=self.layer)}")


@dataclass(frozen=True)
class List:
    """Print the presets, modifiers, decays, layers and tasks, with a line each."""

    def run(self) -> None:
        from rich.console import Console
        from rich.table import Table

        from halflife.decay import DECAYS
        from halflife.layers import LAYERS
        from halflife.models import MODIFIERS, PRESETS
        from halflife.tasks import TASKS

        console = Console()
        for title, registry in (
            ("presets", PRESETS), ("modifiers (preset+modifier)", MODIFIERS), ("decays", DECAYS), ("layers", LAYERS),
            ("tasks", TASKS),
        ):  # fmt: skip
            table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
            for name in registry:
                table.add_row(f"[bold]{name}[/]", registry.summary(name))
            console.print(table, "")


@dataclass(frozen=True)
class Info:
    """Print versions, devices, which backend each op would use, and whether the ops are right on this machine."""

    device: str | None = None
    """The device to check; by default the GPU if there is one, else the CPU."""

    def run(self) -> None:
        import torch

        from halflife import ops
        from halflife.training.sweep import versions

        for name, version in versions().items():
            print(f"{name:13} {version}")
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        print(f"\nbackends on {device}, the one that backend='auto' takes first:")
        for op in ops.ops():
            print(f"  {op:17} {', '.join(ops.available_backends(op, device))}")
        report = ops.selfcheck(device)
        print(f"\n{report}")
        if not report.ok:
            raise SystemExit(1)


Command = (
    Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Spectrum, tyro.conf.subcommand("spectrum")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Info, tyro.conf.subcommand("info")]
)


def _only(command: Any, *allowed: str) -> None:
    """An error if options beside the allowed ones are given: a resumed job has its own."""
    changed = [
        f.name for f in dataclasses.fields(command)
        if f.name not in allowed and getattr(command, f.name) != f.default
    ]  # fmt: skip
    if changed:
        raise ValueError(f"--resume takes all settings from the folder; leave out {', '.join(changed)}")


@contextmanager
def _resumable(command: str) -> Iterator[None]:
    """Ctrl-C ends the job with the command that goes on with it."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\ninterrupted; go on with: {command}", file=sys.stderr)
        raise SystemExit(130) from None


def main(arguments: list[str] | None = None) -> None:
    """The entry point: wrong input ends with one line on stderr and exit code 2, not with a traceback."""
    command = tyro.cli(
        Command, args=arguments, prog="halflife", config=(tyro.conf.OmitArgPrefixes,),
        description="How linear recurrent sequence models remember and forget.\n\n" + EPILOG,
    )  # fmt: skip
    try:
        command.run()
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        print(f"halflife: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
