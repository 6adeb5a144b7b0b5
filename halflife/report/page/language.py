"""The report page of a language model: findings, table of perplexities, figures, settings and commands."""

from __future__ import annotations

import math
import shlex
from typing import Any

from halflife.data.tokenizers import unit_of
from halflife.files import flatten
from halflife.report.figures.data import UNFINISHED
from halflife.report.figures.language import NAT_BITS
from halflife.report.numbers import MISSING, count, percent
from halflife.report.page.spectrum import explorer
from halflife.report.table import GAP, Cell, Row, Table, pairs
from halflife.runs.folder import SAMPLES_TXT
from halflife.runs.records import LanguageRun

PERPLEXITY_MARGIN = 0.05  # how much a perplexity may exceed that at the training length and still count as equal


def language_page(run: LanguageRun) -> dict[str, Any]:
    """The variables of the page's template, without the figures."""
    samples = run.path / SAMPLES_TXT
    return {
        "title": f"{run.model}, a language model", "kind": "A run of halflife train",
        "finished": bool(run.result), "findings": findings(run),
        "table": _table(run) if "lengths" in run.result else None,
        "numbers": pairs("Numbers", _numbers(run.result, _unit(run))),
        "models": [run.model], "spectra": explorer({run.model: [run.training]}, run.train_length),
        "settings": pairs("Settings", flatten(run.config)),
        "samples": samples.read_text(encoding="utf-8") if samples.exists() else "",
        "versions": pairs("Versions", flatten({k: value for k, value in run.versions.items() if k != "command"})),
        "commands": {
            "Reproduce": run.versions.get("command") or "unknown",
            "Resume": f"halflife train --resume {shlex.quote(str(run.path))}",
        },
    }  # fmt: skip


def findings(run: LanguageRun) -> list[str]:
    """Say how well the model predicts, and up to which length its perplexity stays the same."""
    if "diverged" in run.result:
        return [f"The run diverged: {run.result['diverged']}."]
    if "lengths" not in run.result:
        return [UNFINISHED]
    loss, unit = run.result["validation"], _unit(run)
    text = (
        f"After {run.result['tokens']:,} tokens, the validation loss is {loss:.3f} nats a {unit} ("
        f"{loss * NAT_BITS:.3f} bits), a perplexity of {math.exp(min(loss, 700)):.2f} a {unit}."
    )
    perplexity = {row["length"]: row["perplexity"] for row in run.result["lengths"]}
    trained, last = min(perplexity), max(perplexity)
    limit = (1 + PERPLEXITY_MARGIN) * perplexity[trained]
    level = (n for n in perplexity if all(perplexity[shorter] <= limit for shorter in perplexity if shorter <= n))
    reached = max(level, default=trained)
    reach = (
        f"The perplexity of a {unit} is {perplexity[trained]:.2f} on texts of the training length, {trained:,} tokens"
    )
    if reached > trained:
        reach += f", and within {percent(PERPLEXITY_MARGIN, 0)} of it up to {reached:,} tokens ({reached // trained}T)"
    if last > reached:
        reach += f", and {perplexity[last]:.2f} at {last:,} tokens ({last // trained}T)"
    return [text, f"{reach}."]


def _unit(run: LanguageRun) -> str:
    return unit_of(run.config["data"]["tokenizer"])


def _table(run: LanguageRun) -> Table:
    rows, unit = run.result["lengths"], _unit(run)
    lowest = {key: min(row[key] for row in rows) for key in ("perplexity", "last_perplexity")}

    def table_row(row: dict[str, float]) -> Row:
        times = int(row["length"]) // run.train_length
        cells = [Cell(f"{row[key]:.3f}", row[key], "bold" if row[key] == low else "") for key, low in lowest.items()]
        return [Cell(count(row["length"]), note="T" if times == 1 else f"{times}T"), *cells]

    return Table(
        [f"length ({unit}s)", f"perplexity of a {unit}", f"of one among the last {run.train_length:,}"],
        [each for row in rows for each in (table_row(row), GAP)],
        f"Perplexity of a {unit} of the validation text, by the length of the text: the mean over all {unit}s, "
        f"and over the last {run.train_length:,} alone. The lowest of a column is marked.",
    )


def _numbers(result: dict[str, Any], unit: str) -> dict[str, str]:
    """The other results of the run. A run that diverged lacks some of them, and one that did no step has no speed."""
    shown = {
        "parameters": ("parameters", count), "tokens": ("tokens read", count),
        "state_size": ("state size of one sequence", count), "tokens_per_second": ("tokens/s", count),
        "mfu": ("model FLOPs utilisation (MFU)", percent),
        "validation": (f"validation loss (nats a {unit})", lambda value: f"{value:.4f}"),
        "bits_per_byte": ("bits per byte", lambda value: f"{value:.4f}"),
        "bits_per_byte_of_documents": ("bits per byte of whole documents", lambda value: f"{value:.4f}"),
    }  # fmt: skip
    return {
        label: show(result[key]) if math.isfinite(result[key]) else MISSING
        for key, (label, show) in shown.items() if key in result
    }  # fmt: skip
