"""The contract of an experiment: models, data and tests at three scales, and the report of the results."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from halflife.files import CONFIG_JSON, read_json, write_text
from halflife.lab.experiments.overrides import apply_overrides
from halflife.layers import LAYERS
from halflife.models.controls import control, split_control
from halflife.registry import Registry, check_choice, constructor_parameters
from halflife.runs.folder import SUMMARY_MD
from halflife.runs.one import CellConfig
from halflife.runs.sweep import Cell
from halflife.training.config import Recipe

# "paper" is a paper's setting, and "large" one of ours. "paper-440m" has another size of model of the paper.
SCALES = ("smoke", "small", "large", "paper", "paper-50m", "paper-410m", "paper-440m", "paper-1.45b")
# Settings of a comparison that `--set training.…` sets.
RECIPE = ("weight_decay", "warmup", "bf16", "validate_every")
Config = TypeVar("Config", bound=CellConfig)


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings(Recipe):
    """The sizes of an experiment and its training recipe. Subclasses add settings of their experiment."""

    # hidden_size, num_layers, num_heads: sizes of every model
    hidden_size: int
    num_layers: int
    num_heads: int
    train_length: int  # T, tokens of a training sequence
    chunk_size: int = 64  # tokens of a chunk in the chunked ops
    # options of every run's configuration by their dotted names, such as `{"mixer.power": 2}`
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Any:
        """An instance of the class, from settings as `config.json` holds them, with lists for tuples."""
        values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
        return cls(**values)

    def run(self, kind: type[Config], cell: Cell, **fields: Any) -> Config:
        """The configuration of one run: `fields`, the rate and seed of the cell, and the settings of these names."""
        return kind(**{
            **self.shared_with(kind), "learning_rate": cell.learning_rate, "seed": cell.seed, **fields
        })  # fmt: skip

    def shared_with(self, kind: type[Any]) -> dict[str, Any]:
        """The settings that are also fields of a dataclass, for its constructor."""
        names = {field.name for field in dataclasses.fields(kind)}
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in names}


@dataclass(frozen=True, kw_only=True)
class TaskSettings(ExperimentSettings):
    """The settings of an experiment on tasks."""

    # numbers of key-value pairs K to train on, one per stage of the curriculum or all at once
    pairs: tuple[int, ...] = ()
    validation_examples: int = 256  # examples of each validation
    test_examples: int = 256  # examples of each test
    action_mask: bool = False  # see `RunConfig`


SKA_CHUNK: int = constructor_parameters(LAYERS["ska"])["chunk_size"].default


def check_layers_act(config: Any) -> None:
    """Check that Koopman attention can read something in training, where a query reads the chunks before its chunk.

    Raises:
        ValueError: no text of the training is longer than a chunk, so that the output of the layer is 0 everywhere.
    """
    model = config.model
    kinds = [(model.mixer, model.mixer_options), *((kind["mixer"], kind["options"]) for kind in model.hybrids)]
    in_chunks = [own for mixer, own in kinds if mixer == "ska" and own.get("mode", "chunk") == "chunk"]
    if not in_chunks:
        return
    size = max(own.get("chunk_size", SKA_CHUNK) for own in in_chunks)
    tasks = [task for mixture in getattr(config, "mixtures", ()) for task in mixture]
    # texts may end before T
    texts = [task.generate(256, 0).slices["length"].max().item() for task in tasks if not task.scalable]
    longest = max([task.length for task in tasks if task.scalable] + texts or config.sequences())
    if longest <= size:
        raise ValueError(
            f"{model.name}: a chunk of Koopman attention has {size} tokens and the longest text of the training "
            f"{longest:.0f}, so the layer would read nothing; shorten its chunks (ska_chunk or --set ska.chunk_size)"
        )


class Experiment:
    """Training runs and tests at several scales. The docstring of a subclass names the paper or the question.

    `docs/papers.py` has the settings of the scale "paper" as the papers print them. Under "Departures" a docstring
    has what else differs.
    """

    scales: ClassVar[dict[str, Any]]  # scale → settings
    settings: ClassVar[type[ExperimentSettings]] = TaskSettings  # the class of the settings
    # scale → learning rates that are tried when the user names none; "" stands for the other scales. A key `scale base`
    # is for one base alone.
    rates: ClassVar[dict[str, tuple[float, ...]]] = {}
    models: ClassVar[tuple[str, ...]] = ()  # the models that are compared when the user names none
    models_of: ClassVar[dict[str, tuple[str, ...]]] = {}  # the same for scales that have other models
    groups: ClassVar[dict[str, tuple[str, ...]]] = {}  # names that stand for several models
    # the tested quantity, "accuracy" or "loss". With "loss", `summary.md` is the table for the terminal.
    measure: ClassVar[str] = "accuracy"

    def learning_rates(self, model: str, scale: str) -> tuple[float, ...]:
        """The learning rates that are tried for a model when the user names none."""
        base = re.split("[+:]", model)[0]
        return self.rates.get(f"{scale} {base}") or self.rates.get(scale) or self.rates[""]

    def default_rates(self, model: str, scale: str) -> tuple[float, ...]:
        """`learning_rates`, where a control has those of its base."""
        return self.learning_rates((split_control(model) or (model,))[0], scale)

    def expanded(self, models: Sequence[str]) -> list[str]:
        """The models, with those of a group in the place of its name."""
        return [each for given in models for each in self.groups.get(given, (given,))]

    def models_at(self, scale: str) -> tuple[str, ...]:
        """The models that are compared at a scale when the user names none."""
        return self.models_of.get(scale, self.models)

    def open_data(self, settings: Any) -> Any:
        """The settings with what only the data can tell, such as their digest. It may read and download data."""
        return settings

    def build_cell(self, settings: Any, cell: Cell) -> CellConfig:
        """The configuration of one cell before the user's overrides; `settings` is an instance of `self.settings`."""
        raise NotImplementedError

    def configure(self, settings: Any, cell: Cell) -> CellConfig:
        """The configuration of one model, learning rate and seed, with the user's overrides.

        The model may be a control, `base@state(target)` or `base@parameters(target)`. It is a ValueError if the base
        cannot have as much of it as the target, an override has no meaning, or a layer cannot act (`check_layers_act`).
        """
        base, kind, target = split_control(cell.model) or (cell.model, "", "")
        config = self.build_cell(settings, dataclasses.replace(cell, model=base))
        if kind:
            other = self.build_cell(settings, dataclasses.replace(cell, model=target))
            model = control(config.model, kind, other.model, settings.train_length, cell.model)
            config = dataclasses.replace(config, model=model)
        config = apply_overrides(config, settings.overrides, skip_absent_parts=True)
        check_layers_act(config)
        return config

    def check_used(self, name: str, settings: Any, without: Any, cells: Sequence[Cell]) -> None:
        """Raise a ValueError if a setting makes no cell another than it is `without` it."""
        if (given := getattr(settings, name)) == getattr(without, name):
            return
        for cell in cells:
            try:
                if self.configure(without, cell) != self.configure(settings, cell):
                    return
            except ValueError:  # without the setting there is no such model
                return
        raise ValueError(f"{name}={given!r} changes nothing here: the names of the models and their tasks choose it")

    def saved_settings(self, folder: Path) -> Any:
        """The settings that a comparison was run with, from its `config.json`."""
        return self.settings.from_dict(read_json(folder / CONFIG_JSON)["settings"])

    def write_data(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write what the experiment measures beside the rows of `results.csv`. By default that is nothing."""

    def summary(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
        """Tables beside those of a paper in Markdown, from the folder and the rows of `results.csv`; "" for none."""
        return ""

    def write_report(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the data, figures, `report.html` and, if there is one, `summary.md` of a comparison."""
        from halflife.report.redraw import write_report

        self.write_data(folder, rows)  # first, because a figure may show it
        summary = self.summary(folder, rows)
        write_report(folder)
        if summary:
            write_text(folder / SUMMARY_MD, summary)

    def settings_at(self, scale: str, changes: Mapping[str, Any]) -> ExperimentSettings:
        """The settings of a scale with some of them replaced; an unknown scale or setting is a ValueError."""
        check_choice("scale", scale, self.scales)
        known = [field.name for field in dataclasses.fields(self.settings)]
        if others := [name for name in changes if name not in known]:
            raise ValueError(
                f"{others[0]!r} is a setting of other tasks or experiments, or of none; here are {', '.join(known)}"
            )
        return dataclasses.replace(self.scales[scale], **changes)


# Name → the module of the experiment, which is imported when the name is asked for.
MODULES = {
    "decay-design": "decay_design", "mqar": "mqar", "post-mqar": "mqar", "recall": "recall", "echo-transfer": "echo",
    "echo-mqar": "echo", "echo-ablations": "echo", "echo-tiers": "echo_tiers", "gate-rank-s5": "gate_rank",
    "gate-rank-mqar": "gate_rank", "gate-rank-niah": "gate_rank", "koopman-powers": "evidence.koopman_powers",
    "overview": "evidence.overview", "post-taken-apart": "evidence.post_parts",
    "post-taken-apart-text": "evidence.post_parts", "post-review": "evidence.post_review",
    "mqar-updates": "evidence.reassigned",
    "decay-lm": "language_models.decay", "echo-lm": "language_models.echo",
    "gate-rank-lm": "language_models.gate_rank", "post-lm": "language_models.post",
}  # fmt: skip
EXPERIMENTS: Registry[type[Experiment]] = Registry(
    "experiment", {name: f"halflife.lab.experiments.{module}" for name, module in MODULES.items()}
)
ON_TASKS = ("mqar", "recall")  # they train on tasks that the user names (`--task NAMES`)


def paper_experiments() -> list[str]:
    """The names of the experiments of papers, for `--experiment`."""
    return [name for name in EXPERIMENTS if name not in ON_TASKS]
