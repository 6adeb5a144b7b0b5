"""The contract of an experiment: models, data and tests at three scales, and the report of the results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from halflife.files import write_text
from halflife.lab.experiments.overrides import apply_overrides
from halflife.models.controls import control, split_control
from halflife.registry import Registry, unknown
from halflife.runs.folder import SUMMARY_MD
from halflife.runs.one import CellConfig
from halflife.runs.sweep import Cell

# "paper" is a paper's setting, and "large" one of ours. "paper-440m" has another size of model of the paper.
SCALES = ("smoke", "small", "large", "paper", "paper-50m", "paper-410m", "paper-440m", "paper-1.45b")
Config = TypeVar("Config", bound=CellConfig)


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings:
    """The sizes of an experiment and its training recipe. Subclasses add settings of their experiment.

    Attributes:
        hidden_size, num_layers, num_heads: sizes of every model.
        train_length: T, tokens of a training sequence.
        steps, batch_size: training steps, and sequences per step.
        weight_decay, warmup, schedule, schedule_options, betas, epsilon, bf16: see `TrainConfig`.
        validate_every: steps between validations.
        save_every: steps between checkpoints.
        chunk_size: tokens of a chunk in the chunked ops.
        overrides: options of every run's configuration by their dotted names; see `resolve`.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    train_length: int
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
    chunk_size: int = 64
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Any:
        """An instance of the class, from settings as `config.json` holds them, with lists for tuples."""
        values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
        return cls(**values)

    def shared_with(self, config: type[CellConfig]) -> dict[str, Any]:
        """The settings that are also fields of a run's configuration, for its constructor."""
        names = {field.name for field in dataclasses.fields(config)}
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in names}


@dataclass(frozen=True, kw_only=True)
class TaskSettings(ExperimentSettings):
    """The settings of an experiment on tasks.

    Attributes:
        pairs: numbers of key-value pairs K to train on, one per stage of the curriculum or all at once.
        validation_examples: examples of each validation.
        test_examples: examples of each test.
        action_mask: see `RunConfig`.
    """

    pairs: tuple[int, ...] = ()
    validation_examples: int = 256
    test_examples: int = 256
    action_mask: bool = False


def resolve(config: Config, overrides: Mapping[str, Any]) -> Config:
    """The configuration of a run with the user's options applied. The configuration of every cell passes through here.

    Args:
        config: the configuration that the experiment builds.
        overrides: dotted name → value, such as `{"mixer.power": 2, "training.weight_decay": 0.0}`.

    Raises:
        ValueError: an unknown name, or a value without meaning.
    """
    return apply_overrides(config, overrides, skip_absent_parts=True)


class Experiment:
    """Training runs and tests at several scales. The docstring of a subclass names the paper or the question.

    Attributes:
        scales: scale → settings.
        settings: the class of the settings.
        models: the models that are compared when the user names none.
        groups: names that stand for several models.
        measure: the tested quantity, "accuracy" or "loss". With "loss", `summary.md` is the table for the terminal.
        is_paper: whether it is an experiment of a paper (`--experiment NAME`); else it trains on tasks that the user
            names (`--task NAMES`).
    """

    scales: ClassVar[dict[str, Any]]
    settings: ClassVar[type[ExperimentSettings]] = TaskSettings
    models: ClassVar[tuple[str, ...]] = ()
    groups: ClassVar[dict[str, tuple[str, ...]]] = {}
    measure: ClassVar[str] = "accuracy"
    is_paper: ClassVar[bool] = False

    def learning_rates(self, model: str, scale: str) -> tuple[float, ...]:
        """The learning rates that are tried for a model when the user names none."""
        raise NotImplementedError

    def models_at(self, scale: str) -> tuple[str, ...]:
        """The models that are compared at a scale when the user names none."""
        return self.models

    def open_data(self, settings: Any) -> Any:
        """The settings with what only the data can tell, such as their digest. It may read and download data."""
        return settings

    def build_cell(self, settings: Any, cell: Cell) -> CellConfig:
        """The configuration of one cell before the user's overrides; `settings` is an instance of `self.settings`."""
        raise NotImplementedError

    def build_control(self, settings: Any, cell: Cell) -> CellConfig:
        """`build_cell`, where a model may be a control: `base@state(target)` or `base@parameters(target)`.

        Raises:
            ValueError: the base cannot have as much state, or as many parameters, as the target.
        """
        if (parts := split_control(cell.model)) is None:
            return self.build_cell(settings, cell)
        base, kind, target = parts
        config, other = (self.build_cell(settings, dataclasses.replace(cell, model=name)) for name in (base, target))
        model = control(config.model, kind, other.model, settings.train_length, cell.model)
        return dataclasses.replace(config, model=model)

    def configure(self, settings: Any, cell: Cell) -> CellConfig:
        """The configuration of one model, learning rate and seed."""
        return resolve(self.build_control(settings, cell), settings.overrides)

    def summary(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
        """Tables and verdicts in Markdown, from the folder and the rows of `results.csv`; "" for none."""
        return ""

    def write_report(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the figures, `report.html` and `summary.md` of a comparison."""
        from halflife.report.redraw import write_report

        summary = self.summary(folder, rows)  # first, because it may write data that a figure shows
        write_report(folder)
        if summary:
            write_text(folder / SUMMARY_MD, summary)

    def settings_at(self, scale: str, changes: Mapping[str, Any]) -> ExperimentSettings:
        """The settings of a scale with some of them replaced.

        Raises:
            ValueError: an unknown scale, or a setting that this experiment does not have.
        """
        if scale not in self.scales:
            raise unknown("scale", scale, list(self.scales))
        known = [field.name for field in dataclasses.fields(self.settings)]
        for name in changes:
            if name not in known:
                raise unknown("setting of this experiment", name, known)
        return dataclasses.replace(self.scales[scale], **changes)


EXPERIMENTS: Registry[type[Experiment]] = Registry("experiment")


def paper_experiments() -> list[str]:
    """The names of the experiments of papers, for `--experiment`."""
    return [name for name in EXPERIMENTS if EXPERIMENTS[name].is_paper]
