"""Write the tables of the pages in docs/results from the files beside them.

    python docs/tables.py

A comment above a table says in YAML what it holds:

    <!-- table
    file: post_parts_gla.csv
    also: [rate]
    columns: {"T = 32, 8 pairs": capacity 32 8, "128, 32": capacity 128 32}
    -->

    | model | …

| key         | value                                                                                           |
|-------------|-------------------------------------------------------------------------------------------------|
| file        | a file of results, or several, one below the other; or file → its models, or its pairs          |
| models      | the rows; by default all models of the file                                                     |
| also        | columns after the model: parameters, state, rate                                                |
| words       | heading → model → text, for columns that no run gives                                           |
| rows        | heading of a row → its cells, for rows that no run gives, such as those of a paper              |
| columns     | heading → "TEST [LENGTH [PAIRS]]", an accuracy, "bits", of the test text at T, or of a file of  |
|             | lengths "bits LENGTH" or "perplexity LENGTH"                                                    |
| learned     | "TEST [LENGTH [PAIRS]]": the accuracy that says whether a model has learned                     |
| minus       | a model: differences to it, on the seeds that both have; of perplexities, in percent            |
| pairs       | heading of a row → [model, model that is subtracted], in the place of `models`                  |

Other tables have one key:

| key         | value                                                                                           |
|-------------|-------------------------------------------------------------------------------------------------|
| overview    | the `overview.json` of the experiment of this name                                              |
| forecast    | a `forecast.json`; models that were asked for pairs                                             |
| forecast errors | the same; its errors, by whether the half-lag was reached                                   |
| text forecast | the same; models that read a text                                                             |
| losses      | steps → a file of results of the decay grid; losses of its rows                                 |
| findings    | the same files; differences of losses that the paper's findings compare                         |
| regressions | steps → a `decay_regression.json`                                                               |
| decays      | the same, and row → what the paper says; medians of λ before and after training                 |
| powers      | models and cells of koopman-powers, and a test                                                  |
| timescales  | the position → a `timescales.csv`; time-scales before and after training                        |
| positions   | the `positions.csv` of gate-rank-s5; accuracy and loss by position                              |
| gates       | the `gates.csv` of an experiment of GateRank; its gates in the last steps of training            |
| theory      | a topic of `halflife theory`, and which rows of which of its tables (see theory_tables.py)       |
| theory errors | a `theory.json`; errors of spectra by T                                                       |
| steps       | a file of `halflife throughput`; milliseconds of training steps                                 |
| ops         | rows of `make gpu`; milliseconds of ops                                                         |
| at each rate | a file, a model to subtract and a column of accuracy; differences at each learning rate        |
| rates       | a file, a column of accuracy, and one at T that says what was learned; seed 0 at every rate     |

A cell has the mean over seeds at the selected learning rate, its 95 % interval and every seed. A model says "not
learned" below 90 % in the column `learned`, by default the first one if that is `in_distribution`. Accuracies are in
percent. A difference is bold if Student's t test over the seeds tells it from 0 at 5 %.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import decay_tables
import differences
import forecasts
import numpy as np
import powers
import speed_tables
import theory_tables
import yaml
from claims import Files, results
from join import RESULTS

from halflife.experiments import gate_rank_tables
from halflife.experiments.evidence import overview_page
from halflife.files import read_json
from halflife.report.intervals import has_learned, with_interval
from halflife.report.markdown import markdown
from halflife.report.tables import forecast

TABLE = re.compile(r"(<!-- table\n(.*?)-->\n\n)(?:\|[^\n]*\n)*\n*", re.DOTALL)
KEYS = {"file", "models", "also", "words", "rows", "columns", "learned", "minus", "pairs"}
WHOLE: dict[str, Callable[[Any], str]] = {
    "overview": lambda file: overview_page.table(read_json(RESULTS / file)),
    "forecast": lambda file: forecast.table(forecast.read_forecasts(RESULTS / file)["models"]).markdown(),
    "forecast errors": forecasts.errors,
    "text forecast": lambda file: forecast.text_table(forecast.read_forecasts(RESULTS / file)["texts"]).markdown(),
    "losses": decay_tables.losses,
    "findings": decay_tables.findings,
    "regressions": decay_tables.regressions,
    "decays": lambda wanted: decay_tables.decays(**wanted),
    "powers": powers.table,
    "timescales": lambda files: _timescales(files),
    "positions": lambda file: gate_rank_tables.by_position(results(file)),
    "gates": lambda file: gate_rank_tables.by_layer(results(file)),
    "theory": lambda wanted: theory_tables.table(**wanted),
    "theory errors": theory_tables.errors,
    "steps": speed_tables.steps,
    "ops": speed_tables.ops,
    "at each rate": lambda wanted: _at_each_rate(**wanted),
    "rates": lambda wanted: _rates(**wanted),
}
ALSO = {"parameters": "parameters", "state": "state_size", "rate": "learning_rate"}
PERPLEXITY, BITS = "perplexity", "bits"


def fill(page: str) -> str:
    """The page with every marked table written anew, and an empty line after it."""
    filled = TABLE.sub(lambda found: f"{found[1]}{table(yaml.safe_load(found[2]))}\n\n", page)
    return filled.rstrip("\n") + "\n"


def table(wanted: Mapping[str, Any]) -> str:
    """One table, as the comment before it asks for.

    Raises:
        ValueError: an unknown key, or a file that has none of the results of a row.
    """
    for key, write in WHOLE.items():
        if set(wanted) == {key}:
            return _signs(write(wanted[key]))
    if unknown := set(wanted) - KEYS:
        names = ", ".join(sorted({*KEYS, *WHOLE}))
        raise ValueError(f"a table has no {', '.join(sorted(unknown))}; it may have {names}")
    return _signs(_accuracies(wanted))


def _accuracies(wanted: Mapping[str, Any]) -> str:
    """A row for each model, or for each pair of models, and a column for each test."""
    words, also = wanted.get("words", {}), wanted.get("also", [])
    columns = wanted["columns"]
    first = next(iter(columns.values()))
    learned = wanted.get("learned", first if first.startswith("in_distribution") else None)
    lines = [[name, *map(str, cells)] for name, cells in wanted.get("rows", {}).items()]
    for file, own in _files(wanted):
        for name, model, base in _rows(file, own):
            sizes = [_size(file, model, each) for each in also]
            cells = [_cell(file, model, base, column) for column in columns.values()]
            if all(cell == "–" for cell in cells):
                raise ValueError(f"{file} has no results of {model} in {', '.join(columns.values())}")
            if learned is not None and base is None and not has_learned(_values(file, model, learned)):
                name += " (not learned)"
            lines.append([name, *(texts.get(model, "") for texts in words.values()), *sizes, *cells])
    return markdown(["model", *words, *also, *columns], lines, texts=["model", *words])


def _files(wanted: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The files of a table, each with what its rows are."""
    if not isinstance(files := wanted["file"], Mapping):
        yield from ((file, wanted) for file in np.atleast_1d(files))
        return
    for file, rows in files.items():
        yield file, {**wanted, "pairs" if isinstance(rows, Mapping) else "models": rows}


