"""GateRank's experiments: state tracking in S5, and recall (MQAR, hard needles), each with and without GateRank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from halflife.files import finite, write_csv
from halflife.lab.experiments.base import EXPERIMENTS, Experiment, TaskSettings
from halflife.lab.experiments.mqar import SMALL as MQAR_SMALL
from halflife.lab.experiments.mqar import SMOKE as MQAR_SMOKE
from halflife.lab.experiments.mqar import MQARExperiment, MQARSettings, mqar_model
from halflife.lab.experiments.recall import RecallExperiment, RecallSettings
from halflife.models import ModelConfig
from halflife.models.presets.modifiers import merge
from halflife.registry import unknown
from halflife.report.markdown import Rows
from halflife.runs.folder import read
from halflife.runs.sweep import Cell
from halflife.runs.task_run import RunConfig, TestSpec
from halflife.tasks import build

# Variant → options of the mixers; `preset:variant` names a model, and `preset:neg-closed` has two variants.
VARIANTS: dict[str, dict[str, Any]] = {
    "neg": {"allow_neg_eigval": True},
    "n4": {"num_householder": 4},  # DeltaProduct: an element of S5 takes up to four reflections
    "reset50": {"gate_rank": {"reset_rate": 0.5}},
    "reset10": {"gate_rank": {"reset_rate": 0.1}},
    "reset2": {"gate_rank": {"reset_rate": 0.02}},
    "closed": {"gate_rank": {"reset_rate": 1e-6}},  # no reset fires, so the gates get no gradient and stay closed
    "untrained": {"gate_rank": {"trained": False}},  # resets at random: the second state without a learned gate
}
PAIRS = ("mamba2", "mamba2+gate_rank", "gated_deltanet", "gated_deltanet+gate_rank")
GATES = tuple(
    f"{base}+gate_rank{end}" for base in ("mamba2", "gated_deltanet") for end in ("", ":closed", ":untrained")
)
POSITIONS_CSV = "positions.csv"  # accuracy and loss of each seed, by span of positions
POSITIONS = ("model", "learning_rate", "seed", "first", "last", "accuracy", "loss")
GATES_CSV = "gates.csv"  # statistics of the gates of each seed and layer


def variant(name: str, also: Iterable[str] = ()) -> tuple[str, dict[str, Any]]:
    """The preset of a name `preset:variant-variant`, and the options of its mixers that the variants change.

    Errors list the names `also` beside the variants.
    """
    base, _, chosen = name.partition(":")
    options: dict[str, Any] = {}
    for part in chosen.split("-") if chosen else ():
        if part not in VARIANTS:
            raise unknown("variant", part, [*VARIANTS, *also])
        if "gate_rank" in VARIANTS[part] and "gate_rank" not in base.split("+"):
            raise ValueError(f"{base} lacks +gate_rank, so {part!r} has nothing to set")
        options = merge(options, VARIANTS[part])
    return base, options


def _with(config: ModelConfig, name: str, options: dict[str, Any]) -> ModelConfig:
    return dataclasses.replace(config, name=name, mixer_options=merge(config.mixer_options, options))


@dataclasses.dataclass(frozen=True, kw_only=True)
class S5Settings(TaskSettings):
    """The settings of state tracking."""

    # group, words: settings of the task s5
    group: str = "s5"
    words: str = "all"
    lengths: tuple[int, ...] = (16, 64, 256)  # the lengths of the tests, in tokens
    validation_length: int = 0  # tokens of a validation sequence; 0 for the training length


PAPER = S5Settings(
    hidden_size=256, num_layers=1, num_heads=4, train_length=16, steps=4000, batch_size=128,
    weight_decay=0.01, warmup=0.032, bf16=True, validation_examples=512, test_examples=2048, validate_every=200,
    save_every=1000, chunk_size=16, validation_length=64,
)  # fmt: skip
SMALL = dataclasses.replace(PAPER, hidden_size=64, bf16=False, test_examples=512, validation_length=0)


DEPTHS = {"d2": 2, "d4": 4}  # parts of a model's name that set its layers
Stages = tuple[tuple[tuple[int, str | None], ...], ...]  # for each stage its tasks, as (T over the length, words)
SWAPS, MIXED, ALL = "swaps", "mixed", None  # all: the words of the settings
# Parts that set the stages of training, which have equally many steps.
CURRICULA: dict[str, Stages] = {
    "curriculum": (((8, ALL),), ((4, ALL),), ((2, ALL),), ((1, ALL),)),
    "swaps": (((1, SWAPS),), *4 * (((1, MIXED),),), *3 * (((1, ALL),),)),
}
ONE_STAGE: Stages = (((1, ALL),),)


def recipe(name: str) -> tuple[str, int | None, Stages]:
    """Take the depth and the curriculum from a name: `mamba2:neg-d4-swaps` → `mamba2:neg`, 4, `CURRICULA["swaps"]`.

    Returns:
        The name that is left, the layers (None for those of the settings), and the stages of training.
    """
    base, _, chosen = name.partition(":")
    parts = chosen.split("-") if chosen else []
    for kind, known in (("depths", DEPTHS), ("curricula", CURRICULA)):
        if len(both := [part for part in parts if part in known]) > 1:
            raise ValueError(f"{name} has two {kind}, {' and '.join(both)}")
    left = "-".join(part for part in parts if part not in DEPTHS and part not in CURRICULA)
    depth = next((DEPTHS[part] for part in parts if part in DEPTHS), None)
    stages = next((CURRICULA[part] for part in parts if part in CURRICULA), ONE_STAGE)
    return f"{base}:{left}" if left else base, depth, stages


def write_positions(folder: Path) -> None:
    """Write `positions.csv`: the means over spans of positions in the longest test, which end at the tested lengths."""
    run = read(folder)
    edges = sorted({found["length"] for one in run.trainings for found in one.positions})
    rows = [
        (model, one.learning_rate, one.seed, low + 1, high, *(fmean(found[name][low:high]) for name in POSITIONS[-2:]))
        for model in run.models for one in run.trainings_of(model)
        for found in one.positions if found["length"] == edges[-1]
        for low, high in pairwise([0, *edges])
    ]  # fmt: skip
    write_csv(folder / POSITIONS_CSV, POSITIONS, rows)


def write_gates(folder: Path) -> None:
    """Write `gates.csv`, if a model has gates: their statistics in the last steps, a row for each layer of each run."""
    run = read(folder)
    rows = [
        {"model": model, "learning_rate": one.learning_rate, "seed": one.seed, "layer": layer, **found}
        for model in run.models for one in run.trainings_of(model)
        for _, last in one.gates()[-1:] for layer, found in enumerate(last.values())
    ]  # fmt: skip
    if rows:
        write_csv(folder / GATES_CSV, list(rows[0]), (finite(list(row.values())) for row in rows))


@EXPERIMENTS.add("gate-rank-s5")
class GateRankS5(Experiment):
    """Words in S5 (GateRank, §4.4 and Figure 4): training at T = 16, tests up to 16 T, by position.

    `preset:neg` has β in (0, 2), `preset:d4` four layers, and `preset:curriculum` trains on words of T/8, T/4, T/2 and
    T tokens, each for a quarter of the steps. `preset:neg-d4-curriculum` has all three. `preset:swaps` trains on words
    of transpositions for an eighth of the steps, then on mixed words for half of them. `deltaproduct:n4` has four
    reflections per token. The group `learnable` has them.

    Departures: the paper gives no model sizes and no β of AdamW, so these are ours. Validation measures accuracy, and
    Figure 4 the loss; the tests have both by position.
    """

    scales: ClassVar = {
        "smoke": dataclasses.replace(SMALL, group="s3", steps=400, lengths=(16, 64), save_every=200),
        "small": SMALL,
        "paper": PAPER,
    }
    settings = S5Settings
    rates: ClassVar = {"": (1e-2,)}
    models: ClassVar = (*PAIRS, "gated_deltanet:neg", "gated_deltanet+gate_rank:neg")
    groups: ClassVar = {
        "learnable": tuple(
            f"{base}{depth}{curriculum}"
            for base, depths in (
                ("gated_deltanet:neg", ("", "-d2", "-d4")),
                ("gated_deltanet+gate_rank:neg", ("", "-d2", "-d4")),
                ("deltaproduct:n4", ("",)),
            )
            for depth in depths
            for curriculum in ("", *(f"-{name}" for name in CURRICULA))
        )
    }

    def build_cell(self, settings: S5Settings, cell: Cell) -> RunConfig:
        def task(length: int, words: str | None = None) -> dict[str, Any]:
            return {"name": "s5", "group": settings.group, "words": words or settings.words, "length": length}

        name, depth, stages = recipe(cell.model)
        length = settings.train_length
        sized = dataclasses.replace(settings, num_layers=depth or settings.num_layers)
        return settings.run(
            RunConfig,
            cell,
            model=dataclasses.replace(self.model(name, sized), name=cell.model),
            stages=tuple(tuple(task(max(1, length // part), words) for part, words in stage) for stage in stages),
            validation=(task(settings.validation_length or settings.train_length),),
            tests=tuple(TestSpec(name=settings.group, task=task(length)) for length in settings.lengths),
        )

    def model(self, name: str, settings: S5Settings) -> ModelConfig:
        """One mixer between embedding and head, the paper's "single attention layer", with equal state sizes."""
        base, options = variant(name, [*DEPTHS, *CURRICULA])
        vocab_size = build("s5", group=settings.group).vocab_size
        sizes = MQARSettings(**settings.shared_with(MQARSettings), vocab_size=vocab_size)
        return _with(mqar_model(base, sizes), name, options)

    def write_data(self, folder: Path, rows: Rows) -> None:
        write_positions(folder)
        write_gates(folder)


