"""The report page of a comparison, on tasks or on text: findings, summary table, figures, settings and commands."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from halflife.files import RUN_JSON, flatten, read_json_object
from halflife.report.figures.data import UNFINISHED
from halflife.report.figures.decays import unit
from halflife.report.numbers import MISSING, count, percent
from halflife.report.page.spectrum import explorer
from halflife.report.table import GAP, Cell, Row, Table, pairs
from halflife.report.tables.comparison import levels, recall_sentence
from halflife.runs.folder import read_grid
from halflife.runs.records import IN_DISTRIBUTION, LAG, Comparison, mean, repeated_tests
from halflife.tasks import TASKS


class Column(NamedTuple):
    """A column of the summary table."""

    label: str  # its heading
    column: str  # the attribute of `Score` that it shows
    where: dict[str, Any]  # the scores that it averages, as `Comparison.select` takes them
    show: Callable[[float], str]  # how a number is printed
    best: Callable[..., float] | None  # `max` or `min`, which picks the mean that is marked; None to mark none


MAX_LISTED_MODELS = 8  # the most models that the title or a sentence lists
PARAMETERS = Column("parameters", "parameters", {}, count, None)
STATE_SIZE = Column("state size", "state_size", {}, count, None)
# It moves by a factor of 1.7 from run to run on a busy machine, so that no best one is marked.
SPEED = Column("tokens/s", "tokens_per_second", {}, count, None)
LEARNING_RATE = Column("learning rate", "learning_rate", {}, lambda value: f"{value:.3g}", None)
GRID_COLUMNS = [Column("test loss", "loss", {}, "{:.4f}".format, min), PARAMETERS, STATE_SIZE, SPEED, LEARNING_RATE]


def comparison_page(run: Comparison) -> dict[str, Any]:
    """The variables of the page's template, without the figures."""
    first = [said] if (said := recall_sentence([vars(score) for score in run.scores])) else []
    said = [*first, *findings(run), *not_learned(run), *about(run)]
    return {**sweep_page(run, said[:1], _table(run)), "notes": said[1:]}


