"""The main job: train several models, test them, and write tables, figures and a report."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halflife import extensions
from halflife.data.paths import absolute_paths, relative_paths
from halflife.data.trust import check_origin, sign
from halflife.files import CONFIG_JSON, RESULT_JSON, RUN_JSON, read_json, read_json_object, write_json
from halflife.lab.experiments.base import EXPERIMENTS, Experiment, ExperimentSettings, paper_experiments
from halflife.lab.experiments.overrides import check_parts
from halflife.registry import check_choice
from halflife.runs.folder import FolderKind, check_content, folder_kind
from halflife.runs.one import CellConfig, training_device
from halflife.runs.records import COMPARISON
from halflife.runs.sweep import Cell, Runner, RunsFailed, count_runs, create_sweep, first_cells, one_by_one, run_sweep
from halflife.runs.sweep import cells as sweep_cells
from halflife.tasks import TASKS
from halflife.training.config import ExecutionConfig
from halflife.training.estimate import Estimate, estimate
from halflife.training.trial import Trial, try_runs

MIXTURE = "recall"  # the experiment of all tasks but mqar alone


@dataclass(frozen=True)
class Comparison:
    """A comparison whose choices have been checked: of `plan_comparison`, or of the folder that `load` reads."""

    kind: str  # the name of the experiment
    settings: ExperimentSettings  # its resolved settings
    label: str  # the task or the experiment that is named
    scale: str  # the scale
    learning_rates: dict[str, list[float]]  # model → the rates that are tried
    seeds: int  # number of seeds
    tune_seeds: int | None = None  # how many of them try all rates; None for all. The others run at the best rate.

    @classmethod
    def load(cls, folder: Path) -> Comparison:
        """The comparison in a folder.

        Raises:
            FileNotFoundError: the folder holds no comparison.
            ValueError: `config.json` is damaged, or somebody else made it and it names a text that lies elsewhere.
        """
        path = folder / CONFIG_JSON
        if not path.exists():
            raise FileNotFoundError(f"{folder} holds no comparison (it has no {CONFIG_JSON})")
        config = read_json_object(path)
        if (folder / RUN_JSON).is_file():
            command = "; `halflife train --resume` continues one" * (folder_kind(folder) is FolderKind.LANGUAGE_RUN)
            raise ValueError(f"{folder} holds no comparison, but a {folder_kind(folder).value}{command}")
        if "settings" not in config or "experiment" not in config:
            raise ValueError(f"{path} is damaged: it has no settings or no experiment")
        check_content(path, config, COMPARISON)
        check_origin(config, path)
        extensions.recall(config, folder)
        kind = config["experiment"]
        try:
            settings: Any = EXPERIMENTS[kind].settings.from_dict(_with_text(config["settings"], folder, absolute_paths))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: a setting cannot be ({error})") from error
        if "text" in config["settings"]:
            check_origin(config, path, settings.text, tokenizer=settings.tokenizer)
        rates, seeds = config["learning_rates"], len(config["seeds"])
        return cls(kind, settings, config["task"], config["scale"], rates, seeds, config.get("tune_seeds"))

    @property
    def experiment(self) -> Experiment:
        return EXPERIMENTS[self.kind]()

    def cells(self) -> list[Cell]:
        """One cell for each model and rate."""
        return list(sweep_cells(self.learning_rates, [0]))

    def configure(self, cell: Cell) -> CellConfig:
        """The configuration of one run."""
        return self.experiment.configure(self.settings, cell)

    def estimate(self, rows: int | None = None) -> list[tuple[Estimate, int]]:
        """What a run of each model needs, and the number of its runs. `rows` are the sequences of a micro-batch."""
        self.check_micro_batches(rows)
        found = []
        for model, rates in self.learning_rates.items():
            config = self.configure(Cell(model, rates[0], 0))
            needs = dataclasses.replace(estimate(config, config.sequences(), rows), model=model)
            found.append((needs, count_runs(len(rates), self.seeds, self.tune_seeds)))
        return found

    def try_runs(self, folder: Path, only_seeds: Sequence[int] | None = None, rows: int | None = None) -> Trial | None:
        """What the runs in `folder` without a result will take, of `only_seeds` or all; see `trial.try_runs`."""
        seeds = range(self.seeds)
        at_one_rate = set() if self.tune_seeds is None else set(seeds[self.tune_seeds :])
        later = [Cell(model, rates[0], seed) for model, rates in self.learning_rates.items() for seed in at_one_rate]
        cells = [*first_cells(self.learning_rates, seeds, self.tune_seeds), *later]
        chosen = [cell for cell in cells if only_seeds is None or cell.seed in only_seeds]
        left = [cell for cell in chosen if not _ended(folder, cell, any_rate=cell.seed in at_one_rate)]
        configs = [self.configure(cell) for cell in left]
        return try_runs([(one, one.sequences()) for one in configs], training_device(), rows)

    def check_micro_batches(self, rows: int | None) -> None:
        """Raises: ValueError: micro-batches of an experiment on tasks."""
        if rows is not None and self.experiment.measure != "loss":
            raise ValueError("micro-batches are for experiments on text; an experiment on tasks reads whole batches")


def plan_comparison(
    models: Sequence[str],
    *,
    tasks: Sequence[str] = (),
    experiment: str | None = None,
    scale: str = "smoke",
    seeds: int = 1,
    tune_seeds: int | None = None,
    learning_rates: Sequence[float] | None = None,
    settings: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Comparison:
    """Check every choice of a comparison, without reading data or writing files.

    Args:
        models: preset names, or names that the experiment defines; none for the models of the experiment.
        tasks: the tasks to train on when no experiment is given: `mqar` alone (the default), or a mixture of `name` or
            `name:tier`.
        experiment: the name of a paper's experiment; None for an experiment on `tasks`.
        scale: smoke, small, large or paper; an experiment has some of them.
        seeds: the number of seeds, counted from 0.
        tune_seeds: how many of them try all learning rates; None for all. The others run at each model's best one.
        learning_rates: tried for every model; None for those of the experiment.
        settings: settings of the experiment that replace those of the scale.
        overrides: options of every run by their dotted names, such as `{"mixer.power": 2}`.
    """
    kind, tested = _experiment_name(tasks, experiment)
    chosen = EXPERIMENTS[kind]()
    changes = {**({"tasks": tuple(tasks)} if kind == MIXTURE else {}), **(settings or {})}
    if overrides:
        changes["overrides"] = dict(overrides)
    resolved = chosen.settings_at(scale, changes)
    models = chosen.expanded(models or chosen.models_at(scale))
    if not models or len(set(models)) != len(models):
        raise ValueError(f"name at least one model, and each model once; got {', '.join(models) or 'none'}")
    _check_count(seeds)
    if tune_seeds is not None and not 1 <= tune_seeds <= seeds:
        raise ValueError(f"tune_seeds is at least 1 and at most the number of seeds, {seeds}; got {tune_seeds}")
    rates = {model: list(dict.fromkeys(learning_rates or chosen.default_rates(model, scale))) for model in models}
    plan = Comparison(kind, resolved, tested, scale, rates, seeds, tune_seeds)
    if resolved.overrides:
        plain = dataclasses.replace(resolved, overrides={})
        check_parts([chosen.configure(plain, cell) for cell in plan.cells()], resolved.overrides)
    for cell in plan.cells():
        plan.configure(cell)
    cells = [Cell(model, own[0], 0) for model, own in rates.items()]
    for name in settings or {}:
        without = chosen.settings_at(scale, {key: x for key, x in changes.items() if key != name})
        chosen.check_used(name, resolved, without, cells)
    return plan


def _check_count(seeds: int) -> None:
    if not 1 <= seeds <= 10_000:
        raise ValueError(f"seeds is the number of seeds, at least 1 and at most 10,000; got {seeds}")


def create_comparison(
    models: Sequence[str], *, output: Path | None = None, name: str | None = None, command: str = "", **choices: Any
) -> Path:
    """Check every choice of a comparison, open its data, and write its configuration into a new folder; return that.

    Args:
        models: see `plan_comparison`.
        output: the folder; None for `runs/<time>-<name>`.
        name: the name of that folder; None for the task or experiment and the scale.
        command: the command line that the report shows.
        **choices: the other arguments of `plan_comparison`.

    Raises:
        ValueError: as `plan_comparison`, or the data cannot be read.
        FileExistsError: `output` holds a comparison already.
    """
    if name is not None and output is not None:
        raise ValueError(f"--output is the whole folder, and --name a part of its default; leave out --name {name}")
    plan = plan_comparison(models, **choices)
    settings = plan.experiment.open_data(plan.settings)
    config = {
        "command": command, "models": list(plan.learning_rates), "experiment": plan.kind,
        "task": plan.label, "scale": plan.scale, "seeds": list(range(plan.seeds)),
        "learning_rates": plan.learning_rates, "tune_seeds": plan.tune_seeds, **extensions.record(),
    }  # fmt: skip
    label = re.sub(r"[^\w.+-]", "-", name or f"{plan.label}-{plan.scale}")
    folder = output or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    config["settings"] = _with_text(dataclasses.asdict(settings), folder, relative_paths)
    return create_sweep(folder, config)


def extend_comparison(
    folder: Path, models: Sequence[str] = (), *, learning_rates: Sequence[float] = (), seeds: int | None = None,
    command: str = "",
) -> None:  # fmt: skip
    """Add models, learning rates or seeds to the comparison in `folder`. `run_comparison` then runs what is new.

    Args:
        models: those that get the learning rates. One that is not in the comparison joins it. None named: all.
        learning_rates: to try beside those of a model; none for a new model means those of the experiment.
        seeds: the number of seeds from now on, counted from 0; None for as many as before.
        command: the command line that the report shows behind the first one.
    """
    comparison, config = Comparison.load(folder), read_json(folder / CONFIG_JSON)
    experiment, rates, count = comparison.experiment, comparison.learning_rates, comparison.seeds
    _check_count(seeds := count if seeds is None else seeds)
    if seeds < count:
        raise ValueError(f"the comparison in {folder} has {count} seeds; seeds can only be added, got {seeds}")
    for model in dict.fromkeys(experiment.expanded(models) or rates):
        tried = rates.get(model, [])
        given = learning_rates or (() if tried else experiment.default_rates(model, comparison.scale))
        added = [rate for rate in dict.fromkeys(given) if rate not in tried]
        if models and not added:
            raise ValueError(
                f"{model} is in the comparison already: add a learning rate that it has not tried, or continue with "
                "--resume alone"
            )
        for rate in added:
            comparison.configure(Cell(model, rate, 0))
        rates[model] = [*tried, *added]
    config |= {"models": list(rates), "learning_rates": rates, "seeds": list(range(seeds))}
    if command:
        config["command"] = f"{config.get('command', '')}; {command}"
    write_json(folder / CONFIG_JSON, sign(config))


def _with_text(settings: dict[str, Any], folder: Path, change: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Settings whose paths of texts and tokenizer, if there are some, `relative_paths` or `absolute_paths` changed."""
    names = {name: key for name, key in (("text", "sources"), ("tokenizer", "tokenizer")) if name in settings}
    changed = change({key: settings[name] for name, key in names.items()}, folder)
    return {**settings, **{name: changed[key] for name, key in names.items()}}


