"""The tables that `halflife compare` prints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from halflife.report.intervals import MIN_SEEDS, bootstrap
from halflife.report.table import Table, styled
from halflife.runs.records import IN_DISTRIBUTION, LAG, at_guess_level, mean, repeated_tests

BAR = 8  # characters of a bar
NAMED = 4  # models in a sentence
MAX_COLUMNS = 12  # columns of tests that fit a terminal


def comparison_tables(rows: Sequence[Mapping[str, Any]]) -> tuple[Table, Table]:
    """What was trained, and its accuracy on every test, in two tables that fit 80 columns, from `results.csv`."""
    repeated = repeated_tests(rows)
    keys, summary = {key: own for key, own in levels(rows).items() if key not in repeated}, summarise(rows)
    if len(keys) > MAX_COLUMNS:  # a grid: one column a test, the mean of its cells
        keys, summary = _over_lengths(keys), [{**row, "accuracy": _over_lengths(row["accuracy"])} for row in summary]
    lags = {(row["test"], row["length"]): row.get("lag", math.nan) for row in rows if row["test"] == LAG}
    runs, tests, notes = [], [], ["lr*: the learning rate with the best validation accuracy in distribution."]
    for row in summary:
        mark, style = "*" if row["selected"] else "", "bold" if isinstance(row["seed"], str) else ""
        rate, seed = f"{row['learning_rate']:g}{mark}", str(row["seed"])
        sizes = (f"{row['parameters']:,}", f"{row['state_size']:,}", speed(row["tokens_per_second"]))
        runs.append(styled(style, row["model"], rate, seed, *sizes))
        label = row["model"] if row["selected"] else f"{row['model']} {rate}"
        tests.append(styled(style, label, seed, *(_percent(row["accuracy"].get(key)) for key in keys)))
        if style:
            for end, values in _intervals(summary, row["model"], keys).items():
                tests.append(styled("dim", "", end, *map(_percent, values)))
    with_pairs = any(row["num_pairs"] not in (None, "") and not math.isnan(row["num_pairs"]) for row in rows)
    for i, level in enumerate(("chance", "ignoring the key" if with_pairs else "best guess")):
        tests.append(styled("dim", level, "", *(f"{100 * values[i]:.1f}" for values in keys.values())))
    if lost := _not_learned(rows):
        notes.append(f"not learned, in distribution at the level of a guess: {', '.join(lost)}.")
    if any(_intervals(summary, row["model"], keys) for row in summary):
        notes.append("low, high: the ends of the 95 % interval of a mean, by bootstrap over seeds.")
    notes.append("state: the numbers that a model stores of one sequence.")
    if any(test == "capacity" for test, _ in keys):
        also = "".join(f", also {_heading(*key, lags)}".replace("\n", " ") for key in sorted(repeated))
        notes.append(f"in: in distribution{also}. cap: `capacity`, K grows with T. Under it: T.")
        if lags:
            notes.append("lag: the training K. Under it: tokens from a value to its question, median.")
        else:
            notes.append("per: `persist`, the training K in T tokens, asked early for the most part.")
    elif any(length is None for _, length in keys):
        notes.append("in: in distribution. Other tests: means over the lengths and the numbers of pairs.")
    # The test in distribution has its length where models were trained at several.
    trained = [key for key in keys if key[0] == IN_DISTRIBUTION]
    headings = ["in" if trained == [key] else _heading(*key, lags) for key in keys]
    return (
        Table(("model", "lr", "seed", "parameters", "state", "tokens/s"), runs, title="runs"),
        Table(("model", "seed", *headings), tests, "\n".join(notes), "accuracy, %"),
    )


def _not_learned(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The models that are at the level of a guess in distribution, at their selected rates."""
    lost = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [r for r in rows if r["model"] == model and r["selected"] and r["test"] == IN_DISTRIBUTION]
        # Of the seeds that did not diverge, as in `Comparison.not_learned`.
        if own and at_guess_level(*(mean(row[column] for row in own) for column in ("accuracy", "shortcut_accuracy"))):
            lost.append(model)
    return lost


def _intervals(summary: Sequence[Mapping[str, Any]], model: str, keys: Iterable[Any]) -> dict[str, list[float | None]]:
    """The ends "low" and "high" of the 95 % interval of a model's mean on each test; empty for fewer than 3 seeds.

    They are None at a test that the model does not have.
    """
    seeds = [row for row in summary if row["model"] == model and row["selected"] and not isinstance(row["seed"], str)]
    runs = [row["accuracy"] for row in seeds if not any(map(math.isnan, row["accuracy"].values()))]
    if len(runs) < MIN_SEEDS:
        return {}
    found = [bootstrap([run[key] for run in runs]) if key in runs[0] else None for key in keys]
    return {"low": [one.low if one else None for one in found], "high": [one.high if one else None for one in found]}


def _over_lengths(cells: Mapping[tuple[str, int], Any]) -> dict[tuple[str, None], Any]:
    tests: dict[tuple[str, None], list[Any]] = {}
    for (test, _), value in cells.items():
        tests.setdefault((test, None), []).append(value)
    return {
        key: tuple(map(fmean, zip(*values, strict=True))) if isinstance(values[0], tuple) else fmean(values)
        for key, values in tests.items()
    }


