"""The test that a review of PoST asks for: retention error over N and T, with the proposed decays and without them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from halflife.analysis.stability import gradient_norms, state_stability
from halflife.files import read_json, write_json
from halflife.lab.experiments.base import EXPERIMENTS
from halflife.lab.experiments.evidence.decay_regression import regress
from halflife.lab.experiments.evidence.post_parts import split, with_part
from halflife.lab.experiments.mqar import LARGE_RATES, MQARExperiment, MQARSettings, mqar_model
from halflife.models import ModelConfig, checkpoint
from halflife.registry import check_choice
from halflife.report.markdown import Rows
from halflife.runs.sweep import Cell
from halflife.runs.task_run import RunConfig, TestSpec
from halflife.tasks import build

# Without PoST; sorted geometric rates alone; as printed, with a fixed step; as printed with t_ref = T.
KINDS = ("mamba2", "mamba2:static", "mamba2:frozen", "mamba2:theorem")
# Scale → numbers of channels N and training lengths T.
GRIDS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "smoke": ((2, 4), (16, 32)),
    "small": ((2, 4, 8), (32, 128)),
    "large": ((2, 4, 8, 16), (128, 512, 2048)),
}
FARTHEST = 4  # tests go to so many times T
FEWEST = 4  # errors; fewer have no fit
AT_A_GUESS = 0.9  # errors above this part of the error of a guess say nothing about a rate
STABILITY_TEXTS = 8
RESULT = "post_review.json"
# Name → the predictors of log error at t; the constant is fitted too.
PREDICTORS = {
    "N / log t": lambda n, train, t: [n / math.log(t)],
    "N / log T": lambda n, train, t: [n / math.log(train)],
    "both": lambda n, train, t: [n / math.log(t), n / math.log(train)],
}


def cells(scale: str) -> tuple[str, ...]:
    """The names `NxT` of the grid of a scale."""
    return tuple(f"{n}x{train}" for n, train in product(*GRIDS[scale]))


CELLS = tuple(dict.fromkeys(cell for scale in GRIDS for cell in cells(scale)))


def parse(name: str) -> tuple[str, int, int]:
    """The model, N and T of `model:NxT`; a ValueError if there is no such cell, or no Mamba-2."""
    model, _, cell = name.rpartition(":")
    check_choice("cell NxT", cell, CELLS)
    if split(model)[0].partition("+")[0] != "mamba2":
        raise ValueError(f"post-review counts channels in heads of mamba2; got {model}")
    n, train = map(int, cell.split("x"))
    return model, n, train


@dataclass(frozen=True, kw_only=True)
class PostReviewSettings(MQARSettings):
    """The settings of the review's test. `num_heads` and `train_length` are those of the cell."""

    state_size: int = 16  # rows of the state of a head. All models have states of the same size, whatever N is.


SMOKE = PostReviewSettings(
    hidden_size=64, num_layers=2, num_heads=4, vocab_size=256, train_length=32, pairs=(2, 4, 4, 4), steps=600,
    batch_size=64, test_examples=256, chunk_size=16,
)  # fmt: skip


