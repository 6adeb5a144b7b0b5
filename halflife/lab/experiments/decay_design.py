"""The Decay paper's grid (Tables 2–4), every decay in one block on text, and its findings as comparisons of losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from halflife.data.corpus import Corpus
from halflife.data.paths import absolute_paths
from halflife.lab.experiments.base import EXPERIMENTS
from halflife.lab.experiments.decay_rows import VARIANTS, as_run, differs, paper_loss, row_model
from halflife.lab.experiments.evidence import decay_regression
from halflife.lab.experiments.language_models import base as language
from halflife.report.markdown import Rows, models
from halflife.report.table import Table

# The variants that the findings compare. The rest of the grid repeats the comparisons with other decays.
CORE = (
    "vector/mamba2", "scalar/mamba2", "simple/0.99", "dplr/vector-0.99", "vector/gla", "scalar/gla", "share/gla",
    "ablation/mamba2-no-Δ", "vector/lightnet", "share/lightnet", "rope/mamba2", "tpe/mamba2", "dplr/scalar-0.99",
    "dplr/none", "ablation/mamba2-no-A", "share/mamba2",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecayDesignSettings(language.LanguageSettings):
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

EQUAL_NATS = 0.01  # nats; two losses closer than this count as equal

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]  # variant → seed → result
Papers = Mapping[str, float | None]  # variant → loss in the paper


@dataclass(frozen=True)
class Finding:
    """A statement of the paper as comparisons of losses."""

    statement: str  # in words
    pairs: tuple[tuple[str, str], ...]  # pairs of variants; the first of each has the lower loss
    equal: bool = False  # whether the finding is instead that the losses of each pair are equal


FINDINGS = (
    Finding(
        "vector decay is better than scalar",
        tuple((f"vector/{decay}", f"scalar/{decay}") for decay in ("mamba2", "gla", "hgrn2", "lightnet")),
    ),
    Finding("Mamba-2 needs its Δ", (("vector/mamba2", "ablation/mamba2-no-Δ"),)),
    Finding("Mamba-2 does not need its A", (("vector/mamba2", "ablation/mamba2-no-A"),), equal=True),
    Finding("Simple Decay with p = 0.99 is at least as good as Mamba-2", (("simple/0.99", "vector/mamba2"),)),
    Finding(
        "sharing k = 1 − λ hurts GLA and LightNet",
        (("vector/gla", "share/gla"), ("vector/lightnet", "share/lightnet")),
    ),
    Finding(
        "sharing is harmless for Mamba-2 and HGRN2",
        (("vector/mamba2", "share/mamba2"), ("vector/hgrn2", "share/hgrn2")), equal=True,
    ),
    Finding(
        "RoPE and TPE are negligible",
        (("rope/mamba2", "scalar/mamba2"), ("tpe/mamba2", "scalar/mamba2")), equal=True,
    ),
    Finding(
        "DPLR: vector decay is best, then scalar, then none",
        (("dplr/vector-0.99", "dplr/scalar-0.99"), ("dplr/scalar-0.99", "dplr/none")),
    ),
    Finding(
        "vector DPLR is better than Simple Decay and vector Mamba-2",
        (("dplr/vector-0.99", "simple/0.99"), ("dplr/vector-0.99", "vector/mamba2")),
    ),
)  # fmt: skip


def findings_table(results: Results, papers: Papers) -> str:
    """A table of the findings with verdicts, in Markdown after a line about them."""
    table = Table(["finding", "first, second", "difference here", "paper", "holds here", "in the paper"], [
        _compared(finding, own, differences, papers) for finding in FINDINGS for pair in finding.pairs
        if (differences := _differences(own := _in_form(pair, results), results))
    ], left=["finding", "first, second", "difference here", "holds here", "in the paper"])  # fmt: skip
    return (
        "The difference is the loss of the second variant minus the loss of the first, by seed; seeds that diverged do "
        "not count. An order holds if every seed has the right sign. "
        f"An equality holds if the mean is within ±{EQUAL_NATS} nats.\n\n"
        f"{table.markdown()}"
    )


def finding_sentences(results: Results) -> list[str]:
    """Return a sentence for each finding with results: in how many comparisons it holds here."""
    sentences = []
    for finding in FINDINGS:
        every = (_differences(_in_form(pair, results), results) for pair in finding.pairs)
        compared = [differences for differences in every if differences]
        if compared:
            held = sum(verdict(differences, finding.equal) == "yes" for differences in compared)
            sentences.append(f"The finding “{finding.statement}” holds here in {held} of {len(compared)} comparisons.")
    return sentences


def _in_form(pair: tuple[str, str], results: Results) -> tuple[str, str]:
    """The names of a pair as the authors ran it if both are among the results, or else as the paper prints it."""
    first, second = map(as_run, pair)
    return (first, second) if {first, second} <= set(results) else pair


def _differences(pair: tuple[str, str], results: Results) -> list[float]:
    """The loss of the second variant minus that of the first, for each seed that both have."""
    first, second = (results.get(name, {}) for name in pair)
    return [second[seed]["test"] - first[seed]["test"] for seed in first if seed in second]


def _compared(finding: Finding, pair: tuple[str, str], differences: Sequence[float], papers: Papers) -> list[str]:
    before, after = (papers[name] for name in pair)
    paper = None if before is None or after is None else after - before
    return [
        finding.statement, f"{pair[0]}, {pair[1]}", ", ".join(f"{x:+.4f}" for x in differences),
        "–" if paper is None else f"{paper:+.3f}", verdict(differences, finding.equal),
        "–" if paper is None else verdict([paper], finding.equal),
    ]  # fmt: skip


def verdict(differences: Sequence[float], equal: bool) -> str:
    """Whether the differences of several seeds have the order, or the equality: "yes", "no" or "seeds differ"."""
    if equal:
        return "yes" if abs(fmean(differences)) <= EQUAL_NATS else "no"
    right = [x > 0 for x in differences]
    return "yes" if all(right) else "seeds differ" if any(right) else "no"


@EXPERIMENTS.add("decay-design")
class DecayDesign(language.LanguageExperiment):
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
        settings, results = self.saved_settings(folder), language.results_by_seed(rows)
        papers = self.papers(settings, models(rows))
        return "\n\n".join(filter(None, [
            language.describe(settings), "## Loss",
            f"{language.units(settings)}, 160M parameters (Tables 6, 8, 9).",
            language.loss_table(rows, papers), "## Findings", findings_table(results, papers),
            decay_regression.report(folder, rows, self.decays),
        ])) + "\n"  # fmt: skip

    def decays(self, folder: Path, rows: Rows) -> list[dict[str, Any]]:
        """The decays of the selected runs in a folder, before and after training (`decay_regression.measure`)."""
        settings = self.saved_settings(folder)
        text = tuple(absolute_paths({"sources": settings.text}, folder)["sources"])
        read = dataclasses.replace(settings, text=text)
        ids = decay_regression.sequences(Corpus.open(read.corpus(), show=False), int(rows[0]["length"]))
        return decay_regression.measure(folder, rows, lambda cell: self.configure(read, cell), ids)
