"""`halflife list`, `halflife info` and `halflife build`."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class List:
    """Print the names of presets, modifiers, decays, layers, tasks, experiments and sizes, with a line each.

    examples:
      halflife list
    """

    def run(self) -> None:
        from halflife.experiments import EXPERIMENTS, paper_experiments
        from halflife.experiments.decay_design import VARIANTS
        from halflife.report.tables.about import print_names

        print_names({name: EXPERIMENTS.summary(name) for name in paper_experiments()}, list(VARIANTS))


@dataclass(frozen=True)
class Info:
    """Print versions, devices, the backends of each op, and a check of the ops on this machine.

    examples:
      halflife info
      halflife info --device cuda
    """

    device: str | None = None
    """The device to check. Default: the GPU if there is one, else the CPU."""

    def run(self) -> None:
        from halflife import ops
        from halflife.cli.options import default_device
        from halflife.report.tables.about import print_backends
        from halflife.runs.sweep import versions

        for name, version in versions().items():
            print(f"{name:13} {version}")
        device = default_device(self.device)
        print_backends(device)
        report = ops.selfcheck(device)
        print(f"\n{report}")
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