@EXPERIMENTS.add("gate-rank-mqar")
class GateRankMQAR(MQARExperiment):
    """MQAR: each base, the base with GateRank, and the base with twice the rows, whose state is as large.

    The group `gates` has GateRank with gates that stay closed from the start, and with gates that are not trained.
    """

    scales: ClassVar = {
        "smoke": dataclasses.replace(MQAR_SMOKE, length_factors=(1, 2, 4)),
        "small": dataclasses.replace(MQAR_SMALL, length_factors=(1, 2, 4)),
        "large": MQARExperiment.scales["paper"],
    }
    models: ClassVar = (*PAIRS, "mamba2:double", "gated_deltanet:double")
    held: ClassVar = "persist"
    groups: ClassVar = {"gates": GATES}

    def model(self, name: str, settings: MQARSettings) -> ModelConfig:
        base, _, chosen = name.partition(":")
        if chosen != "double":
            base, options = variant(name, ["double"])
            return _with(mqar_model(base, settings), name, options)
        config = mqar_model(base, settings)
        rows = "state_size" if "state_size" in config.mixer_options else "head_dim"
        return _with(config, name, {rows: 2 * config.mixer_options[rows]})

    def write_data(self, folder: Path, rows: Rows) -> None:
        write_gates(folder)


# With one answer per sequence, recall is learned slowly. Half of each batch is therefore MQAR with the same ids, which
# has one answer per key.
NIAH = RecallSettings(
    hidden_size=64, num_layers=2, num_heads=4, train_length=32, pairs=(1, 2, 4), tasks=("mqar", "niah:hard"),
    warm_length=16, warm_pairs=(1, 2), steps=800, batch_size=128, chunk_size=16,
    test_tasks=("niah:hard",), lengths=(32, 64, 128, 256), test_pairs=(1, 4, 8), test_examples=512, test_tokens=1 << 17,
)  # fmt: skip


