"""The settings of training one model, and of how the run is carried out."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from typing import Any

from halflife.models import ModelConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is fitted; what to is a subclass's.

    Attributes:
        model: what is trained.
        steps, batch_size: of training.
        learning_rate, weight_decay, warmup, schedule, clip: of AdamW; `warmup` is a fraction of the steps,
            `schedule` a name of transformers' schedulers, `schedule_options` its own settings.
        betas: AdamW's.
        bf16: mixed precision.
        seed: of weights and data.
        validate_every, save_every: steps.
    """

    model: ModelConfig
    steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.1
    warmup: float = 0.1
    schedule: str = "linear"
    schedule_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    bf16: bool = False
    seed: int = 0
    validate_every: int = 100
    save_every: int = 200

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "validate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive; got {self.learning_rate}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How a run is carried out: memory, processes and what it shows. Its numbers change by rounding alone.

    Attributes:
        micro_batch_size: rows of a batch that a process holds at once, the gradients of several being added; None for
            all of its rows.
        gradient_checkpointing: recompute the activations of a block instead of keeping them.
        fsdp: shard parameters, gradients and optimiser over the processes (FSDP2), else each has all of them (DDP).
        tensorboard: write `tensorboard/` as well.
        show: draw a progress bar.
    """

    micro_batch_size: int | None = None
    gradient_checkpointing: bool = False
    fsdp: bool = False
    tensorboard: bool = False
    show: bool = True

    def num_micro_batches(self, batch_size: int) -> int:
        """Into how many micro-batches a batch is cut, over all processes.

        Raises:
            ValueError: the rows of a batch cannot be shared out equally.
        """
        world, micro = world_size(), self.micro_batch_size
        rows = batch_size // world if micro is None else micro
        if rows < 1 or batch_size % (rows * world):
            raise ValueError(
                f"a batch of {batch_size} rows cannot be shared equally by {world} process{'es' * (world > 1)}"
                f"{'' if micro is None else f' in micro-batches of {micro}'}"
            )
        return batch_size // rows


def world_size() -> int:
    """How many processes torchrun started for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process among them."""
    return int(os.environ.get("RANK", "0"))


def as_json(data: dict[str, Any]) -> dict[str, Any]:
    """Data as JSON gives them back: lists for tuples."""
    return json.loads(json.dumps(data))


def defaults(config: TrainConfig | ModelConfig) -> dict[str, Any]:
    missing = dataclasses.MISSING
    given = {f.name: f.default for f in dataclasses.fields(config) if f.default is not missing}
    return given | {f.name: f.default_factory() for f in dataclasses.fields(config) if f.default_factory is not missing}
