"""The command line: parse, call, print."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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

        if self.resume is not None:
            changed = [
                f.name for f in dataclasses.fields(self)
                if f.name not in ("resume", "quiet") and getattr(self, f.name) != f.default
            ]  # fmt: skip
            if changed:
                raise ValueError(f"--resume takes all settings from the folder; leave out {', '.join(changed)}")
            folder = self.resume
        else:
            overrides = {n: v for n in self.OVERRIDES if (v := getattr(self, n)) is not None}
            folder = compare.new(
                self.models, task=self.task, scale=self.scale, seeds=self.seeds, learning_rates=self.lr or None,
                overrides=overrides, output=self.output, name=self.name,
                command=shlex.join(["halflife", *sys.argv[1:]]),
            )  # fmt: skip
        print(f"writing to {folder}")
        try:
            rows = compare.execute(folder, show=not self.quiet)
        except KeyboardInterrupt:
            print(f"\ninterrupted; go on with: halflife compare --resume {folder}", file=sys.stderr)
            raise SystemExit(130) from None
        _print_comparison(rows)
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
    | Annotated[Spectrum, tyro.conf.subcommand("spectrum")]
    | Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Info, tyro.conf.subcommand("info")]
)


def _print_comparison(rows: list[dict[str, Any]]) -> None:
    """Two tables that fit 80 columns: what was trained, and its accuracy on every test."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from halflife.experiments.compare import levels, shown, summarise

    keys = levels(rows)
    runs = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="runs", title_justify="left")
    tests = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="accuracy, %", title_justify="left")
    for table, headings in (
        (runs, ("model", "lr", "seed", "parameters", "state", "tokens/s")),
        (tests, ("model", "seed", *(_heading(test, length) for test, length in keys))),
    ):
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for row in summarise(rows):
        mark, style = "*" if row["selected"] else "", "bold" if isinstance(row["seed"], str) else None
        rate, seed = f"{row['learning_rate']:g}{mark}", str(row["seed"])
        sizes = (f"{row['parameters']:,}", f"{row['state_floats']:,}", f"{row['tokens_per_second']:,.0f}")
        runs.add_row(row["model"], rate, seed, *sizes, style=style)
        label = row["model"] if row["selected"] else f"{row['model']} {rate}"
        tests.add_row(label, seed, *(shown(row["accuracy"][key]) for key in keys), style=style)
    for i, level in enumerate(("chance", "ignoring the key")):
        tests.add_row(level, "", *(f"{100 * values[i]:.1f}" for values in keys.values()), style="dim")
    console = Console()
    # A pipe has no width of its own: there the tables are as wide as they need to be.
    console = console if console.is_terminal else Console(width=200)
    console.print(runs, tests)
    print("lr*: the best on in-distribution validation. state: numbers that a sequence's memory holds.")
    print("in: in distribution. cap: `capacity`, K = T/4 pairs. per: `persist`, the training K. Under them: T.")


def _heading(test: str, length: int) -> str:
    return "in" if test == "in_distribution" else f"{test[:3]}\n{length}"


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
