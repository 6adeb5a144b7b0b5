"""Echo's experiments: transfer between recall tasks, MQAR, and ablations of spectral Koopman attention (SKA)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from halflife.lab.experiments.base import EXPERIMENTS
from halflife.lab.experiments.mqar import MQARExperiment, MQARSettings, mqar_model
from halflife.lab.experiments.recall import SMOKE as RECALL_SMOKE
from halflife.lab.experiments.recall import RecallExperiment, RecallSettings, recall_model
from halflife.layers import LAYERS
from halflife.models import SIZES as MODEL_SIZES
from halflife.models import LanguageModel, ModelConfig, preset
from halflife.registry import constructor_parameters, unknown
from halflife.report.markdown import Rows, models, percent
from halflife.report.table import Table
from halflife.runs.sweep import Cell
from halflife.runs.task_run import RunConfig, TestSpec


def _ska(power: int, mix: str = "learned", **options: Any) -> dict[str, Any]:
    return {"power": power, "mix": mix, "query_init": "key", **options}


# Variant → options of the SKA layers; `preset:variant` names a model. "own": query and key projections start from
# different values, as in the paper. "full": μ = 1, the paper's filter; otherwise μ is learned.
VARIANTS: dict[str, dict[str, Any]] = {
    "K0-own": _ska(0, "ridge", query_init="own"),
    "K1-full-own": _ska(1, "koopman", query_init="own"),
    "K2-full-own": _ska(2, "koopman", query_init="own"),  # the paper
    "K4-full-own": _ska(4, "koopman", query_init="own"),
    "K1-own": _ska(1, query_init="own"),
    "K2-own": _ska(2, query_init="own"),
    "K4-own": _ska(4, query_init="own"),
    "K0": _ska(0, "ridge"),
    "K1-full": _ska(1, "koopman"),
    "K2-full": _ska(2, "koopman"),
    "K4-full": _ska(4, "koopman"),
    "K1": _ska(1),
    "K2": _ska(2),
    "K4": _ska(4),
    "K1-sequence": _ska(1, normalization="sequence"),
    "K1-S1": _ska(1, chunk_size=1),
    "K1-S8": _ska(1, chunk_size=8),
    "K1-S16": _ska(1, chunk_size=16),
}
# What the paper says failed, in its form of SKA and in ours: a sigmoid gate (§6.1), the norm of each token (Remark 5),
# and the features of the SSM in the place of own projections (§6.1).
FAILED: dict[str, dict[str, Any]] = {
    f"{name}-{change}": {**VARIANTS[name], **options}
    for name in ("K2-full-own", "K1-own")
    for change, options in {
        "gated": {"gate": "sigmoid"}, "token": {"normalization": "token"}, "shared": {"features": "mixer"}
    }.items()
}  # fmt: skip


def variant(name: str, also: Iterable[str] = ()) -> tuple[str, dict[str, Any]]:
    """The preset of a name `preset:variant`, and the options of its SKA layers. Errors list the names `also`, too."""
    base, _, chosen = name.partition(":")
    if not chosen:
        return base, {}
    known = VARIANTS | FAILED
    if chosen not in known:
        raise unknown("variant", chosen, [*known, *also])
    if "ska" not in base.split("+"):
        raise ValueError(f"{chosen!r} is a variant of models with +ska, and {base} is none")
    return base, known[chosen]


def with_shared_features(config: ModelConfig) -> ModelConfig:
    """The hybrid `config` whose SKA layers read the features of the Mamba layer before them, if they have no own ones.

    Keys then have as many numbers as the SSM's state has rows, and values those of its inner width 2 d.
    """
    own = config.hybrid.get("options", {})
    if own.get("features") != "mixer":
        return config
    mixer = {**config.mixer_options, "share_features": True}
    rows = mixer.get("state_size") or constructor_parameters(LAYERS[config.mixer])["state_size"].default
    sizes = {"query_init": "own", "rank": rows, "value_dim": 2 * config.hidden_size // mixer["num_heads"]}
    return dataclasses.replace(config, mixer_options=mixer, hybrid={**config.hybrid, "options": {**own, **sizes}})


# The paper's training takes 15 minutes per model here. This one has a third of its steps, twice the examples, a higher
# rate, and short sequences in the first half of the steps (docs/log.md).
SMALL = RecallSettings(
    hidden_size=128, num_layers=4, num_heads=4, train_length=64, pairs=tuple(range(1, 9)), warm_length=24,
    warm_pairs=(1, 2, 3, 4), steps=2000, batch_size=32, weight_decay=0.01, warmup=0.05, schedule="cosine", bf16=True,
    chunk_size=32, test_tasks=("mqar", "sysprompt", "tooltrace", "niah", "multihop", "commonword"),
    lengths=(64, 128, 256, 512, 1024, 2048, 4096), test_pairs=(1, 4, 8), validation_examples=32, test_examples=128,
    validate_every=500, save_every=500,
)  # fmt: skip
PAPER = dataclasses.replace(
    SMALL, warm_length=0, steps=6000, batch_size=16, test_pairs=(1, 3, 4, 8), test_examples=512, test_tokens=1 << 22,
    hop_lengths=(16, 32, 64, 128, 256),
)  # fmt: skip


PAPER_MODELS = ("SSM", "SSM+Attn", "SSM+SKA")
# Table 3: means over lengths and KV, percent.
TABLE_3 = {
    "mqar": (55.1, 76.0, 82.2), "sysprompt": (64.2, 81.3, 85.3), "tooltrace": (56.5, 76.2, 80.5),
    "niah": (52.0, 81.1, 84.2), "multihop": (39.3, 71.1, 76.7), "commonword": (52.9, 68.2, 74.1),
}  # fmt: skip
# Table 2: needle in a haystack, KV 1, trained at 64, percent.
TABLE_2 = {
    64: (88.6, 88.5, 94.5), 128: (82.1, 97.4, 89.4), 256: (75.8, 92.9, 93.3), 512: (66.9, 78.1, 95.6),
    1024: (37.3, 64.8, 86.4), 2048: (2.0, 42.5, 81.2), 4096: (2.0, 5.0, 65.1),
}  # fmt: skip


def _beside(first: str, table: list[tuple[str, tuple[float, ...], list[Any]]], names: list[str]) -> str:
    heading = [first, *(f"paper: {column}" for column in PAPER_MODELS), *names]
    body = [
        [name, *(f"{x:.1f}" for x in paper), *(percent([r for r in own if r["model"] == m]) for m in names)]
        for name, paper, own in table
        if own
    ]
    return Table(heading, body).markdown()


@EXPERIMENTS.add("echo-transfer")
class EchoTransfer(RecallExperiment):
    """Echo's Tables 2 and 3: training on two tasks at T = 64, tests on six tasks up to 64 T.

    At the scale "paper", the models are `mamba3_echo` alone, with attention and with `ska_paper` in the last two of
    four layers.

    Departures: embeddings start with a standard deviation of 1. The paper does not give the chunk of SKA at T = 64
    (`ska_chunk`, 4 here), the numbers of pairs in training (1 to 8 here), the share of the warm-up (5 % here), its
    action masks here (none), or its norm here (RMSNorm; `--set model.norm=layer` is that of Appendix G).
    """

    scales: ClassVar = {
        "smoke": dataclasses.replace(RECALL_SMOKE, num_layers=4, tasks=("sysprompt", "tooltrace")),
        "small": SMALL,
        "paper": PAPER,
    }
    rates: ClassVar = {"paper": (3e-4,), "": (2e-3,)}
    models: ClassVar = ("mamba2", "mamba2+attention", "mamba2+ska:K2-full-own", "mamba2+ska:K1")
    models_of: ClassVar = {"paper": ("mamba3_echo", "mamba3_echo+attention", "mamba3_echo+ska_paper")}

    def model(self, name: str, settings: RecallSettings) -> ModelConfig:
        base, options = variant(name)
        return with_shared_features(recall_model(base, settings, **options))

    def summary(self, folder: Path, rows: Rows) -> str:
        """Tables 3 and 2 with the paper's numbers and ours: the mean over seeds and, in brackets, every seed."""
        niah = [r for r in rows if r["test"] == "niah" and r["num_pairs"] == 1]
        by_task = [(name, paper, [r for r in rows if r["test"] == name]) for name, paper in TABLE_3.items()]
        by_length = [(f"{n:,}", paper, [r for r in niah if r["length"] == n]) for n, paper in TABLE_2.items()]
        return "\n\n".join([
            "### Table 3: mean accuracy over all lengths and numbers of pairs, percent",
            _beside("task", by_task, models(rows)),
            "### Table 2: needle in a haystack, one pair, percent",
            _beside("length", by_length, models(rows)),
        ])  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class EchoMQARSettings(MQARSettings):
    """The settings of MQAR with SKA."""

    rank: int = 24  # the rank of the SKA layers
    ska_chunk: int = 2  # tokens of a chunk of the SKA layers


