"""Which power of the Koopman operator recalls best: MQAR with tokens that are held, long values, and masked fillers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from halflife.files import write_json
from halflife.lab.experiments.base import EXPERIMENTS
from halflife.lab.experiments.echo import EchoMQARSettings, with_ska
from halflife.lab.experiments.mqar import LARGE_RATES, MQARExperiment, mqar_model
from halflife.lab.experiments.recall import fits
from halflife.models import ModelConfig
from halflife.models.controls import split_control
from halflife.ops import koopman_attention
from halflife.registry import check_choice
from halflife.report.intervals import LEARNED
from halflife.report.markdown import Rows, models
from halflife.runs.folder import FIGURES, read
from halflife.runs.records import Training
from halflife.runs.sweep import Cell
from halflife.runs.task_run import RunConfig, TestSpec
from halflife.tasks import IGNORED
from halflife.tasks.mqar import MQAR

if TYPE_CHECKING:
    from halflife.report.figures.data import FigureData

HIGHEST_POWER = 3  # the highest power of a learned sum
POWERS = (0, 1, 2, 4, 8)
# Model → options of the SKA layer. K0, K1, … read one power (μ = 1), "learned" a sum over the powers from 0 to 3,
# and "mixed" the learned mixture (1 − μ) x + μ x_K of the preset, with a learned or a fixed γ.
KOOPMAN: dict[str, dict[str, Any]] = {
    **{f"K{power}": {"power": power, "mix": "koopman" if power else "ridge"} for power in POWERS},
    "learned": {"power": HIGHEST_POWER, "mix": "powers"},
    **{
        f"K{power}-mixed{'' if gamma is None else f'-g{gamma:g}'}": {"power": power, "mix": "learned", "gamma": gamma}
        for power in (1, 2)
        for gamma in (None, 1.0, 1.5)
    },
}
RIDGE = "ridge-conv"  # ridge regression behind a short convolution in both layers, the form of MesaNet
BASELINES = {"attention": "mamba2+attention", "gated_deltanet": "gated_deltanet", "mesa": "mesa"}
MODELS = ("K0", "K1", "K2", "learned", RIDGE, *BASELINES)
CELL_NAME = re.compile(r"(?P<axis>[hl])(?P<size>[1-9])(?:-(?P<fillers>none|masked))?")
AXES = {"h": "hold", "l": "value_size"}
QUERY_SLOTS = 2  # slots of a query, with fillers
UNTRAINED = (*(f"h{n}" for n in range(1, 10)), *(f"l{n}" for n in range(2, 10)))  # the map before training; l1 is h1


@dataclasses.dataclass(frozen=True)
class MapCell:
    """One cell of the map, `h4`, `l3-none` or `h2-masked`."""

    # hold, value_size: settings of `mqar`
    hold: int = 1
    value_size: int = 1
    fillers: str = "equal"  # "equal", "none" or "masked"

    @classmethod
    def parse(cls, name: str) -> MapCell:
        """Raises: ValueError: the name has another form."""
        if (found := CELL_NAME.fullmatch(name)) is None:
            raise ValueError(
                f"a cell is hN or lN with N from 1 to 9, and -none or -masked after it: h4, l3-none; got {name!r}"
            )
        return cls(**{AXES[found["axis"]]: int(found["size"])}, fillers=found["fillers"] or "equal")

    def sizes(self, vocab_size: int, num_pairs: int, factor: int = 1) -> dict[str, Any]:
        """Settings of `mqar`. Half of the slots have a query, fewer at `factor` times the length."""
        spacing = int(self.fillers != "none")
        slots = num_pairs * (QUERY_SLOTS if spacing else 1)
        steps = num_pairs * (1 + self.value_size) + slots * (self.value_size + spacing)
        return {
            "vocab_size": vocab_size, "length": factor * self.hold * steps, "num_pairs": num_pairs,
            "value_size": self.value_size, "spacing": spacing, "hold": self.hold,
        }  # fmt: skip

    def task(self, vocab_size: int, num_pairs: int, factor: int = 1) -> dict[str, Any]:
        """Arguments of `tasks.build`."""
        return {"name": "mqar", **self.sizes(vocab_size, num_pairs, factor)}


def split(name: str) -> tuple[str, MapCell]:
    """The model and the cell of a name `model:cell`; without a cell it is h1. Unknown names are a ValueError, and so
    are masked fillers for a model that reads no mask.
    """
    model, _, written = name.partition(":")
    check_choice("model of koopman-powers", model, [*KOOPMAN, RIDGE, *BASELINES])
    cell = MapCell.parse(written or "h1")
    if cell.fillers == "masked" and model in BASELINES:
        raise ValueError(f"{model} reads no action mask, so it has no masked fillers")
    return model, cell


def _groups() -> dict[str, tuple[str, ...]]:
    groups = {}
    for cell in (f"{axis}{size}{end}" for axis in AXES for size in range(1, 10) for end in ("", "-none", "-masked")):
        names = [name for name in MODELS if not (cell.endswith("masked") and name in BASELINES)]
        groups[cell] = tuple(f"{name}:{cell}" for name in names)
        if "-" not in cell:
            groups[f"{cell}-mixed"] = tuple(f"{name}:{cell}" for name in KOOPMAN if "mixed" in name)
    return groups


SMOKE = EchoMQARSettings(
    hidden_size=64, num_layers=2, num_heads=4, vocab_size=128, train_length=24, pairs=(2, 4, 4, 4), steps=900,
    batch_size=64, length_factors=(1, 4), test_examples=256, chunk_size=16, ska_chunk=4,
)  # fmt: skip


@EXPERIMENTS.add("koopman-powers")
class KoopmanPowers(MQARExperiment):
    """Which power recalls best, by the steps for which a token is held, the length of a fact, and the fillers.

    A model is `model:cell`, and each is trained and tested on its cell. A cell's name is a group of all its models.

    | cell | task |
    |---|---|
    | h1, …, h9 | each token is held for so many steps |
    | l1, …, l9 | each value has so many tokens |
    | h4-none, l3-none | without fillers |
    | h4-masked, l3-masked | with an action mask, which leaves fillers and queries out of the sums |

    | model | what it is |
    |---|---|
    | K0, K1, K2, K4, K8 | a layer of Mamba-2, then SKA with one power; a group has the first three |
    | learned | the same with a learned sum of the powers 0 to 3, which starts at K = 1 |
    | K1-mixed, K2-mixed | the same with the learned mixture of ridge regression and one power; γ is learned |
    | K1-mixed-g1, K1-mixed-g1.5, … | the same with γ = 1 or 1.5; the group `h4-mixed` has all of these |
    | ridge-conv | two layers of ridge regression behind a short convolution, the form of MesaNet |
    | attention | a layer of Mamba-2, then softmax attention |
    | gated_deltanet, mesa | two layers |

    The last of `pairs` is K, and T follows from the cell: 6K steps at h1, times h, and times (L + 1)/2. `train_length`
    and `batch_size` are those of h1, and every batch has about as many tokens. A chunk of SKA has `ska_chunk` tokens,
    each for its h steps. `capacity` has 2K pairs, where there are enough values, and `persist` the fillers of 4 T. The
    report adds the steps that a model needed, and what SKA recalls before training, with keys, values and queries that
    are one random unit vector for each token id.
    """

    settings = EchoMQARSettings
    scales: ClassVar = {
        "smoke": SMOKE,
        "small": dataclasses.replace(
            SMOKE, hidden_size=128, vocab_size=512, train_length=48, pairs=(2, 4, 8, 8), steps=3000, chunk_size=32
        ),
        "large": dataclasses.replace(
            SMOKE, hidden_size=256, vocab_size=2048, train_length=192, pairs=(8, 16, 32, 32), steps=6000,
            batch_size=128, rank=48, chunk_size=64, save_every=500,
        ),
    }  # fmt: skip
    groups: ClassVar = _groups()
    models: ClassVar = (*groups["h1"], *groups["h4"])
    rates: ClassVar = {"large": LARGE_RATES, "": (3e-3, 1e-2, 3e-2)}

    def build_cell(self, settings: EchoMQARSettings, cell: Cell) -> RunConfig:
        _, place = split(cell.model)
        largest, vocab_size = settings.pairs[-1], settings.vocab_size
        whole = place.task(vocab_size, largest)
        factors = (1,) if place.fillers == "none" else settings.length_factors
        return settings.run(
            RunConfig,
            cell,
            model=self.model(cell.model, settings),
            stages=tuple(({**whole, "num_pairs": pairs},) for pairs in settings.pairs),
            validation=(whole,),
            tests=(
                TestSpec(name="in_distribution", task=whole),
                *(TestSpec(name="capacity", task=task) for task in [place.task(vocab_size, 2 * largest)] if fits(task)),
                *(TestSpec(name="persist", task=place.task(vocab_size, largest, factor)) for factor in factors),
            ),
            action_mask=settings.action_mask or place.fillers == "masked",
            batch_size=max(1, settings.batch_size * settings.train_length // whole["length"]),
        )

    def model(self, name: str, settings: EchoMQARSettings) -> ModelConfig:
        chosen, cell = split(name)
        settings = dataclasses.replace(settings, ska_chunk=settings.ska_chunk * cell.hold)
        if chosen in BASELINES:
            return dataclasses.replace(mqar_model(BASELINES[chosen], settings), name=name)
        if chosen in KOOPMAN:
            return with_ska(mqar_model("mamba2+ska", settings), name, settings, KOOPMAN[chosen])
        options = {
            "num_heads": settings.num_heads, "rank": settings.rank, "chunk_size": settings.ska_chunk,
            **KOOPMAN["K0"], "query_init": "own", "conv_size": 4,
        }  # fmt: skip
        plain = mqar_model("gated_deltanet", settings)
        return dataclasses.replace(plain, name=name, mixer="ska", mixer_options=options)

    def write_data(self, folder: Path, rows: Rows) -> None:
        from halflife.report.figures.matplotlib_renderer import save

        cells = dict.fromkeys([*UNTRAINED, *_axes(rows)[1]])
        found = {cell: untrained(MapCell.parse(cell)) for cell in cells}
        run = read(folder)
        steps = {model: steps_until_learned(run.trainings_of(model)) for model in models(rows)}
        write_json(folder / "powers.json", {"untrained": found, "steps": steps})
        if models(rows):
            save(picture(rows, found), folder / FIGURES, "powers")


def picture(rows: Rows, found: Mapping[str, Mapping[str, float]]) -> FigureData:
    """The map: recall before training, cell → read → fraction, and accuracy in distribution after it."""
    from halflife.report.figures.operators import power_map

    kinds, cells = _axes(rows)
    after: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    for kind, cell in product(kinds, cells):
        if own := _of(rows, kind, cell, "in_distribution"):
            after[kind][cell] = fmean(row["accuracy"] for row in own)
    before = {name: {cell: found[cell][name] for cell in found} for name in READS}
    return power_map({"before training, %": before, "after training, %": after})


def _place(name: str) -> tuple[str, str]:
    """The model and the cell; of the control `base:h4@state(target:h4)` they are `base@state(target)` and `h4`."""
    base, kind, target = split_control(name) or (name, "", "")
    model, _, cell = base.partition(":")
    return f"{model}@{kind}({target.partition(':')[0]})" if target else model, cell or "h1"


def _axes(rows: Rows) -> tuple[list[str], list[str]]:
    """The models and the cells."""
    places = [_place(name) for name in models(rows)]
    return list(dict.fromkeys(kind for kind, _ in places)), list(dict.fromkeys(cell for _, cell in places))


def _of(rows: Rows, kind: str, cell: str, test: str) -> Rows:
    """The rows of a model in a cell at its selected rate."""
    return [row for row in rows if _place(row["model"]) == (kind, cell) and row["selected"] and row["test"] == test]


def steps_until_learned(runs: Sequence[Training]) -> list[int | None]:
    """For each run, by seed, the step of the first validation that reached `LEARNED`; None if none did."""
    curves = (one.curve("validation_accuracy") for one in sorted(runs, key=lambda one: one.seed))
    return [next((step for step, x in zip(*curve, strict=True) if x >= LEARNED), None) for curve in curves]


# Read before training → the arguments of `untrained_recall`. With one power alone, γ is only a factor of the output.
READS: dict[str, dict[str, Any]] = {
    **{f"K{power}": {"power": power} for power in POWERS},
    **{
        f"K{power}, μ ½, γ {gamma:g}": {"power": power, "mix": 0.5, "gamma": gamma}
        for power, gamma in product((1, 2), (1.0, 1.25, 1.5))
    },
}


def untrained(cell: MapCell) -> dict[str, float]:
    """The share of answers that each of `READS` recalls in a cell without training."""
    task = MQAR(**cell.sizes(vocab_size=256, num_pairs=8))
    return {name: untrained_recall(task, masked=cell.fillers == "masked", **read) for name, read in READS.items()}


def untrained_recall(task: MQAR, *, power: int, mix: float = 1.0, gamma: float = 1.0, masked: bool = False) -> float:
    """Return the share of answers that SKA without weights recalls with K (`power`), μ (`mix`) and γ.

    Each token id is one random unit vector, which is its query, key and value. The answer is the value's id with the
    largest product. A query reads all tokens before its first step, or facts alone if `masked`.
    """
    generator = torch.Generator().manual_seed(0)
    ids = F.normalize(torch.randn(task.vocab_size, 48, generator=generator, dtype=torch.float64), dim=-1)
    batch = task.generate(8, 0)
    x, mask = ids[batch.inputs].unsqueeze(2), batch.facts if masked else None
    y, _ = koopman_attention(x, x, x, power=power, mix=mix, gamma=gamma, mask=mask, chunk_size=task.hold)
    scored, (low, high) = batch.labels != IGNORED, task.value_range
    found = (y[:, :, 0][scored] @ ids[low:high].T).argmax(-1) + low
    return (found == batch.labels[scored]).double().mean().item()
