"""The report page of a comparison: findings, summary table, figures, settings and commands."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

from halflife.report.figures.comparison import comparison_figures
from halflife.report.numbers import MISSING, count, percent
from halflife.report.page.spectrum import explorer, without
from halflife.report.page.table import UNFINISHED, Cell, Row, Table
from halflife.runs.folder import IN_DISTRIBUTION, Comparison, Score, flatten, mean


class Column(NamedTuple):
    """A column of the summary table.

    Attributes:
        label: its heading.
        column: the attribute of `Score` that it shows.
        where: the scores that it averages, as `Comparison.select` takes them.
        show: how a number is printed.
        mark_best: whether the highest mean is marked.
    """

    label: str
    column: str
    where: dict[str, Any]
    show: Callable[[float], str]
    mark_best: bool


def comparison_page(run: Comparison) -> dict[str, Any]:
    """The variables of the page's template."""
    scale = run.config.get("scale", "")
    spectra = explorer({model: run.trainings_of(model) for model in run.models}, run.train_length)
    settings = {key: value for key, value in run.config.items() if key not in ("command", "settings")}
    return {
        "title": f"{', '.join(run.models)} on {run.config.get('task', 'a task')}",
        "kind": f"A halflife comparison{f' at scale {scale}' if scale else ''}",
        "finished": bool(run.scores),
        "findings": findings(run),
        "table": _table(run),
        "numbers": {},
        "figures": comparison_figures(run),
        "spectra": spectra,
        "without": without(run.models, spectra),
        "settings": flatten(settings | run.config.get("settings", {})),
        "versions": flatten(run.versions),
        "commands": {
            "Reproduce": run.config.get("command") or "unknown",
            "Resume": f"halflife compare --resume {shlex.quote(str(run.path))}",
        },
    }


# --------------------------------------------------------------------------------------------- findings


def findings(run: Comparison) -> list[str]:
    """For each test, which model is best at the greatest length and by how much."""
    return [_finding(run, test) for test in run.tests] or [UNFINISHED]


def _finding(run: Comparison, test: str) -> str:
    length = run.lengths(test)[-1]
    where = {"test": test, "length": length}
    seeds = {m: [run.mean(m, "accuracy", **where, seed=seed) for seed in run.seeds(m)] for m in run.models}
    scored = [model for model in run.models if _finite(seeds[model])]
    # A mean that leaves out diverged seeds is too good. Models with such seeds therefore rank last.
    ranked = sorted(scored, key=lambda model: (not _complete(seeds[model]), -mean(seeds[model])))
    task = f"In the test {test} at length {_in_lengths(run, length)}"
    if not ranked:
        return f"{task}, there are no numbers yet."
    shortcut = mean(score.shortcut_accuracy for score in run.scores if (score.test, score.length) == (test, length))
    best, *others = ranked
    if any(mean(seeds[model]) > shortcut for model in ranked):
        text = f"{task}, {best} is best with {_spread(seeds[best])}"
    else:
        text = f"{task}, no model beats the best answer that ignores the key. {best} has {_spread(seeds[best])}"
    if others:
        text += f", followed by {others[0]} with {_spread(seeds[others[0]])}"
        if min(_finite(seeds[best])) <= max(_finite(seeds[others[0]])):
            text += ". Their ranges overlap"
    return f"{text}. An answer that ignores the key reaches {percent(shortcut, 2)}."


def _spread(values: list[float]) -> str:
    """The mean over seeds, the number of seeds, and the lowest and highest value."""
    finite = _finite(values)
    if len(values) == 1:
        return f"{percent(finite[0])} (1 seed)"
    of = "" if len(finite) == len(values) else f" of {len(values)}"
    return f"{percent(mean(finite))} ({len(finite)}{of} seeds, {percent(min(finite))} to {percent(max(finite))})"


