"""Tables of what the library offers: names with a line each, and the backends that run on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from halflife import ops
from halflife.decay import DECAYS
from halflife.evaluation.bundles import BUNDLES
from halflife.layers import LAYERS
from halflife.models import MODIFIERS, PRESETS
from halflife.models.presets.presets import by_family
from halflife.models.presets.sizes import SIZES
from halflife.ops.backends import dispatch
from halflife.report.table import Cell, Table, show
from halflife.tasks import TASKS

REGISTRIES = {
    "presets": PRESETS, "modifiers (preset+modifier)": MODIFIERS, "decays": DECAYS, "layers": LAYERS, "tasks": TASKS,
}  # fmt: skip


def print_names(experiments: dict[str, str], rows: Sequence[str]) -> None:
    """Print every name that a user can choose, with its summary.

    Experiments are given as name → summary, and `rows` are those of the Decay paper's grid.
    """
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
