"""The Decay paper's grid (Tables 2–4): every decay in one block, on text, with the same budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from halflife.data.corpus import Corpus
from halflife.data.paths import absolute_paths
from halflife.files import CONFIG_JSON, read_json
from halflife.lab.experiments.base import EXPERIMENTS
from halflife.lab.experiments.decay_findings import finding_sentences, losses_and_findings
from halflife.lab.experiments.evidence import decay_regression
from halflife.lab.experiments.language_models import base as language
from halflife.lab.experiments.language_models.base import (
    LanguageExperiment,
    LanguageSettings,
    describe,
    results_by_seed,
)
from halflife.models import ModelConfig, preset
from halflife.registry import unknown


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


# What the authors' code has in place of the paper's (docs/fidelity.md).
RELEASED = {
    "decay": {name: f"{name}_released" for name in ("gla", "lightnet", "tnl", "tnl_l")},
    "position": {"rope": "half_lrpe"},
    "update": {"dplr": "dplr_released"},
}


def find_variant(name: str) -> Variant:
    """The variant `name`, or `name:released`, the same row as the paper's authors ran it.

    Raises:
        ValueError: an unknown variant (the message lists them), or a row whose released form is the printed one.
    """
    row, _, form = name.partition(":")
    if row not in VARIANTS or form not in ("", "released"):
        raise unknown("variant", name, [*DecayDesign.groups, *VARIANTS])
    printed = VARIANTS[row]
    if not form:
        return printed
    options = {key: RELEASED.get(key, {}).get(str(value), value) for key, value in printed.options.items()}
    released = Variant(printed.paper, options, printed.preset.replace("+tpe", "+tpe_released"))
    if released == printed:
        raise ValueError(f"{row} was run as the paper prints it")
    return released


def paper_loss(name: str) -> float | None:
    """The paper's loss of a variant in nats per token; None for a control or a preset, which its tables have not."""
    return find_variant(name).paper if "@" not in name and name.partition(":")[0] in VARIANTS else None


def _differs(name: str) -> bool:
    try:
        find_variant(f"{name}:released")
    except ValueError:
        return False
    return True


# The variants that the findings compare. The rest of the grid repeats the comparisons with other decays.
CORE = (
    "vector/mamba2", "scalar/mamba2", "simple/0.99", "dplr/vector-0.99", "vector/gla", "scalar/gla", "share/gla",
    "ablation/mamba2-no-Δ", "vector/lightnet", "share/lightnet", "rope/mamba2", "tpe/mamba2", "dplr/scalar-0.99",
    "dplr/none", "ablation/mamba2-no-A", "share/mamba2",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecayDesignSettings(LanguageSettings):
    """The budget that all variants share, and their text. Tokens are bytes."""

    betas: tuple[float, float] = (0.9, 0.999)
    schedule: str = "wsd"
    floor: float = 0.0
    decay: float = 1 / 3


SMOKE = DecayDesignSettings(**language.SMOKE, learning_rate=3e-3)
SMALL = DecayDesignSettings(**language.SMALL, learning_rate=2e-3)
# The 160M row of Table 5 with its tokens per step and its steps, but on bytes of the user's text. The paper trains on
# FineWeb-Edu with GPT-2's tokens, so this is not its experiment.
LARGE = DecayDesignSettings(
    hidden_size=768, num_layers=12, num_heads=12, train_length=2048, batch_size=256, steps=20_000, bf16=True,
    learning_rate=3e-4, validate_every=5000, save_every=1000, validation_tokens=1 << 17, test_tokens=1 << 21,
)  # fmt: skip


@EXPERIMENTS.add("decay-design")
class DecayDesign(LanguageExperiment):
    """The Decay paper's grid (Tables 2–4): losses on text beside the paper's, and whether its findings hold."""

    scales: ClassVar = {"smoke": SMOKE, "small": SMALL, "large": LARGE}
    settings = DecayDesignSettings
    models: ClassVar = CORE
    groups: ClassVar = {"core": CORE, "all": tuple(VARIANTS)}
    # `released` is added below: it needs `find_variant`, whose errors name the groups.

    def model(self, name: str, settings: DecayDesignSettings) -> ModelConfig:
        return variant_model(name, settings)

    def recipe(self, name: str, settings: DecayDesignSettings) -> dict[str, Any]:
        """Warm-up, stable, and half a cosine wave to 0. The paper has WSD (§5), and does not say which decay."""
        return {"schedule": "warmup_stable_decay", "schedule_options": {"num_decay_steps": settings.steps // 3}}

    def papers(self, settings: DecayDesignSettings, names: Sequence[str]) -> dict[str, float | None]:
        return {name: paper_loss(name) for name in names}

    def findings(self, results: dict[str, Any]) -> list[str]:
        return finding_sentences(results)

    def summary(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
        settings = self.settings.from_dict(read_json(folder / CONFIG_JSON)["settings"])
        results = results_by_seed(rows)
        found = losses_and_findings(results, self.papers(settings, list(results)), describe(settings))
        predicted = decay_regression.report(folder, rows, self.decays)
        return f"{found}\n{predicted}" if predicted else found

    def decays(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The decays of the selected runs in a folder, before and after training (`decay_regression.measure`)."""
        settings = self.settings.from_dict(read_json(folder / CONFIG_JSON)["settings"])
        text = tuple(absolute_paths({"sources": settings.text}, folder)["sources"])
        read = dataclasses.replace(settings, text=text)
        ids = decay_regression.sequences(Corpus.open(read.corpus(), show=False), int(rows[0]["length"]))
        return decay_regression.measure(folder, rows, lambda cell: self.configure(read, cell), ids)


DecayDesign.groups["released"] = tuple(f"{name}:released" for name in VARIANTS if _differs(name))


def variant_model(name: str, settings: DecayDesignSettings) -> ModelConfig:
    """The Decay Linear Transformer of a variant, on bytes.

    Raises:
        ValueError: an unknown variant; the message lists them.
    """
    find_variant(name)  # raises for a preset, which has no row
    return row_or_preset(
        name, hidden_size=settings.hidden_size, num_layers=settings.num_layers, num_heads=settings.num_heads,
        vocab_size=settings.vocab_size, train_length=settings.train_length,
    )  # fmt: skip


def row_or_preset(name: str, **sizes: Any) -> ModelConfig:
    """The configuration of a row of the grid, `vector/gla` or `rope/tnl:released`, or of a preset."""
    if "/" not in name:
        return preset(name, **sizes)
    variant = find_variant(name)
    options = {**variant.options, **sizes.pop("mixer_options", {})}
    return dataclasses.replace(preset(variant.preset, mixer_options=options, **sizes), name=name)
