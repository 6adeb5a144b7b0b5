"""Echo's language models (§3.4, §4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from halflife.lab.experiments.base import EXPERIMENTS
from halflife.lab.experiments.language_models import base as language
from halflife.lab.experiments.language_models.base import FINEWEB_EDU, LanguageExperiment, LanguageSettings


@dataclass(frozen=True, kw_only=True)
class EchoSettings(LanguageSettings):
    """The settings of Echo's language models."""

    state_size: int = 64  # d_state of the Mamba-2 layers


PAPER = EchoSettings(
    **language.LARGE, size="echo-180m", text=(f"{FINEWEB_EDU}:sample-10BT",), tokenizer="meta-llama/Llama-2-7b-hf",
    vocab_size=32_000, train_length=2048, batch_size=96, steps=50_000, learning_rate=3e-4, floor=0.0, warmup=0.02,
    weight_decay=0.01,
)  # fmt: skip
PERPLEXITIES = {"echo-180m": 16.48, "echo-50m": 27.48}  # of the paper's Echo on FineWeb-Edu, Table 4


@EXPERIMENTS.add("echo-lm")
class EchoLM(LanguageExperiment):
    """Echo's language models: Echo, and its variants with SwiGLU, with and without SKA, at 180M parameters.

    `--scale paper-50m` has the 50M sizes and 3B tokens. `echo` is our form of the architecture.

    Departures: Table 6 is of Appendix G; the paper gives no optimiser for its language models. LLaMA-2's tokenizer is
    the common one that fits the printed parameters. No action mask is used, which the paper does not give. The paper's
    loss is the logarithm of its perplexity on FineWeb-Edu, whose documents it does not name.
    """

    scales: ClassVar = {
        "smoke": EchoSettings(**language.SMOKE, size="echo-180m"),
        "small": EchoSettings(**language.SMALL, size="echo-180m"),
        "paper": PAPER,
        "paper-50m": replace(PAPER, size="echo-50m", steps=15_259),
    }
    settings = EchoSettings
    models: ClassVar = ("echo_paper", "mamba2+ska_paper", "mamba2")
    zero_shot: ClassVar = "echo-lm"

    def options(self, name: str, settings: EchoSettings) -> dict[str, Any]:
        with_state = name.partition("+")[0] in ("mamba2", "echo", "echo_paper")
        return {"mixer_options": {"state_size": settings.state_size}} if with_state else {}

    def papers(self, settings: EchoSettings, names: Sequence[str]) -> dict[str, float | None]:
        printed = math.log(PERPLEXITIES[settings.size]) if settings.tokenizer == PAPER.tokenizer else None
        return {name: printed if name == "echo_paper" else None for name in names}
