"""Write docs/claims.md from docs/claims.yaml and the files of docs/results.

    python docs/claims.py            writes the page, in a second
    python docs/claims.py --costs    first estimates what the open claims would cost, in a minute

A claim of claims.yaml has rules, which are Python expressions over the files of results. The verdict follows from them:
"holds" if all are true, "fails" if none is, and "holds in part" otherwise. It is "open" if a claim has no rules, if a
file lacks a model that a rule reads, if a condition under `given` is false, or if a comparison of trained models lacks
seeds, learning rates or a fair chance (CONTRIBUTING.md, "Claims"). The numbers of the page are formatted expressions
over the same files. Expressions may name:

    theory, theory_rfc         theory.json, theory_rfc.json
    value("mask rank")         a statement of theory.json
    slopes("linear", "power")  a column of theory.errors.slopes for one spectrum, by length
    accuracy(file, model, test, length, pairs)    one number per seed, at the selected learning rate
    text_loss(file, model)     the loss on the test text in nats a byte, one number per seed
    loss_above(variant, base)  test losses of a row of the decay grid minus those of another, [budgets, seeds of both]
    parameters(variant)        of the decay grid
    best_median()              [budgets, 3], the median λ of the smallest loss after training, and its interval
    decays(row)                the trained median λ of a row of the decay grid `[budgets, seeds]`; also at its "init"
    medians("/lightnet")       the trained median λ of every run of the decay grid whose row ends so, at both budgets
    perplexity(file, model, length)    of the last T tokens of texts of this length, one number per seed
    perplexity_over(file, model, base, length)    the quotient of two of them, of every seed that both have
    loss_from(file_positions, model, first)    in nats, at the span of positions that starts there, one number per seed
    validated(file_steps, model, step)    the accuracy on validation data after a step of training, one number per seed
    step(file, model, length)  seconds of a training step, from `halflife throughput`; timed(file) is what was timed
    op(file, name, length)     seconds of an op with its backward pass, from `make gpu`
    timescales(file, model, "trained", position)    [seeds · layers, channels], in the model's order; also "initial"
    low(x), high(x)            the ends of the bootstrap interval of the mean of x; of a matrix, of the row furthest out
    percent(x), plain(x)       the mean and its interval, in percent or as it is
    signed(x)                  the mean and its interval at each budget of the decay grid, with the sign
    by_layer(x)                the mean and its interval in each layer, with the sign
    learned(file, model)       whether a model has learned its training task
    mark(file, model)          " (not learned)", or nothing
    measured(file, model)      whether a file has a model, such as a control
    steps(x)                   quotients of neighbouring values
    list_of(x)                 the values of a dict
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import differences  # beside this file
import numpy as np
import yaml
from join import RESULTS, read_table  # beside this file
from papers import ROWS  # beside this file

from halflife.lab.experiments.decay_rows import as_run
from halflife.report.intervals import MIN_SEEDS, bootstrap, has_learned, with_interval

DOCS = Path(__file__).parent
PAGE, COSTS = DOCS / "claims.md", RESULTS / "claims_costs.json"
# The decay grid as its authors ran it: losses at two budgets, and decays at the larger one with their regression.
GRID, DECAYS = ("decay_released.csv", "decay_released_double.csv"), "decay_regression_released.json"
THEORY = ("theory", "theory_rfc")  # files of `halflife theory`
VERDICTS = ("holds", "holds in part", "fails", "open")
MOST_MODELS = 16  # that a claim names one by one
RATES = 3  # learning rates that a comparison of trained models has at least, but at the paper's own rate and setting
OWN_SETTING = {"--experiment", "--scale", "--seeds", "--tune-seeds", "--lr"}  # options that leave the paper's setting
H200 = 989e12 * 0.4  # operations a second of an H200 in bfloat16, at 40 % of its peak

COSTLY = """\
The cost is the number of operations at 40 % of the peak of an H200 (bfloat16); small models reach less. Zero-shot
scores and needles of language models take `halflife eval FOLDER --tasks post-lm s-niah` for each of them afterwards,
with `gate-rank-lm` or `echo-lm` in the place of `post-lm` for the runs of that name. Commands without a cost take
minutes; that of `theory` reads the models of `post-lm`."""
SLIPS = """\
* PoST, §6.2 says that PoST finds more needles with Mamba-2 "particularly as context length grows". In Table 4 its gain
  in the mean of six needles is 21.7, 12.8 and 3.2 points at 1K, 2K and 4K tokens (180M), and 3.9, 9.5 and −2.8 (440M).
