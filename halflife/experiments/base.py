"""What an experiment is: a task at three scales, and what each preset becomes for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halflife.registry import Registry
from halflife.training.run import RunConfig
from halflife.training.sweep import Cell

SCALES = ("smoke", "small", "paper")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The sizes of a recall experiment; `halflife compare` can override each by its name.

    Attributes:
        hidden_size, num_layers, num_heads: of every model.
        vocab_size, train_length: V and T of the task.
        pairs: curriculum: pairs K a stage; the steps are shared equally among the stages.
        steps, batch_size: of training.
        weight_decay, warmup, schedule, bf16: see `RunConfig`.
        length_factors: tests are at T times these.
        validation_examples, test_examples: examples of each.
        validate_every, save_every: steps.
        chunk_size: tokens a chunk of the chunked ops.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    train_length: int
    pairs: tuple[int, ...]
    steps: int
    batch_size: int
    weight_decay: float = 0.1
    warmup: float = 0.1
    schedule: str = "linear"
    bf16: bool = False
    length_factors: tuple[int, ...] = (1, 2, 4, 8)
    validation_examples: int = 256
    test_examples: int = 256
    validate_every: int = 100
    save_every: int = 200
    chunk_size: int = 64


class Experiment:
    """A task at its scales; a subclass names its paper in the docstring and is registered under its task."""

    scales: ClassVar[dict[str, Settings]]

    def learning_rates(self, model: str, scale: str) -> tuple[float, ...]:
        """The learning rates tried for a preset when the user names none."""
        raise NotImplementedError

    def configure(self, settings: Settings, cell: Cell) -> RunConfig:
        """The run of one model, learning rate and seed."""
        raise NotImplementedError


EXPERIMENTS: Registry[type[Experiment]] = Registry("task")
