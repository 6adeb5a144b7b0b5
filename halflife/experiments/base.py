"""What an experiment is: a task at three scales, and what each preset becomes for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from halflife.registry import Registry, unknown
from halflife.runs.sweep import Cell
from halflife.runs.task_run import RunConfig

SCALES = ("smoke", "small", "paper")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The sizes of an experiment; `halflife compare` can override each by its name. An experiment may add its own.

    Attributes:
        hidden_size, num_layers, num_heads: of every model.
        train_length: T of training.
        pairs: numbers of pairs K to train on: one a stage of the curriculum, or all at once.
        steps, batch_size: of training.
        weight_decay, warmup, schedule, bf16: see `RunConfig`.
        validation_examples, test_examples: examples of each.
        validate_every, save_every: steps.
        chunk_size: tokens a chunk of the chunked ops.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    train_length: int
    pairs: tuple[int, ...]
    steps: int
    batch_size: int
    weight_decay: float = 0.1
    warmup: float = 0.1
    schedule: str = "linear"
    bf16: bool = False
    validation_examples: int = 256
    test_examples: int = 256
    validate_every: int = 100
    save_every: int = 200
    chunk_size: int = 64

    def training(self) -> dict[str, Any]:
        """What of it a `RunConfig` takes as it is."""
        names = {field.name for field in dataclasses.fields(RunConfig)}
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in names}


class Experiment:
    """What is trained and tested, at its scales; a subclass names its paper in the docstring.

    Attributes:
        scales: scale → settings.
        settings: the class of the settings.
        models: what is compared when the user names no models.
    """

    scales: ClassVar[dict[str, Any]]
    settings: ClassVar[type[Settings]] = Settings
    models: ClassVar[tuple[str, ...]] = ()

    def learning_rates(self, model: str, scale: str) -> tuple[float, ...]:
        """The learning rates tried for a model when the user names none."""
        raise NotImplementedError

    def configure(self, settings: Any, cell: Cell) -> RunConfig:
        """The run of one model, learning rate and seed; `settings` is an instance of the class's `settings`."""
        raise NotImplementedError

    def summary(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
        """What a paper's experiment says of its folder and the rows of `results.csv`, in Markdown; else nothing."""
        return ""

    def resolve(self, scale: str, overrides: Mapping[str, Any]) -> Settings:
        """The settings of a scale with some of them replaced.

        Raises:
            ValueError: an unknown scale, or a setting that this experiment does not have.
        """
        if scale not in self.scales:
            raise unknown("scale", scale, list(self.scales))
        known = [field.name for field in dataclasses.fields(self.settings)]
        for name in overrides:
            if name not in known:
                raise unknown("setting of this experiment", name, known)
        return dataclasses.replace(self.scales[scale], **overrides)


EXPERIMENTS: Registry[type[Experiment]] = Registry("experiment")
