"""Write the tables of the pages in docs/results from the files beside them.

    python docs/tables.py

A comment above a table says in YAML what it holds:

    <!-- table
    file: post_parts_gla.csv
    also: [rate]
    columns: {"T = 32, 8 pairs": capacity 32 8, "128, 32": capacity 128 32}
    -->

    | model | …

| key             | value                                                                                        |
|-----------------|----------------------------------------------------------------------------------------------|
| file            | a file of results, or several, one below the other; or file → its models, or its pairs       |
| models          | the rows; by default all models of the file                                                  |
| also            | columns after the model: parameters, state, rate                                             |
| columns         | heading → "TEST [LENGTH [PAIRS]]", an accuracy, "bits", of the test text at T, or of a file  |
|                 | of lengths "bits LENGTH" or "perplexity LENGTH"                                              |
| learned         | "TEST [LENGTH [PAIRS]]": the accuracy that says whether a model has learned                  |
| pairs           | heading of a row → a model, or [model, model that is subtracted], in the place of `models`   |

A difference is taken on the seeds that both models have; one of perplexities is in percent. Other tables have one key:

| key             | value                                                                                        |
|-----------------|----------------------------------------------------------------------------------------------|
| overview        | the `overview.json` of the experiment of this name                                           |
| forecast errors | what the models are → a `forecast.json`; errors of its forecasts by model                    |
| findings        | form → steps → a file of results of the decay grid; differences that the paper compares      |
| powers          | models and cells of koopman-powers                                                           |
| theory          | a topic of `halflife theory`, and which rows of which of its tables (see theory_tables.py)   |
| theory errors   | a `theory.json`; errors of spectra by T                                                      |
| steps           | a file of `halflife throughput`; milliseconds of training steps                              |
| ops             | rows of `make gpu`; milliseconds of ops                                                      |

A cell has the mean over seeds at the selected learning rate and its 95 % interval; the file has every seed. A model
says "not learned" below 90 % in the column `learned`, by default the first one if that is `in_distribution`.
Accuracies are in percent. A difference is bold if it is significant: Student's t test over the seeds, at 5 %.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import decay_tables
import differences
import forecasts
import numpy as np
import overview
import powers
import speed_tables
import theory_tables
import yaml
from claims import Files, results
from join import RESULTS

from halflife.files import read_json
from halflife.report.intervals import has_learned, with_interval
from halflife.report.table import Table

TABLE = re.compile(r"(<!-- table\n(.*?)-->\n\n)(?:\|[^\n]*\n)*\n*", re.DOTALL)
KEYS = {"file", "models", "also", "columns", "learned", "pairs"}
WHOLE: dict[str, Callable[[Any], str]] = {
    "overview": lambda file: overview.table(read_json(RESULTS / file)),
    "forecast errors": forecasts.errors,
    "findings": decay_tables.findings,
    "powers": powers.table,
    "theory": lambda wanted: theory_tables.table(**wanted),
    "theory errors": theory_tables.errors,
    "steps": speed_tables.steps,
    "ops": speed_tables.ops,
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
    also, columns = wanted.get("also", []), wanted["columns"]
    first = next(iter(columns.values()))
    learned = wanted.get("learned", first if first.startswith("in_distribution") else None)
    lines = []
    for file, own in _files(wanted):
        for name, model, base in _rows(file, own):
            sizes = [_size(file, model, each) for each in also]
            cells = [_cell(file, model, base, column) for column in columns.values()]
            if all(cell == "–" for cell in cells):
                raise ValueError(f"{file} has no results of {model} in {', '.join(columns.values())}")
            if learned is not None and base is None and not has_learned(_values(file, model, learned)):
                name += " (not learned)"
            lines.append([name, *sizes, *cells])
    return Table(["model", *also, *columns], lines).markdown()


def _files(wanted: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The files of a table, each with what its rows are."""
    if not isinstance(files := wanted["file"], Mapping):
        yield from ((file, wanted) for file in np.atleast_1d(files))
        return
    for file, rows in files.items():
        yield file, {**wanted, "pairs" if isinstance(rows, Mapping) else "models": rows}


def _rows(file: str, wanted: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """The heading of each row, its model, and the model that is subtracted."""
    if "pairs" in wanted:
        for name, pair in wanted["pairs"].items():
            yield (name, pair, None) if isinstance(pair, str) else (name, *pair)
        return
    for model in wanted.get("models") or dict.fromkeys(row["model"] for row in results(file)):
        yield f"`{model}`", model, None


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
            return with_interval(100 * values, 1) if _is_accuracy(column) else with_interval(values, 2)
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
    """One number per seed."""
    test, *sizes = column.split()
    if column == BITS:
        return Files().text_loss(file, model) / np.log(2)
    if not _is_accuracy(column):
        perplexities = Files().perplexity(file, model, *map(int, sizes))
        return perplexities if test == PERPLEXITY else np.log2(perplexities)
    return Files().accuracy(file, model, test, *map(int, sizes))


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
