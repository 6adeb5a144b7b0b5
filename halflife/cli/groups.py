"""Groups of options that commands share, and a command with its groups as one mapping of options.

tyro shows the options of a group without a prefix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from halflife.registry import construct, constructor_parameters, plain_type

Command = TypeVar("Command")


@dataclass(frozen=True)
class Job:
    """The folder of a job, and where its settings come from."""

    output: Path | None = None
    """The folder to write. Default: runs/<time>-<name>."""
    resume: Path | None = None
    """Continue the job in this folder, which has all settings. Options of the execution (micro-batches, processes, …)
    may differ. A comparison also takes models, --lr and --seeds, which are added to it."""
    trust_data: bool = False
    """With --resume, accept a folder whose settings somebody else wrote, or that were changed: the texts, the tokenizer
    and the modules that they name are read, wherever they lie. They count as yours from then on."""
    config: Path | None = None
    """Take options from this YAML or JSON file. The command line wins over it."""
    set: tuple[str, ...] = ()
    """Set options of every model or training by name: group.option=value, with a group of model, mixer, decay, post,
    gate_rank, log_linear, ska, training. An unknown name is answered with the known ones."""
    dry_run: bool = False
    """Print the settings and what the job needs (parameters, tokens, memory of one process without
    --recompute and --fsdp, operations); read no text, write and train nothing."""
    quiet: bool = False
    """Show no progress bars, and no estimate of time, memory and disk before the first run."""


@dataclass(frozen=True)
class Execution:
    """How runs use memory, and what they report."""

    micro_batch_size: int | None = None
    """Rows that a process holds at once (training on text); the gradients of micro-batches are added. Default: all."""
    recompute: tuple[str, ...] = ()
    """Compute results again in the backward pass in place of keeping them: norms (with gates, SwiGLU and rotations),
    conv, op, or several of these. blocks (or --gradient-checkpointing) is all inside blocks, a third more work."""
    gpus: int | None = None
    """With --dry-run, also what each of 1, 2, 4, … to this many H100 needs (with --recompute blocks, too), and the
    longest row that they train on."""
    track: tuple[str, ...] = ()
    """Report metrics, gates, decay spectra and their figures to wandb, trackio, mlflow or tensorboard; several are
    allowed. Each has an extra of its name. Local files go into the folder of the job, unless the environment variables
    of the tool say otherwise."""


def options_of(command: Any) -> dict[str, Any]:
    """The options of a command by name, those of its groups included."""
    options: dict[str, Any] = {}
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        options |= options_of(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return options


def as_typed(group: Any) -> Iterator[str]:
    """The options of a group that are not its defaults, as words of a command line."""
    defaults = options_of(type(group)())
    for name, value in options_of(group).items():
        if value != defaults[name]:
            yield f"--{name.replace('_', '-')}"
            if value is not True:
                yield from map(str, value if isinstance(value, tuple) else (value,))


def option_types(command: type) -> dict[str, Any]:
    """The types of `options_of`."""
    return {name: plain_type(one.annotation) for name, one in constructor_parameters(command).items()}


def replace_options(command: Command, options: Mapping[str, Any]) -> Command:
    """A command with some of its options replaced."""
    return construct(type(command), {**options_of(command), **options})
