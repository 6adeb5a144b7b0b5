"""PoST's experiment: multi-query associative recall, trained at T and tested to 8 T."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from halflife.lab.experiments.base import EXPERIMENTS, SKA_CHUNK, Experiment, ExperimentSettings, TaskSettings
from halflife.layers import LAYERS
from halflife.models import ModelConfig, preset
from halflife.registry import check_choice, check_least, taken
from halflife.runs.records import LAG
from halflife.runs.sweep import Cell
from halflife.runs.task_run import RunConfig, TestSpec


@dataclass(frozen=True, kw_only=True)
class MQARSettings(TaskSettings):
    """The settings of MQAR."""

    vocab_size: int  # number of token ids of the task
    length_factors: tuple[int, ...] = (1, 2, 4, 8)  # the tests have the training length times these factors
    filler: str = "disjoint"  # see the task
    # tie_embeddings, initializer_range, embedding_dropout: see `ModelConfig`
    tie_embeddings: bool = False
    initializer_range: float = 1.0  # with small embeddings, recall appears later (docs/log.md)
    embedding_dropout: float = 0.0
    # whether the models are those of zoology, PoST's framework: RetNet has RoPE and fla's decays, and Gated DeltaNet no
    # output gate
    zoology: bool = False


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
PAPER = MQARSettings(
    hidden_size=512, num_layers=2, num_heads=4, vocab_size=8192, train_length=512, pairs=(16, 32, 64, 128), steps=4096,
    batch_size=512, bf16=True, test_examples=3000, validation_examples=1024, save_every=512,
)  # fmt: skip


LARGE_RATES, DELTA_RATES = (1e-3, 10**-2.5, 1e-2), (10**-3.5, 1e-3, 10**-2.5)  # of the large scales


@EXPERIMENTS.add("mqar")
class MQARExperiment(Experiment):
    """MQAR with two layers without MLP and equal states; tests `capacity` and `lag` at T to 8T.

    `capacity` has T/4 pairs. `lag` has the pairs of training, then fillers, and the questions at the end, so that a
    question comes T − 4K + 1 to T − 3 tokens after its value. The experiments of papers have `persist` in its place:
    the same pairs in T tokens, with questions at places of PoST's power law, most of which come early.

    The scale "paper" has the sizes of PoST (§6.1, App. C) and our recipe. `post-mqar` is PoST's experiment.
    """

    scales: ClassVar = {"smoke": SMOKE, "small": SMALL, "paper": PAPER}
    settings = MQARSettings
    held: ClassVar[str] = LAG  # the test with the pairs of training: `lag` or `persist`
    rates: ClassVar = {
        "large": LARGE_RATES, "paper": LARGE_RATES, "": (1e-2,),
        **{f"{scale} {base}": DELTA_RATES for scale in ("large", "paper") for base in ("gated_deltanet", "deltanet")},
    }  # fmt: skip

    def settings_at(self, scale: str, changes: Mapping[str, Any]) -> ExperimentSettings:
        settings = super().settings_at(scale, changes)
        if isinstance(settings, MQARSettings) and not settings.pairs:
            raise ValueError("pairs needs at least one number of key-value pairs; got none")
        return settings

    def build_cell(self, settings: MQARSettings, cell: Cell) -> RunConfig:
        length, trained = settings.train_length, settings.pairs[-1]

        def task(length: int, pairs: int, gap: int = 0) -> dict[str, Any]:
            sizes = {"vocab_size": settings.vocab_size, "length": length, "num_pairs": pairs}
            further = {"filler": settings.filler} if settings.filler != "disjoint" else {}
            return {"name": "mqar", **sizes, **further, **({"gap": gap} if gap else {})}

        def gap(t: int) -> int:
            return t - 4 * trained if self.held == LAG else 0

        lengths = [length * factor for factor in settings.length_factors]
        return settings.run(
            RunConfig,
            cell,
            model=self.model(cell.model, settings),
            stages=tuple((task(length, pairs),) for pairs in settings.pairs),
            validation=(task(length, trained),),
            tests=(
                TestSpec(name="in_distribution", task=task(length, trained)),
                *(TestSpec(name="capacity", task=task(t, t // 4)) for t in lengths),
                *(TestSpec(name=self.held, task=task(t, trained, gap(t))) for t in lengths),
            ),
        )

    def model(self, name: str, settings: MQARSettings) -> ModelConfig:
        """The configuration of a model by its name."""
        return mqar_model(name, settings)


def mqar_model(name: str, settings: MQARSettings) -> ModelConfig:
    """The preset with a state of d²/h numbers per layer, no MLP and no positional encoding (PoST, App. C).

    Positions and Koopman MLPs that the name asks for stay.
    """
    check_least(num_heads=settings.num_heads)
    head = settings.hidden_size // settings.num_heads
    base, *modifiers = name.split("+")
    plain = preset(base)
    mixer, koopman = plain.mixer, "koopman_mlp" in modifiers or plain.mlp.startswith("koopman")
    # The inner width of Mamba-2 and Mamba-3 is 2d, so half the rows give a state of the same size.
    half: dict[str, Any] = {"state_size": max(1, head // 2)}
    equal_state: dict[str, Any] = {
        **dict.fromkeys(("mamba2", "mamba3", "mamba3_echo", "longhorn"), half),
        "rwkv7": {"head_dim": head}, "attention": {}, "fox": {},
    }.get(mixer, taken(LAYERS[mixer], {"head_dim": head, "value_dim": head}))  # fmt: skip
    if base in ("gla", "retnet"):
        # Both lack a short convolution, without which two layers cannot bind a key to the value after it.
        equal_state["conv_size"] = 4
    if base == "retnet" and not settings.zoology and not {"rope", "lrpe", "rope_released"} & set(modifiers):
        equal_state["position"] = "none"
    if base == "retnet" and settings.zoology and not modifiers:
        equal_state["decay"] = "retnet_paper"  # fla's, which zoology has; it differs from 8 heads on
    if base == "gated_deltanet" and settings.zoology:
        equal_state["gate"] = "none"
    if mixer not in ("attention", "fox"):
        equal_state |= taken(LAYERS[mixer], {"chunk_size": settings.chunk_size})
    config = preset(
        name, num_heads=settings.num_heads, train_length=settings.train_length, mixer_options=equal_state,
        **({} if koopman else {"mlp": "none"}), **settings.shared_with(ModelConfig),
    )  # fmt: skip
    return with_short_chunks(config, settings.train_length)


def with_short_chunks(config: ModelConfig, train_length: int) -> ModelConfig:
    """Give Koopman attention chunks of T/8 tokens where its own are as long as a text, in which it reads no token."""
    if config.hybrid.get("mixer") != "ska" or train_length > SKA_CHUNK:
        return config
    options = {"chunk_size": max(1, train_length // 8), **config.hybrid["options"]}
    return dataclasses.replace(config, hybrid={**config.hybrid, "options": options})


# Every epoch begins again with 16 pairs.
POST = dataclasses.replace(
    PAPER, pairs=(16, 32, 64, 128) * 8, steps=8 * 4 * 512, schedule="linear_by_epoch", schedule_options={"epochs": 8},
    warmup=0.0, betas=(0.9, 0.999), filler="zoology", tie_embeddings=True, initializer_range=0.02,
    embedding_dropout=0.1, zoology=True,
)  # fmt: skip
FORMS = ("mamba2", "rwkv7", "gated_deltanet", "gla", "retnet")
# Table 2, where GLA and RetNet with PoST are one model.
TABLE = (*FORMS, "mamba2+post_released", "rwkv7+post_released", "gated_deltanet+post_released", "gla+post_released")
STATES = {"64k": (512, 4), "32k": (512, 8), "16k": (256, 4)}  # state size → hidden size and heads


@EXPERIMENTS.add("post-mqar")
class PostMQAR(MQARExperiment):
    """MQAR as PoST ran it (§6.1, Appendix C, released configuration), with its three sizes of the state.

    A model is a preset, or `preset:state` with a state of 64k, 32k or 16k numbers per layer; 64k is the default. Rates
    are those of the released configuration.

    Departures: examples are drawn anew in each epoch. Weights other than embeddings start as ours. The learning rate is
    selected, and not the checkpoint as in the paper. Norms are the paper's RMSNorm, but LayerNorm in RWKV-7, as
    released. The released GLA, RetNet and Gated DeltaNet have LayerNorm too, and zoology's block without an MLP adds a
    norm of the residual stream to it after each of their layers.
    """

    scales: ClassVar = {
        "smoke": dataclasses.replace(SMOKE, filler="zoology", zoology=True, length_factors=(1, 2)),
        "small": dataclasses.replace(SMALL, filler="zoology", zoology=True),
        "paper": POST,
    }
    rates: ClassVar = {**MQARExperiment.rates, "paper rwkv7": (10**-4.5, 1e-4, 10**-3.5)}
    models: ClassVar = TABLE
    held: ClassVar = "persist"
    groups: ClassVar = {state: tuple(f"{name}:{state}" for name in TABLE) for state in STATES}

    def model(self, name: str, settings: MQARSettings) -> ModelConfig:
        base, _, state = name.partition(":")
        if state:
            check_choice("size of the state", state, STATES)
            hidden_size, num_heads = STATES[state]
            settings = dataclasses.replace(settings, hidden_size=hidden_size, num_heads=num_heads)
        return dataclasses.replace(mqar_model(base, settings), name=name)
