"""What the report page of a comparison says: findings, the summary table, captions, commands."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

from halflife.report.page.comparison_plots import plots
from halflife.report.page.spectrum import explorer, without
from halflife.report.page.table import NOTHING, UNFINISHED, Cell, Row, Table, count, percent
from halflife.runs.folder import IN_DISTRIBUTION, Comparison, Score, flatten, mean


class Column(NamedTuple):
    """One number of the summary table, read from the scores of one seed or all seeds of a model."""

    label: str
    column: str
    where: dict[str, Any]
    show: Callable[[float], str]
    best: bool  # whether the highest mean is emphasised


def page(run: Comparison) -> dict[str, Any]:
    """What the template prints, by name."""
    scale = run.config.get("scale", "")
    trainings = {model: run.trainings_of(model) for model in run.models}
    spectra = explorer(trainings, run.train_length)
    settings = {key: value for key, value in run.config.items() if key not in ("command", "settings")}
    return {
        "title": f"{', '.join(run.models)} on {run.config.get('task', 'a task')}",
        "kind": f"A halflife comparison{f' at scale {scale}' if scale else ''}",
        "finished": bool(run.scores),
        "findings": findings(run),
        "table": _table(run),
        "numbers": {},
        "plots": plots(run),
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
    """One sentence a test: which model recalls best at the greatest length, and by how much."""
    return [_finding(run, test) for test in run.tests] or [UNFINISHED]


def _finding(run: Comparison, test: str) -> str:
    length = run.lengths(test)[-1]
    where = {"test": test, "length": length}
    seeds = {m: [run.mean(m, "accuracy", **where, seed=seed) for seed in run.seeds(m)] for m in run.models}
    scored = [model for model in run.models if _finite(seeds[model])]
    # The mean of the seeds that did not diverge flatters a model: it ranks behind those that lost none.
    ranked = sorted(scored, key=lambda model: (not _whole(seeds[model]), -mean(seeds[model])))
    heading = f"{test.capitalize()}, {_length(run, length)}"
    if not ranked:
        return f"{heading}: no numbers yet."
    guess = mean(s.shortcut_accuracy for s in run.scores if (s.test, s.length) == (test, length))
    best, *others = ranked
    verdict = "best is" if any(mean(seeds[m]) > guess for m in ranked) else "no model beats the guess; the highest is"
    text = f"{heading}: {verdict} {best} with {_spread(seeds[best])}"
    if others:
        overlap = min(_finite(seeds[best])) <= max(_finite(seeds[others[0]]))
        text += f", then {others[0]} with {_spread(seeds[others[0]])}" + ("; their seeds overlap" if overlap else "")
    return text + f". Guessing gives {percent(guess, 2)}."


def _spread(values: list[float]) -> str:
    """Mean, and how many seeds between which extremes."""
    finite = _finite(values)
    of = "" if len(finite) == len(values) else f" of {len(values)}"
    if len(values) == 1:
        return f"{percent(finite[0])} (1 seed)"
    return f"{percent(mean(finite))} ({len(finite)}{of} seeds, {percent(min(finite))} to {percent(max(finite))})"


def _finite(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _whole(values: list[float]) -> bool:
    """Whether there are values and every seed has one."""
    return bool(values) and len(_finite(values)) == len(values)


# ------------------------------------------------------------------------------------------------ table


def _columns(run: Comparison) -> list[Column]:
    plain = [
        Column("parameters", "parameters", {}, count, False),
        Column("state floats", "state_size", {}, count, False),
        Column("tokens/s", "tokens_per_second", {}, count, True),
        Column("learning rate", "learning_rate", {}, lambda value: f"{value:.3g}", False),
        Column("in distribution", "accuracy", {"test": IN_DISTRIBUTION}, percent, True),
    ]
    swept = [
        Column(_length(run, length), "accuracy", {"test": test, "length": length}, percent, True)
        for test in run.tests
        for length in run.lengths(test)
    ]
    return plain + swept


def _table(run: Comparison) -> Table:
    levels = f" Levels to compare with: {'; '.join(_levels(run))}." if run.scores else ""
    return Table(
        caption="Accuracy of each model, mean and single seeds, at the learning rate selected on in-distribution "
        f"validation. Marked: the highest mean of a column, of accuracies and tokens a second.{levels}",
        first="model",
        columns=[column.label for column in _columns(run)],
        spans=[(f"{test}, by length in tokens", len(run.lengths(test))) for test in run.tests],
        groups=_groups(run),
    )


def _groups(run: Comparison) -> list[list[Row]]:
    """Per model: its mean row and one row a seed."""
    columns = _columns(run)
    tops = [_top(run, column) for column in columns]
    groups = []
    for model in run.models:
        seeds = run.seeds(model)
        means = [_cell(c, run.mean(model, c.column, **c.where), top) for c, top in zip(columns, tops, strict=True)]
        lost = sum(not _whole([score.accuracy for score in run.select(model, seed=seed)]) for seed in seeds)
        counted = f"{len(seeds) - lost} of {len(seeds)}" if lost else str(len(seeds))
        rows = [Row(model, f"mean of {counted}" if seeds else "no results", means)]
        for seed in seeds:
            cells = [_cell(c, run.mean(model, c.column, **c.where, seed=seed)) for c in columns]
            rows.append(Row(f"seed {seed}", "", cells))
        groups.append(rows)
    return groups


def _top(run: Comparison, column: Column) -> float:
    """The highest mean of a column among models that lost no seed; NaN where there is nothing to compare."""
    chosen = [[getattr(s, column.column) for s in run.select(model, **column.where)] for model in run.models]
    return max((mean(values) for values in chosen if _whole(values)), default=math.nan) if len(chosen) > 1 else math.nan


def _cell(column: Column, value: float, top: float = math.nan) -> Cell:
    if not math.isfinite(value):
        return Cell(NOTHING)
    # Compared as printed: what reads the same is equally good.
    text = column.show(value)
    return Cell(text, value, column.best and math.isfinite(top) and text == column.show(top))


def _levels(run: Comparison) -> list[str]:
    """Chance and guess of each test, from its shortest to its longest length."""
    levels = []
    for test in dict.fromkeys(score.test for score in run.scores):
        scores = sorted((s for s in run.scores if s.test == test), key=lambda s: s.length)
        levels.append(
            f"{test.replace('_', ' ')}: chance {_range(scores, 'chance')}, guess {_range(scores, 'shortcut_accuracy')}"
        )
    return levels


def _range(scores: list[Score], name: str) -> str:
    first, last = percent(getattr(scores[0], name), 2), percent(getattr(scores[-1], name), 2)
    return first if first == last else f"{first} to {last}"


# ----------------------------------------------------------------------------------------- small things


def _length(run: Comparison, length: int) -> str:
    times = run.times(length)
    return f"{length:,} ({times})" if times else f"{length:,}"