def about(run: Comparison) -> list[str]:
    """Say what the tasks are, and at which steps the curriculum makes them harder, where the loss jumps."""
    first = next((one for one in run.trainings if (one.path / RUN_JSON).exists()), None)
    config = read_json_object(first.path / RUN_JSON) if first else {}
    stages, said = config.get("stages", []), []
    for name in dict.fromkeys(task["name"] for stage in stages for task in stage if task.get("name") in TASKS.names()):
        said.append(f"The task {name}. {TASKS.summary(name).replace('`', '')}")
    begins = [i * config.get("steps", 0) // len(stages) for i in range(1, len(stages)) if stages[i] != stages[i - 1]]
    if begins:
        steps = " and ".join(f"step {step:,}" for step in begins)
        said.append(f"Training goes from easier to harder tasks, so the loss jumps after {steps}.")
    return said


def not_learned(run: Comparison) -> list[str]:
    """Name the models that are at the level of a guess."""
    models = [model for model in run.models if run.not_learned(model)]
    further = f" and {len(models) - MAX_LISTED_MODELS} more" if len(models) > MAX_LISTED_MODELS else ""
    lost = ", ".join(models[:MAX_LISTED_MODELS]) + further
    said = f"Not learned: {lost}. In distribution the accuracy is that of a guess, so other columns say nothing."
    return [said] if lost else []


def sweep_page(run: Comparison, findings: list[str], table: Table) -> dict[str, Any]:
    """What the pages of a comparison and of a grid share, with what each says about its results."""
    scale = run.config.get("scale", "")
    settings = {key: value for key, value in run.config.items() if key not in ("command", "settings")}
    return {
        "title": f"{listed(run.models)} on {run.config.get('task', 'a task')}",
        "kind": f"A halflife comparison{f' at scale {scale}' if scale else ''}",
        "finished": bool(run.scores), "findings": findings, "table": table, "models": run.models,
        "spectra": explorer({model: run.trainings_of(model) for model in run.models}, run.train_length),
        "settings": pairs("Settings", flatten(settings | run.config.get("settings", {}))),
        "versions": pairs("Versions", flatten(run.versions)),
        "commands": {
            "Reproduce": run.config.get("command") or "unknown",
            "Resume": f"halflife compare --resume {shlex.quote(str(run.path))}",
        },
    }  # fmt: skip


def listed(models: Sequence[str]) -> str:
    """The names of models for a title, or how many they are."""
    return ", ".join(models) if len(models) <= MAX_LISTED_MODELS else f"{len(models)} models"


def findings(run: Comparison) -> list[str]:
    """Return a sentence for each test: which model is best at the greatest length and by how much."""
    return [_finding(run, test) for test in run.tests] or [UNFINISHED]


def _finding(run: Comparison, test: str) -> str:
    length = run.lengths(test)[-1]
    where = {"test": test, "length": length}
    seeds = {m: [run.mean(m, "accuracy", **where, seed=seed) for seed in run.seeds(m)] for m in run.models}
    scored = [model for model in run.models if _finite(seeds[model])]
    # A mean that leaves out diverged seeds is too good. Models with such seeds therefore rank last.
    ranked = sorted(scored, key=lambda model: (not _complete(seeds[model]), -mean(seeds[model])))
    at = _varied(run, test, length)
    task = f"In the test {test} at " + (f"a median lag of {at} tokens" if test == LAG else f"length {at}")
    if not ranked:
        return f"{task}, every run diverged."
    shortcut = mean(score.shortcut_accuracy for score in run.scores if (score.test, score.length) == (test, length))
    best, *others = ranked
    if any(mean(seeds[model]) > shortcut for model in ranked):
        text = f"{task}, {best} is best with {spread(seeds[best])}"
    else:
        text = f"{task}, no model beats the {run.guess(test)}. {best} has {spread(seeds[best])}"
    if others:
        text += f", followed by {others[0]} with {spread(seeds[others[0]])}"
        if min(_finite(seeds[best])) <= max(_finite(seeds[others[0]])):
            text += ". Their ranges overlap"
    return f"{text}. The {run.guess(test)} reaches {percent(shortcut, 2)}."


def spread(values: list[float], show: Callable[[float], str] = percent) -> str:
    """The mean over seeds, the number of seeds, and the lowest and highest value."""
    finite = _finite(values)
    if len(values) == 1:
        return f"{show(finite[0])} (1 seed)"
    of = "" if len(finite) == len(values) else f" of {len(values)}"
    return f"{show(mean(finite))} ({len(finite)}{of} seeds, {show(min(finite))} to {show(max(finite))})"


def _finite(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _complete(values: list[float]) -> bool:
    return bool(values) and len(_finite(values)) == len(values)


def _columns(run: Comparison) -> list[Column]:
    """In distribution first, then the tests by length, then sizes and speed."""
    lengths = run.lengths(IN_DISTRIBUTION)
    inside = {"test": IN_DISTRIBUTION}
    by_length = [
        Column(_varied(run, test, length), "accuracy", {"test": test, "length": length}, percent, max)
        for test, tested in _tests(run).items()
        for length in tested
    ]
    label = _in_lengths(run, lengths[0]) if len(lengths) == 1 else "mean"
    sizes = [PARAMETERS, STATE_SIZE, SPEED, LEARNING_RATE]
    return [Column(label, "accuracy", inside, percent, max), *by_length, *sizes]


def _tests(run: Comparison) -> dict[str, list[int]]:
    """Test → its lengths, without the tests that repeat the one in distribution."""
    repeated = repeated_tests(map(vars, run.scores))
    tests = {test: [n for n in run.lengths(test) if (test, n) not in repeated] for test in run.tests}
    return {test: lengths for test, lengths in tests.items() if lengths}


def _table(run: Comparison) -> Table:
    known = f" For comparison: {'; '.join(_levels(run))}." if run.scores else ""
    if repeated := repeated_tests(map(vars, run.scores)):
        names = " and ".join(f"{test} at {length:,} tokens" for test, length in sorted(repeated))
        known = f" The test in distribution is also {names}.{known}"
    tests, varied = _tests(run).items(), {LAG: "median lag"}
    return Table(
        ["model", *(column.label for column in _columns(run))],
        rows_of_models(run, _columns(run), "accuracy"),
        "Accuracy of each model, as a mean and for each seed, at the learning rate that validation selected. "
        f"The highest mean of a column is marked.{known}",
        spans=[
            ("in distribution", 1),
            *((f"{test}, by {varied.get(test, 'length')} in tokens", len(n)) for test, n in tests), ("", 4),
        ],
    )  # fmt: skip


def rows_of_models(run: Comparison, columns: list[Column], measure: str) -> list[Row]:
    """Return a group for each model, with the row of its mean and one row for each seed; of a single seed, one row.

    The attribute `measure` of `Score`, "accuracy" or "loss", is NaN if a run diverged.
    """
    best = [_best(run, column) for column in columns]
    rows: list[Row] = []
    for model in run.models:
        seeds = run.seeds(model)
        means = [_cell(c, run.mean(model, c.column, **c.where), top) for c, top in zip(columns, best, strict=True)]
        measured = [[getattr(score, measure) for score in run.select(model, seed=seed)] for seed in seeds]
        diverged = sum(not _complete(values) for values in measured)
        counted = f"{len(seeds) - diverged} of {len(seeds)}" if diverged else str(len(seeds))
        lost = ", not learned" * (measure == "accuracy" and run.not_learned(model))
        if len(seeds) == 1:  # its row would repeat the mean
            rows += [[Cell(model, note=f"seed {seeds[0]}{', diverged' if diverged else lost}"), *means], GAP]
            continue
        nothing = "every run diverged" if any(score.model == model for score in run.scores) else "no results"
        rows.append([Cell(model, note=f"mean of {counted}{lost}" if seeds else nothing), *means])
        for seed in seeds:
            rows.append([f"seed {seed}", *(_cell(c, run.mean(model, c.column, **c.where, seed=seed)) for c in columns)])
        rows.append(GAP)
    return rows


def _best(run: Comparison, column: Column) -> float:
    """The best mean of a column among models without a diverged seed; NaN if there is only one model or no best."""
    values = [[getattr(s, column.column) for s in run.select(model, **column.where)] for model in run.models]
    if column.best is None or len(values) < 2:
        return math.nan
    return column.best((mean(one) for one in values if _complete(one)), default=math.nan)


def _cell(column: Column, value: float, best: float = math.nan) -> Cell:
    if not math.isfinite(value):
        return Cell(MISSING)
    # Printed numbers are compared, so that models with the same printed number are all marked.
    text = column.show(value)
    return Cell(text, value, "bold" if math.isfinite(best) and text == column.show(best) else "")


def _levels(run: Comparison) -> list[str]:
    """Chance, and the best answer that ignores the key, for each test from its shortest to its longest length."""
    found, texts = levels([vars(score) for score in run.scores]), []
    for test in dict.fromkeys(test for test, _ in found):
        ends = [found[test, run.lengths(test)[i]] for i in (0, -1)]
        chance, shortcut = (" to ".join(dict.fromkeys(percent(x, 2) for x in each)) for each in zip(*ends, strict=True))
        texts.append(f"{test.replace('_', ' ')}: chance {chance}, {run.guess(test)} {shortcut}")
    return texts


def _varied(run: Comparison, test: str, length: int) -> str:
    """What a test varies, at one of its lengths: the median lag, or the length."""
    return f"{run.lag(test, length):,g}" if test == LAG else _in_lengths(run, length)


def _in_lengths(run: Comparison, length: int) -> str:
    """A length in tokens and in training lengths, "512 (8T)"."""
    times = run.times(length)
    return f"{length:,} ({times})" if times else f"{length:,}"


def decay_grid_page(run: Comparison) -> dict[str, Any]:
    """The variables of the page's template, without the figures."""
    data = read_grid(run.path)
    return sweep_page(run, grid_findings(data, unit(run)), _grid_table(run, data["paper"]))


def grid_findings(data: dict[str, Any], unit: str = "byte") -> list[str]:
    """The model with the lowest loss, and for each finding of the paper whether it holds."""
    losses = {name: [seed["test"] for seed in seeds.values()] for name, seeds in data["results"].items()}
    if not losses:
        return [UNFINISHED]
    seeds = max(map(len, losses.values()))
    # A mean that leaves out diverged seeds is too good. Models with such seeds therefore rank last.
    best = min(losses, key=lambda name: (len(losses[name]) < seeds, mean(losses[name])))
    losses[best] += [math.nan] * (seeds - len(losses[best]))
    text = f"{best} has the lowest test loss in nats a {unit}, {spread(losses[best], '{:.4f}'.format)}."
    return [text, *data["findings"]]


def _grid_table(run: Comparison, papers: dict[str, float | None]) -> Table:
    return Table(
        ["model", GRID_COLUMNS[0].label, "paper's loss", *(column.label for column in GRID_COLUMNS[1:])],
        [_with_paper(row, papers) for row in rows_of_models(run, GRID_COLUMNS, "loss")],
        f"Test loss of each model in nats a {unit(run)}, as a mean and for each seed. The paper's loss is in "
        "nats a token. The lowest loss is marked.",
    )


def _with_paper(row: Row, papers: dict[str, float | None]) -> Row:
    """The row with the paper's loss in the third column."""
    paper = papers.get(row[0].text) if row and isinstance(row[0], Cell) else None
    return [*row[:2], Cell(MISSING) if paper is None else Cell(f"{paper:.3f}", paper), *row[2:]] if row else row