@EXPERIMENTS.add("gate-rank-niah")
class GateRankNIAH(RecallExperiment):
    """Needles among decoys (niah:hard) instead of the paper's RULER tests: training at T = 32, tests up to 8 T.

    The group `gates` has GateRank with gates that stay closed from the start, and with gates that are not trained.
    """

    scales: ClassVar = {
        "smoke": dataclasses.replace(NIAH, steps=200, lengths=(32, 64), test_pairs=(1, 4)),
        "small": NIAH,
        "large": dataclasses.replace(
            NIAH, hidden_size=512, train_length=512, pairs=(4, 8, 16), steps=20000, lengths=(512, 1024, 2048, 4096),
            test_pairs=(1, 8, 16), bf16=True, chunk_size=64,
        ),
    }  # fmt: skip
    models: ClassVar = PAIRS
    groups: ClassVar = {"gates": GATES}
    rates: ClassVar = {"large": (1e-3,), "": (1e-2,)}

    def model(self, name: str, settings: RecallSettings) -> ModelConfig:
        base, options = variant(name)
        sizes = MQARSettings(**settings.shared_with(MQARSettings), vocab_size=128)
        return _with(mqar_model(base, sizes), name, options)

    def write_data(self, folder: Path, rows: Rows) -> None:
        write_gates(folder)
