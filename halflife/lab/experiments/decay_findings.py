"""The findings of the Decay paper as comparisons of losses, and whether they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from halflife.lab.experiments.decay_rows import as_run
from halflife.report.table import Table

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
    """Whether the differences of several seeds have the order, or the equality, of a finding.

    Returns:
        "yes", "no" or "seeds differ".
    """
    if equal:
        return "yes" if abs(fmean(differences)) <= EQUAL_NATS else "no"
    right = [x > 0 for x in differences]
    return "yes" if all(right) else "seeds differ" if any(right) else "no"
