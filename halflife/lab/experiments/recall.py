"""Recall in mixtures of tasks with 128 token ids: training at one length, tests on grids of lengths and tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from halflife.lab.experiments.base import EXPERIMENTS, Experiment, TaskSettings
from halflife.layers import LAYERS
from halflife.models import ModelConfig, preset
from halflife.registry import check_least, taken
from halflife.runs.sweep import Cell
from halflife.runs.task_run import RunConfig, TestSpec
from halflife.tasks import TASKS, build, with_tier


@dataclass(frozen=True, kw_only=True)
class RecallSettings(TaskSettings):
    """The settings of an experiment on mixtures. All `pairs` are trained on at once."""

    tasks: tuple[str, ...] = ("sysprompt", "tooltrace")  # the tasks to train on, `name` or `name:tier`
    test_tasks: tuple[str, ...] = ("sysprompt", "tooltrace", "niah", "multihop", "commonword")  # the tasks to test on
    # lengths, test_pairs: the grid of each test. Cells that do not fit a task are left out.
    lengths: tuple[int, ...] = (64, 256, 1024)
    hop_lengths: tuple[int, ...] = ()  # the lengths of the test `multihop`; empty for `lengths`
    test_pairs: tuple[int, ...] = (1, 4, 8)
    warm_length: int = 0  # length of the sequences in the first half of the steps; 0 for no such stage
    warm_pairs: tuple[int, ...] = ()  # numbers of pairs in the first half; empty for `pairs`
    test_tokens: int = 1 << 15  # the largest number of tokens of a test, which still has at least 16 examples
    ska_chunk: int = 4  # tokens of a chunk of spectral Koopman attention

    def __post_init__(self) -> None:
        check_least(test_tokens=self.test_tokens)


SMOKE = RecallSettings(
    hidden_size=64, num_layers=2, num_heads=4, train_length=32, pairs=(1, 2), tasks=("sysprompt",), steps=300,
    batch_size=32, weight_decay=0.01, schedule="cosine", lengths=(32, 64, 128), test_pairs=(1, 2),
    validation_examples=64, chunk_size=32,
)  # fmt: skip
SMALL = RecallSettings(
    hidden_size=128, num_layers=4, num_heads=4, train_length=64, pairs=(1, 2, 4, 8), steps=3000, batch_size=32,
    weight_decay=0.01, warmup=0.05, schedule="cosine", bf16=True, validation_examples=64, test_examples=128,
    validate_every=250, chunk_size=32,
)  # fmt: skip
PAPER = dataclasses.replace(
    SMALL, pairs=tuple(range(1, 9)), steps=6000, batch_size=16, lengths=(64, 128, 256, 512, 1024, 2048, 4096),
    test_pairs=(1, 3, 4, 8), test_examples=512,
)  # fmt: skip


@EXPERIMENTS.add("recall")
class RecallExperiment(Experiment):
    """Transfer between recall tasks (Echo, §4.1): one training mixture, tests on all tasks, lengths and pairs."""

    scales: ClassVar = {"smoke": SMOKE, "small": SMALL, "paper": PAPER}
    settings = RecallSettings
    rates: ClassVar = {"paper": (3e-4,), "": (1e-3,)}

    def build_cell(self, settings: RecallSettings, cell: Cell) -> RunConfig:
        mixture = tuple(grid(settings.tasks, (settings.train_length,), settings.pairs))
        stages = [mixture]
        if settings.warm_length:
            warm_pairs = settings.warm_pairs or settings.pairs
            stages.insert(0, tuple(grid(settings.tasks, (settings.warm_length,), warm_pairs)))
        return settings.run(
            RunConfig,
            cell,
            model=self.model(cell.model, settings),
            stages=tuple(stages),
            validation=mixture,
            tests=(
                *(TestSpec(name="in_distribution", task=task) for task in mixture),
                *(
                    TestSpec(
                        name=name,
                        task=task,
                        examples=min(settings.test_examples, max(16, settings.test_tokens // build(**task).length)),
                    )
                    for name in settings.test_tasks
                    for task in grid((name,), self._lengths(name, settings), settings.test_pairs)
                ),
            ),
        )

    @staticmethod
    def _lengths(name: str, settings: RecallSettings) -> tuple[int, ...]:
        return settings.hop_lengths if name == "multihop" and settings.hop_lengths else settings.lengths

    def model(self, name: str, settings: RecallSettings) -> ModelConfig:
        """The configuration of a model by its name."""
        return recall_model(name, settings)


def grid(names: Sequence[str], lengths: Sequence[int], pairs: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The tasks at every length and number of pairs that fits them, as arguments of `tasks.build`.

    Tasks in text have fixed sizes, one set per tier, and appear once. A name is `name` or `name:tier`.
    """
    for written in names:
        own = with_tier(written)
        name = own["name"]
        if name == "mqar":
            own |= {"vocab_size": 128, "filler": "recall"}
        if not TASKS[name].scalable:
            yield own
            continue
        paired = "num_pairs" in {field.name for field in dataclasses.fields(TASKS[name])}
        cells = [{**own, "length": length} for length in lengths]
        if paired:
            cells = [{**cell, "num_pairs": k} for cell in cells for k in pairs]
        if not cells:
            raise ValueError(f"{name} needs at least one length and one number of pairs; got {lengths} and {pairs}")
        fitting = [cell for cell in cells if fits(cell)]
        if not fitting:
            build(**cells[-1])  # raises an error that says what does not fit
        yield from fitting


def fits(cell: dict[str, Any]) -> bool:
    """Whether these arguments of `tasks.build` have sizes that fit the task."""
    try:
        build(**cell)
    except ValueError:
        return False
    return True


def recall_model(name: str, settings: RecallSettings, **options: Any) -> ModelConfig:
    """The preset at the sizes of Echo, §4.1. The hybrid layers are the last half of the layers, as in its baselines.

    Mamba-2 has d_state 16, and B and C per head. The paper leaves this open, and of all readings this one comes nearest
    to its parameters: 1.09 M (printed 1.11 M), 990 K with attention (998 K) and 973 K with SKA (982 K). The printed
    numbers are exactly those of `mamba3_echo`, the block of its Appendix G: 1,110,144, 998,016 and 981,632, which does
    not count γ and η of SKA.

    `options` are those of the hybrid layers; the defaults are rank 24 and the chunk of the settings.
    """
    base = name.split("+")[0]
    state = {"mamba2": {"state_size": 16, "num_groups": settings.num_heads}, "mamba3": {"state_size": 16}}.get(base, {})
    chunks = taken(LAYERS[preset(base).mixer], {"chunk_size": settings.chunk_size})
    config = preset(
        name, vocab_size=128, num_heads=settings.num_heads, train_length=settings.train_length, tie_embeddings=False,
        initializer_range=1.0, **settings.shared_with(ModelConfig),
        mixer_options={} if base == "llama" else {**state, **chunks},
    )  # fmt: skip
    if not config.hybrid:
        return config
    half = {**config.hybrid["options"], "num_heads": settings.num_heads}
    if config.hybrid["mixer"] == "ska":
        half |= {"rank": 24, "chunk_size": settings.ska_chunk, **options}
    layers = list(range(settings.num_layers // 2, settings.num_layers))
    return dataclasses.replace(config, hybrid={**config.hybrid, "options": half, "layers": layers})