@EXPERIMENTS.add("post-review")
class PostReview(MQARExperiment):
    """Whether the error of retention follows exp(−c N/log t) with PoST and exp(−c N/log T) without, over N and T.

    A model is `model:NxT`: N heads, each with one decay, trained at T on recall of a few pairs whose queries come at
    log-uniform lags. `NxT` names all models of a cell. The error at t is that of queries that stand at the end of
    t tokens, from 4 K to 4 T. States have the same size for all N.

    | model | what it is |
    |---|---|
    | mamba2 | no PoST |
    | mamba2:static | sorted geometric rates, which do not stretch |
    | mamba2:frozen | PoST as its paper prints it, with a fixed step |
    | mamba2:theorem | t_ref = T |

    Other parts of `post-taken-apart` can be named too. The report fits the logarithm of the error to N/log t and to
    N/log T, and has the stability of gates that change with the position: the state's Jacobian, and gradient norms.
    """

    settings = PostReviewSettings
    scales: ClassVar = {
        "smoke": SMOKE,
        "small": dataclasses.replace(
            SMOKE, vocab_size=1024, train_length=64, pairs=(2, 4, 8, 8), steps=2000, test_examples=1024
        ),
        "large": dataclasses.replace(
            SMOKE, hidden_size=256, vocab_size=8192, train_length=512, pairs=(4, 8, 16, 16), steps=8000, batch_size=128,
            test_examples=2048, chunk_size=64, save_every=500,
        ),
    }  # fmt: skip
    models_of: ClassVar = {scale: tuple(f"{kind}:{cell}" for cell in cells(scale) for kind in KINDS) for scale in GRIDS}
    models: ClassVar = models_of["smoke"]
    groups: ClassVar = {cell: tuple(f"{kind}:{cell}" for kind in KINDS) for cell in CELLS}
    rates: ClassVar = {"large": LARGE_RATES, "": (3e-3, 1e-2, 3e-2)}

    def build_cell(self, settings: PostReviewSettings, cell: Cell) -> RunConfig:
        _, _, train = parse(cell.model)
        most = settings.pairs[-1]

        def task(pairs: int, length: int, gap: int = 0) -> dict[str, Any]:
            return {
                "name": "mqar", "vocab_size": settings.vocab_size, "length": length, "num_pairs": pairs, "gap": gap
            }  # fmt: skip

        return settings.run(
            RunConfig,
            cell,
            model=self.model(cell.model, settings),
            stages=tuple((task(pairs, train),) for pairs in settings.pairs),
            validation=(task(most, train),),
            tests=(
                TestSpec(name="in_distribution", task=task(most, train)),
                *(TestSpec(name="retained", task=task(most, t, t - 4 * most)) for t in lengths(most, train)),
            ),
            batch_size=max(1, settings.batch_size * settings.train_length // train),
        )

    def model(self, name: str, settings: PostReviewSettings) -> ModelConfig:
        model, n, train = parse(name)
        settings = dataclasses.replace(settings, num_heads=n, train_length=train)
        preset, part = split(model)
        config = mqar_model(preset, settings)
        options = {**config.mixer_options, "state_size": settings.state_size}
        return dataclasses.replace(
            with_part(dataclasses.replace(config, mixer_options=options), name, part, train), name=name
        )

    def write_data(self, folder: Path, rows: Rows) -> None:
        file, examples = folder / RESULT, self.saved_settings(folder).test_examples
        known = read_json(file)["stability"] if file.exists() else {}
        found = list(points(rows, examples))
        write_json(file, {"points": found, "fits": fits(found), "stability": stability(folder, rows, known)})


def lengths(pairs: int, train: int) -> list[int]:
    """The positions of the tests: 4 K, 8 K, … up to `FARTHEST` · T."""
    return [4 * pairs * 2**i for i in range(64) if 4 * pairs * 2**i <= FARTHEST * train]


def points(rows: Rows, examples: int) -> Iterator[dict[str, Any]]:
    """The mean error over seeds of every model at its selected rate, at every position.

    Half a wrong answer, of all that tests with so many examples ask, stands for an error of 0.
    """
    errors: dict[tuple[str, int], list[float]] = {}
    guesses: dict[tuple[str, int], float] = {}
    asked: dict[tuple[str, int], float] = {}
    for row in rows:
        if row["selected"] and row["test"] == "retained" and row["accuracy"] == row["accuracy"]:
            key = row["model"], row["length"]
            errors.setdefault(key, []).append(1 - row["accuracy"])
            guesses[key] = 1 - row["shortcut_accuracy"]
            asked[key] = asked.get(key, 0) + examples * row["num_pairs"]
    for (name, t), found in errors.items():
        model, n, train = parse(name)
        error = fmean(found)
        yield {
            "model": model, "N": n, "T": train, "t": t, "error": error,
            "log error": math.log(max(error, 0.5 / asked[name, t])), "guess": error > AT_A_GUESS * guesses[name, t],
        }  # fmt: skip


def fits(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Model → range of t → name of the predictors → `regress`, over all N, T and t.

    Errors near those of a guess are left out, and so are models with fewer than `FEWEST` other errors.
    """
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for model in dict.fromkeys(one["model"] for one in found):
        own = [one for one in found if one["model"] == model and not one["guess"]]
        for name, part in (("t ≤ T", [one for one in own if one["t"] <= one["T"]]), ("all t", own)):
            if len(part) >= FEWEST:
                result.setdefault(model, {})[name] = {
                    predictors: regress(
                        [law(one["N"], one["T"], one["t"]) for one in part], [one["log error"] for one in part]
                    )
                    for predictors, law in PREDICTORS.items()
                }
    return result


def stability(folder: Path, rows: Rows, known: Mapping[str, Any]) -> dict[str, Any]:
    """Run → "positions" (`PositionStability`) and "gradients" (`GradientNorms`) of the selected runs of the first seed.

    `known` has those that were measured before.
    """
    result, first = {}, min((row["seed"] for row in rows), default=0)
    for row in rows:
        cell = Cell(row["model"], row["learning_rate"], row["seed"])
        if row["selected"] and row["seed"] == first and cell.folder not in result:
            result[cell.folder] = known.get(cell.folder) or _measured(folder / cell.folder, row, rows)
    return result


def _measured(path: Path, row: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
    model = checkpoint.load(path).eval()
    own = [one for one in rows if one["model"] == row["model"] and one["test"] == "retained"]
    tested = sorted({(one["length"], int(one["num_pairs"])) for one in own})
    sizes = {"vocab_size": model.config.vocab_size}
    tasks = [build("mqar", **sizes, length=t, num_pairs=pairs, gap=t - 4 * pairs) for t, pairs in tested]
    batches = [task.generate(STABILITY_TEXTS, 0) for task in tasks]
    positions = [t for t, _ in tested if 2 * t <= tested[-1][0]]
    followed = state_stability(model, batches[-1].inputs, positions) if positions else []
    return {
        "model": row["model"], "positions": [one.to_dict() for one in followed],
        "gradients": [gradient_norms(model, batch).to_dict() for batch in batches],
    }  # fmt: skip