* PoST, Table 3 calls PoST consistently better in the average. Mamba-2 of 180M has 38.8 for 38.7, and the perplexity
  of LAMBADA is higher with PoST in three pairs of four.
* PoST, §5.5 gives GLA a fixed scalar decay per head. GLA has a vector decay that the token sets.
* PoST, Table 8 has base logits of RWKV-7 from −5.5 to 5.5. §5.3 says that 0.5 for the fastest matches RWKV-7, whose
  own logits go from −8 to 3.
* PoST, Figures 1 and 2 have time-scales e^−A. By Algorithm 2 A is −e^p, and the time-scale e^−p.
* PoST, the proof of Proposition 4.16 has the mean gap as the common difference at t_ref. By its equation it is the mean
  gap plus log t_ref / (N − 1).
* PoST, the proof of Lemma 3.6 needs products of powers of two integers to be dense. With powers that are not negative
  they are integers.
* Echo, Table 3 has means of 54.4, 76.2 and 81.1. The means of its cells are 53.3, 75.7 and 80.5.
* Echo, §5.3 has 44.0 for the 44.3 of Table 4 (HellaSwag). §7 compares with GPT-2, which the table has not.
* Echo, §6.2 has r = 56 for the 180M model and §3.4 has 48. The states of SKA have 952 or 742 kB by its formula, and
  the text has 77.
* Echo, §4.1 counts system prompts and tool traces, its training tasks, among the tasks that a model was "never
  trained on".
* Echo, G.4 trains on system prompts for 6,000 steps, and H.2 shows "the full 2,000 steps".
* Echo, Figure 1 says that SKA has the highest accuracy "across all settings". In Table 2, at 128 tokens, attention has
  97.4 % and SKA 89.4.
* Echo, §5.2 fine-tunes the models of MQAR, and §4.2 trains them. Ours start from scratch.
* GateRank, Table 2 has averages of 54.41 and 42.82 for Mamba-2 at 2K and 4K. The means of its cells are 53.71 and
  42.26.
* GateRank, §5.1 calls a WikiText perplexity of 20.79 → 21.12 an improvement, and has 81.20 for the 81.60 of Table 1
  (SCIQ of Gated DeltaNet).
* GateRank, §5.2 says that GateRank "consistently" outperforms on multi-query needles. In Table 2 Mamba-2 is ahead of
  it at all three lengths.
* GateRank, §3.2 has log α > 0 for resets. By Eq. 8 it is at most 0.
* GateRank, Listing 2 gives Λ only with a strictly lower `lower_diag_mask`.
* GateRank, Eq. 6 reads the state with keys. The text and Eq. 18 have queries.
* Decay, §5.5 says that Simple Decay with p = 0.9 is behind Mamba-2. In Table 3 its loss is 2.512, and that of Mamba-2
  2.514.
* Decay, §5.4 calls the effect of TPE negligible for all but LightNet. In Table 6 TPE lowers the losses of the four
  others by 0.018 to 0.029, and a vector decay that of Mamba-2 by 0.013.
* Decay, §5.6 has DPLR without a decay last "across all metrics". In Table 9, at 160M, its LAMBADA perplexity is 120.0,
  and that of a scalar decay with p = 0 is 121.8.
