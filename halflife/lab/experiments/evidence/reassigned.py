"""Does forgetting help Koopman attention where keys are reassigned? MQAR with `updates`, tested at T to 16 T."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from halflife.lab.experiments.base import EXPERIMENTS
from halflife.lab.experiments.echo import EchoMQARSettings, with_ska
from halflife.lab.experiments.mqar import MQARExperiment, mqar_model
from halflife.models import ModelConfig
from halflife.runs.sweep import Cell
from halflife.runs.task_run import RunConfig, TestSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReassignedSettings(EchoMQARSettings):
    """The settings of MQAR with reassigned keys."""

    # how often each key is reassigned, one number per stage; the last is that of the tests
    updates: tuple[int, ...] = (0, 0, 1, 1)

    def __post_init__(self) -> None:
        if len(self.updates) != len(self.pairs):
            raise ValueError(f"updates has a number for each of pairs {self.pairs}; got {self.updates}")


SMOKE = ReassignedSettings(
    hidden_size=64, num_layers=2, num_heads=4, vocab_size=512, train_length=24, pairs=(2, 4, 4, 4), steps=500,
    batch_size=64, length_factors=(1, 4, 16), test_examples=128, chunk_size=16, ska_chunk=2,
)  # fmt: skip


@EXPERIMENTS.add("mqar-updates")
class Reassigned(MQARExperiment):
    """MQAR whose keys are reassigned, at T to 16 T: Koopman attention with and without decay, and baselines.

    The last of `pairs` and of `updates` are K and u, and T should be 2K (u + 2), which leaves no room for more fillers.

    | test | what it is |
    |---|---|
    | in_distribution | T tokens, K keys, u updates |
    | persist | the same with the fillers of T to 16 T |
    | reassigned | K keys with as many updates as T to 16 T hold, 16 (u + 2) − 2 at 16 T |

    A chunk of SKA is one pair, so that a query reads all pairs.

    | model | what it is |
    |---|---|
    | mamba2+ska | a layer of Mamba-2, then SKA, whose sums weigh all tokens alike |
    | mamba2+ska_decay | the same with Simple Decay and β |
    | mamba2+ska_post | the same with PoST around that decay |
    | mamba2+attention | a layer of Mamba-2, then softmax attention |
    | gated_deltanet, mesa | two layers |
    """

    settings = ReassignedSettings
    scales: ClassVar = {
        "smoke": SMOKE,
        "small": dataclasses.replace(
            SMOKE, hidden_size=128, vocab_size=2048, train_length=64, pairs=(4, 8, 8, 8), updates=(0, 0, 1, 2),
            steps=3000, chunk_size=32, test_examples=256,
        ),
    }  # fmt: skip
    models: ClassVar = (
        "mamba2+ska", "mamba2+ska_decay", "mamba2+ska_post", "gated_deltanet", "mesa", "mamba2+attention"
    )  # fmt: skip
    rates: ClassVar = {"": (3e-3, 1e-2, 3e-2)}

    def build_cell(self, settings: ReassignedSettings, cell: Cell) -> RunConfig:
        length, pairs, updates = settings.train_length, settings.pairs[-1], settings.updates[-1]
        lengths = [factor * length for factor in settings.length_factors]

        def task(length: int, pairs: int, updates: int) -> dict[str, Any]:
            sizes = {"vocab_size": settings.vocab_size, "length": length, "num_pairs": pairs}
            return {"name": "mqar", **sizes, "updates": updates}

        def tests() -> Iterator[TestSpec]:
            yield TestSpec(name="in_distribution", task=task(length, pairs, updates))
            for t in lengths:
                yield TestSpec(name="persist", task=task(t, pairs, updates))
                yield TestSpec(name="reassigned", task=task(t, pairs, t // (2 * pairs) - 2))

        stages = zip(settings.pairs, settings.updates, strict=True)
        return settings.run(
            RunConfig,
            cell,
            model=self.model(cell.model, settings),
            stages=tuple((task(length, count, often),) for count, often in stages),
            validation=(task(length, pairs, updates),),
            tests=tuple(tests()),
        )

    def model(self, name: str, settings: ReassignedSettings) -> ModelConfig:
        config = mqar_model(name, settings)
        if config.hybrid.get("mixer") != "ska":
            return config
        return with_ska(config, name, settings, {})
