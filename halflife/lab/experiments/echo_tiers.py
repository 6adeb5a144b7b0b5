"""Echo's Appendix G: tool calls, an economy and system prompts in text, for Mamba-3 with SKA beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from halflife.lab.experiments.base import EXPERIMENTS, Experiment, ExperimentSettings, TaskSettings
from halflife.lab.experiments.echo import with_shared_features
from halflife.models import ModelConfig, preset
from halflife.models.presets.modifiers import SKA_PAPER
from halflife.registry import check_choice
from halflife.runs.sweep import Cell
from halflife.runs.task_run import RunConfig, TestSpec
from halflife.tasks import TASKS

# Model → options of its SKA layers beside the last two; None for no SKA.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "mamba3": None,
    "cg-ska-1.5": {"lift": "cg_projected", "eta_init": 1.5},
    "cg-ska-2.5": {"lift": "cg_projected", "eta_init": 2.5},
    "ska-1.5": {"eta_init": 1.5},
    "ska-2.5": {"eta_init": 2.5},
}
# What the paper says failed (§6.1, G.1, Remark 5).
FAILED: dict[str, dict[str, Any]] = {
    "cg-ska-1.5-gated": {"lift": "cg_projected", "eta_init": 1.5, "gate": "sigmoid"},
    "cg-ska-1.5-token": {"lift": "cg_projected", "eta_init": 1.5, "normalization": "token"},
    "ska-1.5-shared": {"eta_init": 1.5, "features": "mixer"},
}
TEXT_TASKS = ("toolcalling", "economy", "amnesia")
# "task-tier" → the task and its settings.
TIERS = {f"{task}-{tier}": {"name": task, **own} for task in TEXT_TASKS for tier, own in TASKS[task].tiers.items()}


@dataclass(frozen=True, kw_only=True)
class TierSettings(TaskSettings):
    """The settings of the tiers."""

    # amnesia_layers, amnesia_heads, amnesia_steps: of the models for `amnesia`. `num_layers`, `num_heads` and `steps`
    # are those of the others, and of all if they are given.
    amnesia_layers: int = 4
    amnesia_heads: int = 4
    amnesia_steps: int = 6000
    rank: int = 24  # r of the SKA layers


PAPER = TierSettings(
    hidden_size=96, num_layers=3, num_heads=3, train_length=400, steps=2500, batch_size=16, weight_decay=0.01,
    schedule="cosine", bf16=True, validate_every=250, action_mask=True, test_examples=512,
)  # fmt: skip
SMOKE = dataclasses.replace(PAPER, steps=60, amnesia_steps=60, bf16=False, test_examples=64, validation_examples=64)
SMALL = dataclasses.replace(PAPER, steps=500, amnesia_steps=500)


@EXPERIMENTS.add("echo-tiers")
class EchoTiers(Experiment):
    """Echo's Appendix G: every model is trained and tested on one tier of one task in text.

    A model is `variant:task-tier`, such as `cg-ska-1.5:toolcalling-hard`. `toolcalling-hard` names all models of that
    tier. SKA stands beside the last two layers, on the residual stream. Every query reads the operator of all
    tokens in the action mask (Appendix F); the chunks of 64 tokens are those of Mamba-3's scan (G.2, G.5).

    Departures: bfloat16 in the place of float16. Rows end with the longest text, not at T_max; zeros behind it reach an
    answer only through SKA's norm, the largest of all keys. The sizes for `economy` are those of tool calls, because
    Table 5 does not give them. Mamba-3 and SKA have the parts of `mamba3_echo` and `ska_paper`. Figure 3 says 400k
    parameters; the models of `amnesia` have 612,288, and 687,760 with SKA and the lift. The heads of Mamba-3 have 64
    and 48 numbers, twice the d/H of Table 5, because its inner width is 2 d. `--set model.norm=rms` takes the
    LayerNorm's place.

    Further variants have what the paper says failed: `cg-ska-1.5-gated`, `cg-ska-1.5-token` and `ska-1.5-shared`.
    """

    scales: ClassVar = {"smoke": SMOKE, "small": SMALL, "paper": PAPER}
    settings = TierSettings
    models: ClassVar = tuple(f"{name}:toolcalling-easy" for name in VARIANTS)
    groups: ClassVar = {tier: tuple(f"{name}:{tier}" for name in VARIANTS) for tier in TIERS}
    models_of: ClassVar = {"paper": tuple(TIERS)}
    rates: ClassVar = {"paper": (3e-4,), "": (1e-3,)}

    def settings_at(self, scale: str, changes: Mapping[str, Any]) -> ExperimentSettings:
        amnesia = {"steps": "amnesia_steps", "num_layers": "amnesia_layers", "num_heads": "amnesia_heads"}
        given = {amnesia[name]: value for name, value in changes.items() if name in amnesia}
        return super().settings_at(scale, {**given, **changes})

    def build_cell(self, settings: TierSettings, cell: Cell) -> RunConfig:
        name, _, place = cell.model.partition(":")
        check_choice("tier", place, TIERS)
        chosen = TIERS[place]
        task = chosen["name"]
        steps = settings.amnesia_steps if task == "amnesia" else settings.steps
        return settings.run(
            RunConfig,
            cell,
            steps=steps,
            model=dataclasses.replace(self.model(name, task, settings), name=cell.model),
            stages=((chosen,),),
            validation=(chosen,),
            tests=(TestSpec(name=place, task=chosen),),
        )

    def model(self, name: str, task: str, settings: TierSettings) -> ModelConfig:
        """The model of a variant for a task."""
        check_choice("model of echo-tiers", name, VARIANTS | FAILED)
        amnesia = task == "amnesia"
        depth = settings.amnesia_layers if amnesia else settings.num_layers
        heads = settings.amnesia_heads if amnesia else settings.num_heads
        config = preset(
            "mamba3_echo", hidden_size=settings.hidden_size, num_layers=depth, vocab_size=128, num_heads=heads,
            norm="layer", mixer_options={"chunk_size": settings.chunk_size},
        )  # fmt: skip
        options = (VARIANTS | FAILED)[name]
        if options is None:
            return config
        printed = {name: value for name, value in SKA_PAPER.items() if name != "decode_refresh"}
        own = {**printed, "mode": "masked", "num_heads": heads, "rank": settings.rank, **options}
        hybrid = {"mixer": "ska", "options": own, "layers": [depth - 2, depth - 1]}
        return with_shared_features(dataclasses.replace(config, hybrid={**hybrid, "attach": "beside"}))
