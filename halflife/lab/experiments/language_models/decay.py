"""The Decay paper's language models (§5, Table 5): the whole grid on FineWeb-Edu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from halflife.lab.experiments.base import EXPERIMENTS
from halflife.lab.experiments.decay_design import DecayDesign, DecayDesignSettings, finding_sentences
from halflife.lab.experiments.decay_rows import paper_loss, row_or_preset
from halflife.lab.experiments.language_models import base as language
from halflife.lab.experiments.language_models.base import FINEWEB_EDU, LanguageExperiment

PAPER = DecayDesignSettings(
    **language.LARGE, size="decay-160m", text=(f"{FINEWEB_EDU}:sample-10BT",), tokenizer="gpt2", vocab_size=50_432,
    train_length=2048, batch_size=256, steps=20_000, learning_rate=3e-4, warmup=0.05,
    decay=0.1,
)  # fmt: skip


@EXPERIMENTS.add("decay-lm")
class DecayLM(LanguageExperiment):
    """The Decay paper's grid as it was run: all 39 rows at 160M parameters on FineWeb-Edu.

    `--scale paper-410m` and `paper-1.45b` have the other sizes of Table 5. Groups: `as-run`, every row in the form that
    the authors ran, which is the default; `released`, those of them that differ from what the paper prints; `all` and
    `core`, the printed forms; and `all-ours`, these with our Toeplitz layer. The paper's losses belong to `as-run`.

    Departures: the paper does not give the settings that `docs/papers.py` marks, the clipping of the gradient, the
    width of the GLU (8/3 of the model's, rounded up to 256), and what its loss is measured on (held-out documents
    here). 20,000 steps read 10.5B tokens, so the end of the training reads some rows again. The row `tpe/tnl` has no
    loss in the paper's tables of 160M parameters.
    """

    scales: ClassVar = {
        "smoke": DecayDesignSettings(**language.SMOKE, size="decay-160m", decay=0.1),
        "small": DecayDesignSettings(**language.SMALL, size="decay-160m", decay=0.1),
        "paper": PAPER,
        "paper-410m": replace(PAPER, size="decay-410m"),
        "paper-1.45b": replace(PAPER, size="decay-1.45b"),
    }
    settings = DecayDesignSettings
    models: ClassVar = DecayDesign.groups["as-run"]
    groups: ClassVar = DecayDesign.groups
    zero_shot: ClassVar = "decay-lm"
    build_model: ClassVar = staticmethod(row_or_preset)

    def papers(self, settings: DecayDesignSettings, names: Sequence[str]) -> dict[str, float | None]:
        return {name: paper_loss(name) if settings.size == "decay-160m" else None for name in names}

    def findings(self, results: dict[str, Any]) -> list[str]:
        return finding_sentences(results)
