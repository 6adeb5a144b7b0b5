"""`halflife compare`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import tyro
from tyro.conf import Positional

from halflife.cli.groups import Execution, Job, as_typed, options_of
from halflife.cli.options import EXIT_PARTLY_FAILED, check_job, command_line, resumable, say, take_overrides, to_type
from halflife.files import CONFIG_JSON

if TYPE_CHECKING:
    from halflife.lab.experiments.compare import Comparison
    from halflife.runs.sweep import Runner

EXTENSION = ("models", "lr", "seeds")  # what may be added to a comparison with --resume
# Names for --set that are options of the command.
OPTIONS = {
    "training.learning_rate": "lr", "training.steps": "steps", "training.batch_size": "batch_size",
    "training.save_every": "save_every", "model.hidden_size": "hidden_size", "model.num_layers": "num_layers",
    "model.vocab_size": "vocab_size",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of the experiment or of the task, which replace those of the scale."""

    text: Annotated[tuple[str, ...] | None, tyro.conf.arg(aliases=("--data",))] = None
    """Files, folders, globs or hf:owner/name to train on (experiments on text). Default: that of the scale: FineWeb-Edu
    for paper, else the source of Python's standard library, 11 MB."""
    tokenizer: str | None = None
    """bytes, bytes+eos, or a tokenizer of Hugging Face (experiments on text). Give --vocab-size if it has other ids."""
    steps: int | None = None
    """Training steps. Default of this and of all options below: the setting of the scale."""
    batch_size: int | None = None
    """Examples of a batch."""
    hidden_size: int | None = None
    """Model width."""
    num_layers: int | None = None
    """Layers."""
    num_heads: int | None = None
    """Heads."""
    vocab_size: int | None = None
    """Vocabulary of the task (mqar), or of the models (experiments on text)."""
    train_length: int | None = None
    """Training length T."""
    pairs: tuple[int, ...] | None = None
    """Numbers of pairs to train on: one a stage of the curriculum (mqar), or all at once (mixtures)."""
    warm_length: int | None = None
    """Length of the sequences in the first half of the steps; 0 for the training length (mixtures)."""
    warm_pairs: tuple[int, ...] | None = None
    """Numbers of pairs in the first half of the steps (mixtures)."""
    test_tasks: tuple[str, ...] | None = None
    """Tasks to test on (mixtures)."""
    lengths: tuple[int, ...] | None = None
    """Lengths to test at (mixtures)."""
    test_pairs: tuple[int, ...] | None = None
    """Numbers of pairs to test with (mixtures)."""
    test_examples: int | None = None
    """Examples of a test."""
    test_tokens: int | None = None
    """Tokens of a test. One on mixtures has fewer examples than --test-examples where they would exceed this, and at
    least 16."""
    group: str | None = None
    """The group of gate-rank-s5: s5, s3, a5, z60, or z2 (parity)."""
    words: str | None = None
    """The words of gate-rank-s5: all, swaps (transpositions alone), or mixed (one letter of eight is any element)."""
    save_every: int | None = None
    """Steps between checkpoints."""


@dataclass(frozen=True)
class Place(Execution):
    """Where and how the runs are done."""

    on: str = "local"
    """Where the runs are done: local, one after the other; ray, as many at once as this machine has room for (the
    extra sweep); ray://host:port, on that Ray cluster, whose machines must all see the folder under the same path (a
    shared file system); slurm, each as a job of Slurm (the extra slurm). A run whose worker or job dies continues from
    its last checkpoint, up to 5 times."""
    slurm: tuple[str, ...] = ()
    """Options of sbatch for --on slurm, as name=value: time=720 (minutes of a run, always needed) partition=gpu
    account=mine mem=16GB …."""
    cpus_per_run: int | None = None
    """Processors, and threads, of a run on Ray or Slurm. Default: 1."""
    gpus_per_run: float | None = None
    """GPUs of a run on Ray, from 0 to 1; with 0.5 two runs share one. Default: 1 if the cluster has GPUs, else 0. On
    Slurm a whole number; default: none."""
    worker_timeout: float | None = None
    """Seconds without a sign of life after which a worker of Ray is killed and its run continued. Default: 600."""


