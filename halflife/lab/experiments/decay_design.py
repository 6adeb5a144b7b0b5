"""The Decay paper's grid (Tables 2–4): every decay in one block, on text, with the same budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from halflife.data.corpus import Corpus
from halflife.data.paths import absolute_paths
from halflife.lab.experiments.base import EXPERIMENTS
from halflife.lab.experiments.decay_findings import finding_sentences, findings_table
from halflife.lab.experiments.evidence import decay_regression
from halflife.lab.experiments.language_models import base as language
from halflife.lab.experiments.language_models.base import (
    LanguageExperiment,
    LanguageSettings,
    describe,
    loss_table,
    results_by_seed,
)
from halflife.models import ModelConfig, preset
from halflife.registry import unknown
from halflife.report.markdown import Rows


@dataclass(frozen=True)
class Variant:
    """One row of the paper's tables."""

    paper: float | None  # the paper's loss with 160M parameters, nats per token; None where it gives none
    options: dict[str, Any]  # options of the mixer, which select its decay
    preset: str = "simple"  # the preset of the block


def _variant(paper: float | None, decay: str | None, granularity: str = "vector", **options: Any) -> Variant:
    modifier, settings = options.pop("modifier", ""), options.pop("decay_options", {})
    chosen = {"decay": decay, "granularity": granularity, "decay_options": settings, **options}
    return Variant(paper, chosen, f"simple{modifier}")


def _simple(paper: float, p: float, granularity: str = "vector", **options: Any) -> Variant:
    return _variant(paper, "simple", granularity, decay_options={"p": p}, **options)