def _timescales(files: Mapping[int, str]) -> str:
    """Geometric means over seeds and layers of the fastest and slowest time-scale, and the range of their ratio."""
    lines = []
    for position, file in files.items():
        for model in dict.fromkeys(row["model"] for row in results(file)):
            cells: list[str] = []
            for when in ("initial", "trained"):
                scales = Files().timescales(file, model, when, position)
                fastest, slowest = scales.min(1), scales.max(1)
                ratios = slowest / fastest
                ends = [np.exp(np.log(values).mean()) for values in (fastest, slowest, ratios)]
                cells += [
                    f"{_three(ends[0])}, {_three(ends[1])}",
                    f"{_three(ends[2])} [{_three(ratios.min())}, {_three(ratios.max())}]",
                ]
            lines.append([f"`{model}`", *cells])
    return markdown(["model", "before: fastest, slowest", "ratio", "trained: fastest, slowest", "ratio"], lines)


def _rates(file: str, column: str, learned: str) -> str:
    """The accuracy of seed 0 at each rate, in bold at the chosen one, for models that have learned `learned`."""

    def found_at(test: str) -> dict[tuple[str, str], Mapping[str, str]]:
        """(model, rate) → the row of a test, of seed 0."""
        return {(row["model"], row["learning_rate"]): row for row in _tested(file, test) if row["seed"] == "0"}

    cells: dict[str, dict[float, str]] = {}
    trained = found_at(learned)
    for (model, rate), row in found_at(column).items():
        known = has_learned([float(trained[model, rate]["accuracy"])])
        text = f"{100 * float(row['accuracy']):.1f}" if known else "not learned"
        cells.setdefault(model, {})[float(rate)] = f"**{text}**" if row["selected"] == "True" else text
    rates = sorted({rate for found in cells.values() for rate in found})
    lines = [[f"`{model}`", *(found.get(rate, "–") for rate in rates)] for model, found in cells.items()]
    return markdown(["model", *(f"{rate:g}" for rate in rates)], lines)


