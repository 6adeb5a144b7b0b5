"""Tables of what the library offers: names with a line each, and the backends that run on a device."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

import torch

from halflife import ops
from halflife.decay import DECAYS
from halflife.evaluation.bundles import BUNDLES
from halflife.extras import EXTRAS, install
from halflife.layers import LAYERS
from halflife.models import MODIFIERS, PRESETS
from halflife.models.presets.presets import by_family
from halflife.models.presets.sizes import SIZES
from halflife.ops.backends import dispatch
from halflife.report.table import Cell, Table, show
from halflife.tasks import TASKS
from halflife.training.speed import bf16_speedup

PLAIN = ("chunked", "reference", "mask")  # backends without kernels
PURPOSES = {
    "cli": "the command", "train": "train, compare", "report": "figures and pages", "gpu": "more GPU kernels",
    "eval": "eval --tasks", "sweep": "compare --on ray", "slurm": "compare --on slurm", "serve": "serve",
    "onnx": "export --onnx", **{name: f"--track {name}" for name in ("tensorboard", "wandb", "trackio", "mlflow")},
}  # fmt: skip
REGISTRIES = {
    "presets": PRESETS, "modifiers (preset+modifier)": MODIFIERS, "decays": DECAYS, "layers": LAYERS, "tasks": TASKS,
}  # fmt: skip


def print_names(experiments: dict[str, str], rows: Sequence[str]) -> None:
    """Print every name with its summary: `experiments`, name → summary, `rows` of the Decay paper's grid, and ours."""
    groups = list(dict.fromkeys(row.partition("/")[0] for row in rows if "/" in row))
    tables = {
        f"{title}{family}": {name: registry.summary(name) for name in names}
        for title, registry in REGISTRIES.items() for family, names in by_family(registry).items()
    }  # fmt: skip
    tables["experiments (compare --experiment)"] = experiments
    tables["sizes (train --size)"] = {
        name: ", ".join(f"{key} {value}" for key, value in size.items()) for name, size in SIZES.items()
    }
    tables["tasks of papers (eval --tasks)"] = {
        name: f"{', '.join(bundle.tasks)} ({bundle.source})" for name, bundle in BUNDLES.items()
    }
    tables["rows of the Decay paper's grid (train, compare --experiment decay-lm)"] = {
        group: ", ".join(row for row in rows if row.startswith(f"{group}/")) for group in groups
    }
    for title, texts in tables.items():
        show(
            Table((), [(Cell(f"  {name}", style="bold"), text) for name, text in texts.items()], title=title, note=" ")
        )


def print_options(groups: Mapping[str, Sequence[tuple[str, str, str, str]]]) -> None:
    """Print the options of a model, group by group: name, type, value and meaning."""
    headings = ("option", "type", "value", "meaning")
    show(*(Table(headings, rows, left=headings) for rows in groups.values()))


def summary(device: torch.device | str, checks: str) -> Table:
    """What is fast on a device, what is slow, and what is missing, with the command that mends it."""
    device = torch.device(device)
    first = [ops.available_backends(op, device)[0] for op in ops.ops()]
    compiled = [name for name in first if name not in PLAIN]
    kernels = "/".join(dict.fromkeys(compiled)) or "no"
    rows = [
        ("fast", f"{len(compiled)} of {len(first)} ops and passes by {kernels} kernels, the others in plain PyTorch")
    ]
    times = bf16_speedup(device)
    rows.append(
        ("fast" if times > 1 else "slow", f"bfloat16 (--bf16), products {times:.2g} times as fast as in float32")
    )
    rows += of_accelerators(device)
    for (name, reason), affected in refusals(device).items():
        if name == "native" and device.type == "cpu":
            rows.append(("missing", f"native kernels of {len(affected)} ops: {reason}"))
    absent: dict[str, list[str]] = {}
    for package, extra in EXTRAS.items():
        if importlib.util.find_spec(package) is None:
            absent.setdefault(extra, []).append(package)
    rows += [
        ("optional", f"{', '.join(packages)} ({PURPOSES[extra]}): {install(extra)}")
        for extra, packages in absent.items()
    ]
    rows.append(("checked", checks))
    return Table((), [(Cell(f"  {name}", style="bold"), text) for name, text in rows], title=f"halflife on {device}")


def of_accelerators(device: torch.device) -> list[tuple[str, str]]:
    """What to know of a device that is no CUDA one, and of the accelerator that the machine has beside it."""
    if device.type not in ("cpu", "cuda"):
        return [("slow", f"{device.type} has no kernels of ours, and is untested: compare with --device cpu")]
    if device.type == "cuda" or torch.cuda.is_available():
        return []
    if torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator())
        return [("optional", f"{kind}, which runs plain PyTorch alone, untested (--device {kind})")]
    return [("missing", "a GPU: models above some ten million parameters train for days")]


def print_backends(device: torch.device | str) -> None:
    """Print the backends of each op on `device`, the fastest first, and why the others cannot run."""
    print(f"\nbackends on {device}; backend='auto' takes the first:")
    for op in ops.ops():
        print(f"  {op:26} {', '.join(ops.available_backends(op, device))}")
    for (name, reason), affected in refusals(device).items():
        print(f"not {name} ({', '.join(affected)}): {reason}")


def refusals(device: torch.device | str) -> dict[tuple[str, str], list[str]]:
    """Return `(backend, reason) → ops` for the backends that cannot run on `device`."""
    refused: dict[tuple[str, str], list[str]] = {}
    for op in ops.ops():
        for name in dispatch.registered(op):
            reason = dispatch.why_not(op, name, device)
            if reason is not None:
                refused.setdefault((name, reason), []).append(op)
    return refused
