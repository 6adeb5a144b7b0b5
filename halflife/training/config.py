"""Settings of training: what determines the numbers, and how a run uses memory and processes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halflife import extensions
from halflife.extras import require
from halflife.models import ModelConfig
from halflife.ops.backends.dispatch import KINDS
from halflife.registry import check_choice

TRACKERS = ("wandb", "trackio", "mlflow", "tensorboard")
# A job manager sends one of these before it kills a process, or a terminal that closes does.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU") if hasattr(signal, name))

MOST_STEPS = 10**9  # also the largest batch


@contextmanager
def on_signals(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Give signals to end (`SIGNALS`, or Ctrl-C) to a handler, in the main thread alone, as Python demands.

    A signal that is ignored, as SIGHUP under nohup, stays ignored.
    """
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        wanted = (number for number in (*SIGNALS, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN)
        previous = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What runs of several models, learning rates and seeds share: the budget, the optimiser and the schedule.

    Attributes:
        steps, batch_size: number of optimiser steps, and sequences of a step.
        weight_decay: AdamW's weight decay, on matrices only (see `models.param_groups`).
        warmup: the share of the steps in which the learning rate rises.
        schedule, schedule_options: a scheduler of transformers and its settings, or "linear_by_epoch", which falls once
            an epoch, of which there are `epochs`, and has no warm-up.
        betas, epsilon: AdamW's β₁ and β₂, and its ε. RWKV-7's authors take an ε of 1e-18.
        bf16: whether to train with bfloat16 autocast.
        validate_every, save_every: steps between validations, and between checkpoints.
    """

    steps: int
    batch_size: int
    weight_decay: float = 0.1
    warmup: float = 0.1
    schedule: str = "linear"
    schedule_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    bf16: bool = False
    validate_every: int = 100
    save_every: int = 200


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Recipe):
    """Everything but the data of one run. Subclasses add the data.

    Attributes:
        model: configuration of the model.
        learning_rate: the highest one, after the warm-up.
        clip: largest norm of the gradient.
        seed: determines the initial weights and the data.
    """

    model: ModelConfig
    learning_rate: float
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "validate_every", "save_every"):
            if not 1 <= getattr(self, name) <= MOST_STEPS:
                raise ValueError(f"{name} must be at least 1 and at most {MOST_STEPS:,}; got {getattr(self, name)}")
        for name in ("learning_rate", "epsilon", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be 0 or more; got {self.weight_decay}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup must be a share of the steps between 0 and 1; got {self.warmup}")
        falling = self.schedule_options.get("num_decay_steps", 0)
        if self.warmup * self.steps + falling > self.steps + 1:  # the decay is rounded, and takes a step at least
            raise ValueError(
                f"warmup and decay are shares of the same steps, so their sum is at most 1; got {self.warmup} and "
                f"{falling / self.steps:.3g}"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers of 0 or more and less than 1; got {self.betas}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must lie between 0 and {(1 << 32) - 1}; got {self.seed}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def portable(self, saved: dict[str, Any], folder: Path) -> dict[str, Any]:
        """A configuration as JSON holds it, with paths relative to `folder`, the folder of the run."""
        return saved

    def saved_in(self, folder: Path) -> dict[str, Any]:
        """What `run.json` in `folder` holds: the configuration, and the extensions that a resumed run imports."""
        return {**self.portable(as_json(self.to_dict()), folder), **extensions.record()}


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """Memory, processes and display of a run. These settings change the numbers by rounding only.

    Raises:
        ImportError: a package of `track` is not installed.
        ValueError: a name in `track` is unknown, or the environment asks for what cannot be.
    """

    # rows that a process holds at once; the gradients of several micro-batches are added. None for all rows of the
    # process.
    micro_batch_size: int | None = None
    # what the backward pass computes again in place of keeping it: "blocks" for all inside a block, or some of
    # `backends.dispatch.KINDS`
    recompute: tuple[str, ...] = ()
    compile: bool = False  # whether to run each block by `torch.compile` in training steps
    # whether to shard parameters, gradients and optimiser (FSDP2) over the processes, or with context_parallel over
    # those that have the same piece of different rows. Otherwise each process holds all of them (DDP).
    fsdp: bool = False
    context_parallel: int = 1  # processes that share each row, of which each has a piece (`halflife.parallel`)
    profile: bool = False  # whether to profile a few steps by pass (`training.profile`)
    track: tuple[str, ...] = ()  # names of `TRACKERS`, to which the run is reported (`training.trackers`)
    # the folder of the sweep that the run belongs to. The local files of trackers lie there; None for a run by itself.
    sweep: Path | None = None
    # takes the model and returns values and matplotlib figures by name, which the trackers get before the first step
    # and at every validation; None for none
    observe: Callable[..., Any] | None = None
    show: bool = True  # whether to draw a progress bar

    def __post_init__(self) -> None:
        for name in self.track:
            check_choice("tracker", name, TRACKERS)
            require(f"--track {name}", name)
        for name in self.recompute:
            check_choice("kind of --recompute", name, ("blocks", *KINDS))
        if "WORLD_SIZE" not in os.environ:
            if self.fsdp:
                raise ValueError("fsdp shards over the processes of torchrun: start the command with torchrun")
            if self.context_parallel > 1:
                raise ValueError("context_parallel needs the processes of torchrun: start the command with torchrun")
            if rank() != 0:
                raise ValueError(
                    f"the environment has RANK={os.environ['RANK']} and no WORLD_SIZE, so this process would save "
                    "nothing; start the command with torchrun, or unset RANK"
                )

        if self.context_parallel < 1 or world_size() % self.context_parallel:
            raise ValueError(f"context_parallel={self.context_parallel} does not divide {world_size()} processes")
        if self.context_parallel > 1 and self.fsdp and self.replicas == 1:
            raise ValueError(
                "the pieces of a row are a block apart, and fsdp gathers a block on all processes at once, so it "
                f"shards over rows: start twice as many processes as context_parallel={self.context_parallel}, or more"
            )

    @property
    def replicas(self) -> int:
        """The processes that have rows of their own, or groups of `context_parallel` ones."""
        return world_size() // self.context_parallel

    def num_micro_batches(self, batch_size: int) -> int:
        """The number of micro-batches of a batch, over all processes."""
        world, micro = self.replicas, self.micro_batch_size
        rows = batch_size // world if micro is None else micro
        if rows < 1 or batch_size % (rows * world):
            raise ValueError(
                f"a batch of {batch_size} rows cannot be shared equally by {world} process{'es' * (world > 1)}"
                f"{'' if self.context_parallel == 1 else f' of {self.context_parallel} pieces'}"
                f"{'' if micro is None else f' in micro-batches of {micro}'}"
            )
        return batch_size // rows


def world_size() -> int:
    """The number of processes that torchrun started; 1 without torchrun."""
    return _from_environment("WORLD_SIZE", 1)


def rank() -> int:
    """The number of this process, from 0."""
    return _from_environment("RANK", 0)


def _from_environment(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise ValueError(f"the environment has {name}={value!r}, which is no number; unset it, or use torchrun")
    return int(value)


def as_json(data: dict[str, Any]) -> dict[str, Any]:
    """The data as they are after a round trip through JSON, which turns tuples into lists."""
    return json.loads(json.dumps(data))