# Groups whose rows differ in their decay: options of the mixer, and decay → the paper's loss (Tables 6, 8, 9).
SCALAR = {"granularity": "scalar"}
DECAYS: dict[str, tuple[dict[str, Any], dict[str, float | None]]] = {
    "vector": ({}, {"mamba2": 2.947, "gla": 2.975, "hgrn2": 2.966, "lightnet": 3.027}),
    "ablation": ({}, {"mamba2-no-A": 2.946, "mamba2-no-Δ": 3.019, "mamba2-no-A-Δ": 2.973}),
    "share": ({"share_keys": True}, {"mamba2": 2.947, "gla": 3.048, "hgrn2": 2.966, "lightnet": 3.104}),
    "scalar": (
        SCALAR, {"mamba2": 2.960, "gla": 3.008, "hgrn2": 2.987, "lightnet": 3.032, "tnl": 2.985, "tnl-l": 2.970}
    ),
    "rope": (
        SCALAR | {"position": "rope"},
        {"mamba2": 2.959, "gla": 3.010, "hgrn2": 2.990, "lightnet": 3.002, "tnl": 2.975, "tnl-l": 2.972},
    ),
    "tpe": (
        SCALAR | {"modifier": "+tpe_paper"},
        {"mamba2": 2.931, "gla": 2.986, "hgrn2": 2.969, "lightnet": 2.988, "tnl": None, "tnl-l": 2.948},
    ),
}  # fmt: skip
VARIANTS: dict[str, Variant] = {
    **{
        f"{group}/{decay}": _variant(paper, decay.lower().replace("-", "_").replace("δ", "dt"), **options)
        for group, (options, losses) in DECAYS.items()
        for decay, paper in losses.items()
    },
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


GROUPS = ("core", "all", "all-ours", "released")
# What the authors' code has in place of the paper's (docs/fidelity.md). Mamba-2 differs where it shares its keys.
RELEASED = {
    "decay": {name: f"{name}_released" for name in ("gla", "hgrn2", "lightnet", "tnl", "tnl_l")},
    "position": {"rope": "half_lrpe"},
    "update": {"dplr": "dplr_released"},
}


def find_variant(name: str) -> Variant:
    """The variant `name`, or `name:released`, the same row as the paper's authors ran it.

    `tpe/gla:ours` and the others with TPE have our Toeplitz layer, for which the paper has no loss.
    """
    row, _, form = name.partition(":")
    if row not in VARIANTS or form not in ("", "released", *(["ours"] if row.startswith("tpe/") else [])):
        raise unknown("variant", name, [*GROUPS, *VARIANTS])
    printed = VARIANTS[row]
    if not form:
        return printed
    if form == "ours":
        return Variant(None, printed.options, printed.preset.replace("+tpe_paper", "+tpe"))
    options = {key: RELEASED.get(key, {}).get(str(value), value) for key, value in printed.options.items()}
    if row == "share/mamba2":
        options["decay"] = "mamba2_released"
    released = Variant(printed.paper, options, printed.preset.replace("+tpe_paper", "+tpe_released"))
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


SMOKE = DecayDesignSettings(**language.SMOKE)
SMALL = DecayDesignSettings(**language.SMALL)
# The 160M row of Table 5 with its tokens per step and its steps, but on bytes of the user's text. The paper trains on
# FineWeb-Edu with GPT-2's tokens, so this is not its experiment.
LARGE = DecayDesignSettings(
    hidden_size=768, num_layers=12, num_heads=12, train_length=2048, batch_size=256, steps=20_000, bf16=True,
    learning_rate=3e-4, validate_every=5000, save_every=1000, validation_tokens=1 << 17, test_tokens=1 << 21,
)  # fmt: skip


def row_or_preset(name: str, **sizes: Any) -> ModelConfig:
    """The configuration of a row of the grid, `vector/gla` or `rope/tnl:released`, or of a preset."""
    if "/" not in name:
        return preset(name, **sizes)
    variant = find_variant(name)
    options = {**variant.options, **sizes.pop("mixer_options", {})}
    return dataclasses.replace(preset(variant.preset, mixer_options=options, **sizes), name=name)


def row_model(name: str, **sizes: Any) -> ModelConfig:
    """The configuration of a row of the grid. Raises: ValueError: an unknown row; the message lists them."""
    find_variant(name)
    return row_or_preset(name, **sizes)


@EXPERIMENTS.add("decay-design")
class DecayDesign(LanguageExperiment):
    """The Decay paper's grid (Tables 2–4): losses on text beside the paper's, and whether its findings hold."""

    scales: ClassVar = {"smoke": SMOKE, "small": SMALL, "large": LARGE}
    settings = DecayDesignSettings
    models: ClassVar = CORE
    groups: ClassVar = {
        "core": CORE,
        "all": tuple(VARIANTS),
        "all-ours": tuple(f"{name}:ours" if name.startswith("tpe/") else name for name in VARIANTS),
        "released": tuple(f"{name}:released" for name in VARIANTS if _differs(name)),
    }
    build_model: ClassVar = staticmethod(row_model)

    def recipe(self, name: str, settings: DecayDesignSettings) -> dict[str, Any]:
        """Warm-up, stable, and half a cosine wave to 0. The paper has WSD (§5), and does not say which decay."""
        return {"schedule": "warmup_stable_decay", "schedule_options": {"num_decay_steps": settings.steps // 3}}

    def papers(self, settings: DecayDesignSettings, names: Sequence[str]) -> dict[str, float | None]:
        return {name: paper_loss(name) for name in names}

    def findings(self, results: dict[str, Any]) -> list[str]:
        return finding_sentences(results)

    def summary(self, folder: Path, rows: Rows) -> str:
        settings, results = self.saved_settings(folder), results_by_seed(rows)
        papers = self.papers(settings, list(results))
        return "\n\n".join(filter(None, [
            describe(settings), "## Loss",
            "Test loss in nats per byte; the paper's is nats per token, 160M parameters (Tables 6, 8, 9).",
            loss_table(results, papers), "## Findings", findings_table(results, papers),
            decay_regression.report(folder, rows, self.decays),
        ])) + "\n"  # fmt: skip

    def decays(self, folder: Path, rows: Rows) -> list[dict[str, Any]]:
        """The decays of the selected runs in a folder, before and after training (`decay_regression.measure`)."""
        settings = self.saved_settings(folder)
        text = tuple(absolute_paths({"sources": settings.text}, folder)["sources"])
        read = dataclasses.replace(settings, text=text)
        ids = decay_regression.sequences(Corpus.open(read.corpus(), show=False), int(rows[0]["length"]))
        return decay_regression.measure(folder, rows, lambda cell: self.configure(read, cell), ids)