* Decay, Table 7 has the perplexities and accuracies of Table 6 in the row of HGRN2 with TPE.
* Decay, Eq. 5 gives every head a W_d2 of its own, d² numbers in all. The text counts 2d(d/h) for W_d2 and W_d3, as if
  all heads shared it."""
COMMANDS = """\
Where the best rate lay at an end of the grid, more rates were added with `--resume FOLDER --lr RATE`, and
where seeds overlap more seeds with `--only-seeds 3 4`. The pages of the results have every command."""
EXPRESSIONS = """\
A rule is an expression over the files; `docs/claims.py` says what its names are. `value` reads a number of
`halflife theory`, topic `statements`."""


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, as claims.yaml has it.

    Attributes:
        where: the place in the paper.
        says: the statement in plain words.
        rules: expressions; see the module.
        number: the text of the column "number", with expressions in braces. All digits are in braces.
        given: expressions without which the claim is open, and for each the words that say so. Those of `learned` and
            `measured` have words of their own.
        note: a sentence about the verdict.
        settle: the command of the run that would settle an open claim.
        fair: whether the runs gave the paper a fair chance: its setting as far as it can run, and twice the steps.
            Without it, a claim about trained models is open and does not fail.
        names: local names → expressions, for `rules`, `given` and `number`.
    """

    where: str
    says: str
    rules: tuple[str, ...] = ()
    number: str = ""
    given: dict[str, str] = field(default_factory=dict)
    note: str = ""
    settle: str = ""
    fair: bool = False
    names: dict[str, str] = field(default_factory=dict)


class Reading(NamedTuple):
    """What the files say of a claim: the verdict, the number, what was read, and why the claim is open."""

    verdict: str
    number: str
    files: tuple[str, ...]
    models: tuple[str, ...]
    reason: str


class Untrained(ValueError):
    """A file has no row of a model. `model` is its name."""

    def __init__(self, name: str, model: str) -> None:
        super().__init__(f"{name} has no row of {model}")
        self.model = model


