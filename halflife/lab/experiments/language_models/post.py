"""PoST's language models (§6.2, Appendix D)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from halflife.lab.experiments.base import EXPERIMENTS
from halflife.lab.experiments.language_models import base as language
from halflife.lab.experiments.language_models.base import FINEWEB_EDU, LanguageExperiment, LanguageSettings


@dataclass(frozen=True, kw_only=True)
class PostSettings(LanguageSettings):
    """The settings of PoST's language models."""

    # mamba2_initialization, rwkv7_initialization, delta_initialization: `ModelConfig.initialization` of these models
    mamba2_initialization: str = "mamba2_released"
    rwkv7_initialization: str = "rwkv7_released"
    delta_initialization: str = "gated_deltanet_released"
    # rwkv7_betas, rwkv7_epsilon: of AdamW for RWKV-7
    rwkv7_betas: tuple[float, float] = (0.9, 0.99)
    rwkv7_epsilon: float = 1e-18


PAPER = PostSettings(
    **language.LARGE, size="post-180m", text=(f"{FINEWEB_EDU}:sample-10BT",), tokenizer="meta-llama/Llama-3.1-8B",
    vocab_size=128_256, train_length=2048, batch_size=256, steps=7_629, learning_rate=6e-4, floor=1e-5 / 6e-4,
    warmup=0.01,
)  # fmt: skip
PAIRS = ("mamba2", "rwkv7", "gated_deltanet")
ENDS = {"mamba2": "", "gated_deltanet": "-delta"}  # base → what its size is called after that of Mamba-2


@EXPERIMENTS.add("post-lm")
class PostLM(LanguageExperiment):
    """PoST's language models: Mamba-2, RWKV-7 and Gated DeltaNet of ~180M parameters, each with PoST and without.

    `--scale paper-440m` has Mamba-2 of 440M parameters: 48 layers of width 1,024, 9B tokens, a rate of 3e-4. The group
    `released` has PoST as its authors ran it.

    Departures: the paper gives ~180M parameters alone for RWKV-7 and Gated DeltaNet. As in the released code, RWKV-7
    has 12 layers with MLPs, and Gated DeltaNet 24 layers without MLPs, which are 212M. Chunks have 64 tokens and the
    paper's 256, which changes rounding alone.
    """

    scales: ClassVar = {
        "smoke": PostSettings(**language.SMOKE, size="post-180m"),
        "small": PostSettings(**language.SMALL, size="post-180m"),
        "paper": PAPER,
        "paper-440m": replace(PAPER, size="post-440m", steps=17_166, learning_rate=3e-4, floor=1e-5 / 3e-4),
    }
    settings = PostSettings
    models: ClassVar = tuple(name for base in PAIRS for name in (base, f"{base}+post_paper"))
    groups: ClassVar = {"released": tuple(name for base in PAIRS for name in (base, f"{base}+post_released"))}
    models_of: ClassVar = {"paper-440m": ("mamba2", "mamba2+post_paper")}
    zero_shot: ClassVar = "post-lm"

    def size_of(self, name: str, settings: PostSettings) -> str:
        end = ENDS.get(name.partition("+")[0], "-mlp")
        if end and settings.size == "post-440m":
            raise ValueError(f"PoST's paper has no {name} of 440M parameters, only Mamba-2")
        return f"{settings.size}{end}"

    def options(self, name: str, settings: PostSettings) -> dict[str, Any]:
        base = name.partition("+")[0]
        if base == "rwkv7":
            return {"initialization": settings.rwkv7_initialization}
        if base == "gated_deltanet":
            return {"initialization": settings.delta_initialization}
        if base != "mamba2":
            return {}
        plain = {} if "post" in name else {"mixer_options": {"decay_options": {"rate_start": "s4d_real"}}}  # Table 7
        return {"initialization": settings.mamba2_initialization, **plain}

    def recipe(self, name: str, settings: PostSettings) -> dict[str, Any]:
        if name.partition("+")[0] != "rwkv7":
            return {}
        return {"betas": settings.rwkv7_betas, "epsilon": settings.rwkv7_epsilon}
