"""`halflife compare`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from halflife.cli.resume import only, resumable


@dataclass(frozen=True)
class Compare:
    """Train models on a task, test them in and beyond distribution, and write a table, figures and a report.

    Results go to runs/<time>-<name>/: results.csv, report.html, figures/, and a folder a run with its configuration,
    metrics and weights. An interrupted comparison goes on with --resume DIR, to the same numbers.
    """

    models: Positional[tuple[str, ...]] = ()
    """Presets, base[+modifier…]; `halflife list` shows them."""
    task: tuple[str, ...] = ("mqar",)
    """What to train on: a task, or several as a mixture; `name` or `name:tier` (niah:hard). `halflife list` shows them.
    All but mqar alone are trained on 128 token ids and tested on the grid --test-tasks × --lengths × --test-pairs."""
    experiment: str | None = None
    """A paper's experiment in the place of a task; it brings its models: echo-transfer, echo-mqar, echo-ablations,
    gate-rank-s5, gate-rank-mqar, gate-rank-niah, decay-design."""
    text: tuple[str, ...] | None = None
    """Files to train on (decay-design). Default: the source of Python's standard library."""
    scale: str = "smoke"
    """smoke (minutes on 2 cores), small (an hour), or paper (a GPU)."""
    seeds: int = 1
    """How many seeds, from 0; every one is in the table."""
    lr: tuple[float, ...] = ()
    """Learning rates to try; the best on in-distribution validation is marked. Default: the scale's own."""
    resume: Path | None = None
    """Go on with the comparison in this folder; it has all settings but where the runs are done."""
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
    """Pairs to train on instead of the scale's: a number a stage of the curriculum (mqar), all at once (mixtures)."""
    test_tasks: tuple[str, ...] | None = None
    """Tasks to test on instead of the scale's (mixtures)."""
    lengths: tuple[int, ...] | None = None
    """Lengths to test at instead of the scale's (mixtures)."""
    test_pairs: tuple[int, ...] | None = None
    """Numbers of pairs to test with instead of the scale's (mixtures)."""
    test_examples: int | None = None
    """Examples a test instead of the scale's."""
    group: str | None = None
    """Group of gate-rank-s5 instead of s5: s3, a5, z60, z2 (parity)."""
    words: str | None = None
    """Words of gate-rank-s5: all (the default), or swaps, words in transpositions alone."""
    save_every: int | None = None
    """Steps between checkpoints instead of the scale's."""
    only_seeds: tuple[int, ...] = ()
    """Run only these seeds now, so that several processes can share the work."""
    on: str = "local"
    """Where the runs are done: local, one after the other; ray, as many at once as this machine has room for (pip
    install 'halflife[sweep]'); ray://host:port, on that Ray cluster, all of whose machines must see the folder under
    the same path (a shared file system). A run that is killed there goes on from its last checkpoint, up to 5 times."""
    cpus_per_run: int | None = None
    """Processors, and threads, of a run on Ray. Default: 1."""
    gpus_per_run: float | None = None
    """GPUs of a run on Ray, 0 to 1; 0.5: two runs share one. Default: 1 if the cluster has GPUs, else 0."""
    quiet: bool = False
    """No progress bars."""

    OVERRIDES = (
        "steps", "batch_size", "hidden_size", "num_layers", "num_heads", "vocab_size", "train_length", "pairs",
        "test_examples", "save_every", "group", "words", "text", "test_tasks", "lengths", "test_pairs",
    )  # fmt: skip

    PLACE = ("on", "cpus_per_run", "gpus_per_run")

    def run(self) -> None:
        from halflife.experiments import compare
        from halflife.experiments.tables import print_comparison
        from halflife.runs.pool import make_runner

        runner = make_runner(self.on, cpus_per_run=self.cpus_per_run, gpus_per_run=self.gpus_per_run)
        if self.resume is not None:
            only(self, "resume", "only_seeds", "quiet", *self.PLACE)
            folder = self.resume
        else:
            settings = {n: v for n in self.OVERRIDES if (v := getattr(self, n)) is not None}
            folder = compare.create_comparison(
                self.models, tasks=self.task, experiment=self.experiment, scale=self.scale, seeds=self.seeds,
                learning_rates=self.lr or None,
                settings=settings, output=self.output, name=self.name,
                command=shlex.join(["halflife", *sys.argv[1:]]),
            )  # fmt: skip
        print(f"writing to {folder}")
        with resumable(shlex.join(["halflife", "compare", "--resume", str(folder), *self._place()])):
            rows = compare.run_comparison(
                folder, only_seeds=self.only_seeds or None, show=not self.quiet, runner=runner
            )
        if compare.load_experiment(folder)[0].measure == "loss":
            print((folder / "summary.md").read_text(encoding="utf-8"))
        else:
            print_comparison(rows)
            print(f"report: {folder / 'report.html'}")

    def _place(self) -> Iterator[str]:
        """The options that say where the runs are done, as they were typed."""
        for field in dataclasses.fields(self):
            if field.name in self.PLACE and (value := getattr(self, field.name)) != field.default:
                yield from (f"--{field.name.replace('_', '-')}", str(value))
