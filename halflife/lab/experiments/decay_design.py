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
from halflife.lab.experiments.decay_rows import VARIANTS, as_run, differs, paper_loss, row_model
from halflife.lab.experiments.evidence import decay_regression
from halflife.lab.experiments.language_models import base as language
from halflife.lab.experiments.language_models.base import (
    LanguageExperiment,
    LanguageSettings,
    describe,
    loss_table,
    results_by_seed,
)
from halflife.report.markdown import Rows, models

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
        "released": tuple(as_run(name) for name in VARIANTS if differs(name)),
        "as-run": tuple(map(as_run, VARIANTS)),
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
        papers = self.papers(settings, models(rows))
        return "\n\n".join(filter(None, [
            describe(settings), "## Loss",
            "Test loss in nats per byte; the paper's is nats per token, 160M parameters (Tables 6, 8, 9).",
            loss_table(rows, papers), "## Findings", findings_table(results, papers),
            decay_regression.report(folder, rows, self.decays),
        ])) + "\n"  # fmt: skip

    def decays(self, folder: Path, rows: Rows) -> list[dict[str, Any]]:
        """The decays of the selected runs in a folder, before and after training (`decay_regression.measure`)."""
        settings = self.saved_settings(folder)
        text = tuple(absolute_paths({"sources": settings.text}, folder)["sources"])
        read = dataclasses.replace(settings, text=text)
        ids = decay_regression.sequences(Corpus.open(read.corpus(), show=False), int(rows[0]["length"]))
        return decay_regression.measure(folder, rows, lambda cell: self.configure(read, cell), ids)
