"""`halflife list` and `halflife info`: what there is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class List:
    """Print the presets, modifiers, sizes, decays, layers and tasks, with a line each."""

    def run(self) -> None:
        from rich.console import Console
        from rich.table import Table

        from halflife.decay import DECAYS
        from halflife.layers import LAYERS
        from halflife.models import MODIFIERS, PRESETS
        from halflife.models.presets.sizes import SIZES
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
        sizes = Table(title="sizes (train --size)", title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name, size in SIZES.items():
            sizes.add_row(f"[bold]{name}[/]", ", ".join(f"{key} {value}" for key, value in size.items()))
        console.print(sizes)


@dataclass(frozen=True)
class Info:
    """Print versions, devices, which backend each op would use, and whether the ops are right on this machine."""

    device: str | None = None
    """The device to check; by default the GPU if there is one, else the CPU."""

    def run(self) -> None:
        import torch

        from halflife import ops
        from halflife.runs.sweep import versions

        for name, version in versions().items():
            print(f"{name:13} {version}")
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        print(f"\nbackends on {device}, the one that backend='auto' takes first:")
        for op in ops.ops():
            print(f"  {op:17} {', '.join(ops.available_backends(op, device))}")
        for (name, reason), missed in refusals(device).items():
            print(f"not {name} ({', '.join(missed)}): {reason}")
        report = ops.selfcheck(device)
        print(f"\n{report}")
        if not report.ok:
            raise SystemExit(1)


def refusals(device: str) -> dict[tuple[str, str], list[str]]:
    """Which backends cannot run on `device`: `(backend, why) → ops`."""
    from halflife import ops
    from halflife.ops.backends import dispatch as backend

    found: dict[tuple[str, str], list[str]] = {}
    for op in ops.ops():
        for name in backend.registered(op):
            reason = backend.why(op, name, device)
            if reason is not None:
                found.setdefault((name, reason), []).append(op)
    return found