def with_ska(config: ModelConfig, name: str, settings: EchoMQARSettings, options: dict[str, Any]) -> ModelConfig:
    """The hybrid `config` with the sizes of the settings and further options added to those of its SKA layers."""
    sizes = {"num_heads": settings.num_heads, "rank": settings.rank, "chunk_size": settings.ska_chunk}
    own = {**config.hybrid["options"], **sizes, **options}
    return dataclasses.replace(config, name=name, hybrid={**config.hybrid, "options": own})


MQAR = EchoMQARSettings(
    hidden_size=64, num_layers=2, num_heads=4, vocab_size=256, train_length=64, pairs=(4, 8, 16, 16), steps=800,
    batch_size=32, length_factors=(1, 2, 4), test_examples=512, chunk_size=16,
)  # fmt: skip


# Echo's grid: pairs × fillers in the gap.
CELLS = tuple(f"{pairs}x{gap}" for pairs in (4, 8, 16, 32) for gap in (64, 128, 256, 512, 1024, 2048, 4096))
MODELS_50M = ("mamba2", "mamba2+attention", "mamba2+ska_paper")
MQAR_50M = EchoMQARSettings(
    hidden_size=448, num_layers=16, num_heads=7, vocab_size=8192, train_length=192, pairs=(4, 8, 16, 32), steps=6000,
    batch_size=16, weight_decay=0.01, schedule="cosine", bf16=True, rank=56, ska_chunk=64, test_examples=1024,
)  # fmt: skip