def _heading(test: str, length: int | None, lags: Mapping[Any, float]) -> str:
    short = "in" if test == IN_DISTRIBUTION else test
    return short if length is None else f"{short[:3]}\n{lags.get((test, length), length):.0f}"


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per run, and for each model with several seeds one with the means of its selected runs.

    `accuracy[(test, length)]` of a row is the mean over the numbers of pairs. The "seed" of a row of means is "mean";
    seeds that diverged do not count, and then it is "mean of 2 of 3".
    """
    table: list[dict[str, Any]] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        runs: dict[tuple[float, int], dict[str, Any]] = {}
        for row in (r for r in rows if r["model"] == model):
            entry = runs.setdefault((row["learning_rate"], row["seed"]), {**row, "accuracy": {}})
            entry["accuracy"].setdefault((row["test"], row["length"]), []).append(row["accuracy"])
        for entry in runs.values():
            entry["accuracy"] = {key: fmean(cells) for key, cells in entry["accuracy"].items()}
        table.extend(runs.values())
        chosen = [entry for entry in runs.values() if entry["selected"]]
        whole = [entry for entry in chosen if not any(map(math.isnan, entry["accuracy"].values()))]
        if len(chosen) > 1 and whole:
            means = {key: fmean(e["accuracy"][key] for e in whole) for key in chosen[0]["accuracy"]}
            rates = [entry["tokens_per_second"] for entry in whole]
            label = "mean" if whole == chosen else f"mean of {len(whole)} of {len(chosen)}"
            table.append({**chosen[0], "seed": label, "accuracy": means, "tokens_per_second": mean(rates)})
    return table


def recall_by_lag(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Model → lag in tokens → the mean accuracy of its selected runs, the model that recalls most first.

    Runs that diverged do not count, and models with such runs are last, because their means are too good.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["test"] == LAG and row["selected"] and math.isfinite(row["accuracy"]):
            found.setdefault(row["model"], {}).setdefault(round(row["lag"]), []).append(row["accuracy"])
    means = {model: {lag: fmean(own) for lag, own in sorted(lags.items())} for model, lags in found.items()}
    lost = _diverged_seeds(rows)
    return dict(sorted(means.items(), key=lambda one: (one[0] in lost, -one[1][max(one[1])])))


def _diverged_seeds(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Model → how many of its selected runs diverged; models without such runs are left out."""
    lost = {(row["model"], row["seed"]) for row in rows if row["selected"] and math.isnan(row["accuracy"])}
    return dict(Counter(model for model, _ in lost))


def recall_sketch(rows: Sequence[Mapping[str, Any]]) -> str:
    """Recall by lag as bars of characters, and `recall_sentence`; "" without tests of the lag."""
    if not (recalled := recall_by_lag(rows)):
        return ""
    lags = sorted({lag for own in recalled.values() for lag in own})
    width = max(map(len, (*recalled, "recalled after")))
    lines = [f"{'recalled after':<{width}}  {'  '.join(f'{lag:<{BAR},}' for lag in lags)} tokens"]
    for model, own in recalled.items():
        bars = (_bar(own[lag]).ljust(BAR) if lag in own else " " * BAR for lag in lags)
        lines.append(f"{model:<{width}}  {'  '.join(bars)}".rstrip())
    return "\n".join([*lines, "", recall_sentence(rows)])


def recall_sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say how much models recall at the longest lag, the first of `NAMED` of them; "" without tests of the lag."""
    if not (recalled := recall_by_lag(rows)):
        return ""
    last = max(lag for own in recalled.values() for lag in own)
    guess = [row for row in rows if row["test"] == LAG and round(row["lag"]) == last]
    lost = {model: f" (without {count} diverged)" for model, count in _diverged_seeds(rows).items()}
    first, *others = [model for model, own in recalled.items() if last in own]
    said = [f"{first} still recalls {100 * recalled[first][last]:.0f} % of {guess[0]['num_pairs']:.0f} pairs"]
    said += [f"{model} {100 * recalled[model][last]:.0f} %" for model in others]
    said = [words + lost.get(model, "") for model, words in zip((first, *others), said, strict=True)]
    level, further = 100 * fmean(row["shortcut_accuracy"] for row in guess), ", others less" if said[NAMED:] else ""
    return (
        f"{last:,} tokens after a value, {', '.join(said[:NAMED])}{further}. "
        f"A guess among the values is right in {level:.0f} %."
    )


def _bar(share: float) -> str:
    """A share of `BAR` characters, in eighths of one."""
    eighths = round(8 * BAR * share)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def rates_at_ends(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, str, float]]:
    """The models whose best learning rate is the lowest or the highest of several that were tried in `results.csv`.

    Returns:
        model → (its best rate, "lowest" or "highest", the rate that would continue the grid).
    """
    found = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        best = {row["learning_rate"] for row in own if row["selected"]}
        tried = sorted({row["learning_rate"] for row in own})
        for end, (rate, inner) in {"lowest": tried[:2], "highest": tried[:-3:-1]}.items() if tried[1:] else ():
            if rate in best:
                found[model] = (rate, end, float(f"{rate * rate / inner:.1g}"))
    return found


def levels(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], tuple[float, float]]:
    """Return (test, length) → (accuracy by chance, accuracy of the best answer that ignores the key).

    Both are means over the numbers of pairs.
    """
    cells: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["test"], row["length"]), []).append(row)
    return {
        key: (fmean(row["chance"] for row in own), fmean(row["shortcut_accuracy"] for row in own))
        for key, own in cells.items()
    }


def speed(tokens_per_second: float) -> str:
    """A number of tokens per second, which is unknown after a resume from the last step."""
    return "–" if math.isnan(tokens_per_second) else f"{tokens_per_second:,.0f}"


def _percent(accuracy: float | None) -> str:
    if accuracy is None:
        return "–"  # the model does not have this test
    return "diverged" if math.isnan(accuracy) else f"{100 * accuracy:.1f}"
