"""What the report page of a language model says: findings, tables, captions, commands."""

from __future__ import annotations

import math
import shlex
from typing import Any

from halflife.report.page.language_plots import BITS, plots
from halflife.report.page.spectrum import explorer, without
from halflife.report.page.table import UNFINISHED, Cell, Row, Table, count, percent
from halflife.runs.folder import LanguageRun, flatten

STAYS = 1.05  # a perplexity of no more than so many times that at the training length counts as kept


def page(run: LanguageRun) -> dict[str, Any]:
    """What the template prints, by name."""
    spectra = explorer({run.model: [run.training]}, run.train_length)
    return {
        "title": f"{run.model}, a language model",
        "kind": "A run of halflife train",
        "finished": bool(run.result),
        "findings": findings(run),
        "table": _table(run) if "lengths" in run.result else None,
        "numbers": _numbers(run.result),
        "plots": plots(run),
        "spectra": spectra,
        "without": without([run.model], spectra),
        "settings": flatten(run.config),
        "versions": flatten({name: value for name, value in run.versions.items() if name != "command"}),
        "commands": {
            "Reproduce": run.versions.get("command") or "unknown",
            "Resume": f"halflife train --resume {shlex.quote(str(run.path))}",
        },
    }


def findings(run: LanguageRun) -> list[str]:
    """How well the model predicts, and how far beyond the training length that lasts."""
    if "diverged" in run.result:
        return [f"The run diverged: {run.result['diverged']}."]
    if "lengths" not in run.result:
        return [UNFINISHED]
    loss = run.result["validation"]
    text = (
        f"After {run.result['tokens']:,} tokens: validation loss {loss:.3f} nats a token ({loss * BITS:.3f} bits), "
        f"perplexity {math.exp(loss):.2f}."
    )
    sizes = {row["length"]: row["perplexity"] for row in run.result["lengths"]}
    trained, last = min(sizes), max(sizes)
    limit = STAYS * sizes[trained]
    kept = max(size for size in sizes if all(sizes[other] <= limit for other in sizes if other <= size))
    reach = f"Texts of the training length, {trained:,} tokens: perplexity {sizes[trained]:.2f}"
    if kept > trained:
        reach += f"; within {percent(STAYS - 1, 0)} of it up to {kept:,} ({kept // trained} T)"
    if last > kept:
        reach += f"; at {last:,} ({last // trained} T) {sizes[last]:.2f}"
    return [text, f"{reach}."]


def _table(run: LanguageRun) -> Table:
    rows = run.result["lengths"]
    best = {key: min(row[key] for row in rows) for key in ("perplexity", "last_perplexity")}

    def row(found: dict[str, float]) -> Row:
        times = int(found["length"]) // run.train_length
        cells = [Cell(f"{found[key]:.3f}", found[key], found[key] == low) for key, low in best.items()]
        return Row(count(found["length"]), "T" if times == 1 else f"{times} T", cells)

    return Table(
        caption="Perplexity on the validation text by length, over all tokens and over those of the last context "
        "alone. Marked: the lowest of a column.",
        first="length (tokens)",
        columns=["perplexity", "of its last context"],
        spans=[],
        groups=[[row(found)] for found in rows],
    )


def _numbers(result: dict[str, Any]) -> dict[str, str]:
    """The run's other numbers; a run that diverged lacks some."""
    shown = {
        "parameters": ("parameters", count), "tokens": ("tokens read", count),
        "state_size": ("numbers of the state of a row", count), "tokens_per_second": ("tokens/s", count),
        "mfu": ("share of the machine's peak in use", percent),
        "validation": ("validation loss (nats a token)", lambda value: f"{value:.4f}"),
        "bits_per_byte": ("bits per byte", lambda value: f"{value:.4f}"),
        "bits_per_byte_of_documents": ("bits per byte of whole documents", lambda value: f"{value:.4f}"),
    }  # fmt: skip
    return {label: show(result[key]) for key, (label, show) in shown.items() if key in result}
