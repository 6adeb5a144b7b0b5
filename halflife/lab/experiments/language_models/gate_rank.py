"""GateRank's language models (§4.1)."""

from __future__ import annotations

from typing import ClassVar

from halflife.lab.experiments.base import EXPERIMENTS
from halflife.lab.experiments.language_models import base as language
from halflife.lab.experiments.language_models.base import FINEWEB_EDU, LanguageExperiment, LanguageSettings

PAPER = LanguageSettings(
    **language.LARGE, size="gate-rank-760m", text=(FINEWEB_EDU,), tokenizer="mistralai/Mistral-7B-v0.1",
    vocab_size=32_000, train_length=4096, batch_size=120, steps=61_036, learning_rate=1.25e-3, warmup=0.01,
)  # fmt: skip


@EXPERIMENTS.add("gate-rank-lm")
class GateRankLM(LanguageExperiment):
    """GateRank's language models: Mamba-2 and Gated DeltaNet of ~760M parameters, each with GateRank and without.

    Departures: the paper does not give the settings that `docs/papers.py` marks, the heads, the width of values
    (docs/design-space.md has our reading), and the number, bias and rate of GateRank's gates, which are those of
    `gate_rank`. Mistral's tokenizer has the 32,000 ids of flash-linear-attention's models, whose trainer the paper
    used.
    """

    scales: ClassVar = {
        "smoke": LanguageSettings(**language.SMOKE, size="gate-rank-760m"),
        "small": LanguageSettings(**language.SMALL, size="gate-rank-760m"),
        "paper": PAPER,
    }
    models: ClassVar = ("mamba2", "mamba2+gate_rank", "gated_deltanet", "gated_deltanet+gate_rank")
    zero_shot: ClassVar = "gate-rank-lm"

    def size_of(self, name: str, settings: LanguageSettings) -> str:
        return f"{settings.size}-delta" if name.partition("+")[0] == "gated_deltanet" else settings.size