@EXPERIMENTS.add("echo-mqar")
class EchoMQAR(MQARExperiment):
    """MQAR: one layer of Mamba-2 and one of SKA, against two layers of Mamba-2 with as large a state.

    At the scale "paper" it is Echo's grid (§4.2) with the 50M sizes of §3.4. A model `preset:KxG` is trained and tested
    on K pairs and a gap of G fillers alone. `4x64` names all three models of that cell.

    Departures: §5.2 speaks of fine-tuning and §4.2 of training, and here models start from scratch. Norms are RMSNorm,
    as in all experiments of Echo but `echo-tiers` (`--set model.norm=layer`). The paper does not give the layout of a
    cell. Here the queries follow the gap in every second token. The models have SwiGLU, and 50 million parameters with
    the 8,192 tokens of the task.
    """

    scales: ClassVar = {
        "smoke": dataclasses.replace(MQAR, train_length=32, pairs=(2, 4, 8, 8), steps=400),
        "small": MQAR,
        "paper": MQAR_50M,
    }
    settings = EchoMQARSettings
    models: ClassVar = ("mamba2", "mamba2:equal-state", "mamba2+ska:K2-full-own", "mamba2+ska:K1")
    held: ClassVar = "persist"
    groups: ClassVar = {cell: tuple(f"{name}:{cell}" for name in MODELS_50M) for cell in CELLS}
    models_of: ClassVar = {"paper": CELLS}
    rates: ClassVar = {"paper": (3e-4,), "": (1e-2,)}

    def build_cell(self, settings: EchoMQARSettings, cell: Cell) -> RunConfig:
        base, _, place = cell.model.partition(":")
        if place not in CELLS:
            return super().build_cell(settings, cell)
        pairs, gap = map(int, place.split("x"))
        sizes = {"vocab_size": settings.vocab_size, "length": 4 * pairs + gap, "num_pairs": pairs, "gap": gap}
        task = {"name": "mqar", **sizes}
        chosen = {name: getattr(settings, name) for name in ("hidden_size", "num_layers", "vocab_size")}
        known = {**MODEL_SIZES["echo-50m"], **chosen}
        model = preset(base, **known, train_length=sizes["length"], mixer_options={"state_size": 64})
        if model.hybrid.get("mixer") == "ska":
            model = with_ska(model, cell.model, settings, {})
        return settings.run(
            RunConfig,
            cell,
            model=dataclasses.replace(model, name=cell.model),
            stages=((task,),),
            validation=(task,),
            tests=(TestSpec(name="in_distribution", task=task),),
        )

    def model(self, name: str, settings: EchoMQARSettings) -> ModelConfig:
        if name == "mamba2:equal-state":
            return self._equal_state(settings)
        base, options = variant(name, ["equal-state", *CELLS])
        config = mqar_model(base, settings)
        if config.hybrid.get("mixer") != "ska":
            return config
        return with_shared_features(with_ska(config, name, settings, options))

    def _equal_state(self, settings: EchoMQARSettings) -> ModelConfig:
        """Mamba-2 with the smallest d_state at which its state is at least as large as that of the model with SKA."""
        target = _state_size(self.model("mamba2+ska", settings))
        plain = self.model("mamba2", settings)
        row = settings.num_layers * 2 * settings.hidden_size  # numbers that one more row adds to all states
        size = plain.mixer_options["state_size"] + math.ceil((target - _state_size(plain)) / row)
        return dataclasses.replace(
            plain, name="mamba2:equal-state", mixer_options={**plain.mixer_options, "state_size": size}
        )


def _state_size(config: ModelConfig) -> int:
    return LanguageModel(config).state_size()


@EXPERIMENTS.add("echo-ablations")
class EchoAblations(EchoMQAR):
    """Ablations of SKA on MQAR: the power K, the mixture μ, the start of the queries, normalisation, chunk."""

    scales: ClassVar = {name: EchoMQAR.scales[name] for name in ("smoke", "small")}
    models: ClassVar = tuple(f"mamba2+ska:{name}" for name in VARIANTS)
