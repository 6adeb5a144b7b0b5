"""`halflife list`, `halflife info` and `halflife build`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tyro.conf import Positional


@dataclass(frozen=True)
class List:
    """Print the names of presets, modifiers, decays, layers, tasks, experiments and sizes, or one model's options.

    Each name has a line. With a model, the command prints the options that --set takes for it: their types, values at
    the default sizes, and meanings.

    examples:
      halflife list
      halflife list mamba2+post
    """

    model: Positional[str | None] = None
    """A preset, base[+modifier…], or a row of the Decay paper's grid (vector/gla), whose options are printed."""

    def run(self) -> None:
        if self.model is not None:
            return _print_options(self.model)
        from halflife.lab.experiments import EXPERIMENTS, paper_experiments
        from halflife.lab.experiments.decay_rows import VARIANTS
        from halflife.report.tables.about import print_names

        print_names({name: EXPERIMENTS.summary(name) for name in paper_experiments()}, list(VARIANTS))


def _print_options(model: str) -> None:
    from halflife.lab.experiments.decay_rows import row_or_preset
    from halflife.lab.experiments.overrides import describe_options
    from halflife.report.tables.about import print_options
    from halflife.training.config import TrainConfig

    config = TrainConfig(model=row_or_preset(model), steps=1, batch_size=1, learning_rate=1.0)
    given = [f"training.{name}" for name in ("steps", "batch_size", "learning_rate")]  # options of the commands
    groups = describe_options(config)
    print_options({name: [row for row in rows if row[0] not in given] for name, rows in groups.items()})
    print("""\
Set them with --set, as in: halflife train MODEL --set mixer.conv_size=3. In Python, `halflife.preset` takes
`mixer_options`, `hybrid` and the options of the group model. `train` and experiments have recipes of their own in
the place of the values of training.""")


@dataclass(frozen=True)
class Info:
    """Say in one screen what is fast on this machine, what is missing, and the command that mends it.

    Every op is checked against its definition. With --details the command also prints the backends of each op, why the
    others cannot run, and each check.

    examples:
      halflife info
      halflife info --details
      halflife info --device cuda
    """

    device: str | None = None
    """The device to check. Default: the GPU if there is one, else the CPU."""
    details: bool = False
    """Also print the backends of each op and every check."""

    def run(self) -> None:
        from halflife import ops
        from halflife.cli.options import default_device
        from halflife.report.table import show
        from halflife.report.tables.about import print_backends, summary
        from halflife.runs.versions import versions

        print(", ".join(f"{name} {version}" for name, version in versions().items()))
        device = default_device(self.device)
        report = ops.selfcheck(device, length=70)  # more than a chunk
        wrong = [check for check in report.checks if not check.ok]
        verdict = f"{len(report.checks):,} comparisons with the token loops, {len(wrong) or 'all right'}"
        show(summary(device, f"{verdict} WRONG" if wrong else verdict))
        if self.details:
            print_backends(device)
            print(f"\n{report}")
        elif wrong:
            print("\n".join(f"  {check}" for check in wrong))
        if not report.ok:
            raise SystemExit(1)


@dataclass(frozen=True)
class Build:
    """Compile the native kernels of the ops for this CPU, once, and check them. Everything works without them, slower.

    examples:
      halflife build
      CXX=clang++ halflife build --force
    """

    force: bool = False
    """Compile again, even if the kernels are there."""

    def run(self) -> None:
        from halflife.ops.backends.native.build import CannotBuild, build

        try:
            build(self.force, report=lambda line: print(line, flush=True))
        except CannotBuild as error:
            print(f"halflife: {error}\nThe ops run without native kernels, by their chunked form.", file=sys.stderr)
            raise SystemExit(1) from None