def _ended(folder: Path, cell: Cell, any_rate: bool) -> bool:
    """Whether a cell has a result, or the same model and seed have one at another learning rate."""
    place = folder / cell.folder
    names = f"lr*-seed{cell.seed}" if any_rate else place.name
    return any((found / RESULT_JSON).exists() for found in place.parent.glob(names))


def _experiment_name(tasks: Sequence[str], experiment: str | None) -> tuple[str, str]:
    """The experiment that trains on these tasks or has this name, and its label."""
    papers = paper_experiments()
    if named := [task for task in tasks if task in papers]:
        raise ValueError(f"{named[0]} is a paper's experiment, not a task: use --experiment {named[0]}")
    if experiment is None:
        tasks = list(tasks) or ["mqar"]
        return ("mqar" if tasks == ["mqar"] else MIXTURE), "+".join(tasks)
    if experiment in TASKS:
        raise ValueError(f"{experiment} is a task, not a paper's experiment: use --task {experiment}")
    check_choice("experiment", experiment, papers)
    if tasks:
        raise ValueError(f"give --task or --experiment, not both: {experiment} has its tasks")
    return experiment, experiment


def run_comparison(
    folder: Path,
    comparison: Comparison | None = None,
    *,
    only_seeds: Sequence[int] | None = None,
    show: bool = True,
    runner: Runner = one_by_one,
    execution: ExecutionConfig | None = None,
) -> list[dict[str, Any]]:
    """Run or continue the comparison in `folder`, write its table, figures and report, and return the table's rows.

    Args:
        comparison: what it holds; None to read it.
        only_seeds: the seeds to run now, so that several processes can share the work; None for all. The table
            contains every finished run.
        runner: runs the cells (`runs.pool.make_runner`).
        execution: how the runs use memory; None for the defaults.

    Raises:
        FileNotFoundError, ValueError: as `Comparison.load`, or `execution` divides the batches of an experiment on
            tasks.
        RunsFailed: some runs raised an error. The others have ended, and the report shows them.
    """
    comparison = comparison or Comparison.load(folder)
    comparison.check_micro_batches(execution.micro_batch_size if execution else None)
    rows, failed = run_sweep(
        folder, comparison.configure, seeds=only_seeds, show=show, runner=runner, execution=execution
    )
    comparison.experiment.write_report(folder, rows)
    if failed:
        raise RunsFailed(failed, rows)
    return rows
