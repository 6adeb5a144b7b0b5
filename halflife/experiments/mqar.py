"""PoST's experiment: multi-query associative recall, trained at T and tested to 8 T."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from halflife.experiments.base import EXPERIMENTS, Experiment, TaskSettings
from halflife.models import ModelConfig, preset
from halflife.report.markdown import Rows, in_distribution
from halflife.runs.sweep import Cell
from halflife.runs.task_run import RunConfig, TestSpec


@dataclass(frozen=True, kw_only=True)
class MQARSettings(TaskSettings):
    """The settings of MQAR.

    Attributes:
        vocab_size: number of token ids of the task.
        length_factors: the tests have the training length times these factors.
    """

    vocab_size: int
    length_factors: tuple[int, ...] = (1, 2, 4, 8)


# Half of the steps have fewer pairs, and half have K = T/4. Without the easy start, the delta rule often never learns
# to recall. With equal stages, Mamba-2 has too few steps at the end (docs/log.md).
SMOKE = MQARSettings(
    hidden_size=64, num_layers=2, num_heads=4, vocab_size=256, train_length=32, pairs=(2, 4, 8, 8), steps=1400,
    batch_size=128, test_examples=512, chunk_size=16,
)  # fmt: skip
SMALL = MQARSettings(
    hidden_size=128, num_layers=2, num_heads=4, vocab_size=1024, train_length=128, pairs=(8, 16, 32, 32), steps=3000,
    batch_size=64, test_examples=512, chunk_size=32, save_every=500,
)  # fmt: skip
# A batch has 2^18 tokens. Each of the four stages reads its 2^18 examples twice, which makes 8 epochs in all.
PAPER = MQARSettings(
    hidden_size=512, num_layers=2, num_heads=4, vocab_size=8192, train_length=512, pairs=(16, 32, 64, 128), steps=4096,
    batch_size=512, bf16=True, test_examples=3000, validation_examples=1024, save_every=512,
)  # fmt: skip


@EXPERIMENTS.add("mqar")
class MQARExperiment(Experiment):
    """MQAR (PoST, §6.1 and App. C): two layers without MLP, equal states; tests `capacity` and `persist` at T to 8T."""

    scales: ClassVar = {"smoke": SMOKE, "small": SMALL, "paper": PAPER}
    settings = MQARSettings

    def learning_rates(self, model: str, scale: str) -> tuple[float, ...]:
        if scale != "paper":
            return (1e-2,)
        if model.split("+")[0] in ("gated_deltanet", "deltanet"):
            return (10**-3.5, 1e-3, 10**-2.5)
        return (1e-3, 10**-2.5, 1e-2)

    def summary(self, folder: Path, rows: Rows) -> str:
        return in_distribution(rows)

    def build_cell(self, settings: MQARSettings, cell: Cell) -> RunConfig:
        length, largest = settings.train_length, settings.train_length // 4

        def task(length: int, pairs: int) -> dict[str, Any]:
            return {"name": "mqar", "vocab_size": settings.vocab_size, "length": length, "num_pairs": pairs}

        lengths = [length * factor for factor in settings.length_factors]
        return RunConfig(
            model=self.model(cell.model, settings),
            stages=tuple((task(length, pairs),) for pairs in settings.pairs),
            validation=(task(length, largest),),
            tests=(
                TestSpec(name="in_distribution", task=task(length, settings.pairs[-1])),
                *(TestSpec(name="capacity", task=task(t, t // 4)) for t in lengths),
                *(TestSpec(name="persist", task=task(t, largest)) for t in lengths),
            ),
            learning_rate=cell.learning_rate,
            seed=cell.seed,
            **settings.shared_with(RunConfig),
        )

    def model(self, name: str, settings: MQARSettings) -> ModelConfig:
        """The configuration of a model by its name."""
        return mqar_model(name, settings)


def mqar_model(name: str, settings: MQARSettings) -> ModelConfig:
    """The preset with a state of d²/h numbers per layer, no MLP and no positional encoding (PoST, App. C)."""
    head = settings.hidden_size // settings.num_heads
    base = name.split("+")[0]
    # The inner width of Mamba-2 and Mamba-3 is 2d, so half the rows give a state of the same size.
    half: dict[str, Any] = {"state_size": max(1, head // 2)}
    equal_state = {"mamba2": half, "mamba3": half, "rwkv7": {"head_dim": head}}.get(
        base, {"head_dim": head, "value_dim": head}
    )
    if base in ("gla", "retnet"):
        # Both lack a short convolution, without which two layers cannot bind a key to the value after it.
        equal_state["conv_size"] = 4
    if base == "retnet" and "rope" not in name:
        equal_state["position"] = "none"
    return preset(
        name,
        hidden_size=settings.hidden_size,
        num_layers=settings.num_layers,
        vocab_size=settings.vocab_size,
        num_heads=settings.num_heads,
        train_length=settings.train_length,
        mlp="none",
        tie_embeddings=False,
        initializer_range=1.0,  # with small embeddings, recall appears later (docs/log.md)
        mixer_options={} if base == "llama" else {**equal_state, "chunk_size": settings.chunk_size},
    )
