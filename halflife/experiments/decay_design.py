"""The Decay paper's grid (Tables 2–4): every decay in one block, on text, with the same budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from halflife.data.corpus import Corpus, CorpusConfig
from halflife.data.documents import PYTHON
from halflife.experiments.base import EXPERIMENTS, Experiment, ExperimentSettings
from halflife.experiments.decay_findings import finding_sentences, losses_and_findings
from halflife.files import CONFIG_JSON, read_json, write_json
from halflife.models import ModelConfig, preset
from halflife.registry import unknown
from halflife.runs.folder import RESULTS_JSON
from halflife.runs.language_run import LanguageConfig
from halflife.runs.sweep import Cell


@dataclass(frozen=True)
class Variant:
    """One row of the paper's tables.

    Attributes:
        paper: the paper's loss with 160M parameters, nats per token; None where it gives none.
        options: options of the mixer, which select its decay.
        preset: the preset of the block.
    """

    paper: float | None
    options: dict[str, Any]
    preset: str = "simple"


def _variant(paper: float | None, decay: str | None, granularity: str = "vector", **options: Any) -> Variant:
    modifier, settings = options.pop("modifier", ""), options.pop("decay_options", {})
    chosen = {"decay": decay, "granularity": granularity, "decay_options": settings, **options}
    return Variant(paper, chosen, f"simple{modifier}")


def _simple(paper: float, p: float, granularity: str = "vector", **options: Any) -> Variant:
    return _variant(paper, "simple", granularity, decay_options={"p": p}, **options)


# Losses: the paper's Tables 6, 8 and 9.
VARIANTS: dict[str, Variant] = {
    "vector/mamba2": _variant(2.947, "mamba2"),
    "vector/gla": _variant(2.975, "gla"),
    "vector/hgrn2": _variant(2.966, "hgrn2"),
    "vector/lightnet": _variant(3.027, "lightnet"),
    "ablation/mamba2-no-A": _variant(2.946, "mamba2_no_a"),
    "ablation/mamba2-no-Δ": _variant(3.019, "mamba2_no_dt"),
    "ablation/mamba2-no-A-Δ": _variant(2.973, "mamba2_no_a_dt"),
    "share/mamba2": _variant(2.947, "mamba2", share_keys=True),
    "share/gla": _variant(3.048, "gla", share_keys=True),
    "share/hgrn2": _variant(2.966, "hgrn2", share_keys=True),
    "share/lightnet": _variant(3.104, "lightnet", share_keys=True),
    "scalar/mamba2": _variant(2.960, "mamba2", "scalar"),
    "scalar/gla": _variant(3.008, "gla", "scalar"),
    "scalar/hgrn2": _variant(2.987, "hgrn2", "scalar"),
    "scalar/lightnet": _variant(3.032, "lightnet", "scalar"),
    "scalar/tnl": _variant(2.985, "tnl", "scalar"),
    "scalar/tnl-l": _variant(2.970, "tnl_l", "scalar"),
    "rope/mamba2": _variant(2.959, "mamba2", "scalar", position="rope"),
    "rope/gla": _variant(3.010, "gla", "scalar", position="rope"),
    "rope/hgrn2": _variant(2.990, "hgrn2", "scalar", position="rope"),
    "rope/lightnet": _variant(3.002, "lightnet", "scalar", position="rope"),
    "rope/tnl": _variant(2.975, "tnl", "scalar", position="rope"),
    "rope/tnl-l": _variant(2.972, "tnl_l", "scalar", position="rope"),
    "tpe/mamba2": _variant(2.931, "mamba2", "scalar", modifier="+tpe"),
    "tpe/gla": _variant(2.986, "gla", "scalar", modifier="+tpe"),
    "tpe/hgrn2": _variant(2.969, "hgrn2", "scalar", modifier="+tpe"),
    "tpe/lightnet": _variant(2.988, "lightnet", "scalar", modifier="+tpe"),
    "tpe/tnl": _variant(None, "tnl", "scalar", modifier="+tpe"),
    "tpe/tnl-l": _variant(2.948, "tnl_l", "scalar", modifier="+tpe"),
    "simple/0.8": _simple(2.954, 0.8),
    "simple/0.9": _simple(2.949, 0.9),
    "simple/0.95": _simple(2.939, 0.95),
    "simple/0.99": _simple(2.940, 0.99),
    "dplr/none": _variant(3.000, None, update="dplr"),
    "dplr/scalar-0": _simple(2.965, 0, "scalar", update="dplr"),
    "dplr/scalar-0.99": _simple(2.941, 0.99, "scalar", update="dplr"),
    "dplr/vector-0": _simple(2.937, 0, update="dplr"),
    "dplr/vector-0.99": _simple(2.920, 0.99, update="dplr"),
    "llama": Variant(2.921, {}, "llama"),
}


# The variants that the findings compare. The rest of the grid repeats the comparisons with other decays.
CORE = (
    "vector/mamba2", "scalar/mamba2", "simple/0.99", "dplr/vector-0.99", "vector/gla", "scalar/gla", "share/gla",
    "ablation/mamba2-no-Δ", "vector/lightnet", "share/lightnet", "rope/mamba2", "tpe/mamba2", "dplr/scalar-0.99",
    "dplr/none", "ablation/mamba2-no-A", "share/mamba2",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecayDesignSettings(ExperimentSettings):
    """The budget that all variants share, and their text. Tokens are bytes.

    Attributes:
        text: sources of a `CorpusConfig`; "python:" is the source of Python's standard library.
        held_out: shares of the documents for validation and for the test.
        validation_tokens: tokens of each validation.
        test_tokens: tokens of the test.
        digest, text_bytes: SHA-256 and size of the corpus, filled in by `settings_at`.
    """

    text: tuple[str, ...] = (PYTHON,)
    held_out: tuple[float, float] = (0.05, 0.05)
    validation_tokens: int
    test_tokens: int
    digest: str = ""
    text_bytes: int = 0

    def corpus(self) -> CorpusConfig:
        """The text: bytes of documents that follow each other, as in the paper."""
        return CorpusConfig(
            sources=self.text, tokenizer="bytes", context=self.train_length, mode="concatenated",
            fractions=self.held_out,
        )  # fmt: skip


SMOKE = DecayDesignSettings(
    hidden_size=64, num_layers=2, num_heads=2, train_length=128, batch_size=8, steps=60,
    validate_every=15, save_every=100, validation_tokens=1 << 13, test_tokens=1 << 12,
)  # fmt: skip
SMALL = DecayDesignSettings(
    hidden_size=256, num_layers=4, num_heads=4, train_length=256, batch_size=4, steps=800, bf16=True,
    validate_every=200, save_every=100, validation_tokens=1 << 14, test_tokens=1 << 16,
)  # fmt: skip
# The 160M row of Table 5 on bytes, with its tokens per step and its steps.
PAPER = DecayDesignSettings(
    hidden_size=768, num_layers=12, num_heads=12, train_length=2048, batch_size=256, steps=20_000, bf16=True,
    validate_every=5000, save_every=1000, validation_tokens=1 << 17, test_tokens=1 << 21,
)  # fmt: skip


@EXPERIMENTS.add("decay-design")
class DecayDesign(Experiment):
    """The Decay paper's grid (Tables 2–4): losses on text beside the paper's, and whether its findings hold."""

    is_paper: ClassVar = True
    measure: ClassVar = "loss"
    scales: ClassVar = {"smoke": SMOKE, "small": SMALL, "paper": PAPER}
    settings = DecayDesignSettings
    models: ClassVar = CORE
    groups: ClassVar = {"core": CORE, "all": tuple(VARIANTS)}

    def learning_rates(self, model: str, scale: str) -> tuple[float, ...]:
        return {"smoke": (3e-3,), "small": (2e-3,), "paper": (3e-4,)}[scale]

    def settings_at(self, scale: str, changes: Mapping[str, Any]) -> DecayDesignSettings:
        """Return what the base class returns, with the text and its digest, which every run checks."""
        settings = super().settings_at(scale, changes)
        assert isinstance(settings, DecayDesignSettings)
        corpus = Corpus.open(settings.corpus(), show=False)
        text = tuple(corpus.config.to_dict()["sources"])
        return dataclasses.replace(settings, text=text, digest=corpus.digest, text_bytes=corpus.bytes)

    def build_cell(self, settings: DecayDesignSettings, cell: Cell) -> LanguageConfig:
        """One variant and seed, with AdamW and the paper's schedule: warm-up, stable, linear decay (§5)."""
        return LanguageConfig(
            **{
                **settings.shared_with(LanguageConfig),
                "schedule": "warmup_stable_decay",
                "schedule_options": {"num_decay_steps": settings.steps // 3},
            },
            model=variant_model(cell.model, settings),
            data=settings.corpus().to_dict(),
            context=settings.train_length,
            mode="concatenated",
            test_split="test",
            learning_rate=cell.learning_rate,
            betas=(0.9, 0.999),
            seed=cell.seed,
        )

    def summary(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
        settings = DecayDesignSettings.from_dict(read_json(folder / CONFIG_JSON)["settings"])
        papers = {name: variant.paper for name, variant in VARIANTS.items()}
        return losses_and_findings(results_by_seed(rows), papers, describe(settings))

    def write_report(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write `results.json`, then the report of the base class, which reads this file."""
        results = results_by_seed(rows)
        papers = {name: VARIANTS[name].paper for name in results}
        data = {"results": results, "paper": papers, "findings": finding_sentences(results)}
        write_json(folder / RESULTS_JSON, data)
        super().write_report(folder, rows)


def variant_model(name: str, settings: DecayDesignSettings) -> ModelConfig:
    """The Decay Linear Transformer of a variant, on bytes.

    Raises:
        ValueError: an unknown variant; the message lists them.
    """
    if name not in VARIANTS:
        raise unknown("variant", name, [*DecayDesign.groups, *VARIANTS])
    variant = VARIANTS[name]
    config = preset(
        variant.preset, hidden_size=settings.hidden_size, num_layers=settings.num_layers,
        num_heads=settings.num_heads, vocab_size=256, train_length=settings.train_length,
        mixer_options=variant.options,
    )  # fmt: skip
    return dataclasses.replace(config, name=name)


def results_by_seed(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Variant → seed → sizes and "test", the loss at the selected learning rate; diverged runs are left out."""
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["selected"] and not math.isnan(row["loss"]):
            sizes = {name: row[name] for name in ("parameters", "state_size", "tokens_per_second")}
            results.setdefault(row["model"], {})[str(row["seed"])] = {**sizes, "test": row["loss"]}
    return results


def describe(settings: DecayDesignSettings) -> str:
    """The text and the budget in words."""
    tokens = settings.steps * settings.batch_size * settings.train_length
    return (
        f"Text: {settings.text_bytes:,} bytes (SHA-256 {settings.digest[:12]}…). Model: {settings.num_layers} layers, "
        f"hidden size {settings.hidden_size}, {settings.num_heads} heads. Training: {settings.steps} steps of "
        f"{settings.batch_size} × {settings.train_length} bytes ({tokens / 1e6:.2f} M)"
        f"{', bfloat16 autocast' if settings.bf16 else ''}."
    )