@dataclass(frozen=True)
class Compare:
    """Train models, test them in and beyond their training distribution, and write a table, figures and a report.

    The models learn one task or a mixture of tasks (--task), or a paper's experiment (--experiment). The folder
    runs/<time>-<name>/ gets results.csv, report.html, figures/, and one folder a run with its configuration, metrics
    and weights. An interrupted comparison continues with --resume DIR and reaches the same numbers.

    examples:
      halflife compare mamba2 mamba2+post gated_deltanet --task mqar --scale smoke
      halflife compare mamba2 simple+vector --task sysprompt niah:hard --scale small --seeds 3 --lr 1e-3 3e-3
      halflife compare mamba2+post mamba2+post+ska --set post.reference_length=512 training.weight_decay=0.05
      halflife compare --experiment echo-mqar --scale small --seeds 3
      halflife compare vector/mamba2 simple/0.99 --experiment decay-design --text corpus/*.txt
      halflife compare --experiment post-lm --scale paper --dry-run
      halflife compare --resume runs/20260101-120000-mqar-smoke
      halflife compare gla --resume runs/20260101-120000-mqar-smoke --lr 1e-3
    """

    models: Positional[tuple[str, ...]] = ()
    """Presets, base[+modifier…]; `halflife list` shows them. An experiment may add models and has its own default.
    'mamba2@state(mamba2+ska)' and 'mamba2@parameters(mamba2+ska)' are controls: mamba2 with as much state, or as many
    parameters."""
    task: tuple[str, ...] = ()
    """The task to learn, or several as a mixture: `name` or `name:tier` (niah:hard); `halflife list` shows them. All
    but mqar alone are trained on 128 token ids and tested on the grid --test-tasks × --lengths × --test-pairs. Default:
    mqar."""
    experiment: str | None = None
    """A paper's experiment, which brings its models. Recall and tracking: echo-transfer, echo-mqar, echo-tiers,
    echo-ablations, gate-rank-s5, gate-rank-mqar, gate-rank-niah, koopman-powers, mqar-updates, post-mqar,
    post-review, post-taken-apart, overview. Text: decay-design, decay-lm, post-lm, echo-lm, gate-rank-lm,
    post-taken-apart-text."""
    scale: str = "smoke"
    """smoke (minutes on 2 cores), small (an hour), paper or large (GPUs). Some experiments have more, such as
    paper-440m."""
    seeds: int = 1
    """The number of seeds, counted from 0, also with --resume. The table shows every seed."""
    tune_seeds: int | None = None
    """How many seeds try all learning rates; the others run at each model's best one. Default: all seeds try all."""
    lr: tuple[float, ...] = ()
    """Learning rates to try, or with --resume to add to the models that are named, or to all. The table marks the best
    on in-distribution validation. Default: those of the scale."""
    name: str | None = None
    """Name of that folder, after the time. Default: <task or experiment>-<scale>."""
    only_seeds: tuple[int, ...] = ()
    """Run only these seeds now, so that several processes can share the work."""
    settings: Settings = Settings()
    place: Place = Place()
    job: Job = field(default_factory=Job)

    def run(self) -> None:
        from halflife.lab.experiments import compare
        from halflife.report.table import show
        from halflife.report.tables.comparison import comparison_tables, rates_at_ends, recall_sketch
        from halflife.report.tables.estimate import describe_trial
        from halflife.report.tracking import track_options
        from halflife.runs.folder import REPORT_HTML, SUMMARY_MD
        from halflife.runs.sweep import RunsFailed, check_seeds
        from halflife.training.config import ExecutionConfig

        place, rows_held, quiet = self.place, self.place.micro_batch_size, self.job.quiet
        tracking = track_options(place.track)
        execution = ExecutionConfig(micro_batch_size=rows_held, recompute=place.recompute, **tracking)
        runner = self._runner()
        check_job(self, CONFIG_JSON, "only_seeds", *EXTENSION, *options_of(place))
        if self.job.resume is not None:
            folder = self.job.resume
            self._extend(folder)
        elif self.job.dry_run:
            return self._estimate()
        else:
            check_seeds(self.only_seeds, range(self.seeds))
            folder = compare.create_comparison(
                **self._choices(), output=self.job.output, name=self.name, command=command_line()
            )
        seeds, comparison = self.only_seeds or None, compare.Comparison.load(folder)
        say(f"writing to {folder}")
        if not quiet and (trial := comparison.try_runs(folder, seeds, rows_held)):
            say(describe_trial(trial, here=place.on in ("local", "ray")))
        failed: Mapping[str, str] = {}
        share = ["--only-seeds", *map(str, self.only_seeds)] if self.only_seeds else []
        command = to_type("compare", "--resume", str(folder), *share, *as_typed(place))
        with resumable(command, folder / CONFIG_JSON):
            try:
                rows = compare.run_comparison(
                    folder, comparison, only_seeds=seeds, show=not quiet, runner=runner, execution=execution
                )
            except RunsFailed as error:
                rows, failed = error.rows, error.failed
        if rows and comparison.experiment.measure == "loss":
            say((folder / SUMMARY_MD).read_text(encoding="utf-8"))
        elif rows:
            show(*comparison_tables(rows))
            say(recall_sketch(rows))
        for model, (rate, end, further) in rates_at_ends(rows).items():
            command = to_type("compare", model, "--resume", str(folder), "--lr", f"{further:g}")
            say(f"{model} is best at the {end} learning rate that it tried, {rate:g}; try one beyond it: {command}")
        if rows:
            say(f"report: {folder / REPORT_HTML}")
            if comparison.experiment.measure != "loss":
                say(_next_commands(folder, comparison))
        self._report_failures(rows, failed)

    def _runner(self) -> Runner:
        from halflife.runs.pool import make_runner
        from halflife.runs.slurm import SlurmRunner

        place = self.place
        if place.on == "slurm":
            if place.worker_timeout is not None:
                raise ValueError("--worker-timeout is for Ray; a job of Slurm ends with its time limit")
            return SlurmRunner(place.slurm, 1 if place.cpus_per_run is None else place.cpus_per_run, place.gpus_per_run)
        if place.slurm:
            raise ValueError("--slurm has the options of --on slurm; give both, or neither")
        return make_runner(
            place.on, cpus_per_run=place.cpus_per_run, gpus_per_run=place.gpus_per_run,
            worker_timeout=place.worker_timeout,
        )  # fmt: skip

    def _report_failures(self, rows: Sequence[Mapping[str, Any]], failed: Mapping[str, str]) -> None:
        """Name the runs that raised an error and the models whose runs all diverged, and end with an exit code."""
        diverged = {row["model"] for row in rows} - {row["model"] for row in rows if row["selected"]}
        lines = [f"{name} failed: {reason}" for name, reason in failed.items()]
        lines += [f"every run of {model} diverged; try a lower --lr" for model in sorted(diverged)]
        for line in lines:
            print(f"halflife: {line}", file=sys.stderr)
        if lines:
            raise SystemExit(EXIT_PARTLY_FAILED)

    def _extend(self, folder: Path) -> None:
        """Add the models, learning rates and seeds that are given with --resume to the comparison."""
        from halflife.lab.experiments import compare

        seeds = None if self.seeds == Compare.seeds else self.seeds
        if self.models or self.lr or seeds:
            compare.extend_comparison(folder, self.models, learning_rates=self.lr, seeds=seeds, command=command_line())

    def _estimate(self) -> None:
        from halflife.lab.experiments import compare
        from halflife.report.tables.estimate import describe_model, print_needs, print_plans
        from halflife.training.plan import Needs

        plan = compare.plan_comparison(**self._choices())
        needs = plan.estimate(self.place.micro_batch_size)
        models = {cell.model: describe_model(plan.configure(cell).model) for cell in plan.cells()}
        rates = {model: ", ".join(f"{rate:g}" for rate in rates) for model, rates in plan.learning_rates.items()}
        # A whole number of 0 stands for a value that is elsewhere, such as the width of `size`.
        chosen = {k: x for k, x in dataclasses.asdict(plan.settings).items() if type(x) is not int or x}
        settings = {f"{plan.label}, {plan.scale}": chosen, "models": models, "learning rates": rates}
        print_needs(settings, needs, plan.settings.bf16, plan.experiment.measure == "loss")
        if self.place.gpus is not None:
            for cell in {cell.model: cell for cell in plan.cells()}.values():
                config = plan.configure(cell)
                runs = Needs.of(config, max(config.sequences()), "blocks" in self.place.recompute)
                print_plans(runs, cell.model, self.place.gpus)

    def _choices(self) -> dict[str, Any]:
        """The arguments of `plan_comparison`."""
        from halflife.lab.experiments.base import RECIPE, ExperimentSettings
        from halflife.lab.experiments.values import convert

        command, overrides = take_overrides(self, OPTIONS)
        if "training.seed" in overrides:
            raise ValueError("training.seed cannot be set: a comparison runs the seeds of --seeds")
        settings = {name: value for name, value in options_of(command.settings).items() if value is not None}
        types = get_type_hints(ExperimentSettings)
        for name in RECIPE:  # settings of every experiment, which config.json then shows
            if (key := f"training.{name}") in overrides:
                settings[name] = convert(key, overrides.pop(key), types[name])
        return {
            "models": self.models, "tasks": self.task, "experiment": self.experiment, "scale": self.scale,
            "seeds": self.seeds, "tune_seeds": self.tune_seeds, "learning_rates": command.lr or None,
            "settings": settings, "overrides": overrides,
        }  # fmt: skip


def _next_commands(folder: Path, comparison: Comparison) -> str:
    """What to type next. Only models that were validated on a task of recall have a forecast."""
    from halflife.analysis.forecast.survey import RECALL_TASKS

    place = shlex.quote(str(folder))
    commands = {
        f"halflife look {place}": "see what a model keeps of a sequence, and what it reads",
        f"halflife diagnose {place}": "be told why each model forgets",
    }
    validated = [spec for cell in comparison.cells() for spec in getattr(comparison.configure(cell), "validation", ())]
    if any(spec["name"] in RECALL_TASKS for spec in validated):
        commands[f"halflife forecast {place}"] = "know how far each will recall"
    width = max(map(len, commands))
    return "\n".join(["next:", *(f"  {command:<{width}}  {purpose}" for command, purpose in commands.items())])