class Node(dict):
    """A dict of JSON whose keys are attributes, and whose lists are arrays."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, dict):
            return Node(found)
        if isinstance(found, list) and found and isinstance(found[0], dict):
            return [Node(each) for each in found]
        try:
            return np.array(found) if isinstance(found, list) else found
        except ValueError:  # lists of different lengths
            return found


@cache
def _json(name: str) -> Node:
    return Node(json.loads((RESULTS / name).read_text(encoding="utf-8")))


@cache
def results(name: str) -> list[dict[str, str]]:
    return read_table(RESULTS / name)


class Files:
    """Reads the files of results for one claim, and notes which files, models, seeds and learning rates it used.

    Attributes:
        used, models: names of the files and of the models.
        seeds, rates: the smallest numbers of seeds and of learning rates of the trained models that were read; None if
            none was read.
    """

    def __init__(self) -> None:
        self.used: dict[str, None] = {}
        self.models: dict[str, None] = {}
        self.seeds: int | None = None
        self.rates: int | None = None

    def json(self, name: str) -> Node:
        self.used[name] = None
        return _json(name)

    def accuracy(
        self, name: str, model: str, test: str, length: int | None = None, pairs: int | None = None
    ) -> np.ndarray:
        """The accuracy of every seed, a mean over the rows that are left, at the selected learning rate."""

        def wanted(row: Mapping[str, str]) -> bool:
            at_length = row["test"] == test and length in (None, int(row["length"]))
            return at_length and (pairs is None or pairs == float(row["num_pairs"] or "nan"))

        seeds: dict[str, list[float]] = {}
        for row in self._selected(name, model, wanted, f"{test}, length {length}, pairs {pairs}"):
            seeds.setdefault(row["seed"], []).append(float(row["accuracy"] or "nan"))
        return np.array([float(np.mean(seeds[seed])) for seed in sorted(seeds)])

    def perplexity(self, name: str, model: str, length: int) -> np.ndarray:
        """The perplexity of the last T tokens of texts of a length, of every seed, at the selected learning rate."""
        return np.array([value for _, value in sorted(self._perplexities(name, model, length).items())])

    def perplexity_over(self, name: str, model: str, base: str, length: int) -> np.ndarray:
        """The perplexity of a model over that of another, of every seed that both have."""
        own, theirs = differences.paired(*(self._perplexities(name, each, length) for each in (model, base)))
        return own / theirs

    def _perplexities(self, name: str, model: str, length: int) -> dict[str, float]:
        """Seed → perplexity."""
        rows = self._selected(name, model, lambda row: int(row["length"]) == length, f"length {length}")
        return {row["seed"]: float(row["last_perplexity"]) for row in rows}

    def loss_from(self, name: str, model: str, first: int) -> np.ndarray:
        """The loss at a span of positions, of every seed: `name` is a `positions.csv` of runs at the selected rates."""
        return self._beside(name, "_positions", model, ("first", first), "loss")

    def validated(self, name: str, model: str, step: int) -> np.ndarray:
        """The accuracy after a step, of every seed at the selected rate: `name` is a `validation.csv`."""
        return self._beside(name, "_steps", model, ("step", step), "validation")

    def _beside(self, name: str, ending: str, model: str, place: tuple[str, int], column: str) -> np.ndarray:
        """A column where another has a value. The table whose name lacks the ending says how many rates there were."""
        self.used[name] = self.models[model] = None
        own = [row for row in results(name) if row["model"] == model and row.get("selected") != "False"]
        rows = [row for row in own if int(row[place[0]]) == place[1]]
        if not rows:
            raise Untrained(name, model) if not own else ValueError(f"{name} has no row of {model} at {place}")
        tried = {row["learning_rate"] for row in results(name.replace(ending, "")) if row["model"] == model}
        self._note(seeds=len(rows), rates=len(tried))
        return np.array([float(row[column]) for row in sorted(rows, key=lambda row: row["seed"])])

    def loss_above(self, variant: str, base: str) -> np.ndarray:
        """The test losses of a row of the decay grid minus those of another, at each budget `[budgets, seeds]`.

        The rows are in the form that the authors ran, never in another, and the seeds are those that both have.
        """
        pairs = [[self._losses(file, as_run(row)) for row in (variant, base)] for file in GRID]
        return np.array([np.subtract(*differences.paired(*pair)) for pair in pairs])

    def text_loss(self, name: str, model: str) -> np.ndarray:
        """The losses on the test text at T, in nats a byte, one number per seed."""
        return np.array([value for _, value in sorted(self._losses(name, model).items())])

    def _losses(self, name: str, model: str) -> dict[str, float]:
        """Seed → loss on the test text."""
        rows = self._selected(name, model, lambda row: row["test"] == "text", "text")
        return {row["seed"]: float(row["loss"]) for row in rows}

    def parameters(self, variant: str) -> int:
        """The parameters of a row of the decay grid."""
        return int(self._selected(GRID[0], as_run(variant), lambda row: True, "")[0]["parameters"])

    def best_median(self) -> np.ndarray:
        """The minimum of a parabola through the losses over the medians of λ after training, and its interval.

        The interval is NaN if some resampled parabolas have no minimum.
        """
        data = self.json(DECAYS)
        for model in {run.model for run in data.runs}:
            self._selected(GRID[-1], model, lambda row: True, "")
        parabola = data.regressions.trained["median and its square"]
        return np.array([parabola["best"], parabola["best low"], parabola["best high"]], dtype=float)

    def decays(self, variant: str, when: str = "trained") -> np.ndarray:
        """The median λ of a row of the decay grid by layer, `[layers, seeds]`, after training or before it ("init")."""
        name = as_run(variant)
        self._selected(GRID[-1], name, lambda row: True, "")
        runs = [run for run in self.json(DECAYS).runs if run.model == name]
        return np.array([run[when].medians for run in sorted(runs, key=lambda run: run.seed)]).T

    def medians(self, ending: str, when: str = "trained") -> np.ndarray:
        """The median λ of all rows of the decay grid that end so, by layer, `[layers, runs]`, as in `decays`."""
        names = dict.fromkeys(run.model.removesuffix(":released") for run in self.json(DECAYS).runs)
        return np.concatenate([self.decays(name, when) for name in names if name.endswith(ending)], axis=1)

    def step(self, name: str, model: str, length: int) -> float:
        """Seconds of a training step: `name` is a file of `halflife throughput`."""
        data = self.json(name)
        self.models[model] = None
        (row,) = (row for row in data.models if row.model == model)
        return float(row.seconds[list(data.lengths).index(length)])

    def timed(self, name: str) -> str:
        """What a file of `halflife throughput` has timed; earlier ones do not say that it was a training step."""
        return str(self.json(name).get("timed", "training step"))

    def op(self, name: str, op: str, length: int) -> float:
        """Seconds of an op forward and backward: `name` is a file of `make gpu`."""
        (row,) = (row for row in self.json(name).ops if row.get("name") == op and row.get("T") == length)
        return float(row.both)

    def timescales(self, name: str, model: str, when: str, position: int) -> np.ndarray:
        """The decay time-scales in tokens, a row per layer of a run."""
        rows: dict[tuple[str, str], list[float]] = {}
        for row in self._selected(name, model, lambda row: int(row["position"]) == position, f"position {position}"):
            rows.setdefault((row["seed"], row["layer"]), []).append(float(row[when]))
        return np.array([rows[key] for key in sorted(rows)])

    def learned(self, name: str, model: str) -> bool:
        own = [row for row in results(name) if row["model"] == model]
        tests = {row["test"] for row in own}
        test = "in_distribution" if "in_distribution" in tests else sorted(tests)[0]
        shortest = min(int(row["length"]) for row in own if row["test"] == test)
        return has_learned(self.accuracy(name, model, test, shortest))

    def measured(self, name: str, model: str) -> bool:
        return any(row["model"] == model for row in results(name))

    def mark(self, name: str, model: str) -> str:
        return "" if self.learned(name, model) else " (not learned)"

    def _selected(
        self, name: str, model: str, wanted: Callable[[Mapping[str, str]], bool], what: str
    ) -> list[dict[str, str]]:
        """The rows of a model at its selected learning rate that are wanted."""
        own = [row for row in results(name) if row["model"] == model]
        if not own:
            raise Untrained(name, model)
        self.used[name] = self.models[model] = None
        found = [row for row in own if row["selected"] == "True" and wanted(row)]
        if not found:
            raise ValueError(f"{name} has no row of {model}, {what}")
        rates = {float(row["learning_rate"]) for row in own}
        enough = len(rates) < RATES and rates == _printed_rates(load()[1].get(name, ""))
        self._note(seeds=len({row["seed"] for row in found}), rates=RATES if enough else len(rates))
        return found

    def _note(self, seeds: int, rates: int) -> None:
        self.seeds = seeds if self.seeds is None else min(seeds, self.seeds)
        self.rates = rates if self.rates is None else min(rates, self.rates)

    def lacks(self) -> str:
        """What a verdict on trained models needs and the files do not have."""
        few = [
            f"{count} {unit}{'s' if count != 1 else ''}"
            for count, unit, needed in ((self.seeds, "seed", MIN_SEEDS), (self.rates, "learning rate", RATES))
            if count is not None and count < needed
        ]
        return " and ".join(few)

    def names(self) -> dict[str, Any]:
        """The names in expressions."""
        numpy = (
            "abs", "all", "any", "arange", "corrcoef", "cosh", "exp", "log", "max", "mean", "median", "min", "sqrt",
        )  # fmt: skip
        read = (
            "accuracy", "best_median", "decays", "learned", "loss_above", "loss_from", "mark", "measured", "medians",
            "op", "parameters", "perplexity", "perplexity_over", "step", "text_loss", "timed", "timescales",
            "validated",
        )  # fmt: skip

        def slopes(spectrum: str, column: str) -> np.ndarray:
            return np.array([row[column] for row in self.json("theory.json").errors.slopes if row.spectrum == spectrum])

        return {
            **{name: getattr(np, name) for name in numpy}, "array": np.array, "len": len, "zip": zip,
            "value": lambda name: self.json("theory.json").statements[name].value, "slopes": slopes,
            **{name: getattr(self, name) for name in read},
            "plain": lambda x: with_interval(x, 2), "signed": _signed, "by_layer": _by_layer,
            "percent": lambda fractions: with_interval([100 * value for value in fractions], 1),
            "list_of": lambda node: [node[name] for name in node],
            "low": lambda x: min(bootstrap(row).low for row in np.atleast_2d(x)),
            "high": lambda x: max(bootstrap(row).high for row in np.atleast_2d(x)),
            "steps": lambda x: np.asarray(x)[..., 1:] / np.asarray(x)[..., :-1],
        }  # fmt: skip


def _signed(x: np.ndarray) -> str:
    """The mean and its interval at each budget of the decay grid, "+0.030 [+0.021, +0.039], with twice the steps …"."""
    budgets = (with_interval(row, 3, "+") for row in np.atleast_2d(x))
    return ", with twice the steps ".join(budgets)


def _by_layer(x: np.ndarray) -> str:
    """The mean and its interval in each layer, "+0.030 [+0.021, +0.039] and …"."""
    return " and ".join(with_interval(row, 3, "+") for row in x)


def _printed_rates(command: str) -> set[float]:
    """The learning rate that docs/papers.py has from a paper, if the command trains in the paper's own setting.

    A rate with a source there is that of another experiment of the paper.
    """
    words = shlex.split(command)
    options = {word for word in words if word.startswith("--")}
    if words[:2] != ["halflife", "compare"] or not {"--experiment", "--scale"} <= options <= OWN_SETTING:
        return set()
    experiment, scale = (words[words.index(option) + 1] for option in ("--experiment", "--scale"))
    rows = ROWS.get(experiment, ()) if scale == "paper" else ()
    return {row.paper for row in rows if row.setting == "learning_rate" and not row.source}


def _uses(expression: str) -> set[str]:
    """The names in an expression."""
    return {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}


def _evaluate(expression: str, files: Files, known: Mapping[str, Any]) -> Any:
    """Evaluate an expression. A file is read if the expression names it."""
    sources = {name: files.json(f"{name}.json") for name in THEORY if name in _uses(expression)}
    # A generator in an expression looks its names up in the globals, which must be a plain dict.
    return eval(expression, {"__builtins__": {}, **known, **sources})


def read(claim: Claim) -> Reading:
    """Evaluate the expressions of a claim."""
    files = Files()
    known, absent = files.names(), dict[str, str]()  # names of values, and names without one → the model that they lack
    for name, expression in claim.names.items():
        try:
            known[name] = _evaluate(expression, files, known)
        except Untrained as error:
            absent[name] = error.model
    lacking = [[absent[name] for name in _uses(rule) & absent.keys()] for rule in claim.rules]
    true = [not lacks and bool(_evaluate(rule, files, known)) for rule, lacks in zip(claim.rules, lacking, strict=True)]
    untrained = dict.fromkeys(model for models in lacking for model in models)
    number = _evaluate(f"f{claim.number!r}", files, known) if claim.number else ""
    unmet = [_words(given, words) for given, words in claim.given.items() if not _evaluate(given, files, known)]
    number = re.sub(r"(?<![\w.])-(?=\d)", "−", number)
    unfair = files.seeds is not None and not claim.fair and not all(true)
    reasons = [
        files.lacks(), *(f"`{model}` was not trained" for model in untrained), *unmet, "" if true else "no run",
        "the setting of the paper was not run" if unfair else "",
    ]  # fmt: skip
    reason = ", ".join(filter(None, reasons))
    verdict = "open" if reason else "holds" if all(true) else "holds in part" if any(true) else "fails"
    return Reading(verdict, number, tuple(files.used), tuple(files.models), reason if verdict == "open" else "")


def _words(condition: str, words: str) -> str:
    """The sentence that an unmet condition stands for."""
    asked = re.fullmatch(r'(learned|measured)\(.*"(.+)"\)', condition)
    kinds = {"learned": "has not learned its task", "measured": "was not trained"}
    return words or f"`{asked[2]}` {kinds[asked[1]]}" if asked else words


@cache
def load() -> tuple[str, dict[str, str], dict[str, list[Claim]]]:
    """Read claims.yaml: the text above the tables, file → the command that wrote it, and paper → its claims."""
    data = yaml.safe_load((DOCS / "claims.yaml").read_text(encoding="utf-8"))

    def claim(fields: dict[str, Any]) -> Claim:
        given = fields.get("given", {})
        given = given if isinstance(given, dict) else dict.fromkeys(given, "")
        return Claim(**{**fields, "rules": tuple(fields.get("rules", ())), "given": given})

    papers = {paper: [claim(fields) for fields in claims] for paper, claims in data["papers"].items()}
    return data["head"], data["files"], papers


def page() -> str:
    """The text of docs/claims.md."""
    head, commands, papers = load()
    readings = {paper: [read(claim) for claim in claims] for paper, claims in papers.items()}
    runs = list(dict.fromkeys(claim.settle for claims in papers.values() for claim in claims if claim.settle))
    lines, rules, number = [head.rstrip(), "", *_counts(readings)], list[str](), 0
    for paper, claims in papers.items():
        lines += ["", f"## {paper}", "", "| | statement | where | verdict | evidence |", "|---:|---|---|---|---|"]
        for claim, reading in zip(claims, readings[paper], strict=True):
            number += 1
            evidence = _evidence(claim, reading, runs)
            lines.append(_row(str(number), claim.says, claim.where, f"**{reading.verdict}**", evidence))
            if claim.rules:
                rules.append(_row(str(number), "; ".join(f"`{rule}`" for rule in claim.rules), _names(claim)))
    lines += ["", "## Where a paper contradicts itself", "", SLIPS]
    lines += ["", "## Runs that would settle the open claims", "", COSTLY, ""]
    lines += ["| | command | one H200 |", "|---|---|---:|"]
    hours = json.loads(COSTS.read_text(encoding="utf-8"))
    lines += [f"| R{n} | `{run}` | {_hours(hours[run]) if run in hours else '–'} |" for n, run in enumerate(runs, 1)]
    lines += ["", "## Files and commands", "", COMMANDS, "", "| file | command |", "|---|---|"]
    lines += [f"| [{file}](results/{file}) | `{command}` |" for file, command in commands.items()]
    lines += ["", "## Rules", "", EXPRESSIONS, "", '<details markdown="1">', "<summary>All rules</summary>", ""]
    lines += ["| | true if the statement holds | with |", "|---:|---|---|", *rules, "", "</details>"]
    return "\n".join(lines) + "\n"


def _counts(readings: Mapping[str, list[Reading]]) -> Iterator[str]:
    """A table of the verdicts by paper."""
    yield "| paper | " + " | ".join(VERDICTS) + " | all |"
    yield "|---" + "|---:" * (len(VERDICTS) + 1) + "|"
    for paper, own in {**readings, "all": [one for part in readings.values() for one in part]}.items():
        found = [reading.verdict for reading in own]
        yield f"| {paper} | " + " | ".join(str(found.count(v)) for v in VERDICTS) + f" | {len(found)} |"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _names(claim: Claim) -> str:
    return ", ".join(f"`{name} = {expression}`" for name, expression in claim.names.items())


def _evidence(claim: Claim, reading: Reading, runs: list[str]) -> str:
    """The cell of a claim: number, note, models, files, and why it is open."""
    parts = [part for part in (reading.number, claim.note, _models(reading.models)) if part]
    if reading.files:
        parts.append("From " + ", ".join(f"[{file}](results/{file})" for file in reading.files) + ".")
    if reading.verdict == "open":
        run = f"; R{runs.index(claim.settle) + 1} would settle it" if claim.settle else ""
        parts.append(f"Open: {reading.reason}{run}.")
    return " ".join(parts)


def _models(models: tuple[str, ...]) -> str:
    """The trained or timed models that a claim rests on."""
    if len(models) > MOST_MODELS:
        return f"Models: {len(models)} rows of the grid."
    return f"Models: {', '.join(f'`{name}`' for name in models)}." if models else ""


def _hours(cost: Mapping[str, float]) -> str:
    return f"{cost['hours']:,.0f} hours" if cost["hours"] >= 1 else "under an hour"


def costs() -> dict[str, dict[str, float]]:
    """Command → "operations", "runs" and "hours" of an H200 at 40 % of its peak, for `halflife compare` commands."""
    from halflife.cli import read_command
    from halflife.lab.experiments import compare

    found = {}
    for command in _comparisons():
        plan = compare.plan_comparison(**read_command(shlex.split(command)[1:])._choices())
        needs = plan.estimate()
        operations = sum(each.operations * runs for each, runs in needs)
        found[command] = {
            "operations": operations, "runs": sum(runs for _, runs in needs), "hours": operations / H200 / 3600
        }  # fmt: skip
    return found


def _comparisons() -> Iterator[str]:
    seen = {claim.settle for claims in load()[2].values() for claim in claims}
    return (command for command in sorted(seen) if command.startswith("halflife compare"))


def main() -> None:
    if "--costs" in sys.argv[1:]:
        COSTS.write_text(json.dumps(costs(), indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    verdicts = [read(claim).verdict for claims in load()[2].values() for claim in claims]
    print(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS))


if __name__ == "__main__":
    main()