def _finite(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _complete(values: list[float]) -> bool:
    """Whether there are values and all of them are finite."""
    return bool(values) and len(_finite(values)) == len(values)


# ------------------------------------------------------------------------------------------------ table


def _columns(run: Comparison) -> list[Column]:
    plain = [
        Column("parameters", "parameters", {}, count, False),
        Column("state size", "state_size", {}, count, False),
        Column("tokens/s", "tokens_per_second", {}, count, True),
        Column("learning rate", "learning_rate", {}, lambda value: f"{value:.3g}", False),
        Column("in distribution", "accuracy", {"test": IN_DISTRIBUTION}, percent, True),
    ]
    by_length = [
        Column(_in_lengths(run, length), "accuracy", {"test": test, "length": length}, percent, True)
        for test in run.tests
        for length in run.lengths(test)
    ]
    return plain + by_length


def _table(run: Comparison) -> Table:
    levels = f" For comparison: {'; '.join(_levels(run))}." if run.scores else ""
    return Table(
        caption="Accuracy of each model, as a mean and for each seed, at the learning rate that validation selected. "
        f"The highest mean of a column is marked for accuracies and tokens/s.{levels}",
        first="model",
        columns=[column.label for column in _columns(run)],
        spans=[(f"{test}, by length in tokens", len(run.lengths(test))) for test in run.tests],
        groups=_groups(run),
    )


def _groups(run: Comparison) -> list[list[Row]]:
    """For each model, the row of its mean and one row for each seed."""
    columns = _columns(run)
    highest = [_highest(run, column) for column in columns]
    groups = []
    for model in run.models:
        seeds = run.seeds(model)
        means = [_cell(c, run.mean(model, c.column, **c.where), top) for c, top in zip(columns, highest, strict=True)]
        diverged = sum(not _complete([score.accuracy for score in run.select(model, seed=seed)]) for seed in seeds)
        counted = f"{len(seeds) - diverged} of {len(seeds)}" if diverged else str(len(seeds))
        rows = [Row(model, f"mean of {counted}" if seeds else "no results", means)]
        for seed in seeds:
            cells = [_cell(c, run.mean(model, c.column, **c.where, seed=seed)) for c in columns]
            rows.append(Row(f"seed {seed}", "", cells))
        groups.append(rows)
    return groups


def _highest(run: Comparison, column: Column) -> float:
    """The highest mean of a column among models without a diverged seed; NaN if there is only one model."""
    values = [[getattr(s, column.column) for s in run.select(model, **column.where)] for model in run.models]
    return max((mean(one) for one in values if _complete(one)), default=math.nan) if len(values) > 1 else math.nan


def _cell(column: Column, value: float, highest: float = math.nan) -> Cell:
    if not math.isfinite(value):
        return Cell(MISSING)
    # Printed numbers are compared, so that models with the same printed number are all marked.
    text = column.show(value)
    return Cell(text, value, column.mark_best and math.isfinite(highest) and text == column.show(highest))


def _levels(run: Comparison) -> list[str]:
    """Chance, and the best answer that ignores the key, for each test from its shortest to its longest length."""
    levels = []
    for test in dict.fromkeys(score.test for score in run.scores):
        scores = sorted((score for score in run.scores if score.test == test), key=lambda score: score.length)
        chance = _range(scores, lambda score: score.chance)
        shortcut = _range(scores, lambda score: score.shortcut_accuracy)
        levels.append(f"{test.replace('_', ' ')}: chance {chance}, best answer that ignores the key {shortcut}")
    return levels


def _range(scores: list[Score], read: Callable[[Score], float]) -> str:
    first, last = percent(read(scores[0]), 2), percent(read(scores[-1]), 2)
    return first if first == last else f"{first} to {last}"


def _in_lengths(run: Comparison, length: int) -> str:
    """A length in tokens and in training lengths, "512 (8T)"."""
    times = run.times(length)
    return f"{length:,} ({times})" if times else f"{length:,}"
