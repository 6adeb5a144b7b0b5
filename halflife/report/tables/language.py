"""What `halflife train` prints when a run has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import print as rich_print
from rich.table import Table


def print_language_run(result: dict[str, Any], folder: Path) -> None:
    """Print perplexities by length, bits per byte and speed, or why the run diverged.

    Args:
        result: the `result.json` of the run.
        folder: the folder of the run.
    """
    if "diverged" in result:
        rich_print(f"[bold]diverged[/bold]: {result['diverged']}; try a lower --lr")
        return
    table = Table(title=f"{result['parameters']:,} parameters, {result['tokens']:,} tokens")
    for column in ("length", "perplexity", "of its last context"):
        table.add_column(column, justify="right")
    for row in result["lengths"]:
        table.add_row(f"{row['length']:,}", f"{row['perplexity']:.3f}", f"{row['last_perplexity']:.3f}")
    rich_print(table)
    rows, documents = result["bits_per_byte"], result["bits_per_byte_of_documents"]
    rich_print(f"validation: {rows:.4f} bits per byte in rows as in training, {documents:.4f} of whole documents")
    rich_print(f"training: {result['tokens_per_second']:,.0f} tokens/s, MFU {result['mfu']:.1%}")
    rich_print(f"report: {folder / 'report.html'}")
    rich_print(f'continue a text with: halflife generate {folder} "…"')