def _at_each_rate(file: str, minus: str, column: str) -> str:
    """Differences of accuracy to a model at the same learning rate, on the seeds that both have run there."""
    found: dict[str, dict[float, dict[str, float]]] = {}
    for row in _tested(file, column):
        rates = found.setdefault(row["model"], {})
        rates.setdefault(float(row["learning_rate"]), {})[row["seed"]] = float(row["accuracy"])
    base = found.pop(minus)
    lines = []
    for model, rates in found.items():
        cells = []
        for rate in sorted(base):
            own = rates.get(rate, {})
            values, others = differences.paired(own, base[rate])
            every = ", ".join(f"{100 * x:.1f}" for x in values - others)
            several = f"{_difference(values, others)} ({every})" if len(values) > 1 else every
            cells.append(several or "–")
        lines.append([f"`{model}`", *cells])
    return markdown(["model", *(f"{rate:g}" for rate in sorted(base))], lines)


def _tested(file: str, test: str) -> Iterator[Mapping[str, str]]:
    """The rows of a "TEST LENGTH PAIRS", at every learning rate."""
    return (row for row in results(file) if " ".join((row["test"], row["length"], row["num_pairs"])) == test)


def _three(value: float) -> str:
    return f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def _rows(file: str, wanted: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """The heading of each row, its model, and the model that is subtracted."""
    if "pairs" in wanted:
        yield from ((name, *pair) for name, pair in wanted["pairs"].items())
        return
    base = wanted.get("minus")
    for model in wanted.get("models") or dict.fromkeys(row["model"] for row in results(file)):
        if model != base:
            yield f"`{model}`", model, base


def _size(file: str, model: str, name: str) -> str:
    row = next((row for row in results(file) if row["model"] == model and row["selected"] == "True"), None)
    if row is None:
        return "–"  # `_accuracies` says so
    value = float(row[ALSO[name]])
    return f"{value:g}" if name == "rate" else f"{value:,.0f}"


def _cell(file: str, model: str, base: str | None, column: str) -> str:
    try:
        values = _values(file, model, column)
        if base is None:
            return _mean(100 * values, 1) if _is_accuracy(column) else _mean(values)
        others = _values(file, base, column)
    except ValueError:
        return "–"  # this model has no such test
    own, theirs = _by_seed(file, model, values), _by_seed(file, base, others)
    own, theirs = differences.paired(own, theirs)
    if column.startswith(BITS):
        return differences.write(own - theirs, 2, "+")
    return _difference(own, theirs, relative=column.startswith(PERPLEXITY))


def _by_seed(file: str, model: str, values: np.ndarray) -> dict[str, float]:
    """Seed → its number, of `_values` of a model."""
    seeds = {row["seed"] for row in results(file) if row["model"] == model and row["selected"] == "True"}
    return dict(zip(sorted(seeds), values, strict=True))


def _is_accuracy(column: str) -> bool:
    return not column.startswith((PERPLEXITY, BITS))


def _values(file: str, model: str, column: str) -> np.ndarray:
    """One number a seed."""
    test, *sizes = column.split()
    if column == BITS:
        return Files().text_loss(file, model) / np.log(2)
    if not _is_accuracy(column):
        perplexities = Files().perplexity(file, model, *map(int, sizes))
        return perplexities if test == PERPLEXITY else np.log2(perplexities)
    return Files().accuracy(file, model, test, *map(int, sizes))


def _mean(values: Sequence[float] | np.ndarray, digits: int = 2) -> str:
    every = f" ({', '.join(f'{value:.{digits}f}' for value in values)})" if len(values) > 1 else ""
    return with_interval(values, digits) + every


def _difference(values: np.ndarray, others: np.ndarray, relative: bool = False) -> str:
    """The mean difference in points, or in percent of the others."""
    found = 100 * (values / others - 1 if relative else values - others)
    return re.sub(r"-(?=0\.0\b)", "", differences.write(found, 1))


def _signs(text: str) -> str:
    """Minus signs for the hyphens of numbers."""
    return re.sub(r"(?<![\w/])-(?=\d)", "−", text)


def main() -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in sorted(RESULTS.glob("*.md"))}
    changed = {page: new for page, old in pages.items() if (new := fill(old)) != old}
    for page, text in changed.items():
        page.write_text(text, encoding="utf-8")
    tables = sum(len(TABLE.findall(text)) for text in pages.values())
    print(f"{tables} tables, {len(changed)} pages changed")


if __name__ == "__main__":
    main()
